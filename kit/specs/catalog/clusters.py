"""Text such as ``8xH100`` or ``aws:p4d.24xlarge:8``, or a description in YAML → a cluster.

A description, in a file or in a recipe, is a catalog node with changes, or all of it:

    node: p5.48xlarge          # optional: start from this row, then every key below changes it
    num_nodes: 4
    gpu: H100                  # a GPU of the catalog, or a mapping of GpuSpec
    gpus_per_node: 8
    intra_node_gbytes_per_s: 450
    inter_node_gbytes_per_s: 50
    host_ram_gib: 2048
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog.rows import rows
from kit.specs.cluster import MOST_NODES, ClusterSpec, GpuSpec
from kit.specs.text import alike, nearest, refuse, shown
from kit.specs.validation import trusted

_FORMS = "8xH100, 2x8xH100 (nodes x GPUs), aws:p4d.24xlarge:8 (nodes), cluster.yaml (your own), local (this machine)"
_OTHER_ORDERS = (
    r"(?P<count>[0-9]{1,9})\s*[xX×*]?\s*(?P<gpu>[a-zA-Z].*)",
    r"(?P<gpu>.*?)(?:\s*[xX×*:]\s*|\s+)(?P<count>[0-9]{1,9})",
)
"""``8 H100``, ``H100x8``, and ``H100:8`` as SkyPilot writes it."""
_OWN_KEYS = ("provider", "also", "default_for_gpu", "whole_host", "job_gpus")
"""Keys of a row of nodes.yaml that are not of ClusterSpec."""


_MOST_IN_A_NODE = 8
"""Assumed GPUs per node, if the catalog has no node with these GPUs."""
_MOST_IN_A_HOST = 16
"""Most PCIe cards of a workstation or server."""
_DESCRIBED = (
    "{gpu: {memory_gib: 24, bf16_tflops: 71, fp32_tflops: 36, hbm_gbytes_per_s: 936, pcie_gbytes_per_s: 32}, "
    "gpus_per_node: 2, intra_node_gbytes_per_s: 32}"
)
"""Example of a cluster file in one line."""


def gpu_names() -> list[str]:
    """Every GPU of the catalog."""
    return list(rows("gpus"))


def node_names() -> list[str]:
    """Every node of the catalog."""
    return list(rows("nodes"))


def cheapest_node_with(gpu: GpuSpec) -> tuple[ClusterSpec, float] | None:
    """The catalog's node with the lowest price per GPU, and USD per GPU and hour; None where no node has a price."""
    nodes = [cluster_called(name) for name, row in rows("nodes").items() if row["gpu"] == gpu.name]
    priced = [
        (node, node.price_per_node_hour_usd / node.gpus_per_node) for node in nodes if node.price_per_node_hour_usd
    ]
    return min(priced, key=lambda found: found[1], default=None)


def load_gpu(name: str) -> GpuSpec:
    """A catalog name; case, dashes and a trailing ``GB`` do not matter (``rtx4090``, ``A100-80GB``).

    Raises ``SpecError``: unknown with the nearest names, or ambiguous with the candidates (``A100`` → two sizes).
    """
    called = _gpus_called(name)
    if called and _plain(called[0]) in (_plain(name), f"rtx{_plain(name)}"):
        return trusted(GpuSpec, {"name": called[0], **rows("gpus")[called[0]]})
    if called:
        raise SpecError(f"GPU {shown(name)} is named with its memory size: {' or '.join(called)}")
    raise SpecError(
        f"GPU {shown(name)} is not in the catalog ({nearest(name, gpu_names())}); or write its own figures in the "
        f"place of these into card.yaml, for --gpus card.yaml: {_DESCRIBED}"
    )


def _gpus_called(name: str) -> list[str]:
    """The GPU of this name; or all memory sizes of the GPU, of which the name says none."""
    wanted = _plain(name)
    exact = [known for known in gpu_names() if _plain(known) in (wanted, f"rtx{wanted}")]
    sized = [known.rpartition("-") for known in gpu_names()]
    return exact[:1] or ["".join(parts) for parts in sized if parts[2].isdigit() and _plain(parts[0]) == wanted]


