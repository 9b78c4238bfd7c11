"""What the doctor says to do: by the phase of an out-of-memory, the Xid, the library, the dimension, and the calls in
which ranks wait. Frames and messages are those of the installed torch, transformers, DeepSpeed, and of the sources of
NCCL, Ray 2.60 and NVIDIA's driver."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.diagnose.logs import Cause, diagnose
from kit.diagnose.logs.patterns import PATTERNS

SITE = "/opt/env/lib/python3.11/site-packages"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
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


def read(tmp_path: Path, *lines: str) -> tuple[Cause, ...]:
    (tmp_path / "all.log").write_text("\n".join([*lines, ""]))
    return diagnose([tmp_path / "all.log"])


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


@pytest.mark.parametrize("mark", ["", "[rank3]: ", "node-1: "])
@pytest.mark.parametrize("name", PHASES)
def test_an_out_of_memory_has_the_phase_and_the_act_of_its_traceback(name: str, mark: str, tmp_path: Path) -> None:
    phase, frames = PHASES[name]
    (cause,) = read(tmp_path, *trace(*frames, mark=mark))
    assert (cause.cause, cause.phase) == ("gpu-out-of-memory", phase)
    assert all(word in cause.fix for word in ACTS[phase])
    assert ("micro_batch_size" in cause.fix) == (phase in (None, "forward", "backward"))


def test_a_frame_that_rich_draws_has_a_phase(tmp_path: Path) -> None:
    drawn = [
        "╭───────── Traceback (most recent call last) ─────────╮",
        "│ /project/train.py:12 in main                        │",
        f"│ {SITE}/torch/optim/adamw.py:210 in step              │",
        "╰──────────────────────────────────────────────────────╯",
        OOM,
    ]
    assert read(tmp_path, *drawn)[0].phase == "optimizer step"


def test_a_frame_of_a_notebook_has_a_phase(tmp_path: Path) -> None:
    """As IPython writes it, with the class of a method (github.com/huggingface/transformers/issues/24658)."""
    lines = [
        "OutOfMemoryError                          Traceback (most recent call last)",
        "Cell In[9], line 22",
        "---> 22 trainer.train()",
        "File ~/site-packages/deepspeed/runtime/engine.py:1184, in DeepSpeedEngine._configure_optimizer(self, basic)",
        "   1183 if optimizer_wrapper == ZERO_OPTIMIZATION:",
        "-> 1184     self.optimizer = self._configure_zero_optimizer(basic_optimizer)",
        "File ~/env/lib/python3.11/site-packages/torch/_utils.py:10, in empty(size)",
        OOM,
    ]
    assert [cause.phase for cause in read(tmp_path, *lines)] == ["optimizer step"]
    lines[3:6] = ["File ~/train.py:4, in Trainer.fit(self)", "----> 4     optimizer.step()"]
    assert [cause.phase for cause in read(tmp_path, *lines)] == ["optimizer step"]


def test_words_of_a_log_line_are_no_frames(tmp_path: Path) -> None:
    """A save that went well, and an error without a traceback; and the one before, of another error."""
    assert read(tmp_path, "INFO calling torch.save(model) in save", OOM)[0].phase is None
    handled = trace(MAIN, ("/t.py", "save", "torch.save(model)"), error="OSError: busy")
    assert read(tmp_path, *handled, *trace(MAIN, MODULE, FORWARD))[0].phase == "forward"


def test_two_ranks_out_of_memory_in_two_phases_get_an_act_each(tmp_path: Path) -> None:
    """Their lines alternate; the ranks are the only difference."""
    save = trace(MAIN, MAIN, ("/t.py", "main", "torch.save(model)"), mark="[rank0]: ")
    adam = trace(MAIN, *PHASES["adam"][1][1:], mark="[rank1]: ")
    causes = read(tmp_path, *(line for pair in zip(save, adam, strict=True) for line in pair))
    assert [(cause.ranks, cause.phase) for cause in causes] == [((0,), "checkpoint"), ((1,), "optimizer step")]
    assert ["zero_stage" in cause.fix for cause in causes] == [False, True]
    assert not any("no other" in cause.meaning for cause in causes)


@pytest.mark.parametrize(("phase", "bucket"), [("forward", True), ("adam", False)])
def test_only_a_rank_whose_batch_was_longer_is_told_to_bucket(phase: str, bucket: bool, tmp_path: Path) -> None:
    (cause,) = read(tmp_path, "[rank0]: step 3", *trace(*PHASES[phase][1], mark="[rank1]: "))
    assert "and no other" in cause.meaning
    assert ("bucket by length" in cause.fix, "its batch was longer" in cause.meaning) == (bucket, bucket)
    (alone,) = read(tmp_path, *trace(*PHASES[phase][1], mark="[rank1]: "))
    assert "and no other" not in alone.meaning


RAY = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "OutOfMemoryError: Task was killed due to the node running low on memory.",
    "(raylet) node_manager.cc:3277: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed",
    "Memory on the node (IP: 10.0.0.1) was 59.49GB / 62.58GB (0.95), which exceeds the memory usage threshold of 0.95.",
    "2 worker(s) were killed due to the node running low on memory.",
)


@pytest.mark.parametrize("line", RAY)
def test_rays_kill_is_the_hosts_memory(line: str, tmp_path: Path) -> None:
    (cause,) = read(tmp_path, line)
    assert cause.cause == "host-out-of-memory"
    assert "RAY_memory_usage_threshold" in cause.fix


def test_rays_other_words_are_no_kill(tmp_path: Path) -> None:
    assert read(tmp_path, "0 Workers (tasks / actors) killed due to memory pressure (OOM), 3 Workers crashed") == ()
    (cause,) = read(tmp_path, "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Worker.update()", OOM)
    assert (cause.cause, cause.place) == ("gpu-out-of-memory", "all.log:2")


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


@pytest.mark.parametrize("xid", XIDS)
def test_each_xid_has_its_act_and_the_gpus_address(xid: int, tmp_path: Path) -> None:
    act, weight = XIDS[xid]
    (cause,) = read(tmp_path, f"kernel: NVRM: Xid (PCI:0000:4f:00): {xid}, pid=77, name=python3, x")
    assert (cause.cause, cause.gpus, cause.weight) == ("gpu-fault", ("0000:4f:00",), weight)
    assert act in cause.fix
    assert f"Xid {xid}:" in cause.meaning
    assert str(cause).startswith(f"gpu-fault on GPU 0000:4f:00: Xid {xid}:")
    if xid in (94, 95, 63, 119):
        assert "nvidia-smi --gpu-reset -i 0000:4f:00.0" in cause.fix


def test_two_gpus_and_two_xids_are_told_apart(tmp_path: Path) -> None:
    lines = [
        "NVRM: Xid (PCI:0000:4f:00): 63, Row Remapper: New row marked for remapping, reset gpu to activate.",
        "NVRM: Xid (PCI:0000:4f:00): 94, pid=1, Contained",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid=2, GPU has fallen off the bus.",
        "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:9b:00): 94, pid=3, Contained",
        "NVRM: Xid (PCI:0000:9b:00): 45, pid=3, Ch 1",
        "NVRM: Xid (PCI:0000:1b:00): 45, pid=2, Ch 2",
    ]
    assert [(cause.meaning[:6], cause.gpus) for cause in read(tmp_path, *lines)] == [
        ("Xid 94", ("0000:4f:00",)),
        ("Xid 79", ("0000:1b:00",)),
        ("Xid 94", ("0000:9b:00",)),
        ("Xid 63", ("0000:4f:00",)),
        ("Xid 45", ("0000:9b:00", "0000:1b:00")),
    ]


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "an NVLink error"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "a GPU met an uncorrectable error"),
        ("RuntimeError: CUDA error: device-side assert triggered", "not of the GPU"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "memory that is not its own"),
        ("kernel: GPU has fallen off the bus.", "Xid 79: the GPU has fallen off the PCIe bus"),
    ],
)
def test_cudas_words_of_a_fault_name_no_gpu(line: str, means: str, tmp_path: Path) -> None:
    (cause,) = read(tmp_path, line)
    assert (cause.cause, cause.gpus) == ("gpu-fault", ())
    assert means in cause.meaning
    assert str(cause).startswith("gpu-fault: ")


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
MISSING = "{}: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_says_what_wants_it_and_how_to_see_it(library: str, tmp_path: Path) -> None:
    means, act = LIBRARIES[library]
    frames = (("/t.py", "<module>", "import flash_attn"), (f"{SITE}/flash_attn/interface.py", "<module>", "import c"))
    (cause,) = read(tmp_path, *trace(*frames, error=f"ImportError: {MISSING.format(library)}"))
    assert cause.cause == "missing-library"
    assert means in cause.meaning
    assert act in cause.fix
    assert cause.frames == f"/t.py:88 in <module>, raised in {SITE}/flash_attn/interface.py:88 in <module>"


def test_the_loaders_own_words(tmp_path: Path) -> None:
    """Of a library that no machine has."""
    program = tmp_path / "train.py"
    program.write_text("import ctypes\nctypes.CDLL('libcudart.so.99')\n")
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    (cause,) = read(tmp_path, *ended.stderr.splitlines())
    assert (cause.cause, "built for CUDA 99" in cause.meaning) == ("missing-library", True)


@pytest.mark.parametrize(
    "line",
    [
        "W tensorflow dso_loader.cc:64] Could not load dynamic library 'libcudart.so.11.0'; dlerror: "
        + MISSING.format("libcudart.so.11.0"),
        "NCCL INFO Plugin load returned 2 : " + MISSING.format("libnccl-tuner.so"),
        "ERROR: ld.so: object 'libjemalloc.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file)",
    ],
)
def test_libraries_that_a_healthy_run_does_without(line: str, tmp_path: Path) -> None:
    assert read(tmp_path, line) == ()


def test_a_symbol_of_another_cuda_is_a_mixture(tmp_path: Path) -> None:
    line = "ImportError: nvidia/cusparse/lib/libcusparse.so.12: undefined symbol: __nvJitLinkAddData_12_1, version lib"
    (cause,) = read(tmp_path, line)
    assert (cause.cause, "no __nvJitLinkAddData_12_1" in cause.meaning) == ("binary-mismatch", True)
    assert "LD_LIBRARY_PATH" in cause.fix
    (torchs,) = read(tmp_path, line.replace("__nvJitLinkAddData_12_1", "_ZN3c105ErrorC2E"))
    assert "for the torch that is here" in torchs.fix


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


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
    for call, says in cases.items():
        (cause,) = read(tmp_path, raised(call))
        assert cause.cause in ("not-divisible", "shapes-differ")
        assert says in cause.meaning


@pytest.mark.parametrize(
    ("line", "says", "act"),
    [
        (
            "ValueError: num_attention_heads (30) must be a multiple of tensor_model_parallel_size (4).",
            "num_attention_heads 30 by tensor_model_parallel_size 4",
            "that divides 30",
        ),
        ("AssertionError: Attention head count 30 is not divisible by SP size 4", "head count 30 by SP size 4", "30"),
        (
            "E: global batch size (15) is not divisible by micro batch size (2) times data parallel size (4)",
            "the global batch of 15 does not divide by micro batch 2 times 4",
            "multiple of 2 × 4",
        ),
        ("ValueError: batch's seqlen=1001 isn't divisible by sp-size=4", "seqlen 1001 by sp-size 4", "pad sequences"),
        (
            "NotImplementedError: FSDP does not support uneven sharding on dim 1: torch.Size([8, 30]) (world size: 4)",
            "does not divide by 4 ranks of FSDP; that dimension has 30",
            "shard dimension 0",
        ),
        ("RuntimeError: Tensor's dim 2 does not divide equally across group size", "dimension 2 of a tensor", "pad"),
        ("einops.EinopsError: Shape mismatch, can't divide axis of length 7 in chunks of 2", "length 7 does", "of 2"),
        (
            "ValueError: hidden_size must be divisible by num_heads (got `hidden_size`: 100 and `num_heads`: 3).",
            "hidden_size 100 by num_heads 3",
            "multiple of 3",
        ),
        ("AssertionError: 25 is not divisible by 4", "a size does not divide: 25 by 4", "pad 25 to a multiple of 4"),
    ],
)
def test_what_does_not_divide_and_by_what(line: str, says: str, act: str, tmp_path: Path) -> None:
    (cause,) = read(tmp_path, line)
    assert cause.cause == "not-divisible"
    assert says in cause.meaning
    assert act in cause.fix


def test_every_pattern_can_be_written_out() -> None:
    """Each names only groups of its own expression."""
    for pattern in PATTERNS:
        match = pattern.regex.match("") or next(iter(pattern.regex.finditer("")), None)
        groups = set(pattern.regex.groupindex)
        for text in (pattern.meaning, pattern.fix, *pattern.phases.values()):
            named = {part.split(">")[0] for part in text.split("\\g<")[1:]}
            assert named <= groups, (pattern.cause, named)
        assert match is None, pattern.cause


def timed_out(rank: int, number: int, op: str) -> str:
    return (
        f"[rank{rank}]:[E1120 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=1, Timeout(ms)=600000) ran for 600060 milliseconds"
    )


@pytest.mark.parametrize(
    ("lines", "says", "act"),
    [
        (
            [timed_out(0, 12, "RECV"), timed_out(1, 12, "RECV")],
            "wait, for each other: rank 0 in RECV number 12, rank 1 in RECV number 12",
            "batch_isend_irecv",
        ),
        (
            [timed_out(1, 40, "ALLREDUCE"), timed_out(0, 41, "BROADCAST")],
            "wait, for each other: rank 0 in BROADCAST number 41, rank 1 in ALLREDUCE number 40",
            "the same order of calls",
        ),
        (
            [timed_out(0, 41, "ALLREDUCE"), timed_out(1, 41, "ALLREDUCE")],
            "came to ALLREDUCE number 41, and it did not end",
            "none stayed away",
        ),
        (
            [timed_out(0, 41, "ALLREDUCE"), timed_out(1, 41, "ALLREDUCE"), "[rank2]: step 7"],
            "rank 2 did not come to ALLREDUCE number 41",
            "did not wait",
        ),
    ],
)
def test_ranks_that_all_wait_are_named_with_their_calls(lines: list[str], says: str, act: str, tmp_path: Path) -> None:
    (cause,) = read(tmp_path, *lines)
    assert (cause.cause, cause.ranks) == ("collective-timeout", (0, 1))
    assert cause.meaning.endswith(says)
    assert act in cause.fix


def p2p_records(
    directory: Path,
    calls: dict[int, list[tuple[str, int, str, bool]]],
    ranks: str = "[0, 1, 2, 3]",
    batched: bool = False,
) -> Path:
    """Flight records with sends and receives: rank → (its words, when, state, retired), as ProcessGroupNCCL records
    them; the words count ranks within the group, and calls of a batch have one number."""
    directory.mkdir()
    for rank, made in calls.items():
        entries = [
            {
                "process_group": ("7", "pp"),
                "collective_seq_id": 0,
                "p2p_seq_id": 1 if batched else number,
                "profiling_name": f"nccl:{words}",
                "input_sizes": [[4, 8]],
                "input_dtypes": ["BFloat16"],
                "time_created_ns": created,
                "state": state,
                "retired": retired,
                "is_p2p": True,
            }
            for number, (words, created, state, retired) in enumerate(made, start=1)
        ]
        record = {"version": "2.10", "pg_config": {"7": {"ranks": ranks}}, "entries": entries}
        (directory / f"rank_{rank}").write_bytes(pickle.dumps(record))
    return directory


def test_flight_records_name_a_mutual_wait(tmp_path: Path) -> None:
    done = ("send 0->1", 1, "completed", True)
    both = {
        2: [done, ("recv 0<-1", 20, "started", False), ("send 0->1", 25, "scheduled", False)],
        3: [("recv 1<-0", 21, "scheduled", False)],
    }
    (cause,) = diagnose([p2p_records(tmp_path / "two", both, "[2, 3]")])
    assert (cause.cause, cause.ranks, cause.place) == ("collective-timeout", (2, 3), "rank_2")
    assert cause.meaning == (
        "ranks 2, 3 wait for each other: rank 2 in recv number 2 from rank 3, sizes [[4, 8]]; "
        "rank 3 in recv number 1 from rank 2, sizes [[4, 8]]"
    )
    assert "batch_isend_irecv" in cause.fix
    waits = {0: "recv 0<-1", 1: "recv 1<-2", 2: "send 2->3", 3: "send 3->1"}  # rank 0 waits for the ring of the others
    ring = {rank: [(words, 9 - rank, "started", False)] for rank, words in waits.items()}
    (cause,) = diagnose([p2p_records(tmp_path / "three", ring)])
    assert cause.ranks == (1, 2, 3)
    assert "rank 3 in send number 1 to rank 1" in cause.meaning
    batch = {0: [("send 0->1", 5, "started", False), ("recv 0<-1", 6, "started", False)]}
    batch[1] = [("send 1->0", 5, "started", False), ("recv 1<-0", 6, "started", False)]
    one_by_one = diagnose([p2p_records(tmp_path / "one-by-one", batch)])
    assert [cause.ranks for cause in one_by_one] == [(0, 1)]
    assert diagnose([p2p_records(tmp_path / "batch", batch, batched=True)]) == ()  # the network, and no order of theirs
    receives = {rank: [calls[1], ("coalesced", 7, "started", False)] for rank, calls in batch.items()}
    assert diagnose([p2p_records(tmp_path / "receives", receives, batched=True)])[0].ranks == (0, 1)
    ended = {rank: [calls[1], ("coalesced", 7, "completed", True)] for rank, calls in batch.items()}
    assert diagnose([p2p_records(tmp_path / "ended", ended, batched=True)]) == ()
    pair = {0: [("send 0->1", 5, "started", False)], 1: [("recv 1<-0", 6, "started", False)]}
    assert diagnose([p2p_records(tmp_path / "pair", pair)]) == ()
    for state, retired in (("scheduled", True), ("completed", False)):
        over = {0: [("recv 0<-1", 5, state, retired)], 1: [("recv 1<-0", 6, state, retired)]}
        assert diagnose([p2p_records(tmp_path / f"over-{state}", over)]) == ()


def test_a_mutual_wait_in_records_and_in_the_log_is_one_finding(tmp_path: Path) -> None:
    both = {rank: [(f"recv {rank}<-{1 - rank}", 5, "started", False)] for rank in (0, 1)}
    record = p2p_records(tmp_path / "flight", both)
    (tmp_path / "all.log").write_text(f"{timed_out(0, 12, 'RECV')}\n{timed_out(1, 12, 'RECV')}\n")
    (cause,) = diagnose([tmp_path / "all.log", record])
    assert cause.meaning.startswith("ranks 0, 1 wait for each other: rank 0 in recv number 1 from rank 1")


def test_a_rank_that_did_not_come_to_a_send_or_receive(tmp_path: Path) -> None:
    """Rank 0 waits for 1, which waits for 2, which is elsewhere; rank 3's record is not here."""
    chain = {
        0: [("recv 0<-1", 3, "started", False)],
        1: [("recv 1<-2", 5, "started", False), ("send 1->0", 8, "scheduled", False)],
        2: [("recv 2<-1", 1, "completed", True)],
    }
    (cause,) = diagnose([p2p_records(tmp_path / "chain", chain)])
    assert (cause.cause, cause.ranks, cause.place) == ("collective-timeout", (1,), "rank_1")
    assert cause.meaning.endswith("rank 2 did not come to recv number 1 of group 7 (pp), sizes [[4, 8]]")
    away = {0: [("recv 0<-3", 7, "started", False)]}
    assert diagnose([p2p_records(tmp_path / "away", away)]) == ()


