"""What Megatron-SWIFT and Megatron-LM compute the loss with, and what its trainers of pairs hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kit.addons.configs.extra_memory import extra_gib
from kit.cost.memory.peak import parts_of
from tests.addons.config_files import read

SFT = (
    "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --micro_batch_size 1 "
    "--global_batch_size 8 --recompute_granularity full --max_length 4096 --packing true {}\n"
)
PAIRS = SFT.replace("megatron sft", "megatron rlhf --rlhf_type {}").replace("{}\n", "\n")


OF_FLAGS = {
    "": 10.0,
    "--cross_entropy_loss_fusion true --cross_entropy_fusion_impl native": 10.0,
    "--cross_entropy_loss_fusion false": 6.0,
    "--cross_entropy_fusion_impl te": 2.0,
    "--cross_entropy_loss_fusion false --cross_entropy_fusion_impl te": 6.0,
    "--task_type seq_cls --num_labels 2": 0.0,
    "--task_type causal_lm": 10.0,
}
"""Flags → bytes per logit at the loss's fullest moment: 16 bits, one fp32 copy, and compiled one more; Transformer
Engine's overwrites the 16 bits; a classifier has no vocabulary."""


@pytest.mark.parametrize("flags", OF_FLAGS)
def test_the_loss_of_megatron_swift(file: Callable[[str, str], Path], flags: str) -> None:
    found = read(file("s.sh", SFT.format(flags)))
    assert (parts_of(found.workload, 0).loss, found.gaps) == (OF_FLAGS[flags] * 4096 * 151936 / 2, ())


GPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128000 --swiglu --bf16 "
    "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 128 {}\n"
)


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ("", 6.0),
        ("--cross-entropy-loss-fusion", 10.0),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", 2.0),
        ("--cross-entropy-fusion-impl te", 6.0),
        ("--cross-entropy-loss-fusion --transformer-impl local", None),
    ],
)
def test_the_loss_of_megatron_lm(file: Callable[[str, str], Path], flags: str, each: float | None) -> None:
    """Fused only where it is asked for. What kit counts of its own layers has the head's backward too."""
    loss = parts_of(read(file("s.sh", GPT.format(flags))).workload, 0).loss
    unfused = parts_of(read(file("u.sh", GPT.format("--transformer-impl local"))).workload, 0).loss
    assert loss == (unfused if each is None else each * 2 * 8192 * 128000)


def test_a_changed_layout_keeps_the_loss(file: Callable[[str, str], Path]) -> None:
    work = read(file("s.sh", SFT.format(""))).workload
    assert work.with_layout(work.layout.but(recompute="none")).cross_entropy == "native"


PARAMETERS = 8_190_735_360
"""Of Qwen3-8B (model.safetensors.index.json: 16,381,470,720 bytes in bf16)."""
HELD = {"dpo": 2.0, "kto": 2.0, "rm": 0.0, "dpo --tuner_type lora": 0.0}
"""Objective → bytes that a reference model takes for each of a rank's parameters."""
TOKENS = {"dpo": 4096, "kto": 2048, "rm": 4096}
"""Objective → tokens of a packed row that backward passes: both answers of a pair, and of KTO's two the one that
trains. The packed length holds both."""


@pytest.mark.parametrize("objective", HELD)
def test_a_reference_model_on_megatron(file: Callable[[str, str], Path], objective: str) -> None:
    found = read(file("s.sh", PAIRS.format(objective)))
    assert extra_gib(found.workload) == pytest.approx(HELD[objective] * PARAMETERS / 2 / 2**30, rel=1e-3)
    split = PAIRS.format(objective).replace("recompute", "pipeline_model_parallel_size 2 --recompute")
    work = read(file("p.sh", split)).workload
    fullest = max(each.total for each in work.parameters)
    assert (len(work.parameters), extra_gib(work)) == (2, HELD[objective] * fullest / 2**30)


def test_a_reference_model_is_counted_once(file: Callable[[str, str], Path]) -> None:
    """Of torch and DeepSpeed in the cost model itself."""
    torch = "NPROC_PER_NODE=8 swift rlhf --rlhf_type dpo --model Qwen/Qwen3-8B --tuner_type full --deepspeed zero3\n"
    assert [extra_gib(read(file("s.sh", text)).workload) for text in (torch, SFT.format(""))] == [0, 0]


@pytest.mark.parametrize("objective", TOKENS)
def test_pairs_fill_one_packed_row(file: Callable[[str, str], Path], objective: str) -> None:
    packed = read(file("s.sh", PAIRS.format(objective)))
    assert (packed.workload.tokens, packed.gaps, packed.packed) == (TOKENS[objective], (), True)
    alone = read(file("u.sh", PAIRS.format(objective).replace("--packing true", "")))
    assert (alone.workload.tokens, alone.packed) == (2 * TOKENS[objective], False)
    logits = TOKENS[objective] * 151936 / 2
    assert parts_of(packed.workload, 0).loss == (0 if objective == "rm" else 10 * logits)


BOUNDS = {
    "": [],
    "--use_precision_aware_optimizer true": [("most", "use_precision_aware_optimizer")],
    "--optimizer_cpu_offload true": [("least", "use_precision_aware_optimizer")],
    "--optimizer_cpu_offload true --use_precision_aware_optimizer true": [],
    "--attention_backend unfused": [("least", "attention_backend")],
    "--attention_backend flash": [],
}
"""Flags → bounds and their keys: the precision-aware optimizer keeps half of a fp32 weight beside the 16 bits, but not
with an optimizer on the host, which without it leaves the fp32 weights on the GPU."""


@pytest.mark.parametrize("flags", BOUNDS)
def test_fp32_weights_of_an_optimizer_on_the_host_and_unfused_attention(
    file: Callable[[str, str], Path], flags: str
) -> None:
    assert [(gap.bound, gap.key) for gap in read(file("s.sh", SFT.format(flags))).gaps] == BOUNDS[flags]
