"""Launch files of several nodes: bash reads them, launchers get the right words, and variables travel with a reason."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.diagnose.lint import SCRIPTS, lint
from kit.emit.accelerate import accelerate_config
from kit.emit.environment import assignments, deepspeed_env, fabric_of, fabrics
from kit.emit.megatron import megatron_settings
from kit.emit.run_directory import files_of, write
from kit.emit.slurm import notice_s, sbatch
from kit.planner.plan import Plan
from kit.specs.catalog import node_names, parse_cluster
from kit.specs.run import DataSpec, RunSpec

ROOT = Path(__file__).parents[2]
INTEGRATORS = {
    "hgx-a100-40",
    "hgx-a100-80",
    "hgx-h100",
    "hgx-h20",
    "hgx-h200",
    "hgx-b200",
    "hgx-a800",
    "hgx-h800",
    "gh200-node",
    "server-mi325x",
    "server-mi355x",
}
SLINGSHOT = {"frontier"}
"""Its site's modules set what the plugin for libfabric needs."""
SPY = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$SPY_FILE"
env | sort >> "$SPY_FILE"
[ -z "${DS_ENV_FILE:-}" ] || cat "$DS_ENV_FILE" >> "$SPY_FILE"
"""


def planned(engine: str, cluster: str) -> Plan:
    layers = "huggingface" if engine == "deepspeed" else None
    return kit.plan("llama-3.1-8b", cluster, pins=kit.Pins(engine=engine, implementation=layers))


@pytest.fixture(scope="module", params=["torch", "deepspeed", "megatron"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param, "p5.48xlarge:2")


def run(script: str, plan: Plan, directory: Path, **environment: str) -> list[str]:
    """Words that the interpreter was started with, then the environment it saw, then what was in ``DS_ENV_FILE``."""
    for name, text in files_of(plan).items():
        (directory / name).write_text(text)
    spy = directory / "spy"
    spy.write_text(SPY)
    spy.chmod(0o755)
    given = {"PATH": os.environ["PATH"], "PYTHON": str(spy), "SPY_FILE": str(directory / "seen"), **environment}
    subprocess.run(["bash", str(directory / script), "--stop-at-step", "3"], env=given, check=True, timeout=30)
    return (directory / "seen").read_text().splitlines()


def test_bash_reads_every_script(plan: Plan, tmp_path: Path) -> None:
    scripts = {name: text for name, text in files_of(plan).items() if name.endswith((".sh", ".sbatch"))}
    assert {"launch.sh", "launch_elastic.sh", "launch_hosts.sh", "slurm.sbatch"} <= set(scripts)
    for text in scripts.values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_node_gets_its_rank_and_the_fabric(plan: Plan, tmp_path: Path) -> None:
    seen = run("launch.sh", plan, tmp_path, NODE_RANK="1", MASTER_ADDR="127.0.0.1")
    assert {"FI_EFA_USE_HUGE_PAGE=0", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"} <= set(seen)
    assert seen[seen.index("--node-rank" if "--node-rank" in seen else "--machine_rank") + 1] == "1"
    assert seen[seen.index("--stop-at-step") + 1] == "3"


def test_elastic_needs_no_rank(plan: Plan, tmp_path: Path) -> None:
    seen = run("launch_elastic.sh", plan, tmp_path, RDZV_ENDPOINT="127.0.0.1:29600")
    for word, value in (("--rdzv-backend", "c10d"), ("--rdzv-endpoint", "127.0.0.1:29600"), ("--nnodes", "2:2")):
        assert seen[seen.index(word) + 1] == value
    assert seen[seen.index("--resume") + 1] == "auto"
    assert "--min-nodes" not in seen


def test_elastic_goes_on_with_fewer_nodes_where_asked(plan: Plan, tmp_path: Path) -> None:
    seen = run("launch_elastic.sh", plan, tmp_path, RDZV_ENDPOINT="127.0.0.1:29600", MIN_NODES="1")
    assert seen[seen.index("--nnodes") + 1] == "1:2"
    assert seen[seen.index("--min-nodes") + 1] == "1"


@pytest.mark.parametrize("least", ["0", "3", "-1", "1 2", "*", "one"])
def test_elastic_refuses_other_numbers_of_nodes(least: str, tmp_path: Path) -> None:
    script = files_of(planned("torch", "p5.48xlarge:2"))["launch_elastic.sh"]
    environment = {**os.environ, "RDZV_ENDPOINT": "127.0.0.1:29600", "MIN_NODES": least, "PYTHON": "false"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"error: MIN_NODES={least}: the plan keeps its global batch on 1 2 nodes" in done.stderr


def test_what_the_caller_set_stays(tmp_path: Path) -> None:
    plan = planned("torch", "p5.48xlarge:2")
    given = {"FI_EFA_USE_HUGE_PAGE": "1", "GLOO_SOCKET_IFNAME": "bond7"}
    seen = run("launch.sh", plan, tmp_path, NODE_RANK="0", MASTER_ADDR="127.0.0.1", **given)
    assert {"FI_EFA_USE_HUGE_PAGE=1", "GLOO_SOCKET_IFNAME=bond7"} <= set(seen)


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("pdsh", ["--hostfile", "rank.py"]),
        ("openmpi", ["--mca btl_tcp_if_include bond7 --bind-to none"]),
        ("slurm", ["slurm"]),
        ("no-ssh", ["--no_ssh", "--node_rank"]),
    ],
)
def test_the_deepspeed_launcher(launcher: str, words: list[str], tmp_path: Path) -> None:
    """What it does not hand on by itself is in the file that it reads, which has no blank line."""
    plan = planned("deepspeed", "p5.48xlarge:2")
    seen = run("launch_hosts.sh", plan, tmp_path, LAUNCHER=launcher, NODE_RANK="1", GLOO_SOCKET_IFNAME="bond7")
    assert [word for word in words if word not in seen] == []
    # Once in the environment, once in DS_ENV_FILE; MASTER_ADDR is the first of the hostfile.
    for line in ("FI_EFA_USE_HUGE_PAGE=0", "GLOO_SOCKET_IFNAME=bond7", "MASTER_ADDR=node-0"):
        assert seen.count(line) == 2, line
    assert "" not in seen
    assert not list(tmp_path.glob("tmp.*"))


def test_deepspeed_env_is_what_its_reader_takes() -> None:
    """launcher/runner.py: ``var.split('=', maxsplit=1)`` on every line."""
    for cluster in ("p5.48xlarge:2", "a3-highgpu-8g:2", "nd96asr-v4:2", "16xH100"):
        lines = deepspeed_env(planned("deepspeed", cluster)).splitlines()
        assert lines
        assert all(len(line.split("=", maxsplit=1)) == 2 and line[0].isalpha() for line in lines)


def test_deepspeed_env_names_no_file_that_a_node_may_lack() -> None:
    """Its reader cannot ask whether one is there; the scripts do."""
    plan = planned("deepspeed", "nd96isr-h100-v5:2")
    of_files = [line for line in assignments(plan) if line.startswith("if [ -r")]
    assert any("NCCL_TOPO_FILE" in line for line in of_files)
    assert "NCCL_TOPO_FILE" not in deepspeed_env(plan)
    assert "NCCL_" in deepspeed_env(plan)


@pytest.mark.parametrize(("stage", "again"), [(2, False), (3, True)])
def test_fsdp_gathers_weights_again_in_backward_at_stage_3_alone(stage: int, again: bool) -> None:
    pins = kit.Pins(engine="torch", zero_stage=stage)
    config = accelerate_config(kit.plan("llama-3.2-1b", "8xH100", pins=pins))
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is again


def test_shared_experts_are_one_mlp_as_wide_as_all_of_them() -> None:
    """Megatron-core's size is that of the shared MLP, not of one expert (moe_shared_expert_intermediate_size)."""
    plan = kit.plan("deepseek-v3", "1024xH100", kit.JobSpec(global_batch_size=8192), kit.Pins(engine="megatron"))
    two = dataclasses.replace(plan, model=dataclasses.replace(plan.model, num_shared_experts=2))
    widths = [
        megatron_settings(each)["transformer_config"]["moe_shared_expert_intermediate_size"] for each in (plan, two)
    ]
    assert widths == [2048, 4096]


