"""The plan for verl and OpenRLHF: ``kit emit --target verl|openrlhf`` writes the command with their own arguments.

verl takes GRPO on FSDP2 as hydra overrides; OpenRLHF takes GRPO, DPO and reward models on DeepSpeed as flags
(``programs.py`` has the versions). ``tests.system.other_trainers`` hands both commands to the programs' own
parsers.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

from kit.addons.lint.described import zero_sizes
from kit.addons.targets.programs import file_for, torchrun, version_line
from kit.cost.hardware import usable_gib
from kit.cost.memory.peak import peak_gib
from kit.cost.model.params import count
from kit.emit.deepspeed import ds_config
from kit.emit.derived_file import chosen
from kit.emit.launch import processes_per_node
from kit.emit.trainer import for_trainer
from kit.planner.plan import Plan
from kit.specs.job import GrpoSpec, LoraSpec
from kit.units import GIB


def _grpo(plan: Plan) -> GrpoSpec:
    return plan.job.grpo or GrpoSpec()


def rollout_tp(plan: Plan) -> int | None:
    """Fewest GPUs of a node over which a vLLM's share holds the weights in bf16, and the keys and values of one
    sequence, without which vLLM does not start; None where no number does."""
    workload, node = plan.workload, processes_per_node(plan)
    share = workload.vllm_share * plan.cluster.gpu.memory_gib * GIB
    needed = 2 * count(plan.model).total + workload.cached_bytes_per_token * plan.job.seq_length
    powers = (2**i for i in range(node.bit_length()))
    fits = (n for n in powers if node % n == plan.model.num_attention_heads % n == 0 and needed <= n * share)
    return next(fits, None)


def _gib_of_verl(plan: Plan) -> float:
    """verl keeps frozen weights in fp32, as it does trained ones (workers/engine/fsdp, model_dtype); kit in bf16."""
    layout = plan.layout
    frozen = plan.job.lora is not None and layout.offload_param == "none"
    return peak_gib(plan.workload) + (2 * count(plan.model).total / layout.dp / GIB if frozen else 0)


def _gib_of_openrlhf(plan: Plan) -> float:
    """OpenRLHF asks for "auto" (utils/deepspeed/deepspeed_utils.py), which DeepSpeed reads as no value."""
    return peak_gib(plan.workload.with_layout(plan.layout.but(**zero_sizes({}, plan.workload))))


def _common_refusals(plan: Plan, program: str, gib: float) -> dict[str, object]:
    job, usable, cuda = plan.job, usable_gib(plan.cluster.gpu), plan.cluster.gpu.device == "cuda"
    grpo, share, lora, epochs = (
        job.objective == "grpo",
        plan.workload.vllm_share,
        job.lora or LoraSpec(),
        job.epochs or 0,
    )
    return {
        f"{program} needs GPUs": not cuda,
        f"{program} has no use_rslora, use_dora, eight_bit, rank_pattern or alpha_pattern; leave them out of "
        "job.lora": (lora.use_rslora or lora.use_dora or lora.eight_bit or lora.rank_pattern or lora.alpha_pattern),
        "name the layers that get adapters: job.lora.target_modules=[q_proj,v_proj]": (
            lora.targets == "attention" and not lora.target_modules
        ),
        f"{program} generates by vLLM; set job.grpo.vllm_gpu_memory_utilization=0.3": grpo and share == 0,
        "vLLM's share of a node holds no copy of the model; raise job.grpo.vllm_gpu_memory_utilization": (
            grpo and share and rollout_tp(plan) is None
        ),
        f"{program} counts whole epochs, and the job has {epochs:g}; use job.epochs={math.ceil(epochs)}": epochs % 1,
        f"{program} takes {gib:.1f} GiB a GPU for it, and {usable:.1f} are usable; use a smaller micro batch": (
            gib > usable
        ),
    }


def _verl_refuses(plan: Plan) -> dict[str, object]:
    job, layout, lora = plan.job, plan.layout, plan.job.lora or LoraSpec()
    return {
        f"objective={job.objective}, and kit writes verl's GRPO alone; use job.objective=grpo": job.objective != "grpo",
        "verl shards by FSDP2, and has no DeepSpeed; use layout.engine=torch layout.zero_stage=3": (
            layout.engine != "torch" or layout.zero_stage < 2
        ),
        f"verl computes in bf16, and the plan in {job.precision}; use job.precision=bf16": job.precision != "bf16",
        "verl's adapters have no four_bit or dropout, and vLLM's a rank up to 512; change job.lora": (
            lora.four_bit or lora.dropout or lora.rank > 512
        ),
        **_common_refusals(plan, "verl", _gib_of_verl(plan)),
    }


def _openrlhf_refuses(plan: Plan) -> dict[str, object]:
    job, layout, trl = plan.job, plan.layout, plan.workload.trl
    return {
        f"objective={job.objective}, and kit writes OpenRLHF's grpo, dpo and reward; use one of these": (
            job.objective not in ("grpo", "dpo", "reward")
        ),
        "OpenRLHF trains by DeepSpeed alone; use layout.engine=deepspeed": not for_trainer(plan),
        "OpenRLHF trains bf16 or fp16 weights; use job.precision=bf16, without layout.autocast": (
            job.precision not in ("bf16", "fp16") or layout.autocast
        ),
        "OpenRLHF offloads the optimizer to host memory, and nothing else; use layout.offload_optimizer=cpu": (
            layout.offload_param != "none" or layout.uses_nvme
        ),
        "OpenRLHF has no zero_quantized_weights, zero_quantized_gradients or activation_offloading": (
            layout.zero_quantized_weights or layout.zero_quantized_gradients or layout.activation_offloading
        ),
        "OpenRLHF loads a reference model beside adapters too, which the plan does not hold; leave out job.lora": (
            job.lora and trl and trl.reference_forwards
        ),
        **_common_refusals(plan, "OpenRLHF", _gib_of_openrlhf(plan)),
    }


def verl_overrides(plan: Plan) -> dict[str, Any]:
    """Overrides of ``verl.trainer.main_ppo``. verl counts prompts in a batch, and completions in a micro batch."""
    job, layout, adam, grpo = plan.job, plan.layout, plan.job.optimizer, _grpo(plan)
    lora = job.lora or LoraSpec()
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    prompts, micro = job.global_batch_size // grpo.num_generations, layout.micro_batch_size
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": job.seq_length - grpo.max_completion_length,
        "data.max_response_length": grpo.max_completion_length,
        f"{model}.enable_gradient_checkpointing": layout.recompute == "full",
        f"{model}.enable_activation_offload": layout.activation_offloading,
        **chosen(
            (f"{model}.lora_rank", job.lora, lora.rank),
            (f"{model}.lora_alpha", job.lora, round(lora.alpha)),
            (f"{model}.target_modules", job.lora, list(lora.target_modules) or "all-linear"),
        ),
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{actor}.use_dynamic_bsz": False,
        f"{actor}.fsdp_config.model_dtype": "fp32",
        f"{actor}.fsdp_config.dtype": "bfloat16",
        f"{actor}.fsdp_config.reshard_after_forward": layout.zero_stage == 3,
        f"{actor}.fsdp_config.offload_policy": layout.offload_param != "none",
        f"{actor}.fsdp_config.param_offload": False,
        f"{actor}.fsdp_config.optimizer_offload": False,
        f"{actor}.fsdp_config.ulysses_sequence_parallel_size": layout.cp,
        f"{actor}.use_kl_loss": grpo.beta > 0,
        **chosen((f"{actor}.kl_loss_coef", grpo.beta > 0, grpo.beta)),
        f"{actor}.optim.lr": job.learning_rate,
        f"{actor}.optim.betas": [adam.beta1, adam.beta2],
        f"{actor}.optim.weight_decay": adam.weight_decay,
        f"{actor}.optim.override_optimizer_config": {"eps": adam.eps},
        f"{actor}.optim.clip_grad": job.grad_clip or float("inf"),  # to 0 verl would clip every gradient
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": grpo.num_generations,
        f"{rollout}.gpu_memory_utilization": grpo.vllm_gpu_memory_utilization,
        f"{rollout}.free_cache_engine": grpo.vllm_enable_sleep_mode,
        f"{rollout}.tensor_model_parallel_size": rollout_tp(plan),
        **chosen(("trainer.total_epochs", job.epochs, round(job.epochs or 0))),
        "trainer.nnodes": plan.cluster.num_nodes,
        "trainer.n_gpus_per_node": processes_per_node(plan),
    }


def openrlhf_flags(plan: Plan) -> dict[str, Any]:
    """Flags of ``openrlhf.cli.train_ppo_ray``, ``train_dpo`` or ``train_rm``; True is a flag without a value."""
    job, layout, adam = plan.job, plan.layout, plan.job.optimizer
    config, lora, of_grpo = ds_config(plan), job.lora or LoraSpec(), job.objective == "grpo"
    model, of_actor = ("actor", "actor.") if of_grpo else ("model", "")
    flags = {
        "data.max_len": job.seq_length,
        "train.batch_size": job.global_batch_size,
        "train.micro_batch_size": layout.micro_batch_size,
        "ds.zero_stage": layout.zero_stage,
        "ds.zpg": layout.zero_hpz,
        "ds.param_dtype": job.precision,
        "ds.ring_attn_size": layout.cp,
        "ds.tensor_parallel_size": layout.tp,
        f"{of_actor}optim": "adam",
        f"{of_actor}adam.lr": job.learning_rate,
        f"{of_actor}adam.betas": [adam.beta1, adam.beta2],
        f"{of_actor}adam.eps": adam.eps,
        f"{of_actor}adam.weight_decay": adam.weight_decay,
        f"{of_actor}max_norm": job.grad_clip,
    }
    flags |= chosen(
        ("ds.grad_accum_dtype", "data_types" in config, config.get("data_types", {}).get("grad_accum_dtype")),
        ("train.num_episodes" if of_grpo else "train.max_epochs", job.epochs, round(job.epochs or 0)),
        ("ds.overlap_comm", config["zero_optimization"].get("overlap_comm"), True),
        ("ds.adam_offload", layout.offload_optimizer == "cpu", True),
        (f"{model}.gradient_checkpointing_enable", layout.recompute == "full", True),
        ("ds.lora.rank", job.lora, lora.rank),
        ("ds.lora.alpha", job.lora, round(lora.alpha)),
        ("ds.lora.dropout", job.lora, lora.dropout),
        ("ds.lora.target_modules", lora.target_modules, list(lora.target_modules)),
        ("ds.load_in_4bit", lora.four_bit, True),
    )
    return flags | (_openrlhf_rollout(plan) if of_grpo else {})


def _openrlhf_rollout(plan: Plan) -> dict[str, Any]:
    """GRPO's flags: the models and vLLM on the same GPUs, one optimizer step per batch of completions."""
    grpo, size, nodes = _grpo(plan), rollout_tp(plan) or 1, plan.cluster.num_nodes
    owners = [owner for owner, there in (("actor", True), ("ref", grpo.beta > 0)) if there]
    ranks = {f"{owner}.num_gpus_per_node": processes_per_node(plan) for owner in owners}
    return {
        **{f"{owner}.num_nodes": nodes for owner in owners},
        **ranks,
        "train.colocate_all": True,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": grpo.beta,
        **chosen(("algo.kl.use_loss", grpo.beta > 0, True), ("algo.kl.estimator", grpo.beta > 0, "k3")),
        "rollout.batch_size": plan.job.global_batch_size // grpo.num_generations,
        "rollout.n_samples_per_prompt": grpo.num_generations,
        "rollout.micro_batch_size": plan.layout.micro_batch_size,
        "rollout.max_new_tokens": grpo.max_completion_length,
        "vllm.num_engines": plan.layout.world_size // size,
        "vllm.tensor_parallel_size": size,
        "vllm.gpu_memory_utilization": grpo.vllm_gpu_memory_utilization,
        **chosen(("vllm.enable_sleep", grpo.vllm_enable_sleep_mode, True)),
    }


