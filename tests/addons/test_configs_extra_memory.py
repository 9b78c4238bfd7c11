"""What other trainers have on a GPU that kit's workload has not: towers, adapters on experts, a vLLM in turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kit.addons.configs.answer import answer
from kit.addons.configs.extra_memory import extra_gib, tower_parameters
from kit.addons.configs.text import text_of
from kit.addons.configs.workload import Described
from kit.cost.memory.peak import peak_gib
from kit.cost.model.params import count
from kit.specs.catalog import load_model
from tests.addons.config_files import AXOLOTL, MEGATRON_SWIFT, SWIFT, read

PUBLISHED = {
    "qwen2-vl-2b": 2.21, "qwen2-vl-7b": 8.29, "qwen2-vl-72b": 73.4, "qwen2.5-vl-3b": 3.75, "qwen2.5-vl-7b": 8.29,
    "qwen2.5-vl-32b": 33.5, "qwen2.5-vl-72b": 73.4, "qwen3-vl-2b": 2.13, "qwen3-vl-4b": 4.44, "qwen3-vl-8b": 8.77,
    "qwen3-vl-32b": 33.4, "qwen3-vl-30b-a3b": 31.1, "gemma-3-4b": 4.30, "gemma-3-12b": 12.2, "gemma-3-27b": 27.4,
    "gemma-3n-e2b": 5.44, "gemma-3n-e4b": 7.85, "gemma-4-31b": 31.3, "pixtral-12b": 12.7,
    "mistral-small-3.1-24b": 24.0, "ministral-3-3b": 3.85,
    "ministral-3-8b": 8.92, "ministral-3-14b": 13.9, "llava-1.5-7b": 7.06, "internvl3-2b": 2.09, "internvl3-8b": 7.94,
    "smolvlm2-2.2b": 2.25, "voxtral-mini-3b-2507": 4.68, "qwen2-audio-7b": 8.40,
}  # fmt: skip
"""Parameters of the hub's pages, 10⁹."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_part_and_towers_are_the_published_model(name: str) -> None:
    whole = count(load_model(name)).total + tower_parameters()[name]
    assert float(f"{whole / 1e9:.3g}") == PUBLISHED[name]


def test_every_tower_is_of_a_model_that_has_one() -> None:
    assert [name for name in tower_parameters() if not load_model(name).is_text_part] == []


TOWER = 438.97e6 / 2**30
"""Parameters of Mistral Small's, 2³⁰."""
MISTRAL = AXOLOTL.replace("Qwen/Qwen3-8B ", "mistralai/Mistral-Small-3.1-24B-Instruct-2503 ")
WHOLE = MISTRAL.replace("adapter: lora\n", "")
IMAGES = "processor_type: AutoProcessor\n"
TEXT_LAYERS = r"lora_target_modules: 'model.language_model.layers.[\d]+.(self_attn).(q|v)_proj'" + "\n"
TOWERS = {
    "adapters": (MISTRAL, 2 * TOWER, None),
    "4 bits": (MISTRAL + "load_in_4bit: true\n", 0.5 * TOWER, None),
    "8 bits": (MISTRAL + "load_in_8bit: true\n", TOWER, None),
    "zero3": (MISTRAL + "deepspeed: deepspeed_configs/zero3_bf16.json\n", 2 * TOWER / 8, None),
    "zero2": (MISTRAL + "deepspeed: deepspeed_configs/zero2.json\n", 2 * TOWER, None),
    "offload": (
        MISTRAL.replace("bnb_8bit", "torch") + "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n", 0.0,
        None,
    ),
    "16 bits": (WHOLE, 2 * TOWER, None),
    "fp32": (WHOLE + "fsdp_version: 2\n", 4 * TOWER / 8, None),
    "moments of what does not move": (WHOLE + "deepspeed: deepspeed_configs/zero2.json\n", 2 * TOWER, "of towers"),
    "images": (MISTRAL + IMAGES, 2 * TOWER, "of towers"),
    "images beside adapters of the text": (
        MISTRAL.replace("lora_target_modules: [q_proj, v_proj]\n", TEXT_LAYERS) + IMAGES, 2 * TOWER, None,
    ),
    "not known": (AXOLOTL.replace("Qwen/Qwen3-8B ", "Qwen/Qwen2.5-Omni-7B "), 0.0, "towers for images"),
    "none": (AXOLOTL, 0.0, None),
}  # fmt: skip
"""Text → GiB beside the text part, and how the reason begins why that is not all."""


@pytest.mark.parametrize("case", TOWERS)
def test_towers_that_are_not_trained(file: Callable[[str, str], Path], case: str) -> None:
    text, gib, why = TOWERS[case]
    found = read(file("axolotl.yaml", text))
    assert extra_gib(found.workload) == pytest.approx(gib, rel=1e-3)
    assert found.peak_gib == pytest.approx(peak_gib(found.workload) + gib, rel=1e-4)
    gaps = [gap.why for gap in found.gaps if gap.key == "model"]
    assert [gap[: len(why or "")] for gap in gaps] == [why] * (why is not None)


