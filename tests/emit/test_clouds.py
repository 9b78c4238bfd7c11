"""Files for Kubernetes and SkyPilot, field by field, and commands that really start launch.sh on every node.

``make prove NAME=cloud-targets`` reads those of all recipes with the parsers of Kubeflow and SkyPilot.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.addons.targets.kubernetes import MOUNTED_AT, dns_name
from kit.addons.targets.skypilot import accelerator
from kit.emit.run_directory import files_of
from kit.planner.plan import Plan
from tests.emit.plans import DENSE, TORCH, ZERO2, ZERO3, plan_of, stand_in

CLOUDS = ("k8s", "sky")
TWO = DENSE | {"cluster": "p5.48xlarge:2", "dp": 2}
VOLUMES = [
    {"name": "run", "persistentVolumeClaim": {"claimName": "REPLACE-ME"}},
    {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
]
MOUNTS = [{"name": "run", "mountPath": "/kit/run"}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
SELECTOR = {"node.kubernetes.io/instance-type": "p5.48xlarge"}
SAVE = ["bash", "-c", "kill -USR1 -- -1; while kill -0 1; do sleep 1; done"]
SCRIPT = "exec ./launch.sh --resume auto"
JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "kit-llama-3-1-8b"},
    "spec": {
        "network": {"enableDNSHostnames": True, "subdomain": "kit-llama-3-1-8b"},
        "failurePolicy": {"maxRestarts": 3},
        "replicatedJobs": [
            {
                "name": "node",
                "replicas": 1,
                "template": {
                    "spec": {
                        "parallelism": 2,
                        "completions": 2,
                        "completionMode": "Indexed",
                        "backoffLimit": 0,
                        "template": {
                            "spec": {
                                "restartPolicy": "Never",
                                # without it pods on the host's network do not resolve MASTER_ADDR
                                "hostNetwork": True,
                                "dnsPolicy": "ClusterFirstWithHostNet",
                                "terminationGracePeriodSeconds": 300,
                                "nodeSelector": SELECTOR,
                                "containers": [
                                    {
                                        "name": "node",
                                        "image": "REPLACE-ME",
                                        "workingDir": "/kit/run",
                                        "command": [
                                            "bash",
                                            "-c",
                                            f"trap '' USR1; NODE_RANK=\"$JOB_COMPLETION_INDEX\" {SCRIPT}",
                                        ],
                                        # the address that JobSet's headless service gives to the first pod
                                        "env": [
                                            {
                                                "name": "MASTER_ADDR",
                                                "value": "kit-llama-3-1-8b-node-0-0.kit-llama-3-1-8b",
                                            },
                                            {"name": "MASTER_PORT", "value": "29500"},
                                        ],
                                        "resources": {"limits": {"nvidia.com/gpu": "8"}},
                                        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                                        "lifecycle": {"preStop": {"exec": {"command": SAVE}}},
                                        "volumeMounts": MOUNTS,
                                    }
                                ],
                                "volumes": VOLUMES,
                            }
                        },
                    }
                },
            }
        ],
    },
}
TRAINJOB = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": "kit-llama-3-1-8b"},
    "spec": {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": "REPLACE-ME",
            "numNodes": 2,
            "numProcPerNode": 8,
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": "8"}},
            "command": [
                "bash",
                "-c",
                'trap \'\' USR1; export NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" '
                f'MASTER_PORT="$PET_MASTER_PORT"; unset ${{!PET_@}}; cd /kit/run; {SCRIPT}',
            ],
        },
        "runtimePatches": [
            {
                "manager": "kit",
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {
                            "replicatedJobs": [
                                {
                                    "name": "node",
                                    "template": {
                                        "spec": {
                                            "template": {
                                                "spec": {
                                                    "terminationGracePeriodSeconds": 300,
                                                    "nodeSelector": SELECTOR,
                                                    "containers": [{"name": "node", "volumeMounts": MOUNTS}],
                                                    "volumes": VOLUMES,
                                                }
                                            }
                                        }
                                    },
                                }
                            ]
                        }
                    }
                },
            }
        ],
    },
}
SKY = {
    "name": "kit-llama-3-1-8b",
    "num_nodes": 2,
    "resources": {
        "accelerators": {"H100": 8},
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 3},
        "network_tier": "best",
    },
    "file_mounts": {"/kit/run": {"name": "REPLACE-ME", "source": ".", "mode": "MOUNT_CACHED"}},
    "setup": "pip install 'deepspeed-megatron-kit[megatron] @ git+REPLACE-ME'",
    "run": 'cd /kit/run\nNODE_RANK="$SKYPILOT_NODE_RANK" MASTER_ADDR="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")" '
    "exec bash launch.sh --resume auto\n",
}


def documents(plan: Plan) -> dict[str, Any]:
    return {name: yaml.safe_load(text) for name, text in files_of(plan, CLOUDS).items() if name[:3] in CLOUDS}


def pod_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return pod


def test_every_field_of_two_nodes() -> None:
    assert documents(plan_of(**TWO)) == {"k8s.jobset.yaml": JOBSET, "k8s.trainjob.yaml": TRAINJOB, "sky.yaml": SKY}
    first = next(each["value"] for each in pod_of(JOBSET)["containers"][0]["env"] if each["name"] == "MASTER_ADDR")
    assert all(len(label) <= 63 for label in first.split("."))


HOST = {"dp": 8, "offload_optimizer": "cpu"}


@pytest.mark.parametrize(
    ("plan", "network", "selector", "limits", "memory"),
    [
        (ZERO2, False, None, {"nvidia.com/gpu": "8"}, False),
        (ZERO2 | {"cluster": "p5.48xlarge:1"}, False, SELECTOR, {"nvidia.com/gpu": "8"}, False),
        (
            ZERO2 | {"cluster": "a3-highgpu-8g:2", "dp": 16},
            True,
            {"node.kubernetes.io/instance-type": "a3-highgpu-8g"},
            {"nvidia.com/gpu": "8"},
            False,
        ),
        # Azure's names in the catalog are not the labels of its nodes
        (ZERO3 | HOST | {"cluster": "nd96isr-mi300x-v5:1"}, False, None, {"amd.com/gpu": "8"}, True),
    ],
)
def test_a_pod_is_on_the_host_network_of_its_nodes_and_asks_for_their_memory(
    plan: dict[str, Any], network: bool, selector: dict[str, str] | None, limits: dict[str, str], memory: bool
) -> None:
    made = plan_of(**plan)
    found = documents(made)
    pod = pod_of(found["k8s.jobset.yaml"])
    assert (pod.get("hostNetwork", False), "dnsPolicy" in pod, pod.get("nodeSelector")) == (network, network, selector)
    asked = {"requests": {"memory": f"{-(-made.predicted.host_ram_gib_per_node // 1):.0f}Gi"}} if memory else {}
    assert pod["containers"][0]["resources"] == {"limits": limits, **asked}
    assert ("network_tier" in found["sky.yaml"]["resources"]) == network


def started(place: Path, command: list[str], **given: str) -> list[str]:
    """What launch.sh sees when a shell runs ``command`` in a run directory."""
    stand_in(place, **{"launch.sh": '#!/bin/bash\ntrap -p USR1; echo $NODE_RANK $MASTER_ADDR "$@" ${!PET_@}\n'})
    words = [word.replace(MOUNTED_AT, str(place)) for word in command]
    environment = {"PATH": os.environ["PATH"], **given}
    return subprocess.run(words, cwd=place, env=environment, stdout=-1, text=True, check=True).stdout.split()


def test_each_starts_launch_sh_with_its_rank_and_ignores_the_signal_to_save(tmp_path: Path) -> None:
    command = pod_of(JOBSET)["containers"][0]["command"]
    ignored, resumed = ["trap", "--", "''", "SIGUSR1"], ["1", "first", "--resume", "auto"]
    assert started(tmp_path, command, JOB_COMPLETION_INDEX="1", MASTER_ADDR="first") == [*ignored, *resumed]
    pet = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "1", "PET_NNODES": "2"}
    assert started(tmp_path, TRAINJOB["spec"]["trainer"]["command"], **pet) == [*ignored, *resumed]  # type: ignore[index]
    given = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "first\n10.0.0.2"}
    assert started(tmp_path, ["bash", "-c", str(SKY["run"])], **given) == resumed


def test_the_hook_before_a_stop_reaches_ranks_and_waits(tmp_path: Path) -> None:
    rank = """
