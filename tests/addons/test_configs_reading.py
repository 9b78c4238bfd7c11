"""What ``kit plan`` reads in another trainer's file: the layout, the job, gaps and refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kit.addons.configs.known import recorded
from kit.addons.configs.patch import edited
from kit.addons.configs.reading import asked_of
from kit.addons.configs.tables import tables
from kit.addons.configs.walk import Gap
from kit.addons.configs.workload import Described
from kit.addons.lint.known_keys import trainer_arguments
from kit.errors import SpecError
from kit.specs.job import GrpoSpec, JobSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec
from tests.addons.config_files import AXOLOTL, FACTORY, MEGATRON_SWIFT, REGISTRY, SWIFT, TIGHT, VERL, changed, read
from tests.support.refusals import refusal


def value(found: Described, field: str) -> Any:
    """Of the layout, the job, or what is said beside them."""
    work = found.workload
    return next(getattr(each, field) for each in (work.layout, work.job, work.model, found) if hasattr(each, field))


AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen3-8B}
distributed: {strategy: fsdp2, tp_size: 1, activation_checkpointing: true}
dataset: {seq_length: 2048}
optimizer: {_target_: torch.optim.AdamW}
"""
ON_TORCH = {"engine": "torch", "implementation": "huggingface", "dp": 8}
FULL = {"recompute": "full"}
IN_16 = {"optimizer_state_dtype": "bf16"}
EXPERTS = AXOLOTL.replace("Qwen3-8B ", "Qwen3-30B-A3B ") + "load_in_4bit: true\nquantize_moe_experts: true\n"
IN_4_BITS = LoraSpec(rank=32, alpha=16.0, target_modules=("q_proj", "v_proj"), four_bit=True, quantize_moe_experts=True)
IN_8_BITS = replace(IN_4_BITS, four_bit=False, quantize_moe_experts=False, eight_bit=True)
IN_TRL = LoraSpec(rank=16, alpha=32.0, dropout=0.05, target_modules=("q_proj", "v_proj"), eight_bit=True)
WHOLE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "axolotl": (
        "a.yaml", AXOLOTL, ON_TORCH | FULL | {"micro_batch_size": 2, "gradient_accumulation_steps": 3},
        {"seq_length": 4096, "global_batch_size": 48, "precision": "bf16", "objective": "sft", "packed": True,
         "lora": LoraSpec(rank=32, alpha=16.0, target_modules=("q_proj", "v_proj")),
         "optimizer": OptimizerSpec(name="adamw-8bit")},
    ),
    "axolotl, silent": (
        "a.yaml", "base_model: Qwen/Qwen3-8B\n", ON_TORCH | IN_16,
        {"seq_length": 512, "precision": "bf16", "lora": None, "packed": False},
    ),
    "LLaMA-Factory, silent": (
        "f.yaml", FACTORY, ON_TORCH | FULL | {"micro_batch_size": 8},
        {"seq_length": 2048, "precision": "bf16", "lora": LoraSpec(rank=4, alpha=8.0)},
    ),
    "LLaMA-Factory v1, silent": (
        "v1.yaml", "model: Qwen/Qwen3-8B\nmodel_class: llm\ndist_config: {name: fsdp2}\nglobal_batch_size: 32\n",
        ON_TORCH | FULL | {"zero_stage": 3, "gradient_accumulation_steps": 4},
        {"seq_length": 2048, "precision": "bf16", "lora": None},
    ),
    "ms-swift, silent": (
        "s.yaml", "model: Qwen/Qwen3-8B\ntuner_type: lora\n", ON_TORCH | FULL | {"gradient_accumulation_steps": 2},
        {"seq_length": 40960, "precision": "bf16", "lora": LoraSpec(rank=8, alpha=32.0, dropout=0.05)},
    ),
    # 16 rows a step; sizes that are "auto" are filled in from the hidden size, 3584
    "ms-swift's DeepSpeed": (
        "s.sh", SWIFT,
        {"engine": "deepspeed", "implementation": "huggingface", "dp": 4, "zero_stage": 3, "micro_batch_size": 2,
         "gradient_accumulation_steps": 2, "reduce_bucket_size": 3584**2, "stage3_param_persistence_threshold": 35840,
         "stage3_prefetch_bucket_size": 11_560_550, "stage3_max_live_parameters": 10**9} | FULL,
        {"seq_length": 2048, "notes": ("the file starts 4 processes, and --gpus 8xH100 has 8 GPUs: judged on 4",)},
    ),
    "Megatron-SWIFT": (
        "s.sh", MEGATRON_SWIFT,
        {"engine": "megatron", "implementation": "transformer_engine", "dp": 4, "tp": 2, "ep": 4, "sp": True,
         "zero_stage": 1, "recompute": "selective", "gradient_accumulation_steps": 4},
        {"global_batch_size": 16, "packed": True},
    ),
    # 16 rows a step, where nothing is said; sequence parallelism is read with tensor parallelism alone
    "Megatron-SWIFT, silent": (
        "s.sh", "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 1 "
        "--sequence_parallel true\n",
        {"engine": "megatron", "implementation": "transformer_engine", "dp": 8, "zero_stage": 1,
         "recompute": "selective", "gradient_accumulation_steps": 2},
        {"seq_length": 40960, "lora": None},
    ),
    "Automodel": (
        "sft.yaml", AUTOMODEL,
        ON_TORCH | FULL | IN_16 | {"zero_stage": 3, "micro_batch_size": 2, "gradient_accumulation_steps": 4},
        {"seq_length": 2048, "lora": None, "packed": False},
    ),
    "TRL, silent": (
        "trl.yaml", "model_name_or_path: Qwen/Qwen3-8B\nuse_peft: true\n", ON_TORCH | FULL | {"micro_batch_size": 8},
        {"seq_length": 1024, "precision": "bf16", "objective": "sft",
         "lora": LoraSpec(rank=16, alpha=32.0, dropout=0.05, target_modules=("q_proj", "v_proj"))},
    ),
    "axolotl's experts in nf4": (
        "a.yaml", EXPERTS, ON_TORCH | FULL | {"micro_batch_size": 2, "gradient_accumulation_steps": 3},
        {"gaps": (), "lora": IN_4_BITS},
    ),
    "axolotl's experts in nf4, without recompute": (
        "a.yaml", EXPERTS.replace("checkpointing: true", "checkpointing: false"),
        ON_TORCH | {"micro_batch_size": 2, "gradient_accumulation_steps": 3},
        {"gaps": (Gap("most", "quantize_moe_experts", "quantised experts are counted as 16 bits"),),
         "lora": replace(IN_4_BITS, quantize_moe_experts=False)},
    ),
    "run_clm.py, silent": (
        "t.sh", "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path Qwen/Qwen3-8B --fp16 true\n",
        ON_TORCH | {"micro_batch_size": 8}, {"seq_length": 40960, "precision": "bf16", "objective": "pretrain"},
    ),
    "OpenRLHF, silent": (
        "t.sh", "deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo --model.model_name_or_path Qwen/Qwen3-8B\n",
        {"engine": "deepspeed", "implementation": "huggingface", "dp": 8, "zero_stage": 2, "micro_batch_size": 8,
         "gradient_accumulation_steps": 2, "reduce_bucket_size": 500_000_000},
        {"seq_length": 512, "precision": "bf16", "objective": "dpo", "lora": None},
    ),
    "verl's SFT, silent": (
        "t.sh", "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B\n",
        ON_TORCH | FULL | {"zero_stage": 3, "micro_batch_size": 8, "gradient_accumulation_steps": 4},
        {"seq_length": 1024, "global_batch_size": 256, "packed": True},
    ),
}  # fmt: skip
"""Name and text of a file → all fields of the layout that are not kit's own default, and some of the job."""


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_file(file: Callable[[str, str], Path], case: str) -> None:
    """What it does not say is its program's own."""
    name, text, planned, job = WHOLE[case]
    found = read(file(name, text))
    assert (changed(found), {field: value(found, field) for field in job}) == (planned, job)


