"""What ``kit plan`` reads in another trainer's file: the layout, the job, gaps and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kit.addons.configs.known import recorded
from kit.addons.configs.reading import asked_of
from kit.addons.configs.tables import tables
from kit.addons.configs.workload import Described
from kit.addons.lint.known_keys import trainer_arguments
from kit.errors import SpecError
from kit.specs.job import GrpoSpec, JobSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Pins
from tests.addons.config_files import AXOLOTL, FACTORY, MEGATRON_SWIFT, SWIFT
from tests.support.refusals import refusal


def read(path: Path, gpus: str = "8xH100", row_tokens: int | None = None) -> Described:
    return asked_of(path, gpus, row_tokens).described({})


def layout(path: Path, gpus: str = "8xH100") -> dict[str, Any]:
    """Fields of a layout that are not its defaults."""
    made = read(path, gpus).workload.layout
    plain = {each.name: each.default for each in fields(made)}
    return {name: value for name, value in vars(made).items() if value != plain[name]}


ON_TORCH = {"engine": "torch", "implementation": "huggingface"}


def test_axolotl(file: Callable[[str, str], Path]) -> None:
    path = file("axolotl.yaml", AXOLOTL)
    found = read(path, "2xRTX-4090")
    job = found.workload.job
    assert layout(path, "2xRTX-4090") == ON_TORCH | {
        "dp": 2, "recompute": "full", "micro_batch_size": 2, "gradient_accumulation_steps": 3
    }  # fmt: skip
    assert found.workload.model.name == "qwen3-8b"
    assert (job.seq_length, job.global_batch_size, job.precision, job.objective) == (4096, 12, "bf16", "sft")
    assert job.lora == LoraSpec(rank=32, alpha=16.0, target_modules=("q_proj", "v_proj"))
    assert job.optimizer.name == "adamw-8bit"
    assert (found.gaps, found.packed, found.notes) == ((), True, ())


SILENT = {
    "axolotl.yaml": (
        "base_model: Qwen/Qwen3-8B\n",
        512,
        ON_TORCH | {"dp": 8, "optimizer_state_dtype": "bf16"},
        "bf16",
        None,
    ),
    "factory.yaml": (
        FACTORY,
        2048,
        ON_TORCH | {"dp": 8, "recompute": "full", "micro_batch_size": 8},
        "bf16",
        LoraSpec(rank=4, alpha=8.0),
    ),
    "trl.yaml": (
        "model_name_or_path: Qwen/Qwen3-8B\nuse_peft: true\n",
        1024,
        ON_TORCH | {"dp": 8, "recompute": "full", "micro_batch_size": 8},
        "bf16",
        LoraSpec(rank=16, alpha=32.0, dropout=0.05, target_modules=("q_proj", "v_proj")),
    ),
    "run_clm.sh": (
        "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path Qwen/Qwen3-8B --fp16 true\n",
        40960,
        ON_TORCH | {"dp": 8, "micro_batch_size": 8},
        "bf16",
        None,
    ),
    "dpo.sh": (
        "deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo --model.model_name_or_path Qwen/Qwen3-8B\n",
        512,
        {
            "engine": "deepspeed",
            "implementation": "huggingface",
            "dp": 8,
            "zero_stage": 2,
            "micro_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "reduce_bucket_size": 500_000_000,
        },
        "bf16",
        None,
    ),
    "verl.sh": (
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B\n",
        1024,
        ON_TORCH
        | {"dp": 8, "zero_stage": 3, "recompute": "full", "micro_batch_size": 8, "gradient_accumulation_steps": 4},
        "bf16",
        None,
    ),
    "v1.yaml": (
        "model: Qwen/Qwen3-8B\nmodel_class: llm\ndist_config: {name: fsdp2}\nglobal_batch_size: 32\n",
        2048,
        ON_TORCH | {"dp": 8, "recompute": "full", "zero_stage": 3, "gradient_accumulation_steps": 4},
        "bf16",
        None,
    ),
    "swift.yaml": (
        "model: Qwen/Qwen3-8B\ntuner_type: lora\n",
        40960,
        ON_TORCH | {"dp": 8, "recompute": "full", "gradient_accumulation_steps": 2},
        "bf16",
        LoraSpec(rank=8, alpha=32.0, dropout=0.05),
    ),
}
"""File → its text, and what its program does where it says nothing: length, layout, precision, adapters."""


@pytest.mark.parametrize("name", SILENT)
def test_what_a_file_does_not_say_is_the_programs_own(file: Callable[[str, str], Path], name: str) -> None:
    text, length, planned, precision, lora = SILENT[name]
    path = file(name, text)
    job = read(path).workload.job
    assert layout(path) == planned
    assert (job.seq_length, job.precision, job.lora) == (length, precision, lora)
    assert read(path).gaps == ()


def test_ms_swift(file: Callable[[str, str], Path]) -> None:
    """GPUs, the accumulation and the sizes of DeepSpeed's buffers that nobody wrote down."""
    path = file("train.sh", SWIFT)
    found = read(path, "8xH100")
    made, h = found.workload.layout, found.workload.model.hidden_size
    assert (made.engine, made.zero_stage, made.dp, made.micro_batch_size) == ("deepspeed", 3, 4, 2)
    assert made.gradient_accumulation_steps == 2
    assert (made.reduce_bucket_size, made.stage3_prefetch_bucket_size) == (h * h, int(0.9 * h * h))
    assert (made.stage3_param_persistence_threshold, made.stage3_max_live_parameters) == (10 * h, 10**9)
    assert (made.offload_optimizer, made.offload_param, found.workload.job.seq_length) == ("none", "none", 2048)
    assert found.notes == ("the file starts 4 processes, and --gpus 8xH100 has 8 GPUs: judged on 4",)
    assert read(path, "4xH100").notes == ()
    assert read(path, "8xH100").workload.cluster.num_gpus == 4


