"""The job that runs a launch line: nodes, tasks and GPUs, of a batch script or of a Kubernetes job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_ASKS = re.compile(r"(?m)^#SBATCH[ \t]+(.+)")
_NUMBER = r"(?:[\w.-]+:)*(\d{1,6})\b"
_OPTIONS = {
    "nodes": r"(?:--nodes[= ]|-N[ =]?)",
    "tasks": r"(?:--ntasks[= ]|-n[ =]?)",
    "tasks_per_node": r"--n?tasks-per-node[= ]",
    "gpus": r"(?:--gpus[= ]|-G[ =]?)",
    "gpus_per_node": r"(?:--gpus-per-node[= ]|--gres[= ]gpu:)",
}


@dataclass(frozen=True)
class Job:
    """What a scheduler gives; None where the file does not say it."""

    kind: Literal["", "sbatch", "kubernetes"] = ""
    nodes: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    reaches_hosts: bool = False
    """Whether something in the script starts tasks on other hosts (srun, mpirun, ssh)."""
    names_hosts: bool = False
    """Whether the script reads a hostfile."""
    ranks_by_environment: bool = False
    """Whether PET_* variables give torchrun its nodes and ranks, as Kubeflow sets them."""
    variables: tuple[str, ...] = ()
    """Names that the job sets."""

    @staticmethod
    def of_batch(text: str) -> Job:
        """From the ``#SBATCH`` lines, if there are any."""
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        asked: list[str] = _ASKS.findall(text)
        found = {name: _last(option, asked) for name, option in _OPTIONS.items()}
        nodes = found["nodes"]
        tasks, gpus = found["tasks_per_node"], found["gpus_per_node"]
        if tasks is None and found["tasks"] is not None:
            tasks = -(-found["tasks"] // (nodes or 1))
        if gpus is None and found["gpus"] is not None:
            gpus = found["gpus"] // (nodes or 1)
        return Job(
            kind="sbatch" if asked else "",
            nodes=nodes,
            tasks_per_node=tasks,
            gpus_per_node=gpus,
            reaches_hosts=bool(re.search(r"\b(?:srun|mpirun|mpiexec|ssh|pdsh|clush)\b", code)),
            names_hosts=bool(re.search(r"(?i)host_?file|machine_?file", code)),
            ranks_by_environment="PET_" in code,
        )


def _last(option: str, asked: list[str]) -> int | None:
    found = [number for line in asked for number in re.findall(rf"(?:^|\s){option}[ \t]*{_NUMBER}", line)]
    return int(found[-1]) if found else None
