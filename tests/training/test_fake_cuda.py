"""A step of the torch engine on a CUDA device without values: nothing is made on the host, which waits once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import kit
from kit.emit.run_directory import write
from tests.support import ROOT
from tests.support.assets import FAMILIES, RECIPE

COMMON = (
    "cluster=1xH200", "model.num_layers=1", "job.seq_length=16", "job.global_batch_size=4", "job.precision=bf16",
    "layout.engine=torch", "layout.micro_batch_size=2", "layout.compile_layers=false", "run.data.train=none",
    "run.model_path=null",
)  # fmt: skip
GEMMA2 = (
    "model.family=gemma2", "model.num_layers=2", "model.sliding_window=8", "model.tied_embeddings=true",
    "model.query_pre_attn_scalar=16", "model.attention_softcap=50.0", "model.logit_softcap=30.0",
)  # fmt: skip
CHUNKED = "layout.chunked_loss=true"
CASES = {
    "chunked loss": (CHUNKED,),
    "8-bit AdamW, recompute": ("job.optimizer.name=adamw-8bit", "layout.recompute=full"),
    "fp8": ("job.precision=fp8",),
    "experts": (
        *FAMILIES["mixtral"],
        "job.balancing.moe_router_load_balancing_type=aux_loss",
        "job.balancing.moe_aux_loss_coeff=0.01",
    ),
    "capped logits": (*GEMMA2, CHUNKED),
    "packed rows": ("job.objective=sft", "run.data.packing=true"),
    "planted": (),
}
TABLES = "aten::linspace"
"""bitsandbytes makes its two tables of 256 codes on the host, once a process (functional.py, create_dynamic_map)."""
NUMBERS = 3
"""That the host asks for in a step: loss, tokens and norm, in one copy (kit/engines/kernels/loss.py, to_host)."""


def report() -> None:
    """For a process of its own: a line of JSON for every case."""
    import bitsandbytes  # noqa: F401  # looks for CUDA when it is imported
    import torch

    from kit.engines.protocol import MicroBatch, StateKind
    from kit.engines.torch.engine import TorchEngine
    from tests.support.fake_cuda import fake_cuda

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 200, (2, 17), generator=generator) for _ in range(2)]
    plain = [MicroBatch(input_ids=row[:, :-1].contiguous(), labels=row[:, 1:].contiguous()) for row in rows]
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    places = torch.tensor([[*range(5), *range(11)], [*range(16)]])
    packed = [MicroBatch(each.input_ids, each.labels, position_ids=places, sequence_ids=documents) for each in plain]
    scratch = Path(tempfile.mkdtemp())
    with fake_cuda() as watch:
        for name, words in CASES.items():
            if name == "planted":  # a number on the host, which a GPU multiplies with without a word
                sys.modules["kit.engines.hf_engine"].mean_scale = lambda *_: torch.tensor(0.5)  # type: ignore[attr-defined]
            engine = TorchEngine(rundir(words, scratch / name))
            watch.forget()
            micro_batches = packed if name == "packed rows" else plain
            engine.forward_backward(micro_batches)
            engine.gradient_norm()
            engine.apply(1e-3)
            waits = dict(watch.waits)
            engine.routing_metrics()
            engine.evaluate(micro_batches)
            exported = list(engine.export_blocks([StateKind.EXP_AVG]))
            found = {"blocks": len(exported), "strays": watch.strays, "mixed": watch.mixed, "waits": waits}
            print(json.dumps([name, found]), flush=True)


def rundir(words, directory):
    recipe = kit.load_recipe(RECIPE, [*COMMON, *words])
    return write(kit.plan(recipe.model, recipe.cluster, recipe.job, recipe.layout), recipe.run, directory)


@pytest.mark.nightly
def test_all_of_a_step_is_on_the_gpu():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from tests.training.test_fake_cuda import report; report()"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found.keys() == CASES.keys(), done.stderr
    planted = found.pop("planted")
    assert planted["strays"] or planted["mixed"]
    for name, case in found.items():
        assert case["blocks"], name
        assert {place for place in case["strays"] if not place.endswith(TABLES)} == set(), name
        assert case["mixed"] == {}, name
        assert list(case["waits"].values()) == [NUMBERS], case["waits"]
