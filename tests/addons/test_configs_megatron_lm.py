"""Megatron-LM's pretrain_gpt.py: a model by its sizes, and the scripts that kit itself writes for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.addons.configs.reading import asked_of
from kit.addons.targets.pretrain_gpt import pretrain_gpt_script
from kit.cost.memory.peak import peak_gib, peak_memory
from kit.cost.model.params import count
from kit.errors import SpecError
from tests.addons.config_files import changed, read
from tests.emit.plans import DENSE, MEGATRON, plan_of
from tests.support.refusals import refusal

# examples/gpt3/train_gpt3_175b_distributed.sh of Megatron-LM, d98e8a64ddf3, without what decides nothing
GPT3 = """\
GPUS_PER_NODE=8
NUM_NODES=1
DATA_PATH=$5
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --fp16
)
MODEL_PARALLEL_ARGS=(
\t--tensor-model-parallel-size 8
\t--pipeline-model-parallel-size 16
)
if [ ! -f "pretrain_gpt.py" ]; then exit 1; fi
torchrun ${DISTRIBUTED_ARGS[@]} $MEGATRON/pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    --data-path $DATA_PATH
"""
LLAMA = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu --bf16 "
    "--max-position-embeddings 8192 --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--vocab-size 128256 --micro-batch-size 1 --global-batch-size 128 {}\n"
)


def test_a_model_by_its_sizes(file: Callable[[str, str], Path]) -> None:
    """GPT-3 has 174.6 billion parameters, tied embeddings and learned positions; its MLP is four times as wide."""
    found = read(file("gpt3.sh", GPT3), "16x8xA100-80")
    model = found.workload.model
    assert (model.family, model.ffn_hidden_size, model.head_dim, model.vocab_size) == ("gpt2", 49152, 128, 50257)
    assert model.tied_embeddings
    assert count(model).total / 1e9 == pytest.approx(174.6, abs=0.05)
    assert changed(found) == {
        "engine": "megatron", "implementation": "transformer_engine", "tp": 8, "pp": 16,
        "gradient_accumulation_steps": 1536,
    }  # fmt: skip
    assert (found.workload.job.objective, found.packed) == ("pretrain", True)
    assert [(gap.bound, gap.key) for gap in found.gaps] == [("most", "fp16")]
    assert found.notes == ("the file starts 8 processes, and its sizes take 128: judged on 16x8xA100-80",)
    # 18 bytes for a parameter of the first stage: six layers and the tokens' embeddings in eight parts, and positions
    parts = peak_memory(found.workload)[0].components_gib
    states = 18 * ((6 * 12 * 12288**2 + 50257 * 12288) / 8 + 2048 * 12288) / 2**30
    assert sum(parts[name] for name in ("weights", "gradients", "optimizer")) == pytest.approx(states, rel=0.002)


def test_sizes_that_are_not_given(file: Callable[[str, str], Path]) -> None:
    assert count(read(file("llama.sh", LLAMA.format(""))).workload.model).total / 1e9 == pytest.approx(8.03, abs=0.005)
    narrow = LLAMA.replace("--ffn-hidden-size 14336 ", "")
    assert read(file("narrow.sh", narrow.format(""))).workload.model.ffn_hidden_size == 10880
    experts = "--num-experts 8 --expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel"
    found = read(file("moe.sh", LLAMA.format(experts)))
    model, layout = found.workload.model, found.workload.layout
    assert (model.family, model.experts_per_token, model.moe_ffn_hidden_size) == ("mixtral", 2, 14336)
    assert (layout.ep, layout.etp, layout.sp, layout.zero_stage) == (4, 2, True, 0)
    assert read(file("heads.sh", LLAMA.replace("heads 32", "heads 64").format(""))).workload.model.head_dim == 64
    vocabulary = LLAMA.replace("--vocab-size 128256", "--tokenizer-type HuggingFaceTokenizer")
    assert "does not say vocab_size of its model" in refusal(SpecError, read, file("v.sh", vocabulary.format("")))


def test_ranks_that_experts_and_stages_take_together(file: Callable[[str, str], Path]) -> None:
    """Experts are spread over the ranks that tensors are split over: 4 stages of 8 ranks, not of 16."""
    sizes = "--num-experts 8 --expert-model-parallel-size 8 --tensor-model-parallel-size 2 "
    sizes += "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 4 --sequence-parallel"
    found = read(file("moe.sh", LLAMA.format(sizes)), "4x8xH100")
    assert (found.workload.layout.dp, found.workload.layout.ep) == (4, 8)
    assert found.notes == ("the file starts 8 processes, and its sizes take 32: judged on 4x8xH100",)


FLAGS: dict[str, dict[str, Any]] = {
    "--use-distributed-optimizer": {"dp": 8, "zero_stage": 1, "gradient_accumulation_steps": 16},
    "--recompute-activations": {"dp": 8, "recompute": "selective", "gradient_accumulation_steps": 16},
    "--grad-reduce-in-bf16": {"dp": 8, "gradient_dtype": "bf16", "gradient_accumulation_steps": 16},
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2": {
        "dp": 2, "pp": 4, "vp": 4, "gradient_accumulation_steps": 64,
    },
    "--transformer-impl local --context-parallel-size 2": {
        "dp": 4, "cp": 2, "cp_comm_type": "p2p", "implementation": "local", "gradient_accumulation_steps": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS)
def test_what_a_flag_decides(file: Callable[[str, str], Path], flags: str) -> None:
    found = changed(read(file("llama.sh", LLAMA.format(flags))))
    assert found == {"engine": "megatron", "implementation": "transformer_engine"} | FLAGS[flags]


def test_the_patch_is_in_flags_of_its_own(file: Callable[[str, str], Path]) -> None:
    from kit.addons.configs.patch import edited

    source = asked_of(file("llama.sh", LLAMA.format("")), "8xH100").source
    values = {"use_distributed_optimizer": True, "micro_batch_size": 2}
    text = LLAMA.format("").replace("--micro-batch-size 1", "--micro-batch-size 2")
    assert edited(source, values).split() == f"{text.rstrip()} \\ --use-distributed-optimizer".split()


PLANS: dict[str, dict[str, Any]] = {
    "tp4-pp2": DENSE | {"cluster": "16xH100"},
    "context": DENSE | {"cluster": "16xH100", "cp": 2, "pp": 1, "recompute": "full", "cp_comm_type": "p2p"},
    "virtual": DENSE | {"cluster": "16xH100", "vp": 4, "gradient_accumulation_steps": 4},
    "experts": MEGATRON
    | {
        "model": "qwen3-30b-a3b",
        "dp": 8,
        "ep": 4,
        "zero_stage": 1,
        "recompute": "selective",
        "recompute_modules": ("core_attn",),
    },
    "of experts": MEGATRON | {"model": "mixtral-8x7b", "dp": 4, "tp": 2, "ep": 4, "sp": True, "zero_stage": 1},
    "gpt2": MEGATRON | {"model": "gpt2-xl", "dp": 8, "job": {"seq_length": 1024}},
    "short": MEGATRON | {"dp": 8, "zero_stage": 1, "gradient_dtype": "bf16", "optimizer_state_dtype": "fp32"},
    "fp8": MEGATRON | {"dp": 8, "zero_stage": 1, "fp8_param_gather": True, "job": {"precision": "fp8"}},
}


@pytest.mark.parametrize("case", PLANS)
def test_what_kit_writes_is_read(file: Callable[[str, str], Path], case: str) -> None:
    plan = plan_of(**PLANS[case])
    found = read(file("pretrain_gpt.sh", pretrain_gpt_script(plan)), f"{plan.layout.world_size}xH100")
    assert found.workload.layout == plan.layout
    mine, theirs = plan.model, found.workload.model
    assert count(theirs).total == pytest.approx(count(mine).total, rel=1e-3)  # one row of the vocabulary less
    same = ("num_layers", "num_key_value_heads", "head_dim", "num_experts", "tied_embeddings", "experts_per_token")
    assert [getattr(theirs, name) for name in same] == [getattr(mine, name) for name in same]
    assert found.workload.job.precision == plan.job.precision
    assert found.peak_gib == pytest.approx(plan.predicted.peak_gib, rel=2e-3)
    assert found.peak_gib == pytest.approx(peak_gib(found.workload))
