"""Objectives of TRL's trainers: what they hold and compute beside a step, and the files that start them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from kit.api import plan as make_plan
from kit.cost.estimate import predict
from kit.cost.memory.activations_huggingface import generation_bytes
from kit.cost.memory.peak import parts_of
from kit.cost.memory.rank_huggingface import reference_bytes
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.emit.run_directory import files_of, write
from kit.errors import RunDirectoryError
from kit.planner.plan import Plan
from kit.preflight.run_checks import preflight
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import ADDED_TO_JOB, GrpoSpec, JobSpec, LoraSpec, Objective
from kit.specs.layout import Pins
from kit.specs.run import DataSpec, RunSpec
from kit.units import GIB
from tests.system.examples.cases import with_files

MODEL, CLUSTER = load_model("llama-3.1-8b"), parse_cluster("8xH100")
PARAMETERS = count(MODEL).total


def planned(objective: Objective, pins: Pins, batch: int = 64, **job: object) -> Plan:
    spec = JobSpec(objective=objective, seq_length=2048, global_batch_size=batch, **job)  # type: ignore[arg-type]
    return make_plan(MODEL, CLUSTER, spec, pins)


ZERO3 = Pins(engine="deepspeed", zero_stage=3, micro_batch_size=2, recompute="none")


def like(plan: Plan, objective: Objective, **layout: int) -> Workload:
    """The plan's workload with another objective, and its row counts."""
    job = dataclasses.replace(plan.job, objective=objective, global_batch_size=plan.job.global_batch_size)
    return Workload(plan.model, plan.cluster, job, dataclasses.replace(plan.layout, **layout))


def test_a_pair_is_two_sequences() -> None:
    """A reward model on pairs saves and computes what SFT on twice as many sequences does; it has no reference."""
    reward = planned("reward", ZERO3)
    sft = like(reward, "sft", micro_batch_size=4)
    assert parts_of(reward.workload, 0).saved_activations == parts_of(sft, 0).saved_activations
    assert reward.workload.tokens == sft.tokens == 4 * 2048
    assert reward.predicted.step_time_components_s["scoring"] == 0
    assert reward.job.tokens_per_step == 64 * 2 * 2048
    assert reward.predicted.tokens_per_s * reward.predicted.step_time_s == pytest.approx(64 * 2 * 2048)


@pytest.mark.parametrize(
    ("pins", "each"),
    [
        (ZERO3, 2 / 8),
        (ZERO3.but(zero_stage=2), 2.0),
        (Pins(engine="torch", zero_stage=3), 4 / 8),
        (Pins(engine="torch", zero_stage=0), 4.0),
    ],
)
def test_bytes_of_the_reference(pins: Pins, each: float) -> None:
    """Each GPU holds its shard where the engine shards weights, the whole model otherwise; with adapters nothing."""
    sharded = planned("dpo", ZERO3).workload
    layout = dataclasses.replace(sharded.layout, engine=pins.engine, zero_stage=pins.zero_stage)
    workload = sharded.with_layout(layout)
    assert reference_bytes(workload) == each * PARAMETERS
    adapted = dataclasses.replace(workload, job=dataclasses.replace(workload.job, lora=LoraSpec()))
    assert reference_bytes(adapted) == 0
    with_it, without = parts_of(workload, 0).states, parts_of(like(planned("dpo", ZERO3), "sft"), 0).states
    if each == 2 / 8:
        assert with_it.weights - without.weights == each * PARAMETERS
    offloaded = dataclasses.replace(layout, engine="deepspeed", zero_stage=3, offload_param="cpu")
    assert reference_bytes(workload.with_layout(offloaded)) == 0


def test_forwards_without_gradient_take_time() -> None:
    """KTO's three forwards take three times as long as DPO's one on as many sequences."""
    dpo, kto = planned("dpo", ZERO3.but(micro_batch_size=1)), planned("kto", ZERO3, 128)
    one, three = (plan.predicted.step_time_components_s["scoring"] for plan in (dpo, kto))
    assert 0 < one < dpo.predicted.step_time_components_s["compute"] / 2
    assert three == pytest.approx(3 * one, rel=1e-6)


def test_generation_reads_all_weights_for_each_token() -> None:
    """The time of vLLM's completions is bounded by memory bandwidth; transformers adds launches, FSDP2 gathers."""
    grpo = GrpoSpec(max_completion_length=1024, vllm_gpu_memory_utilization=0.3)
    vllm = planned("grpo", ZERO3, grpo=grpo)
    seconds = vllm.predicted.step_time_components_s["generation"]
    floor = 1024 * 2 * PARAMETERS / (CLUSTER.gpu.hbm_gbytes_per_s * 1e9)
    assert floor < seconds < 2 * floor
    slower = dataclasses.replace(grpo, vllm_gpu_memory_utilization=None)
    by_transformers = dataclasses.replace(vllm.workload, job=dataclasses.replace(vllm.job, grpo=slower))
    assert predict(by_transformers).step_time_components_s["generation"] > seconds
    fsdp = by_transformers.with_layout(dataclasses.replace(vllm.layout, engine="torch"))
    assert predict(fsdp).step_time_components_s["generation"] > 5 * seconds