STUCK = (
    "{}[E626 ProcessGroupNCCL.cpp:1743] [PG ID {} PG GUID 0(default_pg) Rank 7] ProcessGroupNCCL's watchdog got "
    "stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically indicates a hang"
)
ENQUEUED = (
    "[rank7]:[E626 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 7] Exception detected by watchdog at "
    "work: 41, last enqueued NCCL work: 42, last completed NCCL work: 40."
)


@pytest.mark.parametrize(
    ("before", "line", "ranks", "call"),
    [
        ([], STUCK.format("", 0), (7,), "none in these logs"),
        ([], STUCK.format("", 3), (), ""),  # of a group of pipeline ranks: 7 is no rank of the job
        ([], STUCK.format("[rank15]:", 3), (15,), "none in these logs"),
        ([ENQUEUED], STUCK.format("[rank7]:", 0), (7,), "rank 7 in call 42, of which 40 were completed"),
        ([ENQUEUED], STUCK.format("[rank6]:", 0), (6,), "none in these logs"),
        ([], "[rank2]:[E1019] [PG 3 Rank 2] Heartbeat monitor timed out! Process will be terminated", (2,), "none"),
    ],
)
def test_a_stuck_watchdog_is_a_hang_of_its_rank_after_its_last_call(
    before: list[str], line: str, ranks: tuple[int, ...], call: str, tmp_path: Path
) -> None:
    (cause,) = read(tmp_path, *before, line)
    assert (cause.cause, cause.ranks) == ("hung", ranks)
    assert cause.meaning.partition("; last known call: ")[2].startswith(call)
    assert bool(call) == ("last known call" in cause.meaning)