import pathlib, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path("saved").touch(), sys.exit()))
pathlib.Path("up").touch()
while True: signal.pause()
"""
    # Process 1 of a container ends when its rank does; the hook, which waits for it, ends with the container.
    first = """trap '' USR1; "$PYTHON" -c "$RANK" & rank=$!; until [ -e up ]; do sleep 0.05; done
bash -c "$HOOK" & wait $rank; [ -e saved ] && echo saved"""
    given = {**os.environ, "HOOK": SAVE[-1], "RANK": rank, "PYTHON": sys.executable}
    command = ["unshare", "--fork", "--pid", "--mount-proc", "bash", "-c", first]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr:
        pytest.skip(f"the hook was not run, which needs root for a namespace of processes: {done.stderr.strip()}")
    assert done.stdout.split() == ["saved"], done.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama-3.1-8B", "kit-llama-3-1-8b"),
        ("a/b: 'c' $(d)", "kit-a-b-c-d"),
        ("ümlaut-", "kit-mlaut"),
        ("x" * 99, "kit-" + 36 * "x"),
        (35 * "x" + "-y", "kit-" + 35 * "x"),
    ],
)
def test_names_follow_dns(name: str, expected: str) -> None:
    """RFC 1035; JobSet appends a job's name and two indices."""
    plan = plan_of(**ZERO2)
    made = dns_name(dataclasses.replace(plan, model=dataclasses.replace(plan.model, name=name)))
    assert made == expected
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", made)


@pytest.mark.parametrize(
    ("gpu", "sky"),
    [("A100-80", "A100-80GB"), ("A100-40", "A100"), ("V100-16", "V100"), ("V100-32", "V100-32GB"), ("H100", "H100")],
)
def test_gpus_are_called_as_skypilot_calls_them(gpu: str, sky: str) -> None:
    assert accelerator(gpu) == sky


@pytest.mark.parametrize(("step_s", "notice_s"), [(1.0, 300), (99.0, 300), (101.0, 360), (1000.0, 3000)])
def test_a_run_is_told_to_save_three_steps_before_its_end_and_five_minutes_at_least(
    step_s: float, notice_s: int
) -> None:
    plan = plan_of(**TORCH, dp=8, zero_stage=3)
    slow = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, step_time_s=step_s))
    assert f"#SBATCH --signal=B:USR1@{notice_s}\n" in files_of(slow)["slurm.sbatch"]
    assert pod_of(documents(slow)["k8s.jobset.yaml"])["terminationGracePeriodSeconds"] == notice_s
