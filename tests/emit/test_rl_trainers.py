"""verl's overrides and OpenRLHF's flags hold the plan: each as the program is told it, when the script is run beside a
stand-in. The programs' own parsers read them in ``tests.system.other_trainers``."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from kit.addons.lint.described import DEFAULT_SIZES
from kit.addons.targets import rl_trainers
from kit.addons.targets.rl_trainers import rollout_tp
from kit.cost.memory.peak import peak_gib
from kit.emit.run_directory import files_of
from kit.specs.job import GrpoSpec, LoraSpec
from tests.emit.plans import ADAM, ADAPTED, FSDP2, ZERO2, ZERO3, Case, check_settings, plan_of, words

GRPO = {"objective": "grpo", "seq_length": 2048, "learning_rate": 1e-6, "grad_clip": 0.5, "optimizer": ADAM}
VLLM = GrpoSpec(num_generations=4, max_completion_length=768, vllm_gpu_memory_utilization=0.35)
KL = replace(VLLM, beta=0.04)
A, R, V = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
RL: dict[str, Case] = {
    # 48 completions are 12 prompts of four
    "verl": (
        "verl.sh", "verl",
        FSDP2 | {"model": "llama-3.2-1b", "cluster": "16xH100", "dp": 16, "gradient_accumulation_steps": 1,
        "micro_batch_size": 3,
                 "job": GRPO | {"grpo": VLLM, "epochs": 2.0}},
        {"only": True, "algorithm.adv_estimator": "grpo", "data.train_batch_size": "12",
         "data.max_prompt_length": "1280", "data.max_response_length": "768",
         V + "enable_gradient_checkpointing": "False", V + "enable_activation_offload": "False",
         A + "strategy": "fsdp2",
         A + "ppo_mini_batch_size": "12", A + "ppo_micro_batch_size_per_gpu": "3", A + "use_dynamic_bsz": "False",
         A + "fsdp_config.model_dtype": "fp32", A + "fsdp_config.dtype": "bfloat16",
         A + "fsdp_config.reshard_after_forward": "True", A + "fsdp_config.offload_policy": "False",
         A + "fsdp_config.param_offload": "False", A + "fsdp_config.optimizer_offload": "False",
         A + "fsdp_config.ulysses_sequence_parallel_size": "1", A + "use_kl_loss": "False", A + "optim.lr": "1e-06",
         A + "optim.betas": "[0.8,0.97]", A + "optim.weight_decay": "0.03",
         A + "optim.override_optimizer_config": "{eps:1e-07}", A + "optim.clip_grad": "0.5",
         "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "3", R + "log_prob_micro_batch_size_per_gpu": "3",
         R + "name": "vllm", R + "n": "4", R + "gpu_memory_utilization": "0.35", R + "tensor_model_parallel_size": "1",
         R + "free_cache_engine": "False", "trainer.total_epochs": "2",
         "trainer.nnodes": "2", "trainer.n_gpus_per_node": "8"},
    ),
    # to a norm of 0 verl would clip every gradient; the reference costs a second model
    "verl with a reference and adapters": (
        "verl.sh", "verl",
        FSDP2 | {"zero_stage": 2, "recompute": "full", "activation_offloading": True,
                 "job": GRPO | {"grpo": KL, "grad_clip": 0.0, "lora": replace(ADAPTED, dropout=0.0)}},
        {A + "use_kl_loss": "True", A + "kl_loss_coef": "0.04", A + "optim.clip_grad": "inf",
         A + "fsdp_config.reshard_after_forward": "False", V + "enable_gradient_checkpointing": "True",
         V + "enable_activation_offload": "True", V + "lora_rank": "8", V + "lora_alpha": "24",
         V + "target_modules": "[q_proj,v_proj]", "trainer.total_epochs": ..., "trainer.nnodes": "1"},
    ),
    "verl with all adapters on the host": (
        "verl.sh", "verl", FSDP2 | {"offload_param": "cpu",
        "job": GRPO | {"grpo": replace(VLLM, vllm_enable_sleep_mode=True), "lora": LoraSpec()}},
        {R + "free_cache_engine": "True", V + "target_modules": "all-linear", A + "fsdp_config.offload_policy": "True"},
    ),
    "openrlhf": (
        "openrlhf.sh", "openrlhf", ZERO3 | {"zero_hpz": 4, "job": GRPO | {"grpo": KL, "epochs": 2.0}},
        {"only": True, "data.max_len": "2048", "train.batch_size": "48", "train.micro_batch_size": "2",
         "ds.zero_stage": "3", "ds.zpg": "4", "ds.param_dtype": "bf16", "ds.ring_attn_size": "1",
         "ds.tensor_parallel_size": "1", "actor.optim": "adam", "actor.adam.lr": "1e-06",
         "actor.adam.betas": "0.8 0.97", "actor.adam.eps": "1e-07", "actor.adam.weight_decay": "0.03",
         "actor.max_norm": "0.5", "ds.grad_accum_dtype": "fp32", "train.num_episodes": "2", "ds.overlap_comm": True,
         "actor.gradient_checkpointing_enable": True, "actor.num_nodes": "1", "ref.num_nodes": "1",
         "actor.num_gpus_per_node": "8", "ref.num_gpus_per_node": "8", "train.colocate_all": True,
         "algo.advantage.estimator": "group_norm", "algo.kl.init_coef": "0.04", "algo.kl.use_loss": True,
         "algo.kl.estimator": "k3", "rollout.batch_size": "12", "rollout.n_samples_per_prompt": "4",
         "rollout.micro_batch_size": "2", "rollout.max_new_tokens": "768", "vllm.num_engines": "8",
         "vllm.tensor_parallel_size": "1", "vllm.gpu_memory_utilization": "0.35"},
    ),
    # 141 GB of weights and a sequence's keys in shares of 0.35 x 79.6 GiB: eight of them, and one engine a node
    "openrlhf of two nodes": (
        "openrlhf.sh", "openrlhf",
        ZERO3 | {"model": "llama-3-70b", "cluster": "64xH100", "dp": 64, "offload_optimizer": "cpu",
        "recompute": "none",
                 "gradient_accumulation_steps": 1, "micro_batch_size": 1, "job": GRPO | {
                 "grpo": replace(VLLM, vllm_enable_sleep_mode=True), "seq_length": 1024}},
        {"vllm.tensor_parallel_size": "8", "vllm.enable_sleep": True, "vllm.num_engines": "8",
         "actor.num_nodes": "8", "ds.adam_offload": True,
         "algo.kl.init_coef": "0.0", "algo.kl.use_loss": ..., "algo.kl.estimator": ..., "ref.num_nodes": ...,
         "ref.num_gpus_per_node": ..., "train.num_episodes": ..., "ds.grad_accum_dtype": ...,
         "actor.gradient_checkpointing_enable": ..., "ds.lora.rank": ...},
    ),
    "openrlhf's pairs": (
        "openrlhf.sh", "openrlhf",
        ZERO2 | {"job": {"objective": "dpo", "epochs": 3.0, "optimizer": ADAM, "seq_length": 1024}},
        {"nnodes": ..., "model.gradient_checkpointing_enable": True, "train.max_epochs": "3", "optim": "adam",
         "adam.betas": "0.8 0.97", "max_norm": "1.0", "actor.optim": ..., "vllm.num_engines": ...,
         "rollout.batch_size": ..., "ds.adam_offload": ..., "train.num_episodes": ...},
    ),
    "openrlhf's adapters": (
        "openrlhf.sh", "openrlhf",
        ZERO2 | {"job": {"objective": "reward", "seq_length": 1024, "lora": replace(ADAPTED, four_bit=True)}},
        {"ds.lora.rank": "8", "ds.lora.alpha": "24", "ds.lora.dropout": "0.1",
         "ds.lora.target_modules": "q_proj v_proj", "ds.load_in_4bit": True, "train.max_epochs": ...},
    ),
    "openrlhf's adapters of all layers": (
        "openrlhf.sh", "openrlhf", ZERO2 | {"job": {"objective": "reward", "seq_length": 1024, "lora": LoraSpec()}},
        {"ds.lora.rank": "16", "ds.lora.target_modules": ..., "ds.load_in_4bit": ...},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RL)
def test_every_setting_has_its_value(case: str, tmp_path: Path) -> None:
    check_settings(RL[case], tmp_path)


@pytest.mark.parametrize(
    ("model", "gpus", "share", "seq_length", "split"),
    [
        ("llama-3.1-8b", 8, 0.3, 2048, 1),  # 16 of 25.6e9 bytes
        ("llama-3.1-8b", 8, 0.19, 2048, 2),  # of 16.2e9: the weights' 16.06 and 0.27 for the keys of 2,048 tokens
        ("llama-3.1-8b", 8, 0.19, 512, 1),  # and 0.07 for those of 512
        ("llama-3-70b", 8, 0.3, 2048, 8),
        ("llama-3-70b", 8, 0.5, 2048, 4),
        ("llama-3-70b", 8, 0.1, 2048, None),
        ("llama-3-70b", 6, 0.5, 2048, None),  # 4 does not divide the node's six
        ("gpt2-xl", 8, 0.02, 1024, None),  # 3.1e9 bytes are two shares, and 25 heads are not two halves
    ],
)
def test_vllm_is_split_where_a_share_does_not_hold_weights_and_a_sequence(
    model: str, gpus: int, share: float, seq_length: int, split: int | None
) -> None:
    grpo = replace(VLLM, vllm_gpu_memory_utilization=share, max_completion_length=128)
    job = GRPO | {"grpo": grpo, "seq_length": seq_length}
    assert rollout_tp(plan_of(model, f"{gpus}xH100", job, **FSDP2 | {"dp": gpus})) == split


def test_the_sizes_that_openrlhf_leaves_to_deepspeed_are_deepspeeds() -> None:
    own = DeepSpeedZeroConfig()
    names = {name: size for name, size in DEFAULT_SIZES.items() if not name.startswith(("optimizer_", "param_"))}
    assert names == {name: getattr(own, name.removeprefix("stage3_")) for name in names}
    plan = plan_of(**ZERO3, **dict.fromkeys(names, 7), job=GRPO | {"grpo": VLLM})
    with_own = plan.workload.with_layout(plan.layout.but(**names))
    assert peak_gib(with_own) > plan.predicted.peak_gib + 0.5
    script = files_of(plan, ["openrlhf"])["openrlhf.sh"]
    assert f"# {peak_gib(with_own):.1f} GiB a GPU with the program's own buffers" in script
    assert f"the plan: {plan.predicted.peak_gib:.1f} of 75.1 usable" in script


@pytest.mark.parametrize(("lora", "offload", "more_gib"), [(None, "none", 0), (8, "none", 1.87), (8, "cpu", 0)])
def test_verls_frozen_weights_are_counted_in_fp32(lora: int | None, offload: str, more_gib: float) -> None:
    """8.03e9 weights over eight ranks, two bytes more for each; on the host they are not on the GPU."""
    plan = plan_of(**FSDP2, job=GRPO | {"grpo": VLLM, "lora": lora and LoraSpec(rank=lora)}, offload_param=offload)
    assert rl_trainers._gib_of_verl(plan) == pytest.approx(plan.predicted.peak_gib + more_gib, abs=0.005)


@pytest.mark.parametrize(
    ("target", "plan", "program", "says", "says_not"),
    [
        ("verl", FSDP2 | {"job": GRPO | {"grpo": VLLM}}, "verl.trainer.main_ppo", "schedule and\n# length",
        "Run it on"),
        (
            "verl", FSDP2 | {"cluster": "16xH100", "dp": 16, "job": GRPO | {"grpo": VLLM, "epochs": 1.0}},
            "verl.trainer.main_ppo", "# Start Ray on every node", "# length",
        ),
        ("openrlhf", ZERO3 | {"job": GRPO | {"grpo": VLLM}}, "openrlhf.cli.train_ppo_ray", "--reward.remote_url",
        "Ray"),
        (
            "openrlhf", ZERO2 | {"job": {"objective": "dpo", "seq_length": 512}, "cluster": "16xH100", "dp": 16},
            "openrlhf.cli.train_dpo", "# Run it on every node, with RDZV=HOST:PORT", "remote_url",
        ),
        ("openrlhf", ZERO2 | {"job": {"objective": "reward"}}, "openrlhf.cli.train_rm", "--data.dataset DATA", "Ray"),
    ],
)  # fmt: skip
def test_the_callers_arguments_come_last(
    target: str, plan: dict[str, Any], program: str, says: str, says_not: str, tmp_path: Path
) -> None:
    script = files_of(plan_of(**plan), [target])[f"{target}.sh"]
    told = words(script, tmp_path, "model=a b", RDZV="first:29400")
    assert (told[told.index("-m") + 1], told[-1]) == (program, "model=a b")
    assert (says in script, says_not in script) == (True, False)
    ranks = dict(itertools.pairwise(told))
    if ranks.get("--nproc-per-node"):
        assert (ranks["--nnodes"], ranks["--nproc-per-node"]) == (str(plan_of(**plan).cluster.num_nodes), "8")
        assert (ranks["--rdzv-backend"], ranks["--rdzv-endpoint"]) == ("c10d", "first:29400")
