"""Launch files: run by bash beside stand-ins, each launcher gets exactly the right words, and processes exactly the
variables that their GPUs and fabric need."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kit.addons.lint import SCRIPTS, lint
from kit.emit.environment import assignments, deepspeed_env, fabric_of
from kit.emit.run_directory import files_of, write
from kit.emit.slurm import sbatch
from kit.specs.catalog import parse_cluster
from kit.specs.run import DataSpec, RunSpec
from tests.emit.plans import DENSE, FSDP2, MEGATRON, TORCH, ZERO2, ZERO3, plan_of, stand_in
from tests.support import ROOT
from tests.support.files import files_in
from tests.support.refusals import refusal
from tests.support.waiting import comes_true

SPY = """#!/usr/bin/env bash
printf '%s\\n' "$@" -- > "$SPY_FILE"
env | sort >> "$SPY_FILE"
[ -z "${DS_ENV_FILE:-}" ] || cat -- - "$DS_ENV_FILE" <<< -- >> "$SPY_FILE"
"""

DDP16 = TORCH | {"model": "llama-3.2-1b", "dp": 16}
P5, LOST = "p5.48xlarge:2", "hgx-h100:2"
ON_P5 = DDP16 | {"cluster": P5}
SHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ON_GPUS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
RECORDED = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "RUN/flight/rank_",
}  # fmt: skip
RANKS = SHARED | ON_GPUS | RECORDED
EFA = {"FI_EFA_USE_HUGE_PAGE": "0"}
IB = {"NCCL_NET": "IB"}
AMD = SHARED | RECORDED | {
    "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True", "GPU_MAX_HW_QUEUES": "2", "TORCH_NCCL_HIGH_PRIORITY": "1",
}  # fmt: skip
FIRMWARE = {"HSA_NO_SCRATCH_RECLAIM": "1"}
ORDERED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
STOPPABLE = "-m kit.training.interruptible -m"
TORCHRUN = f"{STOPPABLE} torch.distributed.run --nproc-per-node"
OF_NODE = "--node-rank 1 --master-addr 127.0.0.1 --master-port 29500"
WORKER = "-m kit.training . --stop-at-step 3"
ACCELERATE = f"{STOPPABLE} accelerate.commands.launch --config_file accelerate.yaml"
LAUNCHES: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "one process": (TORCH | {"cluster": "1xH100"}, WORKER, ON_GPUS),
    "one node": (FSDP2, f"{TORCHRUN} 8 --standalone {WORKER}", RANKS),
    "a part of a node": (FSDP2 | {"dp": 4}, f"{TORCHRUN} 4 --standalone {WORKER}", RANKS),
    "two nodes": (DDP16 | {"cluster": P5}, f"{TORCHRUN} 8 --nnodes 2 {OF_NODE} {WORKER}", RANKS | EFA),
    "cpus": (
        TORCH | {"cluster": "2xcpu", "dp": 2}, f"{TORCHRUN} 2 --standalone {WORKER}", SHARED | {"OMP_NUM_THREADS": "1"}
    ),
    "zero": (ZERO2, f"{ACCELERATE} --module kit.training . --stop-at-step 3", RANKS),
    "zero of two nodes": (
        ZERO2 | {"dp": 16, "cluster": LOST},
        f"{ACCELERATE} --machine_rank 1 --main_process_ip 127.0.0.1 --main_process_port 29500 --module kit.training . "
        "--stop-at-step 3",
        RANKS,
    ),
    # megatron-core overlaps split tensors and sequences by one connection to the device
    "megatron splits tensors": (DENSE | {"dp": 1}, f"{TORCHRUN} 8 --standalone {WORKER}", RANKS | ORDERED),
    "megatron splits sequences": (MEGATRON | {"cp": 8}, f"{TORCHRUN} 8 --standalone {WORKER}", RANKS | ORDERED),
    "megatron splits nothing": (MEGATRON | {"dp": 4, "pp": 2}, f"{TORCHRUN} 8 --standalone {WORKER}", RANKS),
    "FSDP2 splits tensors": (FSDP2 | {"dp": 4, "tp": 2}, f"{TORCHRUN} 8 --standalone {WORKER}", RANKS),
    "amd": (
        DDP16 | {"cluster": "nd96isr-mi300x-v5:2"},
        f"{TORCHRUN} 8 --nnodes 2 {OF_NODE} {WORKER}",
        AMD | FIRMWARE | IB,
    ),
    "amd's megatron": (
        DENSE | {"cluster": "8xMI355X", "dp": 1}, f"{TORCHRUN} 8 --standalone {WORKER}", AMD | FIRMWARE | ORDERED
    ),
    "older amd": (FSDP2 | {"cluster": "8xMI250X"}, f"{TORCHRUN} 8 --standalone {WORKER}", AMD),
    "one of amd's": (
        TORCH | {"cluster": "1xMI300X"}, WORKER, {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}
    ),
    "tcp": (
        DDP16 | {"cluster": "a2-highgpu-8g:2"},
        f"{TORCHRUN} 8 --nnodes 2 {OF_NODE} {WORKER}",
        RANKS | {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "bond7"},
    ),
    "a file that is not there": (
        DDP16 | {"cluster": "nd96isr-h100-v5:2"}, f"{TORCHRUN} 8 --nnodes 2 {OF_NODE} {WORKER}", RANKS | IB
    ),
    "one node of a fabric": (
        DDP16 | {"dp": 8, "cluster": "p5.48xlarge:1"}, f"{TORCHRUN} 8 --standalone {WORKER}", RANKS
    ),
}  # fmt: skip


def run(script: str, plan: dict[str, Any], directory: Path, *words: str, **environment: str) -> list[list[str]]:
    """Words that the interpreter was started with, the lines of its environment, and of ``DS_ENV_FILE``."""
    files_in(directory, files_of(plan_of(**plan)))
    path = stand_in(directory, spy=SPY)["PATH"]
    given = {"PATH": path, "PYTHON": str(directory / "spy"), "SPY_FILE": str(directory / "seen"), **environment}
    subprocess.run(["bash", str(directory / script), *words], env=given, check=True, timeout=30, cwd="/")
    return [part.split("\n") for part in (directory / "seen").read_text().removesuffix("\n").split("\n--\n")]


@pytest.mark.parametrize(("plan", "words", "variables"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_launcher_gets_these_words_and_processes_these_variables(
    plan: dict[str, Any], words: str, variables: dict[str, str], tmp_path: Path
) -> None:
    given = {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "bond7"}
    told, environment = run("launch.sh", plan, tmp_path, "--stop-at-step", "3", **given)
    bash = {*given, "PATH", "OLDPWD", "SHLVL", "_", "PYTHON", "SPY_FILE"}
    found = dict(line.split("=", maxsplit=1) for line in environment)
    own = {name: value.replace("RUN", str(tmp_path)) for name, value in variables.items()}
    assert {name: value for name, value in found.items() if name not in bash} == own | {"PWD": str(tmp_path)}
    assert " ".join(told) == words


def test_what_the_caller_set_stays(tmp_path: Path) -> None:
    given = dict.fromkeys(RANKS | EFA, "mine") | {"MASTER_PORT": "29600"}
    told, seen = run("launch.sh", ON_P5, tmp_path, NODE_RANK="0", MASTER_ADDR="127.0.0.1", **given)
    assert {f"{name}=mine" for name in RANKS | EFA} <= set(seen)
    assert told[told.index("--master-port") + 1] == "29600"


@pytest.mark.parametrize(
    ("layout", "threads"),
    [
        (ZERO3 | {"offload_optimizer": "cpu"}, "13"),
        (ZERO3 | {"offload_optimizer": "nvme", "cluster": "16xH100", "dp": 16}, "13"),
        (ZERO3 | {"offload_param": "cpu", "dp": 4}, "25"),
        (ZERO3 | {"offload_optimizer": "cpu", "cluster": "128xcpu", "dp": 128}, "1"),
        (ZERO3, None),
    ],
)
def test_ranks_share_the_hosts_cores_for_a_step_there(
    layout: dict[str, Any], threads: str | None, tmp_path: Path
) -> None:
    stand_in(tmp_path, nproc="#!/bin/sh\necho 100\n")
    given = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    found = [run("launch.sh", layout, tmp_path, **given, **mine)[1] for mine in ({}, {"OMP_NUM_THREADS": "3"})]
    told = [[line for line in lines if line.startswith("OMP_")] for lines in found]
    assert told == [[f"OMP_NUM_THREADS={threads}"] if threads else [], ["OMP_NUM_THREADS=3"]]


ELASTIC = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29600 --rdzv-id"


@pytest.mark.parametrize("plan", [DDP16, ZERO3 | {"dp": 16}, DENSE | {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize(
    ("given", "nodes", "words"),
    [
        ({}, f"2:2 {ELASTIC} RUN --max-restarts 3", ""),
        (
            {"MIN_NODES": "1", "RDZV_ID": "a", "MAX_RESTARTS": "7"},
            f"1:2 {ELASTIC} a --max-restarts 7",
            " --min-nodes 1",
        ),
    ],
)
def test_elastic_needs_no_rank_and_goes_on_with_fewer_nodes_where_asked(
    plan: dict[str, Any], given: dict[str, str], nodes: str, words: str, tmp_path: Path
) -> None:
    told, seen = run(
        "launch_elastic.sh", plan | {"cluster": P5}, tmp_path, "--stop-at-step", "3",
        RDZV_ENDPOINT="127.0.0.1:29600", GLOO_SOCKET_IFNAME="bond7", **given,
    )  # fmt: skip
    assert " ".join(told) == (
        f"{TORCHRUN} 8 --nnodes {nodes} -m kit.training . --resume auto{words} --stop-at-step 3"
    ).replace("RUN", tmp_path.name)
    assert {"FI_EFA_USE_HUGE_PAGE=0", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"} <= set(seen)


@pytest.mark.parametrize("least", ["0", "3", "-1", "1 2", "*", "one"])
def test_elastic_refuses_other_numbers_of_nodes(least: str, tmp_path: Path) -> None:
    script = files_of(plan_of(**DDP16, gradient_accumulation_steps=2, cluster=P5))["launch_elastic.sh"]
    environment = {**os.environ, "RDZV_ENDPOINT": "127.0.0.1:29600", "MIN_NODES": least, "PYTHON": "false"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1].partition(" nodes")[0]) == (
        2, f"error: MIN_NODES={least}: the plan keeps its global batch on 1 2",
    )  # fmt: skip


OF_LAUNCHER = "--hostfile hostfile --master_addr node-0 --master_port 29500"


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("", ""),
        ("openmpi", " --launcher openmpi --launcher_args --mca btl_tcp_if_include bond7 --bind-to none"),
        ("slurm", " --launcher slurm"),
        ("no-ssh", " --no_ssh --node_rank 1"),
    ],
)
def test_the_deepspeed_launcher(launcher: str, words: str, tmp_path: Path) -> None:
    """What it does not hand on by itself is in the file that it reads, which has no blank line."""
    given = {"NODE_RANK": "1", "GLOO_SOCKET_IFNAME": "bond7"} | ({"LAUNCHER": launcher} if launcher else {})
    plan = ZERO2 | {"dp": 16, "cluster": P5}
    told, seen, handed = run("launch_hosts.sh", plan, tmp_path, "--resume", "auto", **given)
    assert " ".join(told) == f"-m deepspeed.launcher.runner {OF_LAUNCHER}{words} rank.py . --resume auto"
    assert {line.split("=")[0] for line in handed} == {
        *RANKS, *EFA, "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "PATH",
    }  # fmt: skip
    assert set(handed) <= set(seen)  # MASTER_ADDR is the first of the hostfile
    assert "exit status 2" in refusal(
        subprocess.CalledProcessError, run, "launch_hosts.sh", plan, tmp_path, **given | {"LAUNCHER": "rsh"}
    )
    assert not list(tmp_path.glob("tmp.*"))


def test_pdsh_starts_launch_sh_on_the_hosts_of_the_file(tmp_path: Path) -> None:
    """With the words that were given, and the variables that were set here, quoted once for the shell there."""
    files = files_of(plan_of(**ON_P5))
    assert files["hostfile"].endswith("hosts'; every host needs the same paths.\nnode-0 slots=8\nnode-1 slots=8\n")
    files_in(tmp_path, files | {"hostfile": "# a comment\n\nfirst slots=8\n  second slots=8\n"})
    given = {"HF_HOME": "/a b", "PYTHON": "/opt/python"} | stand_in(
        tmp_path, pdsh='#!/bin/bash\nprintf "%s\\n" "$@"; eval "${@: -1}"\n',
        **{"launch.sh": '#!/bin/bash\nprintf "%s\\n" "$@" "$HF_HOME" $MASTER_ADDR $NCCL_TRACE\n'},
    )  # fmt: skip
    words = ["bash", "launch_hosts.sh", "--resume", "a b"]
    told = subprocess.run(words, cwd=tmp_path, env=given, stdout=-1, text=True, check=True).stdout.splitlines()
    there = f"cd {tmp_path} && exec env NODE_RANK=%n PYTHON=/opt/python MASTER_ADDR=first MASTER_PORT="
    assert [*told[:5], told[5][: len(there)], *told[6:]] == [
        "-S", "-R", "ssh", "-w", "first,second", there, "--resume", "a b", "/a b", "first",
    ]  # fmt: skip


def test_deepspeed_env_is_what_its_reader_takes() -> None:
    """launcher/runner.py: ``var.split('=', maxsplit=1)`` on every line. It cannot ask whether a file is there, or which
    interface leads to the others; the scripts do."""
    fixed = [f"{name}={value}" for name, value in RANKS.items() if not value.startswith("RUN")]
    for cluster, own in (
        (P5, ["FI_EFA_USE_HUGE_PAGE=0"]),
        ("nd96isr-h100-v5:2", ["NCCL_NET=IB"]),
        ("a2-highgpu-8g:2", ["NCCL_NET=Socket"]),
        (LOST, []),
    ):
        plan = plan_of(**ZERO2 | {"dp": 16}, cluster=cluster)
        assert deepspeed_env(plan).splitlines() == [*fixed, *own]
        assert files_of(plan)[".deepspeed_env"] == deepspeed_env(plan)


@pytest.mark.parametrize(
    ("plan", "name", "title", "files", "said"),
    [
        (DDP16 | {"cluster": P5}, "efa", "", {"slurm.sbatch"}, "nsys profile"),
        (DDP16 | {"dp": 8, "cluster": "nd96isr-h100-v5:1"}, None, "Azure ND H100 v5, InfiniBand", {"slurm.sbatch"}, ""),
        (TORCH | {"dp": 4, "cluster": "2x2xcpu"}, "gloo", "", {"slurm.sbatch"}, ""),
        (TORCH | {"dp": 4, "cluster": "4xcpu"}, "gloo", "", set(), ""),
        (DENSE | {"cluster": LOST}, None, None, {"slurm.sbatch"}, "\n# Fabric not known"),
        (DENSE | {"cluster": "8xH100", "dp": 1}, None, None, {"slurm.sbatch"}, "\n# Kernels start in the order"),
        (DENSE | {"cluster": "8xMI300X", "dp": 1}, None, None, {"slurm.sbatch"}, "runtime does not read it"),
    ],
)  # fmt: skip
def test_a_plan_has_the_fabric_of_its_nodes(
    plan: dict[str, Any], name: str | None, title: str | None, files: set[str], said: str
) -> None:
    made = plan_of(**plan)
    found, written = fabric_of(made), files_of(made)
    assert name is None or found.name == name  # type: ignore[union-attr]
    assert not title or found.title == title  # type: ignore[union-attr]
    assert {"slurm.sbatch"} & {*written} == files
    launcher = written["launch.sh"]
    assert said in launcher
    assert ("nsys profile" in launcher) == (made.cluster.gpu.device == "cuda" and "MI" not in made.cluster.gpu.name)
    assert ("# Fabric not known" in launcher) == ("not known" in said)


@pytest.mark.parametrize(
    ("cluster", "path", "content", "without", "there"),
    [
        (
            "a3-ultragpu-8g:2", "/usr/local/gib/scripts/set_nccl_env.sh", 'export NCCL_NET=gIB X="$UNSET"\n',
            "plain TCP", "NCCL_NET=gIB\n",
        ),
        ("nd96isr-h100-v5:2", "/opt/microsoft/ndv5-topo.xml", "", "", "NCCL_TOPO_FILE=HERE\n"),
    ],
)  # fmt: skip
def test_a_file_of_the_host_is_read_where_it_is(
    cluster: str, path: str, content: str, without: str, there: str, tmp_path: Path
) -> None:
    file, text = tmp_path / "file", "\n".join(assignments(plan_of(**DDP16, cluster=cluster)))
    words = ["bash", "-c", "set -euo pipefail\n" + text.replace(path, str(file)) + "\nenv\n"]
    first = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    file.write_text(content)
    second = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    expected = there.replace("HERE", str(file))
    assert (without in first.stderr, expected in first.stdout) == (True, False)
    assert (second.stderr, expected in second.stdout) == ("", True)


@pytest.mark.parametrize(
    ("cluster", "changes", "asked", "by_hand"),
    [
        (P5, {}, ["--exclusive", "--mem=0"], []),  # 0 is all of a node's memory (sbatch's manual)
        ("8xH100", {}, ["--exclusive", "--mem=0"], []),
        ("p5.48xlarge:1", {"gpus_per_node": 2, "host_ram_gib": 512.5}, ["--mem=512G"], ["--cpus-per-task=N"]),
        ("p5.48xlarge:1", {"gpus_per_node": 2, "host_ram_gib": None}, [], ["--cpus-per-task=N --mem=MEMORY"]),
        ("p5.48xlarge:1", {"gpus_per_node": 2, "name": "mine"}, ["--exclusive", "--mem=0"], []),  # a user's own node
        ("2x2xcpu", {}, [], []),
    ],
)
def test_slurm_is_asked_for_cpus_and_memory(
    cluster: str, changes: dict[str, Any], asked: list[str], by_hand: list[str]
) -> None:
    spec = dataclasses.replace(parse_cluster(cluster), **changes)
    text = sbatch(plan_of("llama-3.2-1b", spec, **TORCH, dp=spec.num_gpus))
    head = text.partition("set -euo")[0]
    assert re.findall(r"sbatch (--cpus-per-task=N.*) slurm.sbatch", head) == by_hand
    assert ("whose cores and memory kit does not know" in head) == ("MEMORY" in "".join(by_hand))
    own = r"^#SBATCH (--(?:exclusive|mem|cpus-per-task|gpus-per-node|nodes|ntasks-per-node).*)$"
    gpus = [f"--gpus-per-node={spec.gpus_per_node}"] * (spec.gpu.device == "cuda")
    assert re.findall(own, text, re.MULTILINE) == [f"--nodes={spec.num_nodes}", "--ntasks-per-node=1", *gpus, *asked]


@pytest.mark.parametrize(
    ("days", "hours", "said"),
    [
        (0.01, 1, "0.01 days for the whole run"),
        (0.5, 15, "0.50 days for the whole run"),  # a quarter more than predicted
        (3.0, 24, "3.00 days for the whole run"),
        (None, 24, "at most 2.5 s a step; the number of steps follows from the data"),
    ],
)
def test_slurm_is_asked_for_as_many_hours_as_a_run_may_need_or_a_site_allows(
    days: float | None, hours: int, said: str
) -> None:
    plan = plan_of(**FSDP2)
    predicted = dataclasses.replace(plan.predicted, days=days, step_time_s=2.5)
    model = dataclasses.replace(plan.model, name="a (b) c")
    lines = sbatch(dataclasses.replace(plan, predicted=predicted, model=model)).splitlines()
    assert {f"#SBATCH --time={hours}:00:00", f"# Predicted: {said}.", "#SBATCH --job-name=a-b-c"} <= {*lines}


MPI = {"CONTAINER_IMAGE": "a b.sqsh"}, {"APPTAINER_IMAGE": "a b.sif"}


def job_of(directory: Path, cluster: str, **programs: str) -> dict[str, str]:
    """The environment of a job of Slurm whose script is ``batch``, beside stand-ins for Slurm's programs."""
    script = files_of(plan_of(**DDP16, cluster=cluster))["slurm.sbatch"]
    job = {"SLURM_SUBMIT_DIR": str(directory), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[0-1]"}
    return stand_in(directory, batch=script, **programs) | job


@pytest.mark.parametrize(
    ("cluster", "given", "told", "warned"),
    [
        (P5, {}, "bash -c trap", False),
        (P5, {"SLURM_CPUS_ON_NODE": "96"}, "--cpus-per-task=96 bash -c trap", False),
        (P5, {"SLURM_CPUS_ON_NODE": "4"}, "--cpus-per-task=4 bash -c trap", True),  # srun would give a task one
        (
            P5, MPI[0],
            "--container-image=a b.sqsh --container-mounts=DIR:DIR --container-workdir=DIR bash -c trap", False,
        ),
        (P5, MPI[1], "apptainer exec --nv --bind DIR --pwd DIR a b.sif bash -c trap", False),
        ("nd96isr-mi300x-v5:2", MPI[1], "apptainer exec --rocm --bind DIR --pwd DIR a b.sif bash -c trap", False),
    ],
)  # fmt: skip
def test_a_slurm_step_gets_all_cpus_of_the_job_and_its_container(
    cluster: str, given: dict[str, str], told: str, warned: bool, tmp_path: Path
) -> None:
    job = job_of(tmp_path, cluster, srun='#!/bin/sh\necho "$@"\n', scontrol="#!/bin/sh\necho node-0\n") | given
    done = subprocess.run(["bash", str(tmp_path / "batch")], env=job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"--kill-on-bad-exit=1 {told.replace('DIR', str(tmp_path))}")
    assert ("4 CPUs to 8 processes" in done.stderr) == warned


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "ds_configs").glob("*.json")), *sorted((ROOT / "launch").glob("*/run"))],
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_committed_files_lint_clean(path: Path) -> None:
    assert [str(finding) for finding in lint(path) if finding.severity != "note"] == []


@pytest.mark.parametrize("plan", [FSDP2, DDP16 | {"cluster": P5}, ZERO3, ZERO2 | {"dp": 16, "cluster": P5}, DENSE])
def test_a_run_directory_lints_clean(plan: dict[str, Any], tmp_path: Path) -> None:
    rundir = write(plan_of(**plan), RunSpec(data=DataSpec(train="train")), tmp_path / "run")
    scripts = [file for file in rundir.path.iterdir() if file.suffix in SCRIPTS]
    assert len(scripts) > 1
    assert [str(finding) for file in [rundir.path, *scripts] for finding in lint(file)] == []
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
    seen = tmp_path / "seen"
    given = job_of(tmp_path, P5, srun=STEP, scontrol=CONTROL) | {"SEEN": str(seen)}
    assert "#SBATCH --requeue\n" in (tmp_path / "batch").read_text()
    job = subprocess.Popen(["bash", str(tmp_path / "batch")], env=given, stdout=subprocess.DEVNULL)
    assert comes_true(seen.exists, 20)
    if told:
        job.send_signal(signal.SIGUSR1)
    else:
        (tmp_path / "seen.done").touch()
    assert job.wait(timeout=30) == (75 if told else 0)
    assert seen.read_text().splitlines() == expected
