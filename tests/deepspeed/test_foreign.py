"""Checkpoints of other programs, written here by these programs: kit continues them as they do themselves."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint import ds_to_universal

from kit.addons.importers.inspected import inspected
from kit.emit.trainer import trainer_config
from kit.engines.huggingface.models import hf_config, random_model
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec, OptimizerSpec
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.manifest import FOLDERS, Checkpoint
from tests.deepspeed import cases, foreign
from tests.deepspeed.foreign import Curve
from tests.support import tiny
from tests.support.alone import process_group_of_one
from tests.support.checkpoints import InMemory, change, edit, flipped, same_state, same_tensors
from tests.support.refusals import refusal
from tests.support.workers import pool

WRITERS = ("trainer-zero-2", "trainer-zero-3", "accelerate-fsdp", "accelerate-zero-3")
CLOSEST = 1e-5
"""Relative, of losses and norms: other orders of sums in fp32."""


def plan(target: str, decay: float) -> Any:
    """4 sequences a step. ``decay``: an optimizer that a ds_config names decays norms too, kit's does not."""
    job = {"optimizer": dataclasses.replace(OptimizerSpec(eps=1e-4), weight_decay=decay), "grad_clip": 0.7}
    if target == "torch on 1":
        return tiny.plan(job=job, gradient_accumulation_steps=2)
    if target == "megatron TP2":
        return tiny.plan(job=job, engine="megatron", implementation="local", tp=2, gradient_accumulation_steps=2)
    return tiny.plan(job=job, engine="deepspeed", zero_stage=int(target[-1]), dp=2)


def decay(writer: str) -> float:
    """ZeRO-3 and plain DeepSpeed take the optimizer of the ds_config."""
    by_ds_config = writer == "trainer-zero-3" or "deepspeed" in writer or "accelerate-zero" in writer
    return 0.0 if by_ds_config else 0.1


def with_precision(chosen: Any, writer: str) -> Any:
    """The plan with the precision of a writer that is called by one. From fp16 other engines go on in fp32."""
    named = next((name for name in ("bf16", "fp16") if name in writer), "fp32")
    if named == "fp16" and chosen.layout.engine != "deepspeed":
        return chosen
    return dataclasses.replace(chosen, job=dataclasses.replace(chosen.job, precision=named))