def _hydra(value: Any) -> str:
    """A value in hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(each)}" for key, each in value.items()) + "}"
    return f"[{','.join(map(_hydra, value))}]" if isinstance(value, list) else str(value)


def _script(plan: Plan, gib: float, yours: str, command: str, arguments: list[str]) -> str:
    """A bash script. The caller's arguments come last, and win."""
    target = yours.partition(".")[0]
    of_ray = "Start Ray on every node, then this on one of them."
    of_torchrun = "Run it on every node, with RDZV=HOST:PORT of the first."
    lines = [
        "#!/usr/bin/env bash",
        version_line(target),
        "# kit decided batch, sharding, precision, recomputation and generation. Model, data, reward, schedule"
        + ("" if plan.job.epochs else " and"),
        f"# {'' if plan.job.epochs else 'length of the run '}are yours: bash {yours} …",
        *[f"# {of_torchrun if command.startswith('torchrun') else of_ray}"] * (plan.cluster.num_nodes > 1),
        f"# {gib:.1f} GiB a GPU with the program's own buffers; the plan: {peak_gib(plan.workload):.1f} of "
        f"{usable_gib(plan.cluster.gpu):.1f} usable.",
        "set -euo pipefail",
        " \\\n  ".join([f"exec {command}", *arguments, '"$@"']),
    ]
    return "\n".join(lines) + "\n"