LORA = "base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 8\nlora_alpha: 16\n"
PLAIN = "base_model: Qwen/Qwen3-8B\n"
TRL = "accelerate launch --num_processes 8 trl/scripts/{}.py --model_name_or_path Qwen/Qwen3-8B {}\n"
GRPO = (
    "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --tuner_type full --beta 0.04 "
    "--num_generations 4 --max_completion_length 1024 --max_length 2048 --use_vllm true {}\n"
)
HYDRA = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
    "actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=64 data.max_prompt_length=1024 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.use_kl_loss=True\n"
)
FLAGS = (
    "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path Qwen/Qwen3-8B --ds.adam_offload "
    "--ds.use_liger_kernel --model.gradient_checkpointing_enable --train.micro_batch_size 4\n"
)
FILLED = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B data.max_length={}\n"
MIXTURE = AUTOMODEL.replace("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B").replace("tp_size: 1", "ep_size: 4")
SELECTIVE = AUTOMODEL.replace("checkpointing: true", "checkpointing: selective")
PACK = AUTOMODEL.replace("{", "{{").replace("}", "}}") + "packed_sequence: {{packed_sequence_size: {}}}\n"
PEFT = "peft: {_target_: nemo_automodel.PeftConfig, dim: 8, alpha: 32}\n"
PREFERENCES = "model_name_or_path: Qwen/Qwen3-8B\nbeta: 0.01\nmax_length: 2048\n"
COMPLETIONS = """\
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
torch_dtype: bfloat16
max_prompt_length: 512
max_completion_length: 1024
num_generations: 16
reward_funcs: [accuracy, format]
"""
EVERY_SIZE = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --vocab-size 512 --seq-length 64 "
    "--swiglu --micro-batch-size 1 --global-batch-size 8 --max-position-embeddings 64 --num-experts 4\n"
)
READ = "read -r -d '' words <<EOF\nopenrlhf.cli.train_rm --model.model_name_or_path \\\n  Qwen/Qwen3-8B\nEOF\n"
MEAN = ("least", "model")
VLLM = GrpoSpec(num_generations=4, max_completion_length=1024, beta=0.04, vllm_gpu_memory_utilization=0.9)