def write(writer: str, start: Path, out: Path) -> Curve:
    """Train by another program; returns its curve. ZeRO-2 with the Trainer's own AdamW, in two groups of parameters;
    ZeRO-3 with that of the ds_config, in one."""
    program, chosen = writer.split("-")[0], plan(f"zero-{2 if 'fsdp' in writer else writer[-1]}", decay(writer))
    if "offload" in writer:
        chosen = dataclasses.replace(chosen, layout=dataclasses.replace(chosen.layout, offload_optimizer="cpu"))
    by = foreign.by_fsdp if "fsdp" in writer else getattr(foreign, f"by_{program}")
    config = trainer_config(chosen)
    if decay(writer):
        del config["optimizer"]
    arguments = (False, config) if program == "trainer" else ()
    return pool("deepspeed", 2).run(by, with_precision(chosen, writer), start, out, *arguments)[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """``written(writer) → (its checkpoint of step 3, the curve of its steps 4 to 6)``, each written once."""

    @functools.cache
    def by(writer: str) -> tuple[Path, Curve]:
        root = tmp_path_factory.mktemp("foreign")
        start, path = cases.hf_directory(root), root / writer / ("checkpoint-3" if "trainer" in writer else "")
        curve = write(writer, start, root / writer)
        if not (path / "config.json").exists():
            shutil.copy(start / "config.json", path)
        return path, curve[foreign.SAVED_AT :]

    return by


def error(found: Curve, expected: Curve) -> float:
    """Largest relative difference of losses and norms."""
    assert len(found) == len(expected) == foreign.STEPS - foreign.SAVED_AT
    return max(abs(a / b - 1) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


def continued(target: str, writer: str, checkpoint: Path, directory: Path) -> Curve:
    chosen = with_precision(plan(target, decay(writer)), writer)
    if target == "torch on 1":
        with process_group_of_one():
            return foreign.by_kit(chosen, checkpoint, directory)
    engine = "megatron" if "megatron" in target else "deepspeed"
    return pool(engine, 2).run(foreign.by_kit, chosen, checkpoint, directory)[0]


@pytest.mark.everyday("trainer-zero-2-zero-3", "accelerate-fsdp-torch on 1")
@pytest.mark.parametrize(
    ("writer", "target"),
    [
        ("trainer-zero-2", "zero-3"),
        ("trainer-zero-3", "zero-2"),
        ("trainer-zero-3", "megatron TP2"),
        ("accelerate-fsdp", "torch on 1"),
        ("accelerate-zero-3", "zero-2"),
        ("trainer-zero-1", "megatron TP2"),
        ("deepspeed-zero-2", "torch on 1"),
        ("deepspeed-zero-3", "zero-1"),
        ("deepspeed-bf16-zero-2", "zero-3"),
        ("deepspeed-bf16-zero-1", "zero-1"),
        ("deepspeed-offload-zero-2", "zero-3"),
        ("accelerate-zero-2", "zero-1"),
        ("accelerate-fsdp", "megatron TP2"),
    ],
)
def test_kit_continues_as_the_program_itself(written, tmp_path, writer, target):
    path, expected = written(writer)
    assert convert(path, "step", tmp_path / "step").endswith("with Adam's state")
    counters = Checkpoint(tmp_path / "step").manifest.counters
    assert (counters.step, counters.optimizer_steps) == (3, 3)
    assert error(continued(target, writer, tmp_path / "step", tmp_path / "run"), expected) < CLOSEST


@pytest.mark.everyday("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_kit_continues_a_run_in_fp16(stage, written, tmp_path):
    writer = f"deepspeed-fp16-zero-{stage}"
    path, expected = written(writer)
    assert inspected(path).layout["precision"] == "fp16"
    convert(path, "step", tmp_path / "step")
    assert error(continued(f"zero-{stage}", writer, tmp_path / "step", tmp_path / "run"), expected) < 1e-6
    assert 1e-5 < error(continued("torch on 1", writer, tmp_path / "step", tmp_path / "in-fp32"), expected) < 5e-3


def test_without_a_moment_it_says_so_and_the_curve_is_another(written, tmp_path):
    path, expected = written("trainer-zero-3")
    shutil.copytree(path, tmp_path / "copy")
    state = "optimizer_state_dict"
    for file in (tmp_path / "copy").glob("*/*_optim_states.pt"):
        change(file, lambda loaded: loaded[state][state]["state"][0].pop("exp_avg"))
    said = convert(tmp_path / "copy", "step", tmp_path / "step")
    assert said.endswith("weights only; Adam's exp_avg is missing: weights only")
    assert not inspected(tmp_path / "copy").adam
    assert error(continued("torch on 1", "trainer-zero-3", tmp_path / "step", tmp_path / "run"), expected) > 1e-3


@pytest.mark.parametrize("writer", ["trainer-zero-2", "trainer-zero-3"])
def test_a_universal_checkpoint_of_deepspeeds_own_converter_is_the_same(written, tmp_path, writer):
    path, _ = written(writer)
    out = tmp_path / "universal" / "global_step3_universal"
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(path / "global_step3"),
            output_folder=str(out),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    shutil.copy(path / "config.json", out.parent)
    convert(path, "step", tmp_path / "expected")
    convert(out.parent, "step", tmp_path / "step")
    found, expected = (Checkpoint(tmp_path / name) for name in ("step", "expected"))
    assert (found.manifest.counters, found.manifest.kinds) == (expected.manifest.counters, tuple(FOLDERS))
    assert same_state(found, expected)
    assert inspected(out.parent).layout == {"written by world_size": 2}
    for path in out.glob("zero/*/exp_avg_sq.pt"):
        path.unlink()
    assert "without exp_avg_sq.pt: weights only" in convert(out.parent, "step", tmp_path / "weights")
    if writer == "trainer-zero-3":  # its count is not beside the parameters
        change(
            out / "zero" / "optimizer_state.pt",
            lambda loaded: loaded["optimizer_state_dict"]["state"].update({9: {"step": 4}}),
        )
        assert "Adam made 3 and 4 steps" in refusal(CheckpointError, convert, out.parent, "step", tmp_path / "no")


@pytest.mark.everyday("trainer-zero-3-2")
@pytest.mark.parametrize(("writer", "stage"), [("trainer-zero-3", 2), ("trainer-zero-3", 3), ("trainer-zero-2", 1)])
def test_deepspeed_continues_from_the_universal_checkpoint_that_kit_writes(written, tmp_path, writer, stage):
    path, expected = written(writer)
    checkpoint = tmp_path / "checkpoint-3"
    assert convert(path, "universal", checkpoint).endswith("with Adam's state")
    if stage == 3:  # torch's AdamW, which needs no compiler, takes a count that is a tensor; DeepSpeed's own a number
        (counts,) = checkpoint.glob("*/zero/optimizer_state.pt")
        change(counts, lambda loaded: loaded["optimizer_state_dict"]["state"].update({0: {"step": torch.tensor(3.0)}}))
    assert error(continued_by_trainer(writer, stage, tmp_path), expected) < CLOSEST
    for file in checkpoint.glob("*/zero/*/exp_avg.pt"):
        change(file, lambda loaded: loaded["param"].mul_(1.5))
    assert error(continued_by_trainer(writer, stage, tmp_path), expected) > 1e-4


def continued_by_trainer(writer: str, stage: int, root: Path, **optimizer: Any) -> Curve:
    """Steps 4 to 6 of the Trainer in one process, from the universal checkpoint in ``root``. ``optimizer``: parameters
    of that in the ds_config."""
    job = {"optimizer": dataclasses.replace(OptimizerSpec(eps=1e-4), weight_decay=decay(writer)), "grad_clip": 0.7}
    chosen = tiny.plan(job=job, engine="deepspeed", zero_stage=stage, gradient_accumulation_steps=2)
    config = trainer_config(chosen) | {"checkpoint": {"load_universal": True}}
    config["optimizer"]["params"] |= optimizer
    if decay(writer):
        del config["optimizer"]
    start = cases.hf_directory(root)
    return pool("deepspeed", 1).run(foreign.by_trainer, chosen, start, root, True, config)[0][foreign.SAVED_AT :]


def test_weights_alone_make_no_universal_checkpoint(start, tmp_path):
    assert "has no state of Adam, which DeepSpeed's load_universal needs" in refusal(
        CheckpointError, convert, start, "universal", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_torch_reads_the_distributed_checkpoint_that_kit_writes(written, tmp_path):
    path, _ = written("trainer-zero-2")
    convert(path, "step", tmp_path / "step")
    assert convert(tmp_path / "step", "dcp", tmp_path / "dcp").endswith("with Adam's state")
    written_by_kit = Checkpoint(tmp_path / "step")
    master, *moments = (written_by_kit.source(kind) for kind in FOLDERS)
    shapes = {name: master.shape(name) for name in master.names()}
    states = {name: {kind.value: torch.zeros(shape) for kind in tuple(FOLDERS)[1:]} for name, shape in shapes.items()}
    found: dict[str, Any] = {
        "model": {name: torch.zeros(shape) for name, shape in shapes.items()},
        "optimizer": {"state": {name: state | {"step": torch.zeros(())} for name, state in states.items()}},
    }
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, state in found["optimizer"]["state"].items():
        assert float(state.pop("step")) == 3
        pairs = zip([found["model"][name], *state.values()], (master, *moments), strict=True)
        assert all(torch.equal(tensor, source.read(name)) for tensor, source in pairs)
    convert(tmp_path / "dcp", "step", tmp_path / "back", model=str(path))
    back = Checkpoint(tmp_path / "back")
    assert back.manifest.counters.optimizer_steps == 3
    assert same_state(back, written_by_kit)


INSPECTED = {
    "trainer-zero-2": ("Hugging Face Trainer with DeepSpeed", {"world_size": 2, "dp": 2, "zero_stage": 2}),
    "trainer-zero-3": ("Hugging Face Trainer with DeepSpeed", {"world_size": 2, "dp": 2, "zero_stage": 3}),
    "accelerate-fsdp": ("accelerate: FSDP, sharded", {}),
    "accelerate-zero-3": ("accelerate with DeepSpeed", {"world_size": 2, "dp": 2, "zero_stage": 3}),
}


@pytest.mark.everyday("trainer-zero-2", "trainer-zero-3", "accelerate-fsdp")
@pytest.mark.parametrize("writer", WRITERS)
def test_inspect_says_what_it_is(written, writer):
    path, _ = written(writer)
    found, (program, layout) = inspected(path), INSPECTED[writer]
    said = found.program, found.step, found.optimizer_steps, found.adam, found.parameters, found.dtypes
    assert said == (program, 3, 3, True, 26_784, ["float32"])
    assert {key: found.layout[key] for key in layout} == layout
    assert any("--to step" in command for command in found.can)


@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_adapters_of_peft_become_a_checkpoint(tmp_path, targets):
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=targets if targets == "all-linear" else ["q_proj", "k_proj", "v_proj", "o_proj"],
        use_dora=targets == "attention",
    )
    adapted = get_peft_model(random_model(tiny.model(), seed=1), config)
    adapted.save_pretrained(tmp_path / "peft")
    hf_config(tiny.model()).save_pretrained(tmp_path / "base")
    found = inspected(tmp_path / "peft")
    assert (found.program, found.adam) == ("peft: adapters", False)
    assert 'peft_type "LORA"' in found.model
    convert(tmp_path / "peft", "step", tmp_path / "step", model=str(tmp_path / "base"))
    assert "holds adapters, which --to dcp has no place for" in refusal(
        CheckpointError, convert, tmp_path / "step", "dcp", tmp_path / "dcp"
    )
    found = Checkpoint(tmp_path / "step")
    assert found.manifest.lora == LoraSpec(rank=4, alpha=8, targets=targets, use_dora=targets == "attention")
    assert same_tensors(found.source(StateKind.MASTER), InMemory(get_peft_model_state_dict(adapted)))
    said = tmp_path / "peft" / "adapter_config.json"
    edit(said, lambda text: text.replace(b'"modules_to_save": null', b'"modules_to_save": ["lm_head"]'))
    assert "modules_to_save, which kit does not train" in refusal(
        CheckpointError, convert, tmp_path / "peft", "step", tmp_path / "other", model=str(tmp_path / "base")
    )


STEP, MODEL, OPTIMIZER = "global_step3", "pytorch_model_fsdp_0", "optimizer_0"
OPTIM, STATES = (f"{STEP}/zero_pp_rank_{{}}_mp_rank_00_{kind}_states.pt" for kind in ("optim", "model"))
TERABYTES = b"\x80\x05\x96" + (1 << 46).to_bytes(8, "little")
"""A BYTEARRAY8: unpickling raises MemoryError."""
DAMAGES = {
    "a rank is missing": (
        "trainer-zero-3",
        lambda root: (root / OPTIM.format(1)).unlink(),
        "was written by 2 ranks and rank 1 is missing",
    ),
    "mixed steps": (
        "trainer-zero-3",
        lambda root: change(root / STATES.format(1), lambda loaded: loaded.update(global_steps=2)),
        "has files of step 3 and of step 2",
    ),
    "a moment of one group alone": (
        "trainer-zero-2",
        lambda root: change(
            root / OPTIM.format(1),
            lambda loaded: loaded["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("exp_avg_sq"),
        ),
        "has exp_avg_sq of some parameter groups only",
    ),
    "a moment of another size": (
        "trainer-zero-2",
        lambda root: change(
            root / OPTIM.format(1),
            lambda loaded: loaded["optimizer_state_dict"]["base_optimizer_state"]["state"][1].update(
                exp_avg=torch.zeros(3)
            ),
        ),
        "sizes of weights and moments differ in group 1",
    ),
    "tensor parallelism": (
        "trainer-zero-3",
        lambda root: shutil.copy(root / STATES.format(0), root / STATES.format(0).replace("mp_rank_00", "mp_rank_01")),
        r"has 2 model-parallel ranks \(mp_rank_00",
    ),
    "a truncated archive": (
        "trainer-zero-3",
        lambda root: edit(root / OPTIM.format(0), lambda content: content[: len(content) // 2]),
        "rank_00_optim_states.pt cannot be read",
    ),
    "a flipped byte of a tensor": (
        "trainer-zero-3",
        lambda root: edit(root / OPTIM.format(0), flipped),
        r"rank_00_optim_states.pt is damaged \(.*data/",
    ),
    "an archive that says it spans two disks": (
        "trainer-zero-3",
        lambda root: edit(root / OPTIM.format(0), of_two_disks),
        r"rank_00_optim_states.pt is damaged \(zipfiles that span multiple disks",
    ),
    "an unknown class": (
        "trainer-zero-3",
        lambda root: change(root / STATES.format(0), lambda loaded: loaded.update(extra=Path("x"))),
        "names pathlib.*, which is not in the closed list",
    ),
    "another model": (
        "trainer-zero-3",
        lambda root: edit(root / "config.json", lambda said: said.replace(b'"hidden_size": 32', b'"hidden_size": 64')),
        r"has shape \[.*\] in the checkpoint and",
    ),
    "a step that the Trainer does not say": (
        "trainer-zero-3",
        lambda root: (root / "trainer_state.json").write_text('{"global_step": 4}'),
        "is of step 4 by trainer_state.json and of step 3",
    ),
    "a flipped byte of a distributed checkpoint": (
        "accelerate-fsdp",
        lambda root: edit(root / MODEL / "__1_0.distcp", flipped),
        r"__1_0\.distcp is damaged",
    ),
    "a file of a rank is missing": (
        "accelerate-fsdp",
        lambda root: (root / MODEL / "__1_0.distcp").unlink(),
        r"__1_0\.distcp is missing; copy the checkpoint again, from every rank",
    ),
    "a table of contents that claims terabytes": (
        "accelerate-fsdp",
        lambda root: edit(root / OPTIMIZER / ".metadata", lambda _: TERABYTES),
        r"optimizer_0 is not a torch_dist checkpoint",
    ),
    # A flipped bit in a name of .metadata: found by the fuzz, which saw a KeyError.
    "a tensor that is in no file": (
        "accelerate-fsdp",
        lambda root: edit(root / MODEL / ".metadata", without_a_query),
        r"does not say in which file model\.model\.layers\.0\..*is: it is damaged",
    ),
    "a sharded optimizer without its metadata": (
        "accelerate-fsdp",
        lambda root: (root / OPTIMIZER / ".metadata").unlink(),
        r"optimizer_0 has no .metadata, which torch writes last",
    ),
}


def of_two_disks(content: bytes) -> bytes:
    place = content.rindex(b"PK\x06\x07") + 16  # ZIP64: its last four bytes are the number of disks
    return content[:place] + b"\x02" + content[place + 1 :]


def without_a_query(content: bytes) -> bytes:
    metadata, name = pickle.loads(content), "model.model.layers.0.self_attn.q_proj.weight"
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != name}
    return pickle.dumps(metadata)


@pytest.mark.parametrize(("writer", "harm", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_named_and_nothing_written(written, tmp_path, writer, harm, message):
    shutil.copytree(written(writer)[0], tmp_path / "copy")
    harm(tmp_path / "copy")
    assert re.search(message, refusal(CheckpointError, convert, tmp_path / "copy", "step", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_step_that_adam_did_not_make_is_said(written, tmp_path):
    shutil.copytree(written("trainer-zero-2")[0], tmp_path / "copy")
    (tmp_path / "copy" / "trainer_state.json").unlink()
    (path,) = (tmp_path / "copy" / "global_step3").glob("*_model_states.pt")
    change(path, lambda loaded: loaded.update(global_steps=4))
    assert "Adam made 3 of 4 steps" in convert(tmp_path / "copy", "step", tmp_path / "out")
    # A step that was skipped for an overflow is none of Adam's, and the next program is told so.
    change(path, lambda loaded: loaded.update(skipped_steps=1))
    assert "Adam made" not in convert(tmp_path / "copy", "universal", tmp_path / "universal")
    assert torch.load(next(tmp_path.glob("universal/*/mp_*.pt")))["skipped_steps"] == 1
    convert(tmp_path / "universal", "step", tmp_path / "again")
    assert Checkpoint(tmp_path / "again").manifest.counters == Checkpoint(tmp_path / "out").manifest.counters
