"""``k8s.jobset.yaml`` and ``k8s.trainjob.yaml``: the run on Kubernetes, as a JobSet (jobset.x-k8s.io/v1alpha2) and as
Kubeflow Trainer's TrainJob (trainer.kubeflow.org/v1alpha1). The user fills in two values, the image and the claim of
the volume with this run directory; kit honours both edits.
"""

from __future__ import annotations

import math
import re
from typing import Any

from kit.cost.hardware import runs_rocm
from kit.emit.derived_file import DerivedFile
from kit.emit.launch import processes_per_node
from kit.emit.slurm import notice_s
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.catalog.rows import rows

_TARGET = "k8s"
MOUNTED_AT = "/kit/run"
"""Where pods see the run directory."""
_LONGEST_NAME = 40
"""Characters of a name. A DNS label has 63, and JobSet appends the job's name and two indices."""
_PORT = "29500"
_NODE = "node"
"""Name of the replicated job; Kubeflow's torch runtime has a job and a container of this name too."""
_HEADER = f"""\
# Set image, and claimName: a ReadWriteMany volume claim that holds this run directory. Then: kubectl apply -f FILE
# Checkpoints are written to {MOUNTED_AT}/checkpoints. Add the RDMA devices of your cluster to resources.limits,
# for example rdma/hca: 1 or vpc.amazonaws.com/efa: 32.
"""


def dns_name(plan: Plan) -> str:
    """The model's name as a DNS label: lower-case letters, digits and dashes, a letter first (RFC 1035)."""
    letters = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
    return f"kit-{letters}"[:_LONGEST_NAME].rstrip("-")


def jobset(plan: Plan) -> str:
    """YAML of a JobSet with one pod per node. Pods find the first one by its name in JobSet's headless service."""
    name = dns_name(plan)
    environment = {"MASTER_ADDR": f"{name}-{_NODE}-0-0.{name}", "MASTER_PORT": _PORT}
    container = {
        "name": _NODE,
        "image": "REPLACE-ME",
        "workingDir": MOUNTED_AT,
        "command": _command('NODE_RANK="$JOB_COMPLETION_INDEX" '),
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": _resources(plan),
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "lifecycle": {"preStop": {"exec": {"command": _SAVE}}},
        "volumeMounts": _MOUNTS,
    }
    pod = {
        "restartPolicy": "Never",
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if plan.cluster.num_nodes > 1 else {}),
        **_pod(plan, container),
    }
    job = {
        "parallelism": plan.cluster.num_nodes,
        "completions": plan.cluster.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return _HEADER + strict_yaml.dump(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name},
                "failurePolicy": {"maxRestarts": 3},
                "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
            },
        }
    )


def trainjob(plan: Plan) -> str:
    """YAML of a TrainJob for Kubeflow's runtime ``torch-distributed``, which gives each node its rank in PET_*
    variables. The command unsets these, because torchrun would read them in addition to its arguments."""
    ranks = 'NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"; '
    pod = _pod(plan, {"name": _NODE, "volumeMounts": _MOUNTS})
    jobs = [{"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}]
    return _HEADER + strict_yaml.dump(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": dns_name(plan)},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": {
                    "image": "REPLACE-ME",
                    "numNodes": plan.cluster.num_nodes,
                    "numProcPerNode": processes_per_node(plan),
                    "resourcesPerNode": _resources(plan),
                    "command": _command(f"export {ranks}unset ${{!PET_@}}; cd {MOUNTED_AT}; "),
                },
                "runtimePatches": [
                    {
                        "manager": "kit",
                        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
                    }
                ],
            },
        }
    )


def _command(before: str) -> list[str]:
    """The command of a container. Launchers ignore the signal that asks ranks to save; ranks handle it."""
    return ["bash", "-c", f"trap '' USR1; {before}exec ./launch.sh --resume auto"]


_SAVE = ["bash", "-c", "kill -USR1 -- -1; while kill -0 1; do sleep 1; done"]
"""Before a pod stops: asks every process in it to save, and waits for process 1."""
_MOUNTS = [{"name": "run", "mountPath": MOUNTED_AT}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
_VOLUMES: list[dict[str, Any]] = [
    {"name": "run", "persistentVolumeClaim": {"claimName": "REPLACE-ME"}},
    {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
]
"""NCCL and data loaders need more shared memory than the 64 MiB of a container."""


def _pod(plan: Plan, container: dict[str, Any]) -> dict[str, Any]:
    """The pod specification, which both kinds of jobs share."""
    selector = _selector(plan)
    return {
        "terminationGracePeriodSeconds": notice_s(plan),
        **({"nodeSelector": selector} if selector else {}),
        "containers": [container],
        "volumes": _VOLUMES,
    }


def _resources(plan: Plan) -> dict[str, Any]:
    kind = "amd.com/gpu" if runs_rocm(plan.cluster.gpu) else "nvidia.com/gpu"
    limits: dict[str, Any] = {kind: str(plan.cluster.gpus_per_node)}
    host_gib = math.ceil(plan.predicted.host_ram_gib_per_node)
    return {"limits": limits, **({"requests": {"memory": f"{host_gib}Gi"}} if host_gib else {})}


def _selector(plan: Plan) -> dict[str, str]:
    """AWS's and Google's nodes carry their type as a label; Azure's types are spelled otherwise in the catalog."""
    provider = rows("nodes").get(plan.cluster.name, {}).get("provider")
    return {"node.kubernetes.io/instance-type": plan.cluster.name} if provider in ("aws", "gcp") else {}


def _applies(plan: Plan) -> bool:
    return plan.cluster.gpu.device == "cuda"


FILES = (
    DerivedFile("k8s.jobset.yaml", jobset, _applies, target=_TARGET, own_loop=True),
    DerivedFile("k8s.trainjob.yaml", trainjob, _applies, target=_TARGET, own_loop=True),
)