def megatron(words: str) -> str:
    return f"{MEGATRON_SWIFT.strip()} {words}\n"


DECIDES: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]]]] = {
    "fsdp": (
        LORA + "fsdp: full_shard auto_wrap\nfsdp_config: {fsdp_offload_params: true, activation_checkpointing: true}\n",
        {"zero_stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu", "recompute": "full"}, [],
    ),
    "fsdp 2": (LORA + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}\n", {"zero_stage": 2}, []),
    "fsdp by name": (LORA + "fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", {"zero_stage": 2}, []),
    "offload": (LORA + "gradient_checkpointing: offload\n", {"recompute": "full", "activation_offloading": True}, []),
    "cce": (
        LORA + "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n",
        {"chunked_loss": True, "cp_comm_type": "all_gather"}, [],
    ),
    "no cce": (LORA + "cut_cross_entropy: false\n", {"chunked_loss": False}, []),
    "what is off": (
        AXOLOTL + "dp_replicate_size: 1\nlisa_n_layers: 0\nlora_modules_to_save: []\nrelora: false\n", {"dp": 8}, [],
    ),
    "cce without its plugin": (LORA + "cut_cross_entropy: true\n", {"chunked_loss": False}, []),
    "yes": (LORA + "gradient_checkpointing: yes\n", {"recompute": "full"}, []),
    "quoted": (LORA + "micro_batch_size: '4'\n", {"micro_batch_size": 4}, []),
    "ring": (
        LORA + "context_parallel_size: 2\nfsdp_version: 2\n",
        {"cp": 2, "dp": 4, "zero_stage": 3, "cp_comm_type": "p2p"}, [],
    ),
    "no ring under DeepSpeed": (
        LORA + "deepspeed: deepspeed_configs/zero1.json\n", {"zero_stage": 1, "reduce_bucket_size": 500_000_000}, [],
    ),
    "16 bits": (PLAIN, {"optimizer_state_dtype": "bf16"}, []),
    "16 bits, which FSDP makes 32": (PLAIN + "fsdp_version: 2\n", {"optimizer_state_dtype": "fp32"}, []),
    "16 bits of adapters": (LORA, {"optimizer_state_dtype": "fp32"}, []),
    "32 bits": (PLAIN + "bf16: false\n", {"optimizer_state_dtype": "fp32", "precision": "fp32"}, []),
    "8-bit moments": (PLAIN + "optimizer: adamw_bnb_8bit\n", {"optimizer_state_dtype": "bf16"}, []),
    "32-bit moments": (
        PLAIN + "optimizer: paged_adamw_32bit\n", {"optimizer_state_dtype": "fp32"}, [("most", "optimizer")],
    ),
    "32-bit moments of a Trainer": (
        "model: Qwen/Qwen3-8B\ntuner_type: full\noptim: paged_adamw_32bit\n", {"optimizer_state_dtype": "fp32"},
        [("most", "optim")],
    ),
    "16 bits of a Trainer": ("model: Qwen/Qwen3-8B\ntuner_type: full\n", {"optimizer_state_dtype": "bf16"}, []),
    "zero1": (SWIFT.replace("zero3", "zero1"), {"engine": "deepspeed", "zero_stage": 1, "offload_param": "none"}, []),
    "zero2": (SWIFT.replace("zero3", "zero2"), {"zero_stage": 2, "offload_optimizer": "none"}, []),
    "zero2_offload": (SWIFT.replace("zero3", "zero2_offload"), {"zero_stage": 2, "offload_optimizer": "cpu"}, []),
    "zero3_offload": (
        SWIFT.replace("zero3", "zero3_offload"), {"offload_optimizer": "cpu", "offload_param": "cpu"}, [],
    ),
    "DeepSpeed inline": (
        SWIFT.replace("zero3", """'{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'"""),
        {"zero_stage": 2, "offload_optimizer": "cpu", "reduce_bucket_size": 500_000_000}, [],
    ),
    "vLLM": (GRPO.format(""), {"grpo": VLLM}, []),
    "vLLM elsewhere": (
        GRPO.format("--vllm_mode server"),
        {"grpo": GrpoSpec(num_generations=4, max_completion_length=1024, beta=0.04)}, [],
    ),
    "vLLM that sleeps": (
        GRPO.format("--sleep_level 1"), {"grpo": replace(VLLM, vllm_enable_sleep_mode=True)}, [],
    ),
    "vLLM that is awake": (GRPO.format("--sleep_level 0"), {"grpo": VLLM}, []),
    "vLLM and the model in turns": (
        GRPO.format("--sleep_level 1 --offload_model true --offload_optimizer true"),
        {"grpo": replace(VLLM, vllm_enable_sleep_mode=True)}, [],
    ),
    "bf16 gradients": (megatron("--main_grads_dtype bf16"), {"gradient_dtype": "bf16"}, [MEAN]),
    "bf16 moments": (megatron("--exp_avg_dtype bf16"), {"optimizer_state_dtype": "bf16"}, [MEAN]),
    "fp8 moments": (
        megatron("--exp_avg_dtype fp8"), {"optimizer_state_dtype": "bf16"}, [("most", "exp_avg_dtype"), MEAN],
    ),
    "two halves": (
        megatron("--use_precision_aware_optimizer true"), {"optimizer_state_dtype": "fp32"},
        [("most", "use_precision_aware_optimizer"), MEAN],
    ),
    "modules": (megatron("--recompute_modules core_attn moe"), {"recompute_modules": ("core_attn", "moe")}, []),
    "a module": (megatron("--recompute_modules mlp"), {"recompute_modules": ("mlp",)}, [MEAN]),
    "no modules": (
        megatron("--recompute_modules moe --recompute_granularity full"),
        {"recompute_modules": (), "recompute": "full"}, [],
    ),
    "fp8 weights": (
        megatron("--fp8_format hybrid --fp8_param_gather true"), {"fp8_param_gather": True, "precision": "fp8"}, [MEAN],
    ),
    "fp32 weights": (
        AUTOMODEL.replace("pretrained_model", "torch_dtype: float32, pretrained_model"),
        {"optimizer_state_dtype": "fp32"}, [],
    ),
    "fp8": (AUTOMODEL + "fp8: {enabled: true}\n", {"precision": "fp8", "optimizer_state_dtype": "bf16"}, []),
    "fp8 by axolotl": (AXOLOTL.replace("adapter: lora\n", "fp8: true\n"), {"precision": "fp8", "lora": None}, []),
    "fp8 beside adapters": (AXOLOTL + "fp8: true\n", {"precision": "bf16"}, [("least", "fp8")]),
    "fp8 by LLaMA-Factory": (
        "fp8: true\nfp8_backend: torchao\n" + FACTORY.replace("type: lora", "type: full"), {"precision": "fp8"}, [],
    ),
    "fp8 by Transformer Engine": (
        "fp8: true\nfp8_backend: te\n" + FACTORY.replace("type: lora", "type: full"), {"precision": "bf16"},
        [("least", "fp8_backend")],
    ),
    "fp8 on DeepSpeed": (
        AXOLOTL.replace("adapter: lora\n", "fp8: true\ndeepspeed: deepspeed_configs/zero2.json\n"),
        {"precision": "bf16", "zero_stage": 2}, [("least", "fp8")],
    ),
    "8 bits": (AXOLOTL + "load_in_8bit: true\n", {"lora": IN_8_BITS}, []),
    "8 bits, the experts with them": (
        EXPERTS.replace("load_in_4bit", "load_in_8bit"), {"lora": IN_8_BITS}, [("most", "quantize_moe_experts")],
    ),
    "LLaMA-Factory's 8 bits": (
        "quantization_bit: 8\n" + FACTORY, {"lora": LoraSpec(rank=4, alpha=8.0, eight_bit=True)}, [],
    ),
    "ms-swift's 8 bits": (
        "model: Qwen/Qwen3-8B\ntuner_type: lora\nquant_method: bnb\nquant_bits: 8\n",
        {"lora": LoraSpec(rank=8, alpha=32.0, dropout=0.05, eight_bit=True)}, [],
    ),
    "TRL's 8 bits": (TRL.format("sft", "--use_peft --load_in_8bit"), {"lora": IN_TRL}, []),
    "adapters": (AUTOMODEL + PEFT, {"lora": LoraSpec(rank=8, alpha=32.0), "optimizer_state_dtype": "fp32"}, []),
    "no packing": (PACK.format(0), {"seq_length": 2048, "packed": False}, []),
    "packing": (PACK.format(8192), {"seq_length": 8192, "packed": True}, []),
    "experts": (MIXTURE, {"ep": 4, "dp": 8}, []),
    "experts beside adapters": (MIXTURE + PEFT, {"ep": 1, "dp": 8}, [("most", "ep"), MEAN]),
    "experts that no family describes": (
        MIXTURE.replace("Qwen/Qwen3-30B-A3B", "zai-org/GLM-4.7-Flash"), {"ep": 4, "dp": 8, "zero_stage": 3}, [],
    ),
    "experts beside tensors in parts": (
        MIXTURE.replace("ep_size: 4", "ep_size: 4, tp_size: 2"), {"ep": 1, "tp": 2}, [("most", "ep"), MEAN],
    ),
    "experts under DDP": (
        MIXTURE.replace("strategy: fsdp2", "strategy: ddp"), {"ep": 1, "zero_stage": 0}, [("most", "ep"), MEAN],
    ),
    "selective": (SELECTIVE, {"recompute": "selective"}, []),
    "selective with experts": (
        SELECTIVE.replace("Qwen3-8B", "Qwen3-30B-A3B"), {"recompute": "none"}, [("most", "recompute")],
    ),
    "dpo": (TRL.format("dpo", "--beta 0.1"), {"objective": "dpo", "optimizer_state_dtype": "fp32"}, []),
    "sft": (
        TRL.format("sft", "--dtype bfloat16 --max_length 4096"),
        {"seq_length": 4096, "optimizer_state_dtype": "bf16"}, [],
    ),
    "kto": (TRL.format("kto", "--gradient_checkpointing false"), {"objective": "kto", "recompute": "none"}, []),
    "reward": ("trl reward --model_name_or_path Qwen/Qwen3-8B\n", {"objective": "reward", "seq_length": 1024}, []),
    "completions": (
        TRL.format("grpo", "--max_completion_length 2048 --use_liger_kernel"),
        {"objective": "grpo", "seq_length": 2049, "chunked_loss": False}, [("most", "chunked_loss")],
    ),
    "completions on Megatron": (
        "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --num_generations 8 "
        "--micro_batch_size 1 --global_batch_size 8 --max_length 4096\n",
        {"engine": "megatron", "objective": "grpo"}, [("least", "model")],
    ),
    "flags": (
        FLAGS, {"objective": "sft", "seq_length": 2048, "offload_optimizer": "cpu", "chunked_loss": True,
                "recompute": "full", "micro_batch_size": 4}, [],
    ),
    "rank": (FLAGS.strip() + " --ds.lora.rank 8\n", {"lora": LoraSpec(rank=8, alpha=16.0)}, []),
    "read into a variable": (
        READ + "deepspeed --module $words\n",
        {"objective": "reward", "seq_length": 512, "micro_batch_size": 1, "gradient_accumulation_steps": 16}, [],
    ),
    "hydra": (
        HYDRA, {"objective": "grpo", "seq_length": 1536, "micro_batch_size": 2, "gradient_accumulation_steps": 16,
                "zero_stage": 3, "grpo": GrpoSpec(
                    num_generations=4, beta=0.001, vllm_gpu_memory_utilization=0.5, vllm_enable_sleep_mode=True)}, [],
    ),
    "hydra, silent": (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "actor_rollout_ref.rollout.n=2\n", {"global_batch_size": 512, "seq_length": 1024, "recompute": "full"}, [],
    ),
    "a file of DPO": (
        PREFERENCES + "max_prompt_length: 512\n", {"objective": "dpo", "seq_length": 2048, "dp": 8}, [],
    ),
    "a file of KTO": (
        PREFERENCES + "max_prompt_length: 512\ndesirable_weight: 1.5\n", {"objective": "kto", "seq_length": 2048}, [],
    ),
    "a file of GRPO": (
        COMPLETIONS, {"objective": "grpo", "seq_length": 1536, "optimizer_state_dtype": "bf16",
                      "grpo": GrpoSpec(num_generations=16, max_completion_length=1024)}, [],
    ),
    "a script says its objective": (
        TRL.format("kto", "--max_prompt_length 512"), {"objective": "kto", "seq_length": 1024}, [],
    ),
    "fp32 weights by the older name": (
        COMPLETIONS.replace("bfloat16", "float32"), {"optimizer_state_dtype": "fp32"}, [],
    ),
    "ms-swift under accelerate": (
        "accelerate launch --num_processes 8 swift/cli/sft.py --model Qwen/Qwen3-8B --tuner_type lora\n",
        {"lora": LoraSpec(rank=8, alpha=32.0, dropout=0.05), "seq_length": 40960, "dp": 8}, [],
    ),
    "the hub's cache": (
        PLAIN.replace("Qwen/Qwen3-8B", "$HOME/hub/models--meta-llama--Meta-Llama-3.1-405B/snapshots/222de0"),
        {"num_layers": 126}, [],
    ),
    "tensors in parts": (
        AUTOMODEL.replace("tp_size: 1", "tp_size: 2"), {"tp": 2, "dp": 4, "gradient_accumulation_steps": 8}, [],
    ),
    "filled": (FILLED.format(2048), {"micro_batch_size": 4, "global_batch_size": 256, "packed": True}, []),
    "filled by whole rows": (FILLED.format(3000), {"micro_batch_size": 2}, [("least", "use_dynamic_bsz")]),
    "filled, whatever a micro batch has of rows": (
        HYDRA.replace("per_gpu=2", "per_gpu=3 actor_rollout_ref.actor.use_dynamic_bsz=True"),
        {"micro_batch_size": 8, "gradient_accumulation_steps": 4}, [("least", "use_dynamic_bsz")],
    ),
    "filled, whatever a micro batch has of rows, where 256 rows are no multiple of it": (
        VERL.replace("data.max", "data.micro_batch_size_per_gpu=3 data.max"),
        {"micro_batch_size": 16, "global_batch_size": 256, "packed": True}, [],
    ),
    "adapters on layers of the MLP by an expression": (
        AXOLOTL.replace("[q_proj, v_proj]", r"'model.layers.[\d]+.mlp.(gate|up)_proj'"),
        {"lora": LoraSpec(rank=32, alpha=16.0, target_modules=("gate_proj", "up_proj"))}, [],
    ),
    "adapters on all layers, and some of them": (
        AXOLOTL.replace("[q_proj,", "[all-linear, q_proj,"), {"lora": LoraSpec(rank=32, alpha=16.0)}, [],
    ),
    "filled by one row": (FILLED.format(8192), {"micro_batch_size": 1, "gradient_accumulation_steps": 32}, []),
}  # fmt: skip
"""Text → fields that it decides, and (bound, key) of what is left out."""