def test_a_collectives_time_out_comes_before_the_watchdog_that_then_sticks(tmp_path: Path) -> None:
    causes = read(tmp_path, STUCK.format("[rank7]:", 0), timed_out(7, 41, "_ALLGATHER_BASE"), "[rank2]: step 7")
    assert [(cause.cause, cause.ranks) for cause in causes] == [("collective-timeout", (7,)), ("hung", (7,))]
    assert causes[1].meaning.endswith("last known call: rank 7 in _ALLGATHER_BASE number 41")
    hangs, _ = read(tmp_path, STUCK.format("[rank7]:", 0), timed_out(2, 41, "ALLREDUCE"))
    assert hangs.meaning.endswith("rank 7 hangs, and did not end its part")
    two, _ = read(tmp_path, STUCK.format("[rank7]:", 0), timed_out(2, 41, "ALLREDUCE"), "[rank3]: step 7")
    assert two.meaning.endswith("rank 3, 7 did not come to ALLREDUCE number 41")
    later = [timed_out(7, 41, "ALLREDUCE"), timed_out(7, 42, "BROADCAST"), "[rank3]: step 7"]
    assert read(tmp_path, *later)[0].meaning.endswith("rank 3 did not come to ALLREDUCE number 41")


def test_a_flight_record_names_the_last_call_of_a_rank_that_hangs(tmp_path: Path) -> None:
    made = [("send 0->1", 9, "completed", True), ("send 0->2", 4, "completed", True)]
    record = p2p_records(tmp_path / "flight", {7: made})
    (tmp_path / "all.log").write_text(STUCK.format("[rank7]:", 0) + "\n")
    (cause,) = diagnose([tmp_path / "all.log", record])
    assert cause.meaning.endswith("last known call: rank 7 in send 0->1 number 1 of group 7")
    (tmp_path / "all.log").write_text(f"{ENQUEUED}\n{STUCK.format('[rank7]:', 0)}\n")
    (cause,) = diagnose([tmp_path / "all.log", record])
    assert cause.meaning.endswith("last known call: rank 7 in call 42, of which 40 were completed")


def test_a_hang_ends_the_command_with_a_failure(tmp_path: Path) -> None:
    (tmp_path / "all.log").write_text(STUCK.format("[rank7]:", 0) + "\n")
    done = subprocess.run([sys.executable, "-m", "kit", "doctor", tmp_path / "all.log"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.startswith("hung on rank 7: torch's watchdog made no progress")