@pytest.mark.parametrize(
    ("name", "decided"),
    {
        "zero1": ("deepspeed", 1, "none", "none"),
        "zero2": ("deepspeed", 2, "none", "none"),
        "zero2_offload": ("deepspeed", 2, "cpu", "none"),
        "zero3": ("deepspeed", 3, "none", "none"),
        "zero3_offload": ("deepspeed", 3, "cpu", "cpu"),
    }.items(),
)
def test_files_that_a_program_brings(file: Callable[[str, str], Path], name: str, decided: tuple[Any, ...]) -> None:
    made = read(file("train.sh", SWIFT.replace("zero3", name)), "4xH100").workload.layout
    assert (made.engine, made.zero_stage, made.offload_optimizer, made.offload_param) == decided


AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen3-8B}
distributed: {strategy: fsdp2, tp_size: 1, activation_checkpointing: true}
dataset: {seq_length: 2048}
optimizer: {_target_: torch.optim.AdamW}
"""


def test_automodel(file: Callable[[str, str], Path]) -> None:
    """Under FSDP2 it trains the 16 bits that it loads, unless it loads fp32."""
    path = file("sft.yaml", AUTOMODEL)
    assert layout(path) == ON_TORCH | {
        "dp": 8, "zero_stage": 3, "recompute": "full", "micro_batch_size": 2, "gradient_accumulation_steps": 4,
        "optimizer_state_dtype": "bf16",
    }  # fmt: skip
    assert read(path).gaps == ()
    whole = file("fp32.yaml", AUTOMODEL.replace("pretrained_model", "torch_dtype: float32, pretrained_model"))
    assert (read(whole).workload.layout.optimizer_state_dtype, read(whole).workload.job.lora) == ("fp32", None)
    adapted = file("peft.yaml", AUTOMODEL + "peft: {_target_: nemo_automodel.PeftConfig, dim: 8, alpha: 32}\n")
    assert read(adapted).workload.job.lora == LoraSpec(rank=8, alpha=32.0)
    assert (read(path).packed, read(path).workload.job.seq_length) == (False, 2048)
    for size, found in ((0, (False, 2048)), (8192, (True, 8192))):
        packed = read(file("packed.yaml", f"{AUTOMODEL}packed_sequence: {{packed_sequence_size: {size}}}\n"))
        assert (packed.packed, packed.workload.job.seq_length) == found
    split = file("pp.yaml", AUTOMODEL.replace("tp_size: 1", "pp_size: 2"))
    assert "pipeline parallelism on torch" in refusal(SpecError, read, split)


def test_megatron_swift(file: Callable[[str, str], Path]) -> None:
    path = file("train.sh", MEGATRON_SWIFT)
    assert layout(path) == {
        "engine": "megatron", "implementation": "transformer_engine", "dp": 4, "tp": 2, "ep": 4, "sp": True,
        "zero_stage": 1, "recompute": "selective", "gradient_accumulation_steps": 4,
    }  # fmt: skip
    assert [(gap.bound, gap.why) for gap in read(path).gaps] == [
        ("least", "the fullest rank's experts are counted as the mean")
    ]
    alone = file("dense.sh", "NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 1 "
                 "--sequence_parallel true --recompute_granularity full\n")  # fmt: skip
    assert layout(alone, "4xH100")["gradient_accumulation_steps"] == 4, "16 rows a step, where nothing is said"
    assert "sp" not in layout(alone, "4xH100"), "read with tensor parallelism alone"


GRPO = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --tuner_type full --beta 0.04 {} \\\n"


@pytest.mark.parametrize(("words", "share"), [("--use_vllm true", 0.9), ("--use_vllm true --vllm_mode server", None)])
def test_grpo_shares_the_gpu_with_a_vllm_of_its_own(
    file: Callable[[str, str], Path], words: str, share: float | None
) -> None:
    text = GRPO.format(words) + " --num_generations 4 --max_completion_length 1024 --max_length 2048\n"
    assert read(file("grpo.sh", text)).workload.job.grpo == GrpoSpec(
        num_generations=4, max_completion_length=1024, beta=0.04, vllm_gpu_memory_utilization=share
    )
    asleep = file("asleep.sh", text.strip() + " --sleep_level 1 --offload_model true --offload_optimizer true\n")
    assert [(gap.bound, gap.key) for gap in read(asleep).gaps] == [("most", "sleep_level")]


FSDP = "fsdp: [full_shard, auto_wrap]\nfsdp_config:\n  fsdp_offload_params: true\n  activation_checkpointing: true\n"
MEANINGS = {
    "fsdp": (FSDP, {"zero_stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu", "recompute": "full"}),
    "fsdp 2": ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}\n", {"zero_stage": 2}),
    "fsdp by name": ("fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", {"zero_stage": 2}),
    "offload": ("gradient_checkpointing: offload\n", {"recompute": "full", "activation_offloading": True}),
    "cce": ("plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n", {"chunked_loss": True}),
    "no cce": ("cut_cross_entropy: false\n", {}),
    "yes": ("gradient_checkpointing: yes\n", {"recompute": "full"}),
    "quoted": ("micro_batch_size: '4'\n", {"micro_batch_size": 4}),
    "cp": (
        "context_parallel_size: 2\nfsdp_version: 2\n",
        {"cp": 2, "dp": 4, "zero_stage": 3, "cp_comm_type": "p2p"},
    ),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_what_an_axolotl_key_decides(file: Callable[[str, str], Path], case: str) -> None:
    text, decided = MEANINGS[case]
    path = file("axolotl.yaml", f"base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 8\nlora_alpha: 16\n{text}")
    assert layout(path) == ON_TORCH | {"dp": 8} | decided


IN_16_BITS = {
    "alone": ("", "bf16"),
    "FSDP, which makes fp32 of it": ("fsdp_version: 2\n", "fp32"),
    "adapters": ("adapter: lora\nlora_r: 8\nlora_alpha: 16\n", "fp32"),
    "loaded in fp32": ("bf16: false\n", "fp32"),
    "8-bit moments": ("optimizer: adamw_bnb_8bit\n", "bf16"),
    "moments in fp32 in any case": ("optimizer: paged_adamw_32bit\n", "fp32"),
}
"""Lines of an axolotl file that trains all weights → the dtype of weights, gradients and moments."""


@pytest.mark.parametrize("case", IN_16_BITS)
def test_what_trains_the_16_bits_that_it_loads(file: Callable[[str, str], Path], case: str) -> None:
    text, dtype = IN_16_BITS[case]
    assert (
        layout(file("axolotl.yaml", f"base_model: Qwen/Qwen3-8B\n{text}")).get("optimizer_state_dtype", "fp32") == dtype
    )


TRL = "accelerate launch --num_processes 8 trl/scripts/{}.py --model_name_or_path Qwen/Qwen3-8B {}\n"
COMMANDS = {
    "dpo": (TRL.format("dpo", "--beta 0.1"), "dpo", 1024, {"optimizer_state_dtype": "fp32"}),
    "sft": (TRL.format("sft", "--dtype bfloat16 --max_length 4096"), "sft", 4096, {"optimizer_state_dtype": "bf16"}),
    "kto": (TRL.format("kto", "--gradient_checkpointing false"), "kto", 1024, {"recompute": "none"}),
    "reward": ("trl reward --model_name_or_path Qwen/Qwen3-8B --bf16 --optim sgd\n", "reward", 1024, {"dp": 8}),
    "completions": (
        TRL.format("grpo", "--max_completion_length 2048 --use_liger_kernel"), "grpo", 2049, {"chunked_loss": False},
    ),
    "flags": (
        "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path Qwen/Qwen3-8B --ds.adam_offload "
        "--ds.use_liger_kernel --model.gradient_checkpointing_enable --ds.lora.rank 8 --train.micro_batch_size 4\n",
        "sft", 2048, {"offload_optimizer": "cpu", "chunked_loss": True, "recompute": "full", "micro_batch_size": 4},
    ),
    "read into a variable": (
        "read -r -d '' words <<EOF\nopenrlhf.cli.train_rm --model.model_name_or_path \\\n  Qwen/Qwen3-8B\nEOF\n"
        "deepspeed --module $words\n", "reward", 512, {"micro_batch_size": 1, "gradient_accumulation_steps": 16},
    ),
    "hydra": (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=64 data.max_prompt_length=1024 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.use_kl_loss=True\n",
        "grpo", 1536, {"micro_batch_size": 2, "gradient_accumulation_steps": 16, "zero_stage": 3},
    ),
}  # fmt: skip
"""Command → objective, length, fields of the layout."""


@pytest.mark.parametrize("case", COMMANDS)
def test_what_a_command_trains(file: Callable[[str, str], Path], case: str) -> None:
    text, objective, length, decided = COMMANDS[case]
    found = read(file("train.sh", text)).workload
    assert (found.job.objective, found.job.seq_length) == (objective, length)
    assert {key: getattr(found.layout, key) for key in decided} == decided
    if case == "hydra":
        assert found.job.grpo == GrpoSpec(num_generations=4, beta=0.001, vllm_gpu_memory_utilization=0.5)


def test_micro_batches_that_are_filled(file: Callable[[str, str], Path]) -> None:
    """As many whole rows as they hold, and the rest of them is left out."""
    command = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B data.max_length={}\n"
    for length, micro, gaps in ((2048, 4, []), (3000, 2, ["use_dynamic_bsz"]), (8192, 1, [])):
        found = read(file("train.sh", command.format(length)))
        assert (found.workload.layout.micro_batch_size, found.workload.layout.global_batch_size) == (micro, 256)
        assert ([gap.key for gap in found.gaps], found.packed) == (gaps, True)


MEGATRON = {
    "--main_grads_dtype bf16": ({"gradient_dtype": "bf16"}, set[str]()),
    "--exp_avg_dtype bf16": ({"optimizer_state_dtype": "bf16"}, set[str]()),
    "--exp_avg_dtype fp8": ({"optimizer_state_dtype": "bf16"}, {"exp_avg_dtype"}),
    "--use_precision_aware_optimizer true": ({}, {"use_precision_aware_optimizer"}),
    "--recompute_modules core_attn moe": ({"recompute_modules": ("core_attn", "moe")}, set[str]()),
    "--recompute_modules mlp": ({"recompute_modules": ("mlp",)}, set[str]()),
    "--recompute_modules moe --recompute_granularity full": ({"recompute": "full"}, set[str]()),
    "--fp8_format hybrid --fp8_param_gather true": ({"fp8_param_gather": True}, set[str]()),
}
"""Flags → fields of the layout, and keys of which the figures are a bound."""


@pytest.mark.parametrize("words", MEGATRON)
def test_what_a_megatron_flag_decides(file: Callable[[str, str], Path], words: str) -> None:
    plain = file("plain.sh", MEGATRON_SWIFT)
    path = file("train.sh", f"{MEGATRON_SWIFT.strip()} {words}\n")
    decided, gaps = MEGATRON[words]
    assert layout(path) == layout(plain) | decided
    assert {gap.key for gap in read(path).gaps} - {"model"} == gaps


MIXTURE = AUTOMODEL.replace("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B").replace("tp_size: 1", "ep_size: 4")


def test_experts_on_torch(file: Callable[[str, str], Path]) -> None:
    """Ranks share them out; beside adapters the figures gather them, and are too large."""
    path = file("moe.yaml", MIXTURE)
    assert (layout(path)["ep"], layout(path)["dp"]) == (4, 8)
    assert [(gap.bound, gap.key) for gap in read(path).gaps] == [("least", "model")]
    adapted = read(file("peft.yaml", MIXTURE + "peft: {_target_: nemo_automodel.PeftConfig, dim: 8, alpha: 32}\n"))
    assert adapted.workload.layout.ep == 1
    assert [(gap.bound, gap.key) for gap in adapted.gaps] == [("least", "model"), ("most", "ep")]


@pytest.mark.parametrize(
    ("model", "recompute", "gaps"), [("Qwen3-8B", "selective", []), ("Qwen3-30B-A3B", "none", ["recompute"])]
)
def test_selective_recompute_on_torch(
    file: Callable[[str, str], Path], model: str, recompute: str, gaps: list[str]
) -> None:
    """For dense decoders; of others the figures save everything."""
    text = AUTOMODEL.replace("checkpointing: true", "checkpointing: selective").replace("Qwen3-8B", model)
    found = read(file("sft.yaml", text))
    assert (found.workload.layout.recompute, [gap.key for gap in found.gaps if gap.bound == "most"]) == (
        recompute,
        gaps,
    )


GAPS = {
    "load_in_8bit: true": ("most", "load_in_8bit"),
    "optimizer: paged_adamw_32bit": ("most", "optimizer"),
    "lora_target_modules: [q_proj, lm_head]": ("least", "lora_target_modules"),
    "lora_modules_to_save: [embed_tokens]": ("least", "lora_modules_to_save"),
    "attn_implementation: eager": ("least", "attn_implementation"),
    "quantize_moe_experts: true": ("most", "quantize_moe_experts"),
    "chunked_cross_entropy: true": ("most", "chunked_cross_entropy"),
    "peft_layers_to_transform: [0, 1]": ("most", "peft_layers_to_transform"),
}


@pytest.mark.parametrize("line", GAPS)
def test_what_kit_does_not_model_makes_the_answer_a_bound(file: Callable[[str, str], Path], line: str) -> None:
    found = read(file("axolotl.yaml", f"{AXOLOTL}{line}\n"))
    assert [(gap.bound, gap.key) for gap in found.gaps] == [GAPS[line]]
    assert found.gaps[0].line == AXOLOTL.count("\n") + 1


REFUSED = {
    "qat": ("axolotl.yaml", AXOLOTL + "qat: {weight_dtype: int8}\n", "axolotl.yaml:19: qat.weight_dtype=int8"),
    "frozen": ("axolotl.yaml", AXOLOTL + "unfrozen_parameters: [lm_head]\n", "a partly frozen model"),
    "value": ("axolotl.yaml", AXOLOTL.replace("bf16: auto", "bf16: maybe"), "axolotl.yaml:16: bf16=maybe: kit knows"),
    "optimizer": ("f.yaml", FACTORY + "optim: galore_adamw\n", "optim=galore_adamw: GaLore"),
    "freeze": ("f.yaml", FACTORY.replace("type: lora", "type: freeze"), "a partly frozen model"),
    "file": ("f.yaml", FACTORY + "deepspeed: there/none.json\n", "neither here nor above"),
    "spread": ("s.sh", SWIFT.replace("NPROC_PER_NODE=$GPUS \\\n", ""), "device_map spreads the layers"),
    "variable": ("s.sh", SWIFT.replace("${LENGTH:-2048}", "$LENGTH"), "s.sh:9: max_length is a variable"),
    "tower": ("s.sh", SWIFT.replace("zero3", "zero3 --freeze_vit false"), "a trained vision tower"),
    "fsdp": ("s.sh", MEGATRON_SWIFT.strip() + " --use_megatron_fsdp true\n", "Megatron-FSDP"),
    "batch": ("s.sh", MEGATRON_SWIFT.replace("size 16", "size 15"), "15 is no multiple of micro batch 1 · 4 ranks"),
    "no model": ("axolotl.yaml", "base_model:\nsequence_len: 8\n", "the file names no model"),
    "nothing": ("s.sh", "echo swift sft\npip install x\n", "no command that kit knows"),
    "critic": (
        "s.sh",
        "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-8B\n",
        "with a critic",
    ),
    "engine": ("s.sh", "python -m verl.trainer.main_ppo model_engine=megatron\n", "engine of verl's other than FSDP"),
    "another": (
        "a.yaml",
        "trainer: 1\nexp_manager: 2\nmodel: qwen3-8b\n",
        "NeMo; kit plan reads those of Automodel, axolotl, ",
    ),
    "accelerate": ("a.yaml", "distributed_type: FSDP\n", "kit lint a.yaml judges it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(file: Callable[[str, str], Path], case: str) -> None:
    name, text, why = REFUSED[case]
    assert why in refusal(SpecError, read, file(name, text.replace("echo swift sft", "echo nothing")))


def test_linked_files(file: Callable[[str, str], Path]) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 12345, "offload_optimizer": {"device": "cpu"}}
    file("mine.json", json.dumps({"zero_optimization": zero}))
    made = read(file("f.yaml", FACTORY + "deepspeed: mine.json\n")).workload.layout
    assert (made.engine, made.zero_stage, made.reduce_bucket_size) == ("deepspeed", 2, 12345)
    assert (made.offload_optimizer, made.offload_param) == ("cpu", "none")
    inline = read(
        file("s.sh", SWIFT.replace("--deepspeed zero3", f"--deepspeed '{json.dumps({'zero_optimization': zero})}'"))
    )
    assert (inline.workload.layout.zero_stage, inline.workload.layout.offload_optimizer) == (2, "cpu")
    file("acc.yaml", "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n"
         "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_offload_params: true}\n")  # fmt: skip
    script = "accelerate launch --config_file acc.yaml src/train.py --model_name_or_path Qwen/Qwen3-8B --bf16 true\n"
    made = read(file("t.sh", script), "4xH100").workload.layout
    assert (made.engine, made.zero_stage, made.dp, made.offload_param) == ("torch", 2, 4, "cpu")


def test_every_row_decides_a_field_that_kit_has() -> None:
    mine = (
        "model accumulation packing world gpus_per_node nodes visible states vllm packed_length vllm.mode vllm.share "
    )
    mine += "prompts prompt_tokens filled micro_tokens"
    known = (
        {*mine.split()}
        | {f"layout.{each.name}" for each in fields(Pins)}
        | {f"job.{each.name}" for each in fields(JobSpec)}
    )
    known |= {f"job.lora.{each.name}" for each in fields(LoraSpec)} | {
        f"job.grpo.{each.name}" for each in fields(GrpoSpec)
    }
    known |= {f"job.optimizer.{each.name}" for each in fields(OptimizerSpec)}
    for table in tables():
        named = [row.field for row in table.keys.values() if row.field] + list(table.always)
        named += [field for row in table.keys.values() for sets in row.sets.values() for field in sets]
        assert set(named) <= known, table.program


def test_every_key_of_a_table_is_a_setting_of_its_program() -> None:
    for table in tables():
        if table.target:
            names = recorded(table.target) | set(trainer_arguments().defaults)
            rows = {key: row for key, row in table.keys.items() if not key.startswith(("env.", "launcher."))}
            own = {key for key, row in rows.items() if key != "command" and (row.field or not row.refuse)}
            unknown = {key for key in own if not {key, key.split(".")[-1], key.split(".")[0]} & names}
            assert unknown == set(), table.program
            assert {*table.choices, *table.batch} <= table.keys.keys()