@pytest.mark.parametrize("case", DECIDES)
def test_what_a_key_decides(file: Callable[[str, str], Path], case: str) -> None:
    text, decided, gaps = DECIDES[case]
    found = read(file("run.yaml" if ": " in text.splitlines()[0] else "run.sh", text))
    assert {field: value(found, field) for field in decided} == decided
    assert [(gap.bound, gap.key) for gap in found.gaps] == gaps


GAPS = {
    "optimizer: paged_adamw_32bit": ("most", "optimizer"),
    "lora_target_modules: [q_proj, lm_head]": ("least", "lora_target_modules"),
    "lora_modules_to_save: [embed_tokens]": ("least", "lora_modules_to_save"),
    "attn_implementation: eager": ("least", "attn_implementation"),
    "chunked_cross_entropy: true": ("most", "chunked_cross_entropy"),
    "peft_layers_to_transform: [0, 1]": ("most", "peft_layers_to_transform"),
}


@pytest.mark.parametrize("line", GAPS)
def test_what_kit_does_not_model_makes_the_answer_a_bound(file: Callable[[str, str], Path], line: str) -> None:
    found = read(file("axolotl.yaml", f"{AXOLOTL}{line}\n"))
    assert [(gap.bound, gap.key, gap.line) for gap in found.gaps] == [(*GAPS[line], AXOLOTL.count("\n") + 1)]


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
    "pipeline": ("a.yaml", AUTOMODEL.replace("tp_size: 1", "pp_size: 2"), "pipeline parallelism on torch"),
    "ascend": ("s.sh", "ASCEND_RT_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen3-8B\n", "NPUs"),
    "no number": (
        "axolotl.yaml",
        AXOLOTL.replace("steps: 3", "steps: auto"),
        "axolotl.yaml:9: gradient_accumulation_steps=auto: a whole number belongs here",
    ),
    "a list": (
        "axolotl.yaml",
        AXOLOTL.replace("4096", "[4096]"),
        "axolotl.yaml:6: sequence_len=[4096]: a whole number",
    ),
    "processes": (
        "s.sh",
        SWIFT.replace("GPUS=4", "GPUS=999999"),
        "999999 processes on 125000 nodes: give each node as ",
    ),
    "nodes": ("s.sh", "NNODES=-1 " + SWIFT, "processes on 1 nodes: give each node as many"),
    "draft": (
        "eagle.yaml",
        "recipe: TrainEagle3Recipe\nrecipe_args: {target_model_name_or_path: meta-llama/Llama-3.2-1B}\n",
        "eagle.yaml:1: recipe=TrainEagle3Recipe: a draft model beside one that is frozen",
    ),
    "own script": ("s.sh", "python my_sft.py --model_name_or_path Qwen/Qwen3-8B\n", "no command that kit knows"),
    "no file": ("s.sh", "swift sft there.yaml\n", "the file is neither here nor above this one"),
    "no registry": (
        "torchtitan.sh",
        "torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b\n",
        "torchtitan/models/llama3/config_registry.py: the file is neither here nor above this one",
    ),
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
    assert why in refusal(SpecError, read, file(name, text))