@pytest.mark.parametrize(("seq_length", "windowed"), [(4096, False), (8192, True)])
def test_a_window_is_named_only_where_it_hides_something(seq_length: int, windowed: bool) -> None:
    """Gemma 2's window is 4,096 tokens: a sequence as short is plain causal attention, which kernels do faster."""
    plan = kit.plan("gemma-2-9b", "8xH100", kit.JobSpec(seq_length=seq_length), kit.Pins(engine="megatron"))
    settings = megatron_settings(plan)["transformer_config"]
    assert ("window_size" in settings, "window_attn_skip_freq" in settings) == (windowed, windowed)


def test_an_unknown_launcher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run("launch_hosts.sh", planned("deepspeed", "p5.48xlarge:2"), tmp_path, LAUNCHER="rsh")
    assert caught.value.returncode == 2


def test_every_node_with_a_fabric_is_in_one_row() -> None:
    listed = [node for fabric in fabrics() for node in fabric.nodes]
    assert len(listed) == len(set(listed))
    assert set(listed) | INTEGRATORS | SLINGSHOT == set(node_names())
    for fabric in fabrics():
        assert fabric.source
        assert all(len(variable.why) > 10 for variable in fabric.variables)


AMD = {
    "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",
    "GPU_MAX_HW_QUEUES=2",
    "TORCH_NCCL_HIGH_PRIORITY=1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
    "HSA_NO_SCRATCH_RECLAIM=1",
    "NCCL_NET=IB",
}