def test_a_frozen_tower_of_other_trainers(file: Callable[[str, str], Path]) -> None:
    image = SWIFT.replace("Qwen2.5-7B", "Qwen2.5-VL-7B")
    offloaded = read(file("o.sh", image.replace("zero3", "zero2_offload"))).workload
    assert extra_gib(offloaded) == pytest.approx(2 * 676.6e6 / 2**30)
    assert [gap.key for gap in read(file("s.sh", image)).gaps] == []
    aligner = read(file("t.sh", image.replace("zero3", "zero3 --freeze_aligner false")))
    assert [(gap.bound, gap.key) for gap in aligner.gaps] == [("least", "freeze_aligner")]


ADAPTED = MEGATRON_SWIFT.replace("megatron sft", "megatron sft --tuner_type lora --lora_rank 16")
# 48 layers; A and B of an expert: 2048 and 2·768 of gate and up, 768 and 2048 of down; 128 experts on 4 ranks
OF_EXPERTS = 48 * 16 * (2048 + 2 * 768 + 768 + 2048) * 128 / 4


def test_adapters_on_experts(file: Callable[[str, str], Path]) -> None:
    """In 16 bits, with fp32 gradients; fp32 weights and moments are shared by the two ranks that have an expert."""
    found = read(file("s.sh", ADAPTED))
    assert extra_gib(found.workload) == pytest.approx(OF_EXPERTS * (2 + 4 + 12 / 2) / 2**30)
    twice = read(file("s.sh", ADAPTED.replace("rank 16", "rank 16 --pipeline_model_parallel_size 2")))
    assert extra_gib(twice.workload) == pytest.approx(OF_EXPERTS / 2 * (2 + 4 + 12) / 2**30)
    attention = ADAPTED.replace("rank 16", "rank 16 --target_modules q_proj k_proj v_proj o_proj")
    assert extra_gib(read(file("a.sh", attention)).workload) == 0
    assert extra_gib(read(file("m.sh", MEGATRON_SWIFT)).workload) == 0


UNEVEN = "the fullest rank's experts are counted as the mean"
AUTOMODEL = """\
step_scheduler: {global_batch_size: 64, local_batch_size: 8}
model:
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
  backend: {fake_balanced_gate: BALANCED, fake_gate_noise: NOISE}
distributed: {strategy: fsdp2, ep_size: 8, activation_checkpointing: RECOMPUTE}
dataset: {seq_length: 4096}
optimizer: {_target_: torch.optim.AdamW}
"""


@pytest.mark.parametrize(
    ("recompute", "balanced", "noise", "uneven"),
    [
        ("false", "false", "0.0", True), ("true", "false", "0.0", False), ("false", "true", "0.0", False),
        ("false", "true", "0.5", True),
    ],
)  # fmt: skip
def test_uneven_experts_are_told_where_they_count(
    file: Callable[[str, str], Path], recompute: str, balanced: str, noise: str, uneven: bool
) -> None:
    """Under full recompute the peak is the loss's, not a layer's."""
    text = AUTOMODEL.replace("RECOMPUTE", recompute).replace("BALANCED", balanced).replace("NOISE", noise)
    assert [gap.why for gap in read(file("moe.yaml", text)).gaps] == [UNEVEN] * uneven


GRPO = (
    "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --tuner_type full --max_length 2048 "
    "--use_vllm true --deepspeed zero3 --vllm_gpu_memory_utilization 0.4 {}\n"
)


def test_a_model_that_leaves_the_gpu_while_vllm_generates(file: Callable[[str, str], Path]) -> None:
    def of(words: str) -> Described:
        return read(file("s.sh", GRPO.format(words)))

    there, alone = of("--sleep_level 1"), of("--use_vllm false").workload.cluster.gpu.memory_gib * 0.4
    both = of("--sleep_level 1 --offload_model true --offload_optimizer true")
    assert (both.workload, both.peak_gib) == (there.workload, pytest.approx(alone))  # vLLM has more than the training
    assert there.peak_gib > alone + 10
    small = of("--sleep_level 1 --offload_model true --offload_optimizer true --vllm_gpu_memory_utilization 0.1")
    assert small.peak_gib == pytest.approx(peak_gib(small.alone))
    assert small.peak_gib < there.peak_gib
    one = of("--sleep_level 1 --offload_model true")
    assert (one.peak_gib, [(gap.bound, gap.key) for gap in one.gaps]) == (there.peak_gib, [("most", "vllm")])
    awake = of("--sleep_level 0 --offload_model true --offload_optimizer true")
    assert (awake.peak_gib, awake.gaps) == (of("--sleep_level 0").peak_gib, ())


def test_the_answer_counts_it(file: Callable[[str, str], Path]) -> None:
    found = answer(file("axolotl.yaml", MISTRAL), "1xH100")
    assert found.now.peak_gib == pytest.approx(found.plan.predicted.peak_gib)
    assert found.now.peak_gib == pytest.approx(peak_gib(found.now.described.workload) + 2 * TOWER, rel=1e-4)
    (stage,) = found.plan.predicted.memory
    assert max(stage.phases_gib.values()) == pytest.approx(stage.peak_gib)
    parts = stage.components_gib
    assert parts["weights"] == pytest.approx(2 * (TOWER + count(found.plan.model).total / 2**30), rel=0.01)
    assert "left out" not in text_of(found, (), 110, str)
    unknown = answer(file("omni.yaml", AXOLOTL.replace("Qwen/Qwen3-8B ", "Qwen/Qwen2.5-Omni-7B ")), "1xH100")
    assert "towers for images and sound are left out" in text_of(unknown, (), 110, str)
