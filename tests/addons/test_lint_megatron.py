"""What lint refuses of Megatron-LM's arguments is what megatron.core refuses: each pair differs in one number."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.addons.lint import lint
from tests.support.files import file_with

SIZES = {
    "tensor-model-parallel-size": 2,
    "pipeline-model-parallel-size": 2,
    "micro-batch-size": 2,
    "global-batch-size": 12,
    "num-layers": 8,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
}
WRONG = (
    {"global-batch-size": 15},
    {"global-batch-size": 18},  # of 2 data-parallel ranks of micro batch 2
    {"num-layers": 9},
    {"num-attention-heads": 3, "hidden-size": 66},
    {"hidden-size": 66},
    {"num-experts": 6, "expert-model-parallel-size": 4},
    {"num-layers-per-virtual-pipeline-stage": 3},
)

RIGHT = {"num-layers-per-virtual-pipeline-stage": 2, "num-experts": 8, "expert-model-parallel-size": 2}


def megatron_refuses(sizes: dict[str, int]) -> bool:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, pp = sizes["tensor-model-parallel-size"], sizes["pipeline-model-parallel-size"]
    layers, heads = sizes["num-layers"], sizes["num-attention-heads"]
    chunk = sizes.get("num-layers-per-virtual-pipeline-stage")
    try:
        ConstantNumMicroBatchesCalculator(
            global_batch_size=sizes["global-batch-size"],
            micro_batch_size=sizes["micro-batch-size"],
            data_parallel_size=8 // (tp * pp),
            decrease_batch_size_if_needed=False,
            rank=1,
        )
        # arguments.py, validate_args, asserts this itself: kv_channels is the quotient.
        assert sizes["hidden-size"] % heads == 0
        assert chunk is None or layers // pp % chunk == 0
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=sizes["hidden-size"],
            num_attention_heads=heads,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            pipeline_dtype="bf16",  # type: ignore[arg-type]
            num_moe_experts=sizes.get("num-experts"),
            expert_model_parallel_size=sizes.get("expert-model-parallel-size", 1),
            sequence_parallel="num-experts" in sizes,
            add_bias_linear=False,
        )
        if "num-experts" in sizes:
            assert sizes["num-experts"] % config.expert_model_parallel_size == 0  # experts.py, num_local_experts
        get_num_layers_to_build(config, pp_rank=0)
    except (AssertionError, ValueError):
        return True
    return False


def lint_refuses(words: str, directory: Path) -> bool:
    script = file_with(directory / "run.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}\n")
    return "megatron-argument" in {each.rule for each in lint(script)}


@pytest.mark.parametrize("change", [*WRONG, {}, RIGHT], ids=str)
def test_lint_refuses_what_does_not_divide(change: dict[str, int], tmp_path: Path) -> None:
    words = " ".join(f"--{name} {value}" for name, value in (SIZES | change).items())
    assert lint_refuses(words, tmp_path) is (change in WRONG)


@pytest.mark.slow
def test_megatron_refuses_the_same() -> None:
    assert [change for change in (*WRONG, {}, RIGHT) if megatron_refuses(SIZES | change) != (change in WRONG)] == []


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("$ARGS --micro-batch-size 2 --global-batch-size 15", True),
        ("$ARGS --micro-batch-size 2 --global-batch-size 18", False),  # the sizes in ARGS may make it right
        ("--seed $SEED --micro-batch-size 2 --global-batch-size 18", True),
        ("--seed $@ --micro-batch-size 2 --global-batch-size 18", False),
        ("--tensor-model-parallel-size $TP --micro-batch-size 2 --global-batch-size 18", False),
        ("--micro-batch-size 2 --global-batch-size 18", True),
        ("--micro-batch-size 2 --global-batch-size 16", False),
        ("--micro-batch-size 2 --tensor-model-parallel-size 3", True),
        ("--micro-batch-size 2 --tensor-model-parallel-size 3 --global-batch-size 18", True),
        ("--micro-batch-size 2 --num-layers 9 --pipeline-model-parallel-size 2", True),
        ("--micro-batch-size 2 --num-layers 9 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4",
         False),
        ("--micro-batch-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 3", False),  # without stages
    ],
)  # fmt: skip
def test_only_what_stands_there_is_judged(words: str, refused: bool, tmp_path: Path) -> None:
    assert lint_refuses(words, tmp_path) is refused


def test_arguments_in_a_list_of_the_script_are_read(tmp_path: Path) -> None:
    listed = "GPUS=8\nALL=(\n    --micro-batch-size 2\n    --global-batch-size {}\n)\n"
    start = 'torchrun --nproc_per_node $GPUS pretrain_gpt.py "${ALL[@]}"\n'
    for size, rules in ((15, {"megatron-argument"}), (16, set())):
        assert {each.rule for each in lint(file_with(tmp_path / "run.sh", listed.format(size) + start))} == rules
