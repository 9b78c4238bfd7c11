"""What the doctor says to do: by the phase of an out-of-memory, the Xid, the library, the dimension, and the calls in
which ranks wait. Frames and messages are those of the installed torch, transformers, DeepSpeed, and of the sources of
NCCL, Ray 2.60 and NVIDIA's driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.addons.doctor.logs.patterns import PATTERNS
from tests.addons.written import OOM, SITE, Files, call, flight, p2p, read, say, timed_out

MAIN = ("/project/train.py", "main", "trainer.train()")
MODULE = (f"{SITE}/torch/nn/modules/module.py", "_call_impl", "return forward_call(*args, **kwargs)")
FORWARD = (f"{SITE}/transformers/models/llama/modeling_llama.py", "forward", "return up * gate")
Frame = tuple[str, str, str]


def trace(*frames: Frame, mark: str = "", error: str = OOM) -> list[str]:
    """A traceback with these (file, function, source line), outermost first."""
    lines = ["Traceback (most recent call last):"]
    for file, function, source in frames:
        lines += [f'  File "{file}", line 88, in {function}', f"    {source}"]
    return [f"{mark}{line}" for line in [*lines, error]]


BACKWARD = ("/project/train.py", "step", "loss.backward()")
RECOMPUTED = (f"{SITE}/torch/utils/checkpoint.py", "recompute_fn", "fn(*args, **kwargs)")
STEP = (f"{SITE}/torch/optim/optimizer.py", "wrapper", "out = func(*args, **kwargs)")
PHASES: dict[str, tuple[str | None, tuple[Frame, ...]]] = {
    "adam": ("optimizer step", (MAIN, STEP, (f"{SITE}/torch/optim/adam.py", "_init_group", "torch.zeros_like(p)"))),
    "foreach": ("optimizer step", (MAIN, STEP, (f"{SITE}/torch/optim/adam.py", "_multi_tensor_adam", "x"))),
    "deepspeed's state": (
        "optimizer step",
        (
            (f"{SITE}/deepspeed/__init__.py", "initialize", "engine = DeepSpeedEngine(args=args,"),
            (f"{SITE}/deepspeed/runtime/engine.py", "_configure_zero_optimizer", "optimizer = Stage3(module,"),
            (f"{SITE}/deepspeed/runtime/zero/stage3.py", "__init__", "self._create()"),
        ),
    ),
    "deepspeed's step": ("optimizer step", (MAIN, (f"{SITE}/deepspeed/runtime/zero/stage3.py", "step", "x"))),
    "megatron's": ("optimizer step", ((f"{SITE}/megatron/core/optimizer/optimizer.py", "step_with_ready_grads", "x"),)),
    "lightning": (
        "forward",  # its optimizer calls the whole of forward and backward as a closure
        (STEP, ("/x/lightning/loops/automatic.py", "closure", "f()"), ("/m.py", "training_step", "x"), MODULE, FORWARD),
    ),
    "recomputed": ("backward", (MAIN, BACKWARD, RECOMPUTED, MODULE, FORWARD)),
    "trainer's save": (
        "checkpoint",
        (
            (f"{SITE}/transformers/trainer.py", "_save_checkpoint", "self.save_model(output_dir)"),
            (f"{SITE}/accelerate/accelerator.py", "get_state_dict", "state_dict = model._zero3_consolidated()"),
            (f"{SITE}/deepspeed/runtime/zero/partition_parameters.py", "__enter__", "self.params[0].all_gather()"),
        ),
    ),
    "fsdp's state dict": (
        "checkpoint",
        (
            ("/bagel/fsdp_utils.py", "fsdp_save_ckpt", "ema = ema_model.state_dict()"),
            (f"{SITE}/torch/nn/modules/module.py", "state_dict", "hook(self, prefix, keep_vars)"),
            (f"{SITE}/torch/distributed/fsdp/_state_dict_utils.py", "_full_pre_state_dict_hook", "x"),
        ),
    ),
    "from_pretrained": (
        "building the model",
        (
            (f"{SITE}/transformers/modeling_utils.py", "from_pretrained", "cls._load_pretrained_model(model,"),
            (f"{SITE}/transformers/modeling_utils.py", "load_state_dict", "return torch.load("),
            (f"{SITE}/torch/serialization.py", "load", "return _load("),
        ),
    ),
    "to the GPU": (
        "building the model",
        (("/t.py", "main", "model = model.to(device)"), (f"{SITE}/torch/nn/modules/module.py", "_apply", "fn(param)")),
    ),
    "resumed": ("loading a checkpoint", (("/t.py", "main", 'old = torch.load("model.pt")'),)),
    "evaluated": (
        "evaluation",
        (
            (f"{SITE}/transformers/trainer.py", "evaluation_loop", "self.prediction_step(model, inputs)"),
            (f"{SITE}/transformers/trainer.py", "prediction_step", "self.compute_loss(model, inputs)"),
            MODULE,
            FORWARD,
        ),
    ),
    "forward": ("forward", (MAIN, ("/t.py", "step", "loss = model(batch)"), MODULE, FORWARD)),
    "saved tensors": ("forward", (MAIN, MODULE, ("/t.py", "forward", "ctx.save_for_backward(x)"))),
    "a home named adam": ("forward", (("/home/adam/train.py", "step", "loss = model(batch)"), MODULE, FORWARD)),
    "unknown": (None, (MAIN,)),
}
ACTS = {
    "optimizer step": ("zero_stage 1", "offload_optimizer"),
    "building the model": ("meta device", "load in bf16"),
    "loading a checkpoint": ('map_location="cpu"',),
    "checkpoint": ("write shards", "stage3_gather_16bit_weights_on_model_save: false"),
    "evaluation": ("prediction_loss_only",),
    "backward": ("smaller micro_batch_size",),
    "forward": ("smaller micro_batch_size",),
    None: ("smaller micro_batch_size",),
}


SAVE = (MAIN, MAIN, ("/t.py", "main", "torch.save(model)"))
RAY = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "OutOfMemoryError: Task was killed due to the node running low on memory.",
    "(raylet) node_manager.cc:3277: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed",
    "Memory on the node (IP: 10.0.0.1) was 59.49GB / 62.58GB (0.95), which exceeds the memory usage threshold of 0.95.",
    "2 worker(s) were killed due to the node running low on memory.",
)
PIECES = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 3 has a capacity of 79.11 GiB of "
    "which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated "
    "memory 64.11 GiB is allocated by PyTorch, and {} is reserved by PyTorch but unallocated. If reserved but ..."
)
JOINED = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
XIDS = {
    79: ("drain the node and reboot it", 3),
    94: ("restart that process", 3),
    48: ("go back to a checkpoint before it", 3),
    95: ("go back to a checkpoint before it", 3),
    63: ("reset the GPU when it is idle", 1),
    64: ("have it replaced", 3),
    74: ("reset all its GPUs together", 3),
    149: ("reset all its GPUs together", 3),
    92: ("the run's values are right", 2),
    119: ("drain the node and reset the GPU", 3),
    120: ("drain the node and reset the GPU", 3),
    154: ("do what the line names", 3),
    31: ("compute-sanitizer", 2),
    45: ("the GPU is sound", 1),
    7: ("Xid catalog", 3),
}
RESET = (48, 63, 64, 94, 95, 119, 120, 154)
MISSING = "{}: cannot open shared object file: No such file or directory"
SYMBOL = "ImportError: nvidia/cusparse/lib/libcusparse.so.12: undefined symbol: {}, version lib"
LIBRARIES = {
    "libcudart.so.12": ("built for CUDA 12 wants libcudart.so.12", "CUDA 12's runtime"),
    "libcudart.so.11.0": ("built for CUDA 11 wants libcudart.so.11.0", "CUDA 11's runtime"),
    "libnvJitLink.so.13": ("built for CUDA 13", "torch.version.cuda"),
    "libcufft.so.11": ("wants libcufft.so.11", "torch.version.cuda"),  # CUDA 12 has it: its number is its own
    "libcudnn_ops.so.9": ("wants libcudnn_ops.so.9", "torch.version.cuda"),
    "libcuda.so.1": ("a part of NVIDIA's driver", "--gpus all"),
    "libnvidia-ml.so.1": ("a part of NVIDIA's driver", "--gpus all"),
    "libc10_cuda.so": ("torch's libc10_cuda.so", "import torch before it"),
    "libamdhip64.so.6": ("built for ROCm", "torch.version.hip"),
    "libaio.so.1": ("libaio.so.1 is not where", "apt-file search libaio.so.1"),
}
FLASH = (("/t.py", "<module>", "import flash_attn"), (f"{SITE}/flash_attn/interface.py", "<module>", "import c"))
DIVIDES = {
    "ValueError: num_attention_heads (30) must be a multiple of tensor_model_parallel_size (4).": (
        "num_attention_heads 30 by tensor_model_parallel_size 4", "that divides 30"),
    "AssertionError: Attention head count 30 is not divisible by SP size 4": ("head count 30 by SP size 4", "30"),
    "E: global batch size (15) is not divisible by micro batch size (2) times data parallel size (4)": (
        "the global batch of 15 does not divide by micro batch 2 times 4", "multiple of 2 × 4"),
    "ValueError: batch's seqlen=1001 isn't divisible by sp-size=4": ("seqlen 1001 by sp-size 4", "pad sequences"),
    "NotImplementedError: FSDP does not support uneven sharding on dim 1: torch.Size([8, 30]) (world size: 4)": (
        "does not divide by 4 ranks of FSDP; that dimension has 30", "shard dimension 0"),
    "RuntimeError: Tensor's dim 2 does not divide equally across group size": ("dimension 2 of a tensor", "pad"),
    "einops.EinopsError: Shape mismatch, can't divide axis of length 7 in chunks of 2": ("length 7 does", "of 2"),
    "ValueError: hidden_size must be divisible by num_heads (got `hidden_size`: 100 and `num_heads`: 3).": (
        "hidden_size 100 by num_heads 3", "multiple of 3"),
    "AssertionError: 25 is not divisible by 4": ("a size does not divide: 25 by 4", "pad 25 to a multiple of 4"),
}  # fmt: skip
STUCK = (
    "{}[E626 ProcessGroupNCCL.cpp:1743] [PG ID {} PG GUID 0(default_pg) Rank 7] ProcessGroupNCCL's watchdog got "
    "stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically indicates a hang"
)
OF_7 = STUCK.format("[rank7]:", 0)
ENQUEUED = (
    "[rank7]:[E626 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 7] Exception detected by watchdog at "
    "work: 41, last enqueued NCCL work: 42, last completed NCCL work: 40."
)
KNOWN = "; last known call: rank 7 in call 42, of which 40 were completed\n"
HUNG, WAITS = "hung on rank {}: torch's watchdog made no progress", "collective-timeout on rank {}: "
UNKNOWN = "; last known call: none in these logs\n"
EACH_OTHER = {
    2: [p2p("send 0->1", 1, "completed", True), p2p("recv 0<-1", 20, number=2),
        p2p("send 0->1", 25, "scheduled", number=3)],
    3: [p2p("recv 1<-0", 21, "scheduled")],
}  # fmt: skip
BOTH_WAYS = {
    0: [p2p("send 0->1", 5), p2p("recv 0<-1", 6, number=2)],
    1: [p2p("send 1->0", 5), p2p("recv 1<-0", 6, number=2)],
}


def batch(state: str | None, receives_alone: bool = False) -> Files:
    """``batch_isend_irecv`` of two ranks: all calls of a batch have one number, and the last entry is their state."""
    last = [] if state is None else [p2p("coalesced", 7, state, state == "completed")]
    return flight({rank: [*(each | {"p2p_seq_id": 1} for each in calls[receives_alone:]), *last]
                   for rank, calls in BOTH_WAYS.items()}, g7="[0, 1]")  # fmt: skip


def received(state: str, retired: bool = False) -> Files:
    """Ranks 0 and 1, each in a receive from the other."""
    return flight({rank: [p2p(f"recv {rank}<-{1 - rank}", 5 + rank, state, retired)] for rank in (0, 1)}, g7="[0, 1]")


OF_8 = {"process_group": ("8", "pp")}
LAST = flight({7: [p2p("send 0->1", 9, "completed", True), p2p("send 0->2", 4, "completed", True, 2)]}, g7="[0, 1, 2]")
XID = "NVRM: Xid (PCI:0000:{}:00): {}"
CASES: dict[str, tuple[Files, tuple[tuple[str, ...], ...]]] = {
    "a frame that rich draws": (
        ["╭───────── Traceback (most recent call last) ─────────╮",
         "│ /project/train.py:12 in main                        │",
         f"│ {SITE}/torch/optim/adamw.py:210 in step              │",
         "╰──────────────────────────────────────────────────────╯", OOM],
        (("gpu-out-of-memory in optimizer step: ",),),
    ),
    # As IPython writes it, with the class of a method (github.com/huggingface/transformers/issues/24658).
    "a frame of a notebook": (
        ["OutOfMemoryError                          Traceback (most recent call last)", "Cell In[9], line 22",
         "---> 22 trainer.train()",
         "File ~/site-packages/deepspeed/runtime/engine.py:1184, in DeepSpeedEngine._configure_optimizer(self, basic)",
         "   1183 if optimizer_wrapper == ZERO_OPTIMIZATION:",
         "-> 1184     self.optimizer = self._configure_zero_optimizer(basic_optimizer)",
         "File ~/env/lib/python3.11/site-packages/torch/_utils.py:10, in empty(size)", OOM],
        (("gpu-out-of-memory in optimizer step: ",),),
    ),
    "the source line of a frame of a notebook": (
        ["OutOfMemoryError                          Traceback (most recent call last)",
         "File ~/train.py:4, in Trainer.fit(self)", "----> 4     optimizer.step()", OOM],
        (("gpu-out-of-memory in optimizer step: ",),),
    ),
    "words of a log line are no frames": (
        ["INFO calling torch.save(model) in save", OOM], (("gpu-out-of-memory: ",),),
    ),
    "the traceback of an error before is not this one's": (
        [*trace(MAIN, SAVE[-1], error="OSError: busy"), *trace(MAIN, MODULE, FORWARD)],
        (("gpu-out-of-memory in forward: ",), ("exception: OSError: busy\n",)),
    ),
    # Their lines alternate; the ranks are the only difference.
    "two ranks out of memory in two phases get an act each": (
        [line for pair in zip(trace(*SAVE, mark="[rank0]: "),
                              trace(MAIN, *PHASES["adam"][1][1:], mark="[rank1]: "), strict=True) for line in pair],
        (("gpu-out-of-memory on rank 0 in checkpoint: ", "!zero_stage", "!no other"),
         ("gpu-out-of-memory on rank 1 in optimizer step: ", "zero_stage", "!no other")),
    ),
    "a rank whose batch was longer is told to bucket": (
        ["[rank0]: step 3", *trace(*PHASES["forward"][1], mark="[rank1]: ")],
        (("gpu-out-of-memory on rank 1 in forward: a GPU ran out of memory, and no other: its batch was longer",
          "do     bucket by length and pad alike; else smaller micro_batch_size"),),
    ),
    "a rank that holds more is not told to bucket": (
        ["[rank0]: step 3", *trace(*PHASES["adam"][1], mark="[rank1]: ")],
        (("gpu-out-of-memory on rank 1 in optimizer step: a GPU ran out of memory, and no other: it holds or gathers",
          "!bucket by length"),),
    ),
    "with one rank there is no other": (
        trace(*PHASES["forward"][1], mark="[rank1]: "), (("gpu-out-of-memory on rank 1 in forward: ", "!no other"),),
    ),
    # CUDACachingAllocator.cpp: memory in pieces, of which there is as much as was asked for, or much of it.
    "in pieces, as much as was asked for": (
        [PIECES.format("1.75 GiB", "1.90 GiB")],
        (("gpu-out-of-memory on rank 3: ", "; 1.90 GiB were reserved but unallocated, in pieces too small for the "
          "1.75 GiB asked\n", f"do     set {JOINED}"),),
    ),
    "in pieces, exactly as much": ([PIECES.format("1.75 GiB", "1.75 GiB")], (("gpu-out-of-memory", JOINED),)),
    "in pieces, much, though less than was asked for": (
        [PIECES.format("12.40 GiB", "2.00 GiB")], (("gpu-out-of-memory", JOINED, "!no other"),),
    ),
    "in pieces, little": ([PIECES.format("1.75 GiB", "140.00 MiB")], (("gpu-out-of-memory", f"!{JOINED}"),)),
    "in pieces, of what was asked in MiB": (
        [PIECES.format("20.00 MiB", "140.00 MiB")], (("gpu-out-of-memory", JOINED),),
    ),
    "in pieces, of KiB": ([PIECES.format("20.00 MiB", "140.00 KiB")], (("gpu-out-of-memory", f"!{JOINED}"),)),
    **{line[:24]: ([line], (("host-out-of-memory: ", "RAY_memory_usage_threshold"),)) for line in RAY},
    "ray ended no worker": (
        ["0 Workers (tasks / actors) killed due to memory pressure (OOM), 3 Workers crashed"], (),
    ),
    "ray tells of a GPU": (
        ["ray.exceptions.RayTaskError(OutOfMemoryError): ray::Worker.update()", OOM],
        (("gpu-out-of-memory: ", "all.log:2"),),
    ),
    **{f"Xid {xid}": (
        [f"kernel: {XID.format('4f', xid)}, pid=77, name=python3, x"],
        ((f"gpu-fault on GPU 0000:4f:00: Xid {xid}:", act, f"weight {weight}\n",
          ("" if xid in RESET else "!") + "nvidia-smi --gpu-reset -i 0000:4f:00.0"),),
    ) for xid, (act, weight) in XIDS.items()},
    # In the order of their weights; two GPUs with one Xid are one finding where the act is one.
    "two GPUs and two Xids": (
        [f"{XID.format('4f', 63)}, Row Remapper: New row marked for remapping, reset gpu to activate.",
         f"{XID.format('4f', 94)}, pid=1, Contained", f"{XID.format('1b', 79)}, pid=2, GPU has fallen off the bus.",
         "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.", f"{XID.format('9b', 94)}, pid=3, Contained",
         f"{XID.format('9b', 45)}, pid=3, Ch 1", f"{XID.format('1b', 45)}, pid=2, Ch 2"],
        (("gpu-fault on GPU 0000:4f:00: Xid 94",), ("gpu-fault on GPU 0000:1b:00: Xid 79",),
         ("gpu-fault on GPU 0000:9b:00: Xid 94",), ("gpu-fault on GPU 0000:4f:00: Xid 63",),
         ("gpu-fault on GPU 0000:9b:00, 0000:1b:00: Xid 45",)),
    ),
    **{means: ([line], (("gpu-fault: ", means),)) for means, line in {
        "an NVLink error": "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        "a GPU met an uncorrectable error": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "not of the GPU": "RuntimeError: CUDA error: device-side assert triggered",
        "memory that is not its own": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "Xid 79: the GPU has fallen off the PCIe bus": "kernel: GPU has fallen off the bus.",
    }.items()},
    **{library: (
        trace(*FLASH, error=f"ImportError: {MISSING.format(library)}"),
        (("missing-library: ", *words, f"  from   /t.py:88 in <module>, raised in {FLASH[1][0]}:88 in <module>\n"),),
    ) for library, words in LIBRARIES.items()},
    "libraries that a healthy run does without": (
        ["W tensorflow dso_loader.cc:64] Could not load dynamic library 'libcudart.so.11.0'; dlerror: "
         + MISSING.format("libcudart.so.11.0"),
         "NCCL INFO Plugin load returned 2 : " + MISSING.format("libnccl-tuner.so"),
         "ERROR: ld.so: object 'libjemalloc.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file)"],
        (),
    ),
    "a symbol of another CUDA is a mixture": (
        [SYMBOL.format("__nvJitLinkAddData_12_1")],
        (("binary-mismatch: ", "no __nvJitLinkAddData_12_1", "LD_LIBRARY_PATH"),),
    ),
    "a symbol of another torch": (
        [SYMBOL.format("_ZN3c105ErrorC2E")], (("binary-mismatch: ", "for the torch that is here"),),
    ),
    **{line: ([line], (("not-divisible: ", *words),)) for line, words in DIVIDES.items()},
    "both receive": (
        [timed_out(0, 12, "RECV"), timed_out(1, 12, "RECV")],
        ((WAITS.format("0, 1"), "wait, for each other: rank 0 in RECV number 12, rank 1 in RECV number 12\n",
          "batch_isend_irecv"),),
    ),
    "calls in two orders": (
        [timed_out(1, 40, "ALLREDUCE"), timed_out(0, 41, "BROADCAST")],
        ((WAITS.format("0, 1"), "each other: rank 0 in BROADCAST number 41, rank 1 in ALLREDUCE number 40\n",
          "the same order of calls"),),
    ),
    "of ten ranks the calls of eight": (
        [timed_out(rank, 10 + rank, "RECV") for rank in range(10)],
        (("collective-timeout on rank 0, 1, ", "rank 7 in RECV number 17 and 2 more\n", "!number 18"),),
    ),
    "all came": (
        [timed_out(0, 41, "ALLREDUCE"), timed_out(1, 41, "ALLREDUCE")],
        ((WAITS.format("0, 1"), "came to ALLREDUCE number 41, and it did not end\n", "none stayed away"),),
    ),
    "one did not come": (
        [timed_out(0, 41, "ALLREDUCE"), timed_out(1, 41, "ALLREDUCE"), "[rank2]: step 7"],
        ((WAITS.format("0, 1"), "rank 2 did not come to ALLREDUCE number 41\n", "did not wait"),),
    ),
    "of a rank's calls the first timed out": (
        [timed_out(7, 41, "ALLREDUCE"), timed_out(7, 42, "BROADCAST"), "[rank3]: step 7"],
        ((WAITS.format(7), "rank 3 did not come to ALLREDUCE number 41\n"),),
    ),
    # Words count ranks within the group: 0 and 1 of pipeline group 7 are 2 and 3.
    "a mutual wait in records": (
        flight(EACH_OTHER, g7="[2, 3]"),
        (("collective-timeout on rank 2, 3: ranks 2, 3 wait for each other: rank 2 in recv number 2 from rank 3, sizes "
          "[[4, 8]]; rank 3 in recv number 1 from rank 2, sizes [[4, 8]]\n", "rank_2", "batch_isend_irecv"),),
    ),
    "rank 0 waits for a ring of three others": (
        flight({rank: [p2p(words, 9 - rank)] for rank, words in
                enumerate(["recv 0<-1", "recv 1<-2", "send 2->3", "send 3->1"])}, g7="[0, 1, 2, 3]"),
        (("collective-timeout on rank 1, 2, 3: ", "rank 3 in send number 1 to rank 1", "rank_3"),),
    ),
    "sends before receives, one by one": (
        flight(BOTH_WAYS, g7="[0, 1]"), (("collective-timeout on rank 0, 1: ranks 0, 1 wait for each other",),),
    ),
    "in one batch, which has no order": (batch(None), ()),
    "a batch of receives alone": (
        batch("started", True), (("collective-timeout on rank 0, 1: ranks 0, 1 wait for each other",),),
    ),
    "a batch that ended": (batch("completed", True), ()),
    "a batch that ended in another group": (
        flight({rank: [p2p(f"recv {rank}<-{1 - rank}", 5), p2p("coalesced", 7, "completed", True) | OF_8]
                for rank in (0, 1)}, g7="[0, 1]"),
        (("collective-timeout on rank 0, 1: ranks 0, 1 wait for each other",),),
    ),
    "a send and its receive wait for the network": (
        flight({0: [p2p("send 0->1", 5)], 1: [p2p("recv 1<-0", 6)]}, g7="[0, 1]"), (),
    ),
    "receives that wait": (received("scheduled"), (("collective-timeout on rank 0, 1: ",),)),
    "receives that are over": (received("completed"), ()),
    "receives that retired": (received("scheduled", True), ()),
    "a mutual wait in records and in the log is one finding": (
        {**received("started"), "all.log": [timed_out(0, 12, "RECV"), timed_out(1, 12, "RECV")]},
        (("collective-timeout on rank 0, 1: ranks 0, 1 wait for each other: rank 0 in recv number 1 from rank 1, sizes",
          "batch_isend_irecv"),),
    ),
    # Rank 0 waits for 1, which waits for 2, which is elsewhere; rank 3's record is not here.
    "a rank that did not come to a send or receive": (
        flight({
            0: [p2p("recv 0<-1", 3)],
            1: [p2p("recv 1<-2", 5), p2p("send 1->0", 8, "scheduled", number=2)],
            2: [p2p("recv 2<-1", 1, "completed", True)],
        }, g7="[0, 1, 2, 3]"),
        ((WAITS.format(1), "rank 2 did not come to recv number 1 of group 7 (pp), sizes [[4, 8]]\n", "rank_1"),),
    ),
    "of two ranks that wait for such, the one that waits longer": (
        flight({0: [p2p("recv 0<-2", 9)], 1: [p2p("recv 1<-2", 5)], 2: []}, g7="[0, 1, 2]"),
        ((WAITS.format(1), "rank 2 did not come to recv number 1", "rank_1"),),
    ),
    "a collective without some ranks says more than a receive without its sender": (
        flight({0: [p2p("recv 0<-2", 1), call(1), call(2, at=9)], 1: [call(1), call(2, at=9)], 2: [call(1)]}),
        ((WAITS.format("0, 1"), "rank 2 did not come to all_reduce number 2 of group 0, sizes [[8]]\n", "rank_0"),),
    ),
    # The receive of batch 2 was made first, and stands last; it has no input.
    "the oldest of a rank's waits": (
        flight({0: [p2p("recv 0<-1", 9), p2p("recv 0<-2", 5, number=2) | {"input_sizes": [], "output_sizes": [[3]]}],
                1: [], 2: []}),
        ((WAITS.format(0), "rank 2 did not come to recv number 2 of group 7 (pp), sizes [[3]]\n", "rank_0"),),
    ),
    # By the names of their files, 10 and 11 come first.
    "of two pairs that wait the one of the lowest rank": (
        flight({rank: [p2p(f"recv 0<-{peer}", 5)] for rank, peer in ((2, 3), (3, 2), (10, 11), (11, 10))}),
        (("collective-timeout on rank 2, 3: ranks 2, 3 wait for each other",),),
    ),
    "a group without a word of what it is for": (
        flight({0: [p2p("recv 0<-2", 9) | {"process_group": ("7", "undefined")}], 2: []}),
        ((WAITS.format(0), "rank 2 did not come to recv number 1 of group 7, sizes", "rank_0"),),
    ),
    "a peer whose record is not here": (flight({0: [p2p("recv 0<-3", 7)]}, g7="[0, 1, 2, 3]"), ()),
    "a watchdog of all ranks": ([STUCK.format("", 0)], ((HUNG.format(7), UNKNOWN),)),
    # Of a group of pipeline ranks: 7 is no rank of the job.
    "a watchdog of a group": ([STUCK.format("", 3)], (("hung: torch's watchdog", "!last known call"),)),
    "a watchdog of a group, whose rank is told": ([STUCK.format("[rank15]:", 3)], ((HUNG.format(15), UNKNOWN),)),
    "after its last call": ([ENQUEUED, OF_7], ((HUNG.format(7), KNOWN),)),
    "after another rank's last call": ([ENQUEUED, STUCK.format("[rank6]:", 0)], ((HUNG.format(6), UNKNOWN),)),
    "a heartbeat": (
        ["[rank2]:[E1019] [PG 3 Rank 2] Heartbeat monitor timed out! Process will be terminated"],
        ((HUNG.format(2), UNKNOWN),),
    ),
    "a collective's time-out comes before the watchdog that then sticks": (
        [OF_7, timed_out(7, 41, "_ALLGATHER_BASE"), "[rank2]: step 7"],
        ((WAITS.format(7), "rank 2 did not come"),
         (HUNG.format(7), "; last known call: rank 7 in _ALLGATHER_BASE number 41\n")),
    ),
    "the rank that stayed away hangs": (
        [OF_7, timed_out(2, 41, "ALLREDUCE")],
        ((WAITS.format(2), "rank 7 hangs, and did not end its part\n"), (HUNG.format(7), UNKNOWN)),
    ),
    "two stayed away, of which one hangs": (
        [OF_7, timed_out(2, 41, "ALLREDUCE"), "[rank3]: step 7"],
        ((WAITS.format(2), "rank 3, 7 did not come to ALLREDUCE number 41\n"), (HUNG.format(7), UNKNOWN)),
    ),
    "a record names the last call of a rank that hangs": (
        {**LAST, "all.log": [OF_7]},
        ((HUNG.format(7), "; last known call: rank 7 in send 0->1 number 1 of group 7\n"),),
    ),
    "a log's last call comes before a record's": ({**LAST, "all.log": [ENQUEUED, OF_7]}, ((HUNG.format(7), KNOWN),)),
    "gloo's time-outs are told by the frames": (
        [*trace(("/t.py", "main", "dist.recv(x)"), (f"{SITE}/torch/distributed/distributed_c10d.py", "recv", "x"),
                mark="[rank0]: ", error="RuntimeError: Timed out waiting 1800000ms for recv operation to complete"),
         "[rank1]: RuntimeError: Timed out waiting 1800000ms for send operation to complete"],
        ((WAITS.format("0, 1"), "for each other: rank 0 in recv at /t.py:88 in main, rank 1 in send\n"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mark", ["", "[rank3]: ", "node-1: "])
@pytest.mark.parametrize("name", PHASES)
def test_an_out_of_memory_has_the_phase_and_the_act_of_its_traceback(name: str, mark: str, tmp_path: Path) -> None:
    phase, frames = PHASES[name]
    (cause,) = read(tmp_path, trace(*frames, mark=mark))
    assert (cause.cause, cause.phase) == ("gpu-out-of-memory", phase)
    assert all(word in cause.fix for word in ACTS[phase])
    assert ("micro_batch_size" in cause.fix) == (phase in (None, "forward", "backward"))


@pytest.mark.parametrize("name", CASES)
def test_each_cause_has_its_own_act_and_numbers(name: str, tmp_path: Path) -> None:
    files, expected = CASES[name]
    say(read(tmp_path, files), *expected)


def test_the_loaders_own_words(tmp_path: Path) -> None:
    """Of a library that no machine has."""
    words = [sys.executable, "-c", "import ctypes\nctypes.CDLL('libcudart.so.99')"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    say(read(tmp_path, ended.stderr.splitlines()), ("missing-library: ", "built for CUDA 99"))


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


@pytest.mark.slow
def test_torchs_own_shape_errors_name_the_dimension(tmp_path: Path) -> None:
    import torch

    cases = {
        lambda: torch.zeros(100).view(2, 7, -1): "the shape [2, 7, -1]: 100 does not divide by 2 × 7 = 14",
        lambda: torch.zeros(120).view(6, 4, 8): "which has 192; where one size is wrong, dimension 2 would be 5, not 8",
        lambda: torch.zeros(96).view(6, 4, 8): "dimension 0 would be 3, not 6 or dimension 1 would be 2, not 4 or "
        "dimension 2 would be 4, not 8",
        lambda: torch.zeros(120).view(6, 1, 8): "which has 48; where one size is wrong, dimension 0 would be 15, not 6 "
        "or dimension 2 would be 20, not 8",
        lambda: torch.zeros(7).view(6, 4, 8): "which has 192, and changing one of its sizes does not make it fit",
        lambda: torch.zeros(4, 10) @ torch.zeros(8, 3): "an input of 10 columns meets a weight of 8",
        lambda: torch.zeros(3, 5) + torch.zeros(3, 7): "dimension 1 has 5 in one tensor and 7 in the other",
        lambda: torch.zeros(10).split([4, 5]): "dimension 0 has 10, and the parts that it is cut into are [4, 5]",
        lambda: torch.cat([torch.zeros(2, 3), torch.zeros(2, 4)]): "number 1 has 4 and the first 3",
        lambda: torch.nn.GroupNorm(3, 10): "a size does not divide: num_channels 10 by num_groups 3",
        lambda: torch.nn.MultiheadAttention(100, 3): "embed_dim does not divide by num_heads",
    }
    for made, says in cases.items():
        (cause,) = read(tmp_path, [raised(made)])
        assert cause.cause in ("not-divisible", "shapes-differ")
        assert says in cause.meaning


def test_every_pattern_can_be_written_out() -> None:
    """Each names only groups of its own expression."""
    for pattern in PATTERNS:
        assert pattern.regex.search("") is None, pattern.cause
        for text in (pattern.meaning, pattern.fix, *pattern.phases.values()):
            named = {part.split(">")[0] for part in text.split("\\g<")[1:]}
            assert named <= set(pattern.regex.groupindex), (pattern.cause, named)