def parse_cluster(text: str) -> ClusterSpec:
    """A cluster from text; see ``_FORMS``. Fewer GPUs than a node has are a part of one node.

    Raises ``SpecError`` for another form, an unknown name, no GPUs, a number that is not a whole number of nodes, an
    invalid file, or facts of this machine that are unknown.
    """
    if text.strip().lower() in ("local", "this"):
        from kit.specs.local import local_cluster  # asks the machine; most plans are for another

        return local_cluster({name: load_gpu(name) for name in gpu_names()})
    if text.endswith((".yaml", ".yml")):
        return described_cluster(strict_yaml.read(Path(text)), (), parse_cluster)
    return cluster_called(text)


def cluster_called(text: str) -> ClusterSpec:
    """A cluster of catalog GPUs or nodes; reads no file and does not inspect this machine. Raises ``SpecError``."""
    gpus = re.fullmatch(r"(?:(\d{1,9})x)?(\d{1,9})x(.+)", text.strip(), flags=re.IGNORECASE)
    if gpus:
        nodes, count, name = gpus.groups()
        return _from_gpus(text, name.strip(), int(count), None if nodes is None else int(nodes))
    *words, last = text.strip().lower().split(":")
    nodes_given = re.fullmatch(r"-?\d{1,9}", last) is not None
    number, words = (int(last), words) if nodes_given else (1, [*words, last])
    node = _node_name(words[-1]) if words and len(words) <= 2 else None
    if node is not None:
        return _from_node(text, words[0] if len(words) == 2 else None, node, number)
    for form in _OTHER_ORDERS:
        if (match := re.fullmatch(form, text.strip())) and (names := _gpus_called(match["gpu"])):
            meant = " or ".join(f"{match['count']}x{gpu}" for gpu in names)
            raise SpecError(f"cluster {shown(text)} is not understood; did you mean {meant}?")
    if names := _gpus_called(text):
        meant = " or ".join(f"1x{gpu}" for gpu in names) + f" or 8x{names[0]}" * (len(names) == 1)
        raise SpecError(f"cluster {shown(text)} has no number of GPUs; did you mean {meant}?")
    near = alike(_word(text), node_names())
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    raise SpecError(f"cluster {shown(text)} is not understood; forms are {_FORMS}{meant}")


def _from_gpus(text: str, name: str, count: int, nodes: int | None) -> ClusterSpec:
    if count == 0 or nodes == 0:
        raise SpecError(f"cluster {shown(text)} has no GPU; training needs at least one, for example 1x{name}")
    gpu = load_gpu(name)
    nodes_with_it = (key for key, row in rows("nodes").items() if row["gpu"] == gpu.name and row.get("default_for_gpu"))
    node_name = next(nodes_with_it, None)
    if node_name is None:
        return _lone_node(text, gpu, count, nodes)
    row = rows("nodes")[node_name]
    per_node = int(row["gpus_per_node"])
    if row.get("whole_host") and not row["inter_node_gbytes_per_s"] and count <= _MOST_IN_A_HOST and nodes in (None, 1):
        nodes = 1  # a workstation may have any number of cards
    elif nodes is None:
        nodes, count = _whole_nodes(text, gpu.name, node_name, count, per_node, row.get("job_gpus", per_node))
    elif count > per_node:
        raise SpecError(
            f"cluster {shown(text)}: {node_name} has {per_node} GPUs, not {count}; use {nodes}x{per_node}x{gpu.name}, "
            "or describe the node as a mapping"
        )
    return _build(text, node_name, count, nodes)


def _lone_node(text: str, gpu: GpuSpec, count: int, nodes: int | None) -> ClusterSpec:
    """One node with GPUs that no catalog node has; its figures are those of the GPU's data sheet."""
    if count > _MOST_IN_A_NODE or (nodes or 1) > 1:
        raise SpecError(
            f"cluster {shown(text)}: no node of the catalog has {gpu.name}, so nothing is known of links between "
            f"nodes; use up to {_MOST_IN_A_NODE} GPUs, or describe the cluster in a YAML file"
        )
    return ClusterSpec(
        name=f"{gpu.name} node",
        gpu=gpu,
        gpus_per_node=count,
        num_nodes=1,
        intra_node_gbytes_per_s=gpu.nvlink_gbytes_per_s or gpu.pcie_gbytes_per_s,
        inter_node_gbytes_per_s=0.0,
        source=f"links as in the row of {gpu.name} in gpus.yaml; no node of the catalog has it",
    )


