"""Encoder-decoders: pairs of unequal length, every layout of torch and DeepSpeed against plain transformers."""

from __future__ import annotations

import functools
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from kit.engines.huggingface.models import HfDirectory, check_names
from kit.engines.protocol import IGNORE_INDEX, MicroBatch
from kit.errors import CheckpointError
from kit.specs.job import OptimizerSpec
from kit.training.checkpoint.formats import open_step
from kit.training.checkpoint.to_huggingface import opened_to_hf
from kit.training.data.samples import padded
from tests.deepspeed import plain, samples
from tests.support import tiny
from tests.support.parameter_shapes import parameter_shapes
from tests.support.workers import pool
from tests.training import cases

ROWS = 8
OLD_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
JOB = {"objective": "seq2seq", "optimizer": OptimizerSpec(eps=1e-3), "grad_clip": 0.5}
row = functools.partial(samples.row, "seq2seq")
"""Of an index: sources of 3 to 17 tokens, targets of 2 to 23."""


def micro_batches(engine: Any, rundir: tiny.TinyRunDirectory, step: int) -> list[MicroBatch]:
    """This rank's two micro batches of two."""
    ranks = {"dp_rank": engine.dp_rank, "dp_size": engine.dp_size}
    return samples.micro_batches("seq2seq", step, mbs=2, accumulation=2, **ranks)


@pytest.mark.everyday("t5-torch-3")
@pytest.mark.parametrize(
    ("family", "engine", "stage"),
    [
        ("t5", "torch", 3),
        ("bart", "torch", 0),
        *[("t5", "deepspeed", stage) for stage in (0, 2, 3)],
        ("blenderbot", "deepspeed", 1),
        ("bart", "deepspeed", 3),
    ],
)
def test_gradients_are_those_of_transformers(family: Any, engine: str, stage: int, tmp_path: Path) -> None:
    """The checkpoint goes on the same curve in the other engine, and becomes a model that transformers
    loads."""
    spec, layout = tiny.model(family), {"dp": 2, "gradient_accumulation_steps": 2}
    start = cases.saved(tmp_path, tiny.plan(spec, job=JOB))
    # At initial weights all positions attend alike and give the same: fp32 rounds what little of a gradient is left.
    weights = load_file(path := Path(start) / "model.safetensors")
    steep = {name: each * (16 if re.search(r"[qkv]_proj\.weight", name) else 1) for name, each in weights.items()}
    save_file(steep, path, metadata={"format": "pt"})
    expected = plain.reference(Path(start), 1, objective="seq2seq")
    plan = tiny.plan(spec, job=JOB, engine=engine, zero_stage=stage, **layout)
    rundir = tiny.run_directory(tmp_path / "run", plan, model_path=start)
    found, _ = pool(engine, 2).run(cases.train, rundir, 1e-2, micro_batches)
    assert found["first"][0][0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert found["tokens"] == sum(len(row(k)) for k in range(2 * ROWS, 3 * ROWS))
    assert cases.numbers(found["again"]) == pytest.approx(cases.numbers(found["after"]), rel=1e-6)
    # Softmax is blind to the bias of keys: what is left of its gradient is rounding.
    blind = [name for name in expected.gradients if name.endswith("k_proj.bias")]
    assert all(found["gradients"].pop(name).abs().max() < 1e-9 for name in blind)
    assert cases.worst(found["gradients"], {n: each for n, each in expected.gradients.items() if n not in blind}) < 1e-5

    other = "deepspeed" if engine == "torch" else "torch"
    rundir = tiny.run_directory(tmp_path / "other", tiny.plan(spec, job=JOB, engine=other, zero_stage=2, **layout))
    written = tmp_path / "run" / "step"
    again = pool(other, 2).run(cases.resume, rundir, written, 1e-2, micro_batches)[0]
    assert cases.numbers(again["after"]) == pytest.approx(cases.numbers(found["after"]), rel=1e-5)
    opened_to_hf(open_step(written), tmp_path / "out", dtype="float32")
    model, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], each) for name, each in found["master"].items())


@pytest.mark.parametrize(
    ("family", "copies"),
    [
        ("bart", ("final_logits_bias", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")),
        ("t5", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", OLD_BIAS)),
    ],
)
def test_what_old_files_have_beside_is_left_out(tmp_path: Path, family: Any, copies: tuple[str, ...]) -> None:
    """BART's buffer final_logits_bias, which is not trained, only where it is zero."""
    spec = tiny.model(family)
    path = Path(cases.saved(tmp_path, tiny.plan(spec, job=JOB)))
    tensors = load_file(path / "model.safetensors")
    for constant in (0.0, 1.0):
        more = {name: torch.full((1, spec.vocab_size), constant) for name in copies}
        save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
        refused = constant and family == "bart"
        with pytest.raises(CheckpointError, match="final_logits_bias is not zero") if refused else nullcontext():
            check_names(parameter_shapes(spec), HfDirectory(path))


def test_padding_of_labels_is_ignored_and_of_sources_masked() -> None:
    batch = padded([row(0), row(2)], longest=tiny.SEQ_LENGTH)
    assert batch.source_mask.sum(1).tolist() == [len(row(0).source), len(row(2).source)]  # type: ignore[arg-type]
    assert (batch.labels != IGNORE_INDEX).sum(1).tolist() == [len(row(0)), len(row(2))]
    assert (batch.source_ids.shape[1], batch.input_ids.shape[1]) == (16, 16)