@pytest.mark.parametrize("name", [*TIGHT, "automodel.yaml", "moe.sh", "registry.py"])
@pytest.mark.parametrize("value", ["auto", [], {"a": 1}, -1, 0, 10**20], ids=str)
def test_no_value_of_a_key_breaks_the_reading(file: Callable[[str, str], Path], name: str, value: Any) -> None:
    texts = {name: text for name, (text, _) in TIGHT.items()} | {"automodel.yaml": AUTOMODEL, "moe.sh": EVERY_SIZE}
    texts["registry.py"] = REGISTRY.partition("\n\n\ndef llama_8b_replicated")[0]
    found = asked_of(file(name, texts[name]), "8xH100")
    for key in found.table.keys:
        with suppress(SpecError):
            found.described({key: value})


IN_HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
LINKED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSpeed": (
        "zero_optimization: {stage: 2, reduce_bucket_size: 12345, offload_optimizer: {device: cpu}}",
        {"engine": "deepspeed", "zero_stage": 2, "reduce_bucket_size": 12345, "offload_optimizer": "cpu"},
    ),
    "DeepSpeed's older names": (
        "zero_optimization: {stage: 3, prefetch_bucket_size: 7000, stage3_max_live_parameters: big}",
        {"zero_stage": 3, "stage3_prefetch_bucket_size": 7000, "stage3_max_live_parameters": 10**9},
    ),
    "DeepSpeed's buffers": (
        "zero_optimization: {stage: 3, offload_param: {device: nvme, buffer_count: 9, buffer_size: 80000000}}",
        {"offload_param": "nvme", "param_buffer_count": 9, "param_buffer_size": 8 * 10**7, "offload_optimizer": "none"},
    ),
    "DeepSpeed without a stage": ("zero_optimization: {sub_group_size: 9}", {"engine": "torch", "zero_stage": 0}),
    "DeepSpeed without sections": ("zero_optimization: {stage: 1, offload_param: null}", {"zero_stage": 1}),
    "DeepSpeed in accelerate": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}",
        {"engine": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "none"},
    ),
    "its JSON in accelerate": (
        "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: zero.json}",
        {"engine": "deepspeed", "zero_stage": 2, "dp": 4},
    ),
    "FSDP 2": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}",
        {"engine": "torch", "zero_stage": 3, **IN_HOST},
    ),
    "FSDP 2, gathered once": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}", {"zero_stage": 2},
    ),
    "FSDP 1": ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", {"zero_stage": 2}),
    "FSDP 1 by number": ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 3}", {"zero_stage": 0}),
    "DDP": ("distributed_type: MULTI_GPU\nmixed_precision: 'no'", {"engine": "torch", "zero_stage": 0}),
}  # fmt: skip
"""A file that another one names → what the layout has of it."""