def _verl_script(plan: Plan) -> str:
    words = [shlex.quote(f"{key}={_hydra(value)}") for key, value in verl_overrides(plan).items()]
    yours = "verl.sh actor_rollout_ref.model.path=DIR data.train_files=FILE data.val_files=FILE"
    return _script(plan, _gib_of_verl(plan), yours, "python -m verl.trainer.main_ppo", words)


def _openrlhf_script(plan: Plan) -> str:
    module = {"grpo": "train_ppo_ray", "dpo": "train_dpo", "reward": "train_rm"}[plan.job.objective]
    given = {key: value if isinstance(value, list) else [value] for key, value in openrlhf_flags(plan).items()}
    words = [
        shlex.join([f"--{key}", *(str(each) for each in values if each is not True)]) for key, values in given.items()
    ]
    command = f"python -m openrlhf.cli.{module}"
    yours = "openrlhf.sh --actor.model_name_or_path DIR --data.prompt_dataset DATA --reward.remote_url reward.py"
    if plan.job.objective != "grpo":
        command = torchrun(plan, f"openrlhf.cli.{module}")
        yours = "openrlhf.sh --model.model_name_or_path DIR --data.dataset DATA"
    return _script(plan, _gib_of_openrlhf(plan), yours, command, words)


FILES = (
    file_for("verl", "verl.sh", _verl_script, _verl_refuses),
    file_for("openrlhf", "openrlhf.sh", _openrlhf_script, _openrlhf_refuses),
)
