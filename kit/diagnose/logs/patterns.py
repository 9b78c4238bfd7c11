"""Patterns of failures in logs: each matches one line and names a cause, its meaning and its fix.

Patterns are from provoked failures (``benchmarks/system_tests/failures``) and from the messages in the
sources of torch 2.13 (c10d, elastic, CUDACachingAllocator, DataLoader, amp), gloo, NCCL, aws-ofi-nccl,
megatron-core 0.16.1 (dist_checkpointing), huggingface_hub and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """A cause of failure that one line of a log shows."""

    cause: str
    signs: tuple[str, ...]
    """Every matching line has one of these words. The log is searched for these first, because that is faster."""
    regex: re.Pattern[str]
    weight: int
    """3: a root cause; 2: usually a root cause; 1: a consequence of a failure on another rank."""
    meaning: str
    fix: str

    def shows(self, text: str) -> bool:
        """Whether a line matches the pattern."""
        return any(sign in text for sign in self.signs) and self.regex.search(text) is not None


def _pattern(cause: str, signs: str, regex: str, weight: int, meaning: str, fix: str) -> Pattern:
    return Pattern(cause, tuple(signs.split("|")), re.compile(regex), weight, meaning, fix)


PATTERNS: tuple[Pattern, ...] = (
    _pattern(
        "gpu-out-of-memory",
        "OutOfMemoryError|CUDA out of mem|HIP out of mem",
        r"(?:torch\.|torch\.cuda\.)?OutOfMemoryError|CUDA out of memory|HIP out of memory",
        3,
        "a GPU ran out of memory",
        "smaller micro_batch_size, recompute: full, a higher ZeRO stage or offload; kit memory shows the largest part",
    ),
    _pattern(
        "host-out-of-memory",
        "DefaultCPUAllocator|Cannot allocate mem|MemoryError|oom-kill|Out of memory: K",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|Cannot allocate memory|MemoryError\b|"
        r"oom-kill|Out of memory: Killed",
        3,
        "the host ran out of memory",
        "offload less or to NVMe, fewer data workers, or nodes with more memory; kit memory shows what a node needs",
    ),
    _pattern(
        "thread-limit",
        "'t start new thread|pthread_create |Resource temporarily|BlockingIOError",
        r"can't start new thread|pthread_create (?:failed|returned)|fork: (?:retry: )?Resource temporarily unavailable|"
        r"BlockingIOError: \[Errno 11\]",
        3,
        "no more threads or processes may be started on that host",
        "raise ulimit -u and the pids limit of its container or job, start fewer data workers; where address space is "
        "limited (ulimit -v) it means memory",
    ),
    _pattern(
        "dead-node",
        "DUE TO NODE F|Node failure on|Connection to |send disconnect|"
        "Timeout, server|No route to host|Host is down|UNAVAILABLE",
        r"STEP \d+\.\S+ .*DUE TO NODE FAILURE|srun: error: Node failure on \S+|"
        r"Connection to \S+ closed by remote host|client_loop: send disconnect|Timeout, server \S+ not responding|"
        r"No route to host|Host is down|UNAVAILABLE.*node.*(?:lost|dead)",
        3,
        "a node went away: power, kernel, network, or its scheduler's daemon",
        "kit doctor --hosts hostfile says which does not answer; drain it, start again with --resume auto on others",
    ),
    _pattern(
        "hung",
        " hangs: ",
        r"rank \d+ hangs: .* has taken \d+ s",
        2,
        "a step did not end, and kit's watchdog ended the run",
        "stacks/ of the run directory shows where each rank stood, flight/ in which collective: look at the odd one",
    ),
    _pattern(
        "killed",
        "exitcode: -|SIGKILL|code =",
        r"exitcode: -9\b|Signal 9 \(SIGKILL\)|exit(?:s with| )? ?(?:return )?code = ?-9|died with <Signals.SIGKILL",
        2,
        "a process was killed from outside: most often by the host's out-of-memory killer, else the scheduler",
        "look for 'Out of memory: Killed' in dmesg of that host, and at the scheduler's limits; then kit train RUN "
        "--resume auto",
    ),
    _pattern(
        "crashed",
        "exitcode: -|Signal |Segmentation",
        r"exitcode: -(?:6|7|11)\b|Signal (?:6|7|11) \(SIG\w+\)|Segmentation fault",
        2,
        "a process crashed in native code",
        "read what it printed last; SIGBUS often means /dev/shm is full, SIGABRT a failed check in a library",
    ),
    _pattern(
        "collective-timeout",
        "Watchdog caught|Timed out waiting|Some NCCL op|DistBackendError",
        r"Watchdog caught collective operation timeout|"
        r"Timed out waiting \d+ms for|Some NCCL operations have failed or timed out|DistBackendError.*[Tt]imeout",
        2,
        "ranks waited for a collective that not all of them joined",
        "look at the rank that did not wait: what was it doing?",
    ),
    _pattern(
        "mismatched-collectives",
        "op.preamble|Detected mismatch|CollectiveFingerPrint|differing s|Tensor",
        r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives on ranks|"
        r"CollectiveFingerPrint|differing (?:sizes|shapes) across ranks|"
        r"Tensors? .*(?:shape|size)s? .* (?:across|on) ranks",
        3,
        "ranks called different collectives, or with different shapes",
        "find the branch that only some ranks take (a rank-dependent if, unequal batches, an unused parameter); "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the call",
    ),
    _pattern(
        "peer-gone",
        "by peer|Broken pipe|ncclRemoteError|NCCL WARN",
        r"Connection (?:reset|closed) by peer|Broken pipe|ncclRemoteError|"
        r"NCCL WARN .*(?:socket|Connection).*(?:closed|refused)",
        1,
        "a connection broke because the process at its other end had gone",
        "the cause is in the log of the rank that went first",
    ),
    _pattern(
        "shared-memory",
        "shared mem|Bus error|/dev/shm",
        r"DataLoader worker \(pid \d+\) is killed by signal: Bus error|insufficient shared memory \(shm\)|"
        r"shared memory segment /dev/shm/\S+|/dev/shm/\S* .*No space left",
        3,
        "/dev/shm is full or too small: data workers and NCCL hand data on through it",
        "docker run --shm-size or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm, as kit emit "
        "--target k8s writes it; or fewer data workers",
    ),
    _pattern(
        "gradient-partition-no-sync",
        "no_sync context manager is inc",
        r"no_sync context manager is incompatible with gradient partitioning",
        3,
        "the script accumulates gradients under no_sync; ZeRO 2 and 3 partition gradients at once and cannot",
        "ZeRO 1, or gradient_accumulation_steps in DeepSpeed's file and no no_sync in the script",
    ),
    _pattern(
        "fp16-weights",
        "Attempting to unscale FP16",
        r"Attempting to unscale FP16 gradients",
        3,
        "the loss scaler found fp16 weights: mixed precision keeps fp32 weights and casts in the forward pass",
        "load the model with dtype=float32, or train in bf16, which needs no loss scale",
    ),
    _pattern(
        "sharded-weight",
        "'weight' must be 2-D|in current model is torch.Size([0])",
        r"'weight' must be 2-D|the shape in current model is torch\.Size\(\[0\]\)",
        3,
        "code read a weight that ZeRO-3 has sharded: outside of its layer's forward pass a shard alone is there",
        "with deepspeed.zero.GatheredParameters(weight): around that code; load checkpoints before "
        "deepspeed.initialize",
    ),
    _pattern(
        "checkpoint-world-size",
        "used a DP world size of",
        r"used a DP world size of \d+",
        3,
        "the checkpoint was written by another number of data-parallel ranks, and its optimizer state is sharded so",
        "as many ranks as then, a DeepSpeed universal checkpoint, or kit's exchange checkpoint, which any layout reads",
    ),
    _pattern(
        "meta-tensor",
        "copy out of meta tensor",
        r"Cannot copy out of meta tensor; no data!",
        3,
        "a weight has a shape and no values: it was created on the meta device, and no checkpoint filled it",
        "model.to_empty(device=...) and load every weight; no low_cpu_mem_usage or device_map under ZeRO-3 or FSDP",
    ),
    _pattern(
        "checkpoint-shape",
        "lobal shape mismatch for lo",
        r"Global shape mismatch for loaded",
        3,
        "the checkpoint holds a tensor of another shape than the model: another vocabulary padding, or another model",
        "the same model, and the same make_vocab_size_divisible_by times tensor parallelism as when it was written",
    ),
    _pattern(
        "fabric-error",
        "NET/IB|NET/OFI|mlx5_",
        r"NET/IB ?: ?Got (?:completion|async event).*(?:status=(?!0\b)\d+|error|fatal)|"
        r"NET/OFI .*completed with error|mlx5_\d+.*(?:link down|port error)",
        2,
        "a link between nodes failed: a card, cable, switch, or the address that it was given",
        "ibstat or fi_info on both hosts that the line names; kit doctor --hosts HOSTFILE --bandwidth finds a slow one",
    ),
    _pattern(
        "credentials",
        "401 Client|403 Client|ExpiredToken|Invalid user token|GatedRepoError|InvalidAccessKey",
        r"40[13] Client Error|ExpiredToken|Invalid user token|GatedRepoError|InvalidAccessKeyId",
        3,
        "a token is missing, has expired, or may not read that repository or bucket",
        "log in again on every node; for a gated model accept its terms first; or use a local directory",
    ),
    _pattern(
        "disk-full",
        "No space left|Errno 28|Disk quota|Errno 122",
        r"No space left on device|Errno 28\b|Disk quota exceeded|Errno 122\b",
        3,
        "a disk is full",
        "make room, or keep fewer checkpoints (run.checkpoint.keep_last); the newest complete checkpoint is untouched",
    ),
    _pattern(
        "not-a-number",
        "nan|NaN|inf|Inf|finite",
        r"\b[Ll]oss['\"]?[ =:]+['\"]?(?:nan|NaN|-?inf|-?Inf)\b|"
        r"[Gg]rad(?:ient)?[ _][Nn]orm['\"]?[ =:]+['\"]?(?:nan|NaN|inf|Inf)\b|"
        r"(?:[Ll]oss|gradient norm) (?:is|was) (?:nan|NaN|inf|Inf|not finite)|not a finite number|"
        r"Function '\w+Backward\d*' returned nan",
        3,
        "the loss or a gradient is no longer a number",
        "resume from a checkpoint before that step with a lower rate or without that data; in fp16 look at the loss "
        "scale, or use bf16",
    ),
    _pattern(
        "loss-scale",
        "oss scale|OVERFLOW!",
        r"[Ll]oss scale.*(?:minimum|already at min)|OVERFLOW!.*[Ss]kipping step.*reducing to (?:0|1)\b|"
        r"Current loss scale already at minimum",
        3,
        "fp16 overflows at every loss scale",
        "use bf16 where the GPU has it; else look for the module that overflows, or lower the rate",
    ),
    _pattern(
        "data-exhausted",
        "StopIteration|DataLoader worker|data set has no more|has fewer ",
        r"StopIteration|DataLoader worker .* exited unexpectedly|the data set has no more|"
        r"has fewer (?:samples|tokens|sequences)",
        2,
        "the data ended before the run",
        "fewer run.steps, more data, or let the data be read more than once",
    ),
    _pattern(
        "missing-op",
        "Error building ext|CUDA_HOME does|Ninja is req|libaio|CUDAMismatch|No module named",
        r"Error building extension '(\w+)'|CUDA_HOME does not exist|Ninja is required|libaio|"
        r"CUDAMismatchException|No module named '(?:transformer_engine|flash_attn|deepspeed)",
        3,
        "an operator or a package is missing or did not compile",
        "install it (async_io: apt-get install libaio-dev; compilers: g++ and ninja; CUDA_HOME: the toolkit of torch's "
        "CUDA version)",
    ),
    _pattern(
        "port-in-use",
        "EADDRINUSE|Address already in use",
        r"EADDRINUSE|Address already in use",
        3,
        "the rendezvous port is taken, often by a process that a former run left",
        "end that process (ss -ltnp shows it), or set another MASTER_PORT",
    ),
    _pattern(
        "ssh",
        "Host key verif|Permission denied (p|ssh: connect|pdsh@",
        r"Host key verification failed|Permission denied \(publickey|ssh: connect to host|pdsh@\S+: .*(?:exited|error)",
        3,
        "the launcher could not log in to a node",
        "ssh to it by hand once (known hosts, keys), or start each node's launch.sh through Slurm",
    ),
    _pattern(
        "rendezvous",
        "RendezvousTimeoutError|RendezvousConnectionError|The client socket|failed to connect to|DistNetworkError",
        r"RendezvousTimeoutError|RendezvousConnectionError|The client socket has timed out|"
        r"failed to connect to .*(?:rendezvous|TCPStore)|DistNetworkError",
        2,
        "the processes did not find each other",
        "MASTER_ADDR must be an address of node 0 that the other nodes reach, with its port open; /etc/hosts must "
        "not map "
        "a node's own name to 127.0.1.1; GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME must name the right interface",
    ),
    _pattern(
        "slow-network",
        "NET/Plugin|Using network S",
        r"NET/Plugin ?: ?(?:No plugin found|.*[Pp]lugin.*not found)|Using network Socket\b",
        2,
        "NCCL uses plain TCP: the fabric's plugin (EFA, InfiniBand) was not found",
        "install aws-ofi-nccl or the InfiniBand libraries where NCCL looks, and check LD_LIBRARY_PATH on every node",
    ),
    _pattern(
        "gpu-fault",
        "NVRM: Xid|uncorrectable ECC|GPU has fallen|CUDA error: ",
        r"NVRM: Xid \(.*?\): (\d+)|uncorrectable ECC error|GPU has fallen off the bus|"
        r"CUDA error: (?:an illegal memory access|device-side assert|unspecified launch)",
        3,
        "a GPU or its driver reported a fault",
        "Xid 48, 63, 64, 79, 94 and 95 are hardware: drain that node; a device-side assert is an index out of range "
        "(token ids against vocab_size)",
    ),
    _pattern(
        "config",
        "DeepSpeedConfigError|Check batch rel|ValidationError|Please correct the",
        r"DeepSpeedConfigError|Check batch related parameters|pydantic_core\._pydantic_core\.ValidationError|"
        r"Please correct the following DeepSpeed config values",
        3,
        "a configuration was refused",
        "kit lint on the file says which key and what to write",
    ),
    _pattern(
        "wrong-processes",
        "processes were started where",
        r"processes were started where the plan has",
        3,
        "another number of processes was started than planned",
        "start it by launch.sh, or plan again for the GPUs at hand",
    ),
)
ENDED_BY_LAUNCHER = re.compile(r"Unable to shutdown process (\d+) via \S+, forcefully exiting")
"""torch/distributed/elastic/multiprocessing/api.py: torchrun then kills processes that only waited for another."""
WORKER_FAILED = re.compile(
    r"(?:--local[_-]rank[= ](?P<local>\d+).*)?exits with return code = (?P<code>[1-9]\d*)|"
    r"(?P<host>\S+): task (?P<task>\d+): Exited with exit code (?P<status>\d+)"
)
"""A message of DeepSpeed's launcher or srun about a process that ended with an error."""
RESERVED = re.compile(r"Tried to allocate ([\d.]+ [KMG]iB).*?([\d.]+ [KMG]iB) is reserved by PyTorch but unallocated")
"""CUDACachingAllocator.cpp: an out-of-memory with reserved but fragmented memory."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (torch 2.9 and later also read PYTORCH_ALLOC_CONF)"
DOWNLOADING = re.compile(r"(?i)\bdownloading\b|fetching \d+ files|Downloading shards")
PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "optimizer step",
        re.compile(r"\b(?:optimizer|optim|adamw?)\b.*\bstep\b|_take_model_step|in step\b|optimizer\.step|in apply\b"),
    ),
    ("backward", re.compile(r"\.backward\(|in backward\b|autograd.*backward|run_backward")),
    ("loading the model", re.compile(r"from_pretrained|in build_model|load_state_dict|import_state|zero\.Init")),
    ("checkpoint", re.compile(r"save_checkpoint|in save\b|torch\.save|checkpoint/")),
    ("forward", re.compile(r"in forward\b|\.forward\(|_call_impl")),
)
"""(phase, pattern of a frame): the first match decides the phase, innermost frames first."""
