"""Checkpoints on other layouts and in the background; Hugging Face in, any layout, Hugging Face out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from kit.addons.importers import torch_dist
from kit.engines.huggingface.models import HfDirectory
from kit.training.checkpoint.formats import open_step
from kit.training.checkpoint.to_huggingface import opened_to_hf
from tests.megatron import cases, checkpoints
from tests.megatron.table import FAMILIES
from tests.support import tiny
from tests.support.checkpoints import same_tensors
from tests.support.workers import pool

ZERO = {"dp": 2, "zero_stage": 1}
# written on → read on
LAYOUTS = {
    "llama": [
        (ZERO, [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}]),
        ({"tp": 2, "sp": True}, [{}, ZERO]),
        ({"pp": 2, "vp": 2}, [{"tp": 2}]),
    ],
    "mixtral": [({"dp": 2, "ep": 2, "zero_stage": 1}, [{}, {"tp": 2, "sp": True, "ep": 2}, {"pp": 2}])],
}


def spec_of(family):
    return tiny.model(family, num_layers=4, vocab_size=127, tied_embeddings=family == "llama")


@pytest.mark.everyday("llama-0")
@pytest.mark.parametrize(
    ("family", "index"), [(family, index) for family, found in LAYOUTS.items() for index in range(len(found))]
)
def test_another_layout_goes_on_where_one_was(references, tmp_path, family, index):
    spec = spec_of(family)
    written_on, read_on = LAYOUTS[family][index]

    def run(layout, look):
        rundir = cases.run_directory(references(spec)[0] / "run", spec, **layout)
        return pool("megatron", rundir.plan.layout.world_size).run(cases.inside, rundir, look, tmp_path)[0]

    expected = run(written_on, checkpoints.save)
    for layout in read_on:
        found = run(layout, checkpoints.load)
        assert (found["counters"], found["steps"], found["differing"]) == (checkpoints.COUNTERS, 2, []), layout
        assert found["curve"] == pytest.approx(expected, rel=1e-4), layout


@pytest.mark.everyday("distributed optimizer")
@pytest.mark.parametrize("layout", [ZERO, {"tp": 2}], ids=["distributed optimizer", "tp2"])
def test_a_checkpoint_is_written_while_training_goes_on(references, tmp_path, layout):
    spec = spec_of("llama")
    rundir = cases.run_directory(references(spec)[0] / "run", spec, **layout)
    for found in pool("megatron", 2).run(cases.inside, rundir, checkpoints.in_the_background, tmp_path):
        assert (found["found"], found["counters"]) == (found["expected"], checkpoints.COUNTERS)
        assert "writing the checkpoint" in found["failure"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


@pytest.mark.everyday("llama")
@pytest.mark.parametrize("name", list(FAMILIES))
def test_hugging_face_in_any_layout_hugging_face_out(references, tmp_path, name):
    family, shape = FAMILIES[name]
    spec = tiny.model(family, **(shape | {"tied_embeddings": family == "gpt2"}))
    directory, _ = references(spec)
    expert = {"ep": 2} if spec.num_experts else {}
    for number, layout in enumerate(({"tp": 2, "sp": True} | expert, {"pp": 2, "vp": 2}, ZERO | expert)):
        written = tmp_path / f"step{number}"
        rundir = cases.run_directory(directory / "run", spec, **layout)
        pool("megatron", 2).run(cases.inside, rundir, checkpoints.roundtrip, written)
        opened_to_hf(open_step(written), tmp_path / f"hf{number}", dtype="float32")
        assert same_tensors(HfDirectory(tmp_path / f"hf{number}"), HfDirectory(directory / "model")), layout


def test_large_states_are_written_in_several_files(tmp_path, monkeypatch):
    """torch keeps the tensors of a file in memory until the file is complete."""
    monkeypatch.setattr(torch_dist, "_FILE_BYTES", 100)
    tensors = {name: torch.arange(length, dtype=torch.float32) for name, length in (("c", 90), ("a", 20), ("b", 5))}
    blocks = [
        torch_dist.block_of(name, shape := tuple(tensor.shape), (0,), shape, torch.float32, lambda t=tensor: t)
        for name, tensor in tensors.items()
    ]
    torch_dist.write_blocks(tmp_path, blocks=blocks, common=None)
    assert sorted(path.name for path in tmp_path.glob("*.distcp")) == ["__0_0.distcp", "__0_1_0.distcp"]
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    torch_dist.Checkpoint(tmp_path).verify()
