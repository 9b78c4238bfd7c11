"""verl's overrides and OpenRLHF's flags hold the plan. The programs' own parsers read them in
``tests.system.other_trainers``."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

import kit
from kit.emit import rl_trainers
from kit.emit.rl_trainers import openrlhf_flags, rollout_tp, verl_overrides
from kit.emit.run_directory import files_of, write
from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs.job import GrpoSpec, JobSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Pins
from kit.specs.run import DataSpec, RunSpec

VLLM = GrpoSpec(num_generations=8, max_completion_length=1024, vllm_gpu_memory_utilization=0.3)
FSDP2 = Pins(engine="torch", zero_stage=3)
ZERO3 = Pins(engine="deepspeed", zero_stage=3)


def planned(objective: Any = "grpo", pins: Pins = FSDP2, model: str = "llama-3.1-8b", **job: Any) -> Plan:
    grpo = {"grpo": VLLM} if objective == "grpo" else {}
    chosen = {"seq_length": 2048, "global_batch_size": 512, **grpo, **job}
    return kit.plan(model, "8xH100", JobSpec(objective=objective, **chosen), pins)


def test_verl_counts_prompts_in_a_batch_and_completions_in_a_micro_batch() -> None:
    plan = planned(optimizer=OptimizerSpec(eps=1e-6))
    given, layout = verl_overrides(plan), plan.layout
    actor = "actor_rollout_ref.actor"
    assert given["data.train_batch_size"] == given[f"{actor}.ppo_mini_batch_size"] == 64
    rows = 64 * given["actor_rollout_ref.rollout.n"] // given["trainer.n_gpus_per_node"]
    micro = given[f"{actor}.ppo_micro_batch_size_per_gpu"]
    assert rows == micro * layout.gradient_accumulation_steps
    assert given["data.max_prompt_length"] + given["data.max_response_length"] == 2048
    assert given[f"{actor}.fsdp_config.reshard_after_forward"] is True
    assert given[f"{actor}.optim.override_optimizer_config"] == {"eps": 1e-6}
    assert given[f"{actor}.use_kl_loss"] is False
    assert "actor_rollout_ref.model.lora_rank" not in given


def test_verl_gets_the_stage_clipping_reference_and_adapters() -> None:
    job: dict[str, Any] = {"grad_clip": 0.0, "grpo": replace(VLLM, beta=0.04), "lora": LoraSpec(rank=8, alpha=16)}
    given = verl_overrides(planned(pins=replace(FSDP2, zero_stage=2), **job))
    assert given["actor_rollout_ref.actor.fsdp_config.reshard_after_forward"] is False
    assert given["actor_rollout_ref.actor.optim.clip_grad"] == float("inf")  # 0 would make every gradient 0
    assert (given["actor_rollout_ref.actor.use_kl_loss"], given["actor_rollout_ref.actor.kl_loss_coef"]) == (True, 0.04)
    assert (given["actor_rollout_ref.model.lora_rank"], given["actor_rollout_ref.model.lora_alpha"]) == (8, 16)
    assert given["actor_rollout_ref.model.target_modules"] == "all-linear"


def test_openrlhf_gets_the_plan_as_flags() -> None:
    plan = planned(pins=ZERO3, grpo=replace(VLLM, beta=0.04))
    given, layout = openrlhf_flags(plan), plan.layout
    assert given["ds.zero_stage"] == 3
    assert given["train.batch_size"] == 512 == given["rollout.batch_size"] * given["rollout.n_samples_per_prompt"]
    assert given["train.micro_batch_size"] * layout.gradient_accumulation_steps * layout.dp == 512
    assert given["vllm.num_engines"] * given["vllm.tensor_parallel_size"] == 8
    assert given["ref.num_gpus_per_node"] == given["actor.num_gpus_per_node"] == 8
    assert (given["algo.kl.init_coef"], given["algo.kl.use_loss"], given["algo.kl.estimator"]) == (0.04, True, "k3")
    assert ("actor.gradient_checkpointing_enable" in given) is (layout.recompute == "full")
    without = openrlhf_flags(planned(pins=ZERO3))
    assert without["algo.kl.init_coef"] == 0  # whose default would load a reference model
    assert "ref.num_nodes" not in without


@pytest.mark.parametrize(("objective", "program"), [("dpo", "train_dpo"), ("reward", "train_rm")])
def test_openrlhf_trains_pairs(objective: str, program: str) -> None:
    plan = planned(objective, Pins(engine="deepspeed", zero_stage=2, offload_optimizer="cpu"))
    given = openrlhf_flags(plan)
    assert given["ds.adam_offload"] is True
    assert given["adam.betas"] == [0.9, 0.95]
    assert given["train.micro_batch_size"] == plan.layout.micro_batch_size
    assert not [key for key in given if key.startswith(("actor.", "vllm.", "rollout."))]
    assert f"-m openrlhf.cli.{program} " in files_of(plan, ["openrlhf"])["openrlhf.sh"]


def test_the_sizes_that_openrlhf_leaves_to_deepspeed_are_deepspeeds() -> None:
    own, names = DeepSpeedZeroConfig(), rl_trainers._DEEPSPEED_SIZES
    assert names == {name: getattr(own, name.removeprefix("stage3_")) for name in names}
    plan = planned(pins=ZERO3)
    least = planned(
        pins=replace(
            ZERO3,
            reduce_bucket_size=500_000_000,
            stage3_prefetch_bucket_size=50_000_000,
            stage3_max_live_parameters=10**9,
            stage3_param_persistence_threshold=10**5,
            micro_batch_size=plan.layout.micro_batch_size,
            recompute=plan.layout.recompute,
        )
    )
    said = files_of(plan, ["openrlhf"])["openrlhf.sh"]
    assert f"# {least.predicted.peak_gib:.1f} GiB a GPU" in said


def test_vllm_is_split_where_its_share_does_not_hold_the_weights() -> None:
    assert rollout_tp(planned()) == 1  # 16 of 23.7 GiB
    lora = {"lora": LoraSpec(rank=8), "global_batch_size": 64}
    assert rollout_tp(planned(model="llama-3-70b", **lora)) == 8  # 141 GB in shares of 25.5
    narrow = planned(model="llama-3-70b", grpo=replace(VLLM, vllm_gpu_memory_utilization=0.1), **lora)
    assert rollout_tp(narrow) is None
    assert "openrlhf.sh" not in files_of(narrow, ["openrlhf"])


def test_verls_frozen_weights_are_counted_in_fp32() -> None:
    plan = planned(model="llama-3-70b", lora=LoraSpec(rank=8), global_batch_size=64)
    taken = plan.predicted.peak_gib + 2 * 70_553_706_496 / 8 / 2**30
    assert taken > 75.1 > plan.predicted.peak_gib
    (verl, _) = rl_trainers.FILES
    assert verl.refuses(plan).startswith(f"verl takes {taken:.1f} GiB a GPU")


@pytest.mark.parametrize(
    ("target", "plan", "reason"),
    [
        ("verl", ("grpo", ZERO3, {}), "layout.engine=torch"),
        ("verl", ("dpo", FSDP2, {}), "job.objective=grpo"),
        ("verl", ("grpo", FSDP2, {"grpo": GrpoSpec()}), "job.grpo.vllm_gpu_memory_utilization"),
        ("verl", ("grpo", FSDP2, {"lora": LoraSpec(dropout=0.1)}), "dropout"),
        ("verl", ("grpo", FSDP2, {"lora": LoraSpec(use_dora=True)}), "use_dora"),
        ("openrlhf", ("grpo", FSDP2, {}), "layout.engine=deepspeed"),
        ("openrlhf", ("kto", ZERO3, {}), "grpo, dpo and reward"),
        ("openrlhf", ("dpo", replace(ZERO3, offload_optimizer="nvme"), {}), "offload_optimizer=cpu"),
        ("openrlhf", ("dpo", replace(ZERO3, zero_quantized_weights=True), {}), "zero_quantized_weights"),
        ("openrlhf", ("dpo", ZERO3, {"lora": LoraSpec()}), "reference model"),
        ("openrlhf", ("reward", ZERO3, {"precision": "fp32", "global_batch_size": 64}), "job.precision=bf16"),
    ],
)
def test_what_a_program_cannot_do_is_refused(
    target: str, plan: tuple[str, Pins, dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    objective, pins, job = plan
    with pytest.raises(SpecError, match=reason):
        write(
            planned(objective, pins, **job),
            RunSpec(data=DataSpec(train=str(tmp_path / "data"))),
            tmp_path / "run",
            [target],
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("target", ["verl", "openrlhf"])
def test_the_callers_arguments_come_last(target: str, tmp_path: Path) -> None:
    plan = planned(pins=FSDP2 if target == "verl" else ZERO3)
    script = tmp_path / f"{target}.sh"
    script.write_text(files_of(plan, [target])[script.name])
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    ran = subprocess.run(
        ["bash", str(script), "model=a b"], capture_output=True, text=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    words = ran.stdout.splitlines()
    assert words[-1] == "model=a b"
    if target == "verl":
        assert "actor_rollout_ref.actor.optim.betas=[0.9,0.95]" in words
    else:
        assert words[words.index("--actor.adam.betas") + 1 :][:2] == ["0.9", "0.95"]


def test_epochs_of_prompts_are_whole() -> None:
    assert verl_overrides(planned(epochs=2.0))["trainer.total_epochs"] == 2
    assert openrlhf_flags(planned(pins=ZERO3, epochs=2.0))["train.num_episodes"] == 2
    assert openrlhf_flags(planned("dpo", ZERO3, epochs=2.0))["train.max_epochs"] == 2
    assert "trainer.total_epochs" not in verl_overrides(planned())
    half = planned(epochs=1.5)
    assert "verl.sh" not in files_of(half, ["verl"])
    (refused,) = [file.refuses(half) for file in rl_trainers.FILES if file.target == "verl"]
    assert "counts whole epochs, and the job has 1.5; use job.epochs=2" in refused