@pytest.mark.parametrize("engine", ["torch", "deepspeed", "megatron"])
def test_processes_on_amds_gpus_get_amds_variables_and_none_of_nvidias(engine: str, tmp_path: Path) -> None:
    plan = planned(engine, "nd96isr-mi300x-v5:2")
    seen = run("launch.sh", plan, tmp_path, NODE_RANK="1", MASTER_ADDR="127.0.0.1")
    assert set(seen) >= AMD
    sets = [line for line in seen if line.startswith(("CUDA_", "PYTORCH_CUDA_", "NVTE_", "NVIDIA_"))]
    asked = ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if engine == "megatron" and plan.layout.tp * plan.layout.cp > 1 else []
    assert sets == asked
    texts = "".join(text for name, text in files_of(plan, ("k8s", "sky")).items() if name.endswith((".sh", ".sbatch")))
    assert [word for word in ("nsys", "--nv ", "PYTORCH_CUDA_ALLOC") if word in texts] == []
    assert "apptainer exec --rocm " in texts
    if engine == "deepspeed":
        assert set(deepspeed_env(plan).splitlines()) >= AMD


@pytest.mark.parametrize(
    ("cluster", "communicates", "old_firmware"),
    [("1xMI300X", False, False), ("8xMI355X", True, True), ("8xMI250X", True, False)],
)
def test_rccls_variables_are_for_ranks_that_communicate(cluster: str, communicates: bool, old_firmware: bool) -> None:
    pins = kit.Pins(engine="torch")
    text = "\n".join(assignments(kit.plan("llama-3.2-1b", cluster, pins=pins)))
    assert "PYTORCH_HIP_ALLOC_CONF" in text
    assert ("GPU_MAX_HW_QUEUES" in text, "HSA_NO_SCRATCH_RECLAIM" in text) == (communicates, old_firmware)


def test_a_profile_of_the_host_is_read_where_it_is(tmp_path: Path) -> None:
    plan = planned("torch", "a3-ultragpu-8g:2")
    fabric = fabric_of(plan)
    assert fabric is not None
    assert fabric.profile is not None
    text = "\n".join(assignments(plan))
    profile = tmp_path / "profile.sh"
    script = "set -euo pipefail\n" + text.replace(fabric.profile, str(profile)) + "\nenv\n"
    without = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "plain TCP" in without.stderr
    profile.write_text('export NCCL_NET=gIB X="$UNSET"\n')
    found = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "NCCL_NET=gIB" in found.stdout
    assert found.stderr == ""


def test_every_assignment_has_its_reason_above() -> None:
    for cluster in ("p5.48xlarge:2", "nd96isr-h100-v5:2", "a3-highgpu-8g:2", "a2-highgpu-8g:2"):
        lines = assignments(planned("megatron", cluster))
        for above, line in itertools.pairwise(lines):
            if line.startswith(("export", "if [ -r")) and "TEMP_FILE" not in line:
                assert above.startswith("# "), line


def test_one_node_has_no_files_of_several() -> None:
    files = files_of(kit.plan("llama-3.2-1b", "8xH100", pins=kit.Pins(engine="deepspeed", zero_stage=2)))
    assert not {"hostfile", "launch_hosts.sh", "launch_elastic.sh", ".deepspeed_env", "rank.py"} & set(files)
    assert "GLOO_SOCKET_IFNAME" not in files["launch.sh"]


def test_slurm_gives_notice_and_queues_again() -> None:
    plan = planned("deepspeed", "p5.48xlarge:2")
    text = files_of(plan)["slurm.sbatch"]
    for part in ("#SBATCH --requeue", f"#SBATCH --signal=B:USR1@{notice_s(plan)}", "scontrol requeue"):
        assert part in text
    assert notice_s(plan) >= 3 * plan.predicted.step_time_s