def _whole_nodes(text: str, gpu: str, node_name: str, count: int, per_node: int, of_jobs: int) -> tuple[int, int]:
    """(nodes, GPUs of each). ``of_jobs``: GPUs of a node that jobs take where whole nodes do not add up."""
    if count <= per_node:
        return 1, count
    if count % per_node and count % of_jobs == 0:
        return count // of_jobs, of_jobs
    if count % per_node:
        below = count - count % per_node
        raise SpecError(
            f"cluster {shown(text)}: {count} GPUs are not whole nodes of {per_node} ({node_name}); use "
            f"{below}x{gpu} or {below + per_node}x{gpu}, or nodes x GPUs of each as in 2x{per_node // 2}x{gpu}"
        )
    return count // per_node, per_node


def _from_node(text: str, provider: str | None, name: str, nodes: int) -> ClusterSpec:
    row = rows("nodes")[name]
    offered = row.get("provider")
    fix = f"use {offered}:{name}" if offered else f"{name} belongs to no provider: use {name}:{nodes}"
    reasons = {
        f"cluster {shown(text)}: {provider!r} has no {name}; {fix}": provider is not None and provider != offered,
        f"cluster {shown(text)} has no node; training needs at least one, for example {name}:1": nodes <= 0,
    }
    refuse(reasons)
    return _build(text, name, int(row["gpus_per_node"]), nodes)


def _build(text: str, node_name: str, gpus_per_node: int, nodes: int) -> ClusterSpec:
    row = dict(rows("nodes")[node_name])
    whole = int(row["gpus_per_node"])
    reasons = {
        f"cluster {shown(text)} has {nodes:,} nodes; use at most {MOST_NODES:,}": nodes > MOST_NODES,
        f"cluster {shown(text)}: {node_name} has no fabric to other nodes; use up to {whole} GPUs, or describe the "
        "cluster as a mapping": nodes > 1 and not row["inter_node_gbytes_per_s"],
    }
    refuse(reasons)
    data: dict[str, Any] = {key: value for key, value in row.items() if key not in _OWN_KEYS}
    data |= {"name": node_name, "gpu": load_gpu(row["gpu"]), "num_nodes": nodes}
    if gpus_per_node != whole:
        # A part of a server has its share of memory and disks (a rank's pinned memory lies on one NUMA node), and no
        # price, because providers rent whole servers.
        share = 1.0 if row.get("whole_host") else gpus_per_node / whole
        for key in ("host_ram_gib", "host_memory_gbytes_per_s", "nvme_gib"):
            data[key] = data[key] * share if data.get(key) else None
        data |= {"gpus_per_node": gpus_per_node, "price_per_node_hour_usd": None, "price_date": None}
    return trusted(ClusterSpec, data)


def _node_name(word: str) -> str | None:
    """A row of nodes.yaml by its name, its short name, or as Azure writes it (``Standard_ND96isr_H100_v5``)."""
    word = word.replace("_", "-").removeprefix("standard-")
    return next((name for name, row in rows("nodes").items() if word in (name, row.get("also"))), None)


def _plain(name: str) -> str:
    """Letters and digits only, without a trailing GB."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("gb")


def _word(text: str) -> str:
    """The part of a cluster text that looks like a name."""
    parts = [part for part in text.split(":") if part and not part.lstrip("-").isdigit()]
    return parts[-1] if parts else text


def described_cluster(
    document: strict_yaml.Document, location: tuple[str, ...], cluster_of: Callable[[str], ClusterSpec]
) -> ClusterSpec:
    """The cluster in a file (``location`` is empty), or under a key of a recipe. ``cluster_of`` looks up its node.

    Raises SpecError with the line of every invalid value.
    """
    given = document.data
    for key in location:
        given = given[key]
    if not isinstance(given, dict):
        return strict_yaml.parse(ClusterSpec, given, document, location)
    given, name = dict(given), document.name.removesuffix(".yaml").removesuffix(".yml")
    data: dict[str, Any] = {"name": name, "num_nodes": 1, "inter_node_gbytes_per_s": 0.0, "source": document.name}
    node = given.pop("node", None)
    if node is not None:
        with document.at((*location, "node")):
            data |= strict_yaml.to_plain(cluster_of(str(node)))
    gpu = given.get("gpu")
    if isinstance(gpu, str):
        with document.at((*location, "gpu")):
            given["gpu"] = dataclasses.asdict(load_gpu(gpu))
    elif isinstance(gpu, dict):
        given["gpu"] = {"name": "own", "source": document.name, "fp16_tflops": gpu.get("bf16_tflops"), **gpu}
    if "price_per_node_hour_usd" in given:
        data["price_date"] = None  # the date of the node's own price
    return strict_yaml.parse(ClusterSpec, data | given, document, location)
