"""Files for Kubernetes and SkyPilot: names, sizes, and commands that really start launch.sh on every node.

``make prove NAME=cloud-targets`` reads those of all recipes with the parsers of Kubeflow and SkyPilot.
"""

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import yaml

from kit.emit.kubernetes import MOUNTED_AT, dns_name
from kit.emit.run_directory import TARGETS, RunDirectory, files_of, write
from kit.emit.skypilot import accelerator
from kit.errors import SpecError
from kit.specs.run import DataSpec, RunSpec
from tests.emit.test_launch import planned

RUN = RunSpec(data=DataSpec(train="train"))


def documents(cluster="p5.48xlarge:2"):
    files = files_of(planned("torch", cluster), TARGETS)
    return [yaml.safe_load(files[name]) for name in ("k8s.jobset.yaml", "k8s.trainjob.yaml", "sky.yaml")]


def started(tmp_path, command, **given):
    """What launch.sh sees when a shell runs ``command`` in a run directory."""
    (tmp_path / "launch.sh").write_text('#!/bin/bash\ntrap -p USR1; echo $NODE_RANK $MASTER_ADDR "$@" ${!PET_@}\n')
    (tmp_path / "launch.sh").chmod(0o755)
    words = [word.replace(MOUNTED_AT, str(tmp_path)) for word in command]
    done = subprocess.run(
        words, cwd=tmp_path, env={"PATH": os.environ["PATH"], **given}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_they_are_written_only_when_asked_for(tmp_path):
    plan = planned("torch", "p5.48xlarge:2")
    assert not [name for name in files_of(plan) if name.startswith(("k8s", "sky"))]
    write(plan, RUN, tmp_path / "without")
    assert RunDirectory.open(tmp_path / "without").edits == ()
    found = {path.name for path in write(plan, RUN, tmp_path / "with", ["k8s", "sky"]).path.iterdir()}
    assert {"k8s.jobset.yaml", "k8s.trainjob.yaml", "sky.yaml"} <= found
    with pytest.raises(SpecError, match="--target nomad: unknown; use k8s or sky"):
        write(plan, RUN, tmp_path / "other", ["nomad"])
    assert not (tmp_path / "other").exists()


def test_an_image_set_by_hand_is_an_edit_that_is_honoured(tmp_path):
    path = write(planned("torch", "p5.48xlarge:2"), RUN, tmp_path / "run", ["k8s"]).path
    file = path / "k8s.trainjob.yaml"
    file.write_text(file.read_text().replace("image: REPLACE-ME", "image: site/kit:1"))
    (edit,) = RunDirectory.open(path).edits
    assert (edit.file, edit.key, edit.found) == ("k8s.trainjob.yaml", "spec.trainer.image", "site/kit:1")


def test_every_node_is_a_pod_with_all_of_its_gpus():
    jobset, trainjob, sky = documents()
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert job["template"]["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    trainer = trainjob["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert (sky["num_nodes"], sky["resources"]["accelerators"]) == (2, {"H100": 8})


def test_the_first_pod_is_found_under_the_name_that_jobset_gives_it():
    jobset, *_ = documents()
    name, subdomain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    address = {each["name"]: each["value"] for each in container["env"]}["MASTER_ADDR"]
    assert address == f"{name}-{replicated['name']}-0-0.{subdomain}"
    assert all(len(label) <= 63 for label in address.split("."))


def test_each_starts_launch_sh_with_its_rank_and_ignores_the_signal_to_save(tmp_path):
    jobset, trainjob, sky = documents()
    (replicated,) = jobset["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    ignored = ["trap", "--", "''", "SIGUSR1"]
    resumed = ["--resume", "auto"]
    seen = started(tmp_path, container["command"], JOB_COMPLETION_INDEX="1", MASTER_ADDR="first")
    assert seen == [*ignored, "1", "first", *resumed]
    pet = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "1", "PET_NNODES": "2"}
    assert started(tmp_path, trainjob["spec"]["trainer"]["command"], **pet) == [*ignored, "1", "first", *resumed]
    given = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    assert started(tmp_path, ["bash", "-c", sky["run"]], **given) == ["1", "10.0.0.1", *resumed]


def test_the_hook_before_a_stop_reaches_ranks_and_waits(tmp_path):
    jobset, *_ = documents()
    (replicated,) = jobset["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    *_, hook = container["lifecycle"]["preStop"]["exec"]["command"]
    rank = """
import pathlib, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path("saved").touch(), sys.exit()))
pathlib.Path("up").touch()
while True: signal.pause()
"""
    # Process 1 of a container ends when its rank does; the hook, which waits for it, ends with the container.
    first = """trap '' USR1; "$PYTHON" -c "$RANK" & rank=$!; until [ -e up ]; do sleep 0.05; done
bash -c "$HOOK" & wait $rank; [ -e saved ] && echo saved"""
    given = {**os.environ, "HOOK": hook, "RANK": rank, "PYTHON": sys.executable}
    command = ["unshare", "--fork", "--pid", "--mount-proc", "bash", "-c", first]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr:
        pytest.skip(f"the hook was not run: {done.stderr.strip()}")
    assert done.stdout.split() == ["saved"], done.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Llama-3.1-8B", "kit-llama-3-1-8b"), ("a/b: 'c' $(d)", "kit-a-b-c-d"), ("ümlaut", "kit-mlaut"), ("x" * 99, None)],
)
def test_names_follow_dns(name, expected):
    plan = planned("torch", "8xH100")
    made = dns_name(dataclasses.replace(plan, model=dataclasses.replace(plan.model, name=name)))
    assert expected is None or made == expected
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", made)


@pytest.mark.parametrize(
    ("gpu", "sky"), [("A100-80", "A100-80GB"), ("A100-40", "A100"), ("V100-32", "V100-32GB"), ("H100", "H100")]
)
def test_gpus_are_called_as_skypilot_calls_them(gpu, sky):
    assert accelerator(gpu) == sky


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "--kill-on-bad-exit=1 bash"),
        ({"CONTAINER_IMAGE": "a b.sqsh"}, "--kill-on-bad-exit=1 --container-image=a b.sqsh --container-mounts=DIR:DIR"),
        ({"APPTAINER_IMAGE": "a b.sif"}, "--kill-on-bad-exit=1 apptainer exec --nv --bind DIR --pwd DIR a b.sif bash"),
    ],
)
def test_slurm_starts_containers_where_an_image_is_named(given, expected, tmp_path):
    for name, text in (("srun", 'echo "$@"'), ("scontrol", "echo node-0")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = files_of(planned("torch", "p5.48xlarge:2"))["slurm.sbatch"]
    job = {"SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job, **given}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(expected.replace("DIR", str(tmp_path))), done.stdout + done.stderr


@pytest.mark.parametrize(("step_s", "notice_s"), [(1.0, 300), (99.0, 300), (101.0, 360), (1000.0, 3000)])
def test_a_run_is_told_to_save_three_steps_before_its_end_and_five_minutes_at_least(step_s, notice_s):
    plan = planned("torch", "p5.48xlarge:2")
    slow = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, step_time_s=step_s))
    files = files_of(slow, TARGETS)
    assert f"#SBATCH --signal=B:USR1@{notice_s}\n" in files["slurm.sbatch"]
    (replicated,) = yaml.safe_load(files["k8s.jobset.yaml"])["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == notice_s


def test_every_variable_of_launch_sh_stands_below_its_reason_as_a_sentence():
    lines = files_of(planned("torch", "p5.48xlarge:2"))["launch.sh"].splitlines()
    reason = lines[next(i for i, line in enumerate(lines) if line.startswith("export PYTORCH_CUDA_ALLOC_CONF")) - 1]
    assert reason == "# Segments that grow in place fragment less when sequence lengths or stages differ."