def test_memory_of_a_vllm_and_of_generation() -> None:
    """A vLLM keeps its share all the time. transformers' generation at ZeRO-3 gathers the weights before the step."""
    share = GrpoSpec(vllm_gpu_memory_utilization=0.3)
    with_vllm, without = planned("grpo", ZERO3, grpo=share), planned("grpo", ZERO3)
    grown = with_vllm.predicted.memory[0].components_gib["overhead"]
    grown -= without.predicted.memory[0].components_gib["overhead"]
    assert grown == pytest.approx(0.3 * CLUSTER.gpu.memory_gib)
    assert generation_bytes(with_vllm.workload) == 0
    rows = 64 / 8
    cache = rows * 2048 * 32 * 2 * 1024 * 2  # tokens, layers, keys and values of 8 heads of 128, two bytes
    assert generation_bytes(without.workload) == 2 * PARAMETERS + cache + rows * MODEL.vocab_size * 4
    many = dataclasses.replace(without.workload, layout=dataclasses.replace(without.layout, micro_batch_size=1))
    fullest = predict(many).memory[0]
    assert fullest.phases_gib["forward"] > generation_bytes(many) / GIB
    again = planned("grpo", ZERO3, grpo=dataclasses.replace(share, beta=0.1))
    assert reference_bytes(with_vllm.workload) == 0 < reference_bytes(again.workload)
    both, one = (plan.predicted.step_time_components_s["scoring"] for plan in (again, with_vllm))
    assert both == pytest.approx(2 * one)  # vLLM's completions are scored once more; and once by the reference


def test_the_run_directory_starts_trl_alone() -> None:
    """No file of kit's own loop; TRL's arguments in the README."""
    files = files_of(planned("grpo", ZERO3, grpo=GrpoSpec(num_generations=4, vllm_gpu_memory_utilization=0.4)))
    assert not {"launch.sh", "slurm.sbatch"} & set(files)
    assert {"accelerate.yaml", "ds_config.json", "ds_config.trainer.json"} <= set(files)
    for words in ("trl_grpo.py", "--num_generations 4", "--use_vllm true", "--vllm_gpu_memory_utilization 0.4"):
        assert words in files["README.md"]
    assert "launch.sh" in files_of(planned("sft", ZERO3))


@pytest.mark.nightly
@pytest.mark.parametrize("objective", ["dpo", "kto", "reward", "grpo"])
def test_trl_accepts_the_arguments(objective: Objective, tmp_path: Path) -> None:
    """TRL's own parser reads the emitted arguments; a misspelled one is refused."""
    plan = planned(objective, ZERO3, grpo=GrpoSpec(beta=0.1) if objective == "grpo" else None)
    place = with_files(tmp_path / "run", plan)
    command = next(line for line in (place / "README.md").read_text().splitlines() if line.startswith("accelerate"))
    words = command.split(f"trl_{objective}.py")[1].split("--model")[0].split()
    kind = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}[objective]
    code = (
        "import sys; from transformers import HfArgumentParser; import trl; "
        f"HfArgumentParser(trl.{kind}Config).parse_args_into_dataclasses(args=sys.argv[1:])"
    )

    def parse(*more: str) -> int:
        args = [sys.executable, "-c", code, *words, "--output_dir", str(tmp_path), "--use_cpu", "true", *more]
        return subprocess.run(args, capture_output=True, check=False).returncode

    assert parse() == 0
    assert parse("--max_lenght", "3") != 0


def test_what_a_plan_may_lack_is_the_default() -> None:
    for path, default in ADDED_TO_JOB.items():
        owner: object = JobSpec(lora=LoraSpec())
        for name in path:
            owner = getattr(owner, name)
        assert owner == default, path


def test_kit_train_names_trl(tmp_path: Path) -> None:
    """One problem, and what to do: not the data that kit's own loop would need."""
    written = write(
        planned("dpo", ZERO3, epochs=1.0), RunSpec(data=DataSpec(train=str(tmp_path / "none"))), tmp_path / "run"
    )
    with pytest.raises(RunDirectoryError, match=r"trained by TRL's DPOTrainer, .*README\.md") as refused:
        preflight(written)
    assert "convert data" not in str(refused.value)
