"""Reads a cluster that a user describes in YAML, in a file or in a recipe: a catalog node with changes, or all of it.

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
from collections.abc import Callable
from typing import Any

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.cluster import ClusterSpec, GpuSpec


def described_cluster(
    document: strict_yaml.Document,
    location: tuple[str, ...],
    cluster_of: Callable[[str], ClusterSpec],
    gpu_of: Callable[[str], GpuSpec],
) -> ClusterSpec:
    """The cluster in a file (``location`` is empty), or under a key of a recipe. ``cluster_of`` and ``gpu_of`` look up
    catalog names.

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
        try:
            data |= strict_yaml.to_plain(cluster_of(str(node)))
        except SpecError as error:
            at = (*location, "node")
            raise SpecError(f"{document.where(at)}: {'.'.join(at)}: {error}") from None
    gpu = given.get("gpu")
    if isinstance(gpu, str):
        try:
            given["gpu"] = dataclasses.asdict(gpu_of(gpu))
        except SpecError as error:
            at = (*location, "gpu")
            raise SpecError(f"{document.where(at)}: {'.'.join(at)}: {error}") from None
    elif isinstance(gpu, dict):
        given["gpu"] = {"name": "own", "source": document.name, "fp16_tflops": gpu.get("bf16_tflops"), **gpu}
    if "price_per_node_hour_usd" in given:
        data["price_date"] = None  # the date of the node's own price
    data |= {key: _number(key, value) for key, value in given.items()}
    if isinstance(data.get("gpu"), dict):
        data["gpu"] = {key: _number(key, value) for key, value in data["gpu"].items()}
    return strict_yaml.parse(ClusterSpec, data, document, location)


_FLOATS = {
    item.name
    for spec in (ClusterSpec, GpuSpec)
    for item in dataclasses.fields(spec)
    if str(item.type).startswith("float")
}


def _number(key: str, value: Any) -> Any:
    """Converts a whole number to a float, where the field needs a float: ``450`` → ``450.0``."""
    return float(value) if key in _FLOATS and type(value) is int else value
