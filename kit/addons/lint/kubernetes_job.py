"""Launch lines of a Kubernetes job: the script that each container runs, and the nodes and GPUs that it has.

Kinds: Job, JobSet, Kubeflow's PyTorchJob and TrainJob; of others, every list of containers with a command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from kit.addons.lint.config import mapping
from kit.addons.lint.job import Job

_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash")
_DEEPEST = 30


def pod_scripts(data: Mapping[str, Any]) -> Iterator[tuple[str, Job]]:
    """(script, job) of every container that has a command, of one document."""
    pods = {
        name: _count(mapping(spec), "replicas")
        for name, spec in mapping(mapping(data.get("spec")).get("pytorchReplicaSpecs")).items()
    }
    yield from _found(data, sum(pods.values()) or 1, bool(pods), 0)


def _found(node: Any, nodes: int, kubeflow: bool, depth: int) -> Iterator[tuple[str, Job]]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if isinstance(node, dict):
        if not kubeflow and isinstance(node.get("numNodes"), int):
            nodes, kubeflow = node["numNodes"], True
        elif not kubeflow:
            nodes *= max(_count(node, "replicas"), _count(node, "completions"), _count(node, "parallelism"))
        if isinstance(node.get("command"), list) or isinstance(node.get("args"), list):
            yield _script(node, nodes, kubeflow)
    for each in inner if depth < _DEEPEST else ():
        yield from _found(each, nodes, kubeflow, depth + 1)


def _script(container: Mapping[str, Any], nodes: int, kubeflow: bool) -> tuple[str, Job]:
    given = (container.get(key) for key in ("command", "args"))
    words = [word for each in given if isinstance(each, list) for word in each if isinstance(word, str)]
    if words and words[0] in _SHELLS:
        text = "\n".join(word for word in words[1:] if not word.startswith("-"))
    else:
        text = " ".join(word if word.startswith("$(") else shlex.quote(word) for word in words)
    listed = container.get("env")
    env = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    names = tuple(str(each.get("name")) for each in env)
    values = (f"{each.get('name')}={shlex.quote(str(each['value']))}\n" for each in env if "value" in each)
    text = "".join(values) + re.sub(
        r"\$\((\w+)\)", lambda match: f"${match[1]}" if match[1] in names else match[0], text
    )
    ranks = kubeflow or any(name.startswith("PET_") for name in names)
    gpus = _gpus(container.get("resources") or container.get("resourcesPerNode"))
    return text, Job("kubernetes", nodes, 1, gpus, ranks_by_environment=ranks, variables=names)


def _gpus(resources: Any) -> int | None:
    limits = mapping(mapping(resources).get("limits")) or mapping(mapping(resources).get("requests"))
    count = next((value for name, value in limits.items() if str(name).endswith("/gpu")), None)
    return int(count) if isinstance(count, int | str) and str(count).isdecimal() else None


def _count(node: Mapping[str, Any], key: str) -> int:
    value = node.get(key)
    return value if isinstance(value, int) and 1 <= value < 10**6 else 1