@pytest.mark.parametrize(
    ("cluster", "changes", "asked"),
    [
        ("p5.48xlarge:2", {}, ["--exclusive", "--mem=0"]),  # 0 is all of a node's memory (sbatch's manual)
        ("8xH100", {}, ["--exclusive", "--mem=0"]),
        ("p5.48xlarge:1", {"gpus_per_node": 2, "host_ram_gib": 512.5}, ["--mem=512G"]),
        ("p5.48xlarge:1", {"gpus_per_node": 2, "host_ram_gib": None}, []),
        ("p5.48xlarge:1", {"gpus_per_node": 2, "name": "mine"}, ["--exclusive", "--mem=0"]),  # a user's own node
    ],
)
def test_slurm_is_asked_for_cpus_and_memory(cluster: str, changes: dict[str, Any], asked: list[str]) -> None:
    spec = dataclasses.replace(parse_cluster(cluster), **changes)
    text = sbatch(kit.plan("llama-3.2-1b", spec, pins=kit.Pins(engine="torch", zero_stage=0)))
    found = re.findall(r"^#SBATCH (--(?:exclusive|mem|cpus-per-task).*)$", text, re.MULTILINE)
    assert found == asked
    assert ("sbatch --cpus-per-task=N" in text.partition("set -euo")[0]) == ("--exclusive" not in asked)


@pytest.mark.parametrize(("cpus", "warned"), [(96, False), (4, True), (None, False)])
def test_a_slurm_step_gets_all_cpus_of_the_job(cpus: int | None, warned: bool, tmp_path: Path) -> None:
    """Without --cpus-per-task srun gives a task one."""
    for name, text in (("srun", '#!/bin/sh\necho "$@"\n'), ("scontrol", "#!/bin/sh\necho node-0\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "slurm.sbatch").write_text(files_of(planned("torch", "p5.48xlarge:2"))["slurm.sbatch"])
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    given |= {"SLURM_JOB_NODELIST": "node-[0-1]", **({} if cpus is None else {"SLURM_CPUS_ON_NODE": str(cpus)})}
    done = subprocess.run(["bash", str(tmp_path / "slurm.sbatch")], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"--cpus-per-task=(\d+)", done.stdout) == ([] if cpus is None else [str(cpus)])
    assert ("4 CPUs to 8 processes" in done.stderr) == warned
    assert parse_cluster("1xcpu").gpu.device == "cpu"


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*/accelerate.yaml")), ids=lambda path: path.parent.name)
def test_committed_accelerate_files_lint_clean(path: Path, tmp_path: Path) -> None:
    """Beside the DeepSpeed configuration that each names; on several machines too."""
    for beside in ("accelerate.yaml", "megatron.yaml"):
        if (path.parent / beside).is_file():
            (tmp_path / beside).write_text((path.parent / beside).read_text())
    if (config := ROOT / "ds_configs" / f"{path.parent.name}.json").is_file():
        (tmp_path / "ds_config.json").write_text(config.read_text())
    assert [str(finding) for finding in lint(tmp_path / path.name) if finding.severity != "note"] == []


@pytest.mark.parametrize("cluster", ["8xH100", "p5.48xlarge:2"])
@pytest.mark.parametrize("engine", ["torch", "deepspeed", "megatron"])
def test_a_run_directory_lints_clean(engine: str, cluster: str, tmp_path: Path) -> None:
    rundir = write(planned(engine, cluster), RunSpec(data=DataSpec(train="train")), tmp_path / "run")
    assert [str(finding) for finding in lint(rundir.path)] == []
    scripts = [file for file in rundir.path.iterdir() if file.suffix in SCRIPTS]
    assert scripts
    assert [str(finding) for file in scripts for finding in lint(file)] == []
    broken = rundir.path / "accelerate.yaml"
    if broken.is_file():  # and lint does look at it
        broken.write_text(broken.read_text().replace("same_network:", "same_netwrok:"))
        assert any("same_netwrok" in str(finding) for finding in lint(rundir.path))


STEP = """#!/usr/bin/env bash
trap 'echo saved >> "$SEEN"; exit 75' USR1
echo started >> "$SEEN"
for _ in $(seq 300); do [ -e "$SEEN.done" ] && exit 0; sleep 0.05; done
exit 9
"""
CONTROL = """#!/usr/bin/env bash
[ "$1" = show ] && echo node-0 || echo "$@" >> "$SEEN"
"""


@pytest.mark.parametrize(("told", "expected"), [(True, ["started", "saved", "requeue 7"]), (False, ["started"])])
def test_the_batch_script_hands_the_signal_on(told: bool, expected: list[str], tmp_path: Path) -> None:
    """Beside stand-ins for srun and scontrol; ``tests.system.slurm`` does it in a real Slurm."""
    for name, text in (("srun", STEP), ("scontrol", CONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "slurm.sbatch").write_text(files_of(planned("torch", "p5.48xlarge:2"))["slurm.sbatch"])
    seen = tmp_path / "seen"
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(seen), "SLURM_SUBMIT_DIR": str(tmp_path)}
    given |= {"SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", str(tmp_path / "slurm.sbatch")], env=given, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not seen.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if told:
        job.send_signal(signal.SIGUSR1)
    else:
        (tmp_path / "seen.done").touch()
    assert job.wait(timeout=30) == (75 if told else 0)
    assert seen.read_text().splitlines() == expected