@pytest.mark.parametrize("case", LINKED)
def test_linked_files(file: Callable[[str, str], Path], case: str) -> None:
    text, decided = LINKED[case]
    file("mine.yaml", f"{text}\n")
    file("zero.json", '{"zero_optimization": {"stage": 2}}')
    by_launcher = f"accelerate launch --config_file mine.yaml {TRL.partition(' 8 ')[2]}".format("sft", "")
    by_name = f"deepspeed: mine.yaml\n{FACTORY}"
    path = file("f.yaml", by_name) if text.startswith("zero") else file("t.sh", by_launcher)
    made = vars(read(path).workload.layout)
    assert {name: made[name] for name in decided} == decided


def test_a_linked_file_that_kit_has_no_figures_for(file: Callable[[str, str], Path]) -> None:
    file("mine.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n")
    path = file("t.sh", f"accelerate launch --config_file mine.yaml {TRL.partition(' 8 ')[2]}".format("sft", ""))
    assert "HYBRID_SHARD: kit does not have this sharding strategy" in refusal(SpecError, read, path)


def test_a_file_that_a_command_names(file: Callable[[str, str], Path]) -> None:
    """Its flags win, and the patch is a flag."""
    file("f.yaml", FACTORY + "learning_rate: 1.0e-4\n")
    path = file("f.sh", "NPROC_PER_NODE=4 llamafactory-cli train f.yaml\n")
    assert (value(read(path), "lora"), value(read(path), "dp")) == (LoraSpec(rank=4, alpha=8.0), 4)
    file("s.yaml", "model: Qwen/Qwen3-8B\ntuner_type: lora\nlora_rank: 16\nmax_length: 4096\n")
    found = asked_of(file("s.sh", "NPROC_PER_NODE=8 swift sft --config s.yaml --max_length 2048\n"), "8xH100")
    assert (value(found.described({}), "lora").rank, value(found.described({}), "seq_length")) == (16, 2048)
    assert edited(found.source, {"lora_rank": 4}).endswith("--max_length 2048 \\\n    --lora_rank 4\n")
    copy = "NPROC_PER_NODE=8 megatron sft --mcore_model /data/Qwen3-30B-A3B-Instruct-2507-mcore\n"
    assert read(file("m.sh", copy)).workload.model.name == "qwen3-30b-a3b-2507"


