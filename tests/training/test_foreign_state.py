"""Tensors of another program's checkpoint under Hugging Face names, by hand: fused experts, uneven parts of ranks."""

from __future__ import annotations

import pytest
import torch

from kit.addons.importers.deepspeed import _cut_parameters, _joined, _stretch
from kit.addons.importers.inspected import Inspected
from kit.addons.importers.stored import StoredState, stored
from kit.addons.importers.tensors import sources, steps_of
from kit.addons.importers.torch_dist import block_of, write_blocks
from kit.engines.protocol import StateKind
from tests.support import tiny
from tests.support.refusals import refusal


def test_fused_experts_are_read_one_by_one():
    """transformers' Mixtral has gate and up of all experts in one parameter, the gate's rows first."""
    model = tiny.model("mixtral")
    experts, rows, columns = model.num_experts, model.ffn_hidden_size, model.hidden_size
    fused = torch.arange(experts * 2 * rows * columns, dtype=torch.float32).view(experts, 2 * rows, columns)
    source = sources(StoredState({"module.model.layers.0.mlp.experts.gate_up_proj": stored(fused.detach)}), model)[
        StateKind.MASTER
    ]
    for number in range(experts):
        gate, up = (f"model.layers.0.block_sparse_moe.experts.{number}.{name}.weight" for name in ("w1", "w3"))
        assert source.shape(gate) == (rows, columns)
        assert torch.equal(source.read(gate), fused[number, :rows])
        assert torch.equal(source.read(up), fused[number, rows:])


@pytest.mark.parametrize("groups", [[5], [2, 3]], ids=["one group", "a part crosses groups"])
def test_stage_3_cuts_each_parameter_into_parts_that_are_rounded_up(groups):
    """5 elements on two ranks are 3 and 2 with a pad, as DeepSpeed's stage 3 partitions (partition_parameters.py). A
    rank's groups lie one behind another: sub groups end where they are full."""
    ranks = torch.tensor([[0.0, 1, 2, 10, 11], [3.0, 4, -1, 12, 13]])
    shapes = {"a": torch.Size([5]), "b": torch.Size([2, 2])}
    parts = _cut_parameters([shapes], [rank.split(groups) for rank in ranks])
    assert [_joined(name, tuple(shapes[name]), parts[name]).read().tolist() for name in "ab"] == [
        [0.0, 1, 2, 3, 4],
        [[10.0, 11], [12, 13]],
    ]


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (3, 3), (5, 1)])
def test_elements_that_no_rank_has_are_refused(start, length):
    assert "of 5" in refusal(ValueError, _stretch, [torch.arange(2), torch.arange(3)], start, length)


@pytest.mark.parametrize(
    ("groups", "steps"),
    [
        ([{"params": [0], "step": 3}, {"params": []}], {3}),
        ([{"params": [0], "step": 3}, {"params": [], "step": 1}], {3}),  # optimizers pass over it: its count stays
        ([{"params": [0], "step": 2}, {"step": torch.tensor(5.0)}], {2, 3, 5}),
    ],
)
def test_every_parameter_and_group_that_has_any_says_adams_steps(groups, steps):
    assert steps_of({"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "param_groups": groups}) == steps


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({
            "step": 3, "optimizer_steps": 2, "layout": {"tp": 2, "pp": 1}, "dtypes": ["bfloat16", "float32"],
            "parameters": 12_345, "tensors": 6, "adam": True, "hyperparameters": [{"lr": 0.1, "eps": 1e-08}],
            "model": "model_type llama", "notes": ["a note"], "can": ["kit one", "kit two"],
        }, [
            "program       Megatron", "model         model_type llama", "step          step 3, of Adam 2",
            "layout        tp=2, pp=1", "weights       12,345 in 6 tensors, bfloat16, float32", "Adam's state  yes",
            "              lr 0.1, eps 1e-08", "note          a note", "do            kit one", "do            kit two",
        ]),
        ({
            "step": None, "optimizer_steps": None, "layout": {}, "dtypes": [], "parameters": None, "tensors": None,
            "adam": False, "hyperparameters": [], "model": None, "notes": [], "can": [],
        }, [
            "program       Megatron", "model         not said", "step          not said",
            "layout        not said", "Adam's state  no",
        ]),
    ],
)  # fmt: skip
def test_inspect_has_a_line_for_all_that_is_known(known, said):
    assert str(Inspected("DIR", "Megatron", "megatron", samples_seen=None, **known)).split("\n") == [
        "DIR",
        *(f"  {line}" for line in said),
    ]


def test_a_block_is_written_in_the_dtype_of_its_tensor(tmp_path):
    write_blocks(
        tmp_path,
        blocks=[block_of("a", (2, 3), (0, 0), (2, 3), torch.float32, torch.ones(2, 3).bfloat16)],
        common=None,
    )
    assert torch.load(next(tmp_path.glob("*.distcp"))).dtype == torch.float32