def test_every_row_decides_a_field_that_kit_has() -> None:
    mine = (
        "model accumulation packing world gpus_per_node nodes visible states vllm packed_length vllm.mode vllm.share "
        "prompts prompt_tokens filled micro_tokens fp8 towers even_experts away.model away.optimizer layers_of_chunk "
        "loss loss_chunks rank_tokens step_tokens"
    )
    specs = {"layout": Pins, "model": ModelSpec, "job": JobSpec}
    specs |= {"job.lora": LoraSpec, "job.grpo": GrpoSpec, "job.optimizer": OptimizerSpec}
    known = {*mine.split(), *(f"{name}.{each.name}" for name, spec in specs.items() for each in fields(spec))}
    for table in tables():
        rows = table.keys.values()
        named = {*table.always, *(field for row in rows for sets in row.sets.values() for field in sets)}
        assert named | {row.field for row in rows if row.field} <= known, table.program


def test_every_key_of_a_table_is_a_setting_of_its_program() -> None:
    for table in (each for each in tables() if each.target):
        names = recorded(table.target) | set(trainer_arguments().defaults)
        rows = {key: row for key, row in table.keys.items() if not key.startswith(("env.", "launcher."))}
        own = {key for key, row in rows.items() if key != "command" and (row.field or not row.refuse)}
        assert {key for key in own if not {key, key.split(".")[-1], key.split(".")[0]} & names} == set(), table.program
        assert {*table.choices, *table.batch} <= table.keys.keys()
