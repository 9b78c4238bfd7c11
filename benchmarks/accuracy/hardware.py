"""GPUs and links of published rows: the catalog's."""

from __future__ import annotations

import dataclasses
import re

from benchmarks.accuracy.cleaned import number_of
from benchmarks.accuracy.pipelines import NotPredictedError, Row
from kit.errors import SpecError
from kit.specs.catalog import gpu_names, load_gpu
from kit.specs.catalog.rows import rows
from kit.specs.cluster import ClusterSpec, GpuSpec

OWN = {
    "V100": load_gpu("V100-32"),
    "H100-96GB-HBM2e-500W": dataclasses.replace(
        load_gpu("H100"),
        name="H100-96GB-HBM2e-500W",
        memory_gib=94.0,
        hbm_gbytes_per_s=2400.0,
        source="torchtitan's tables: H100, 96 GB HBM2e at 2.4 TB/s, 500 W",
    ),
}
"""GPUs of rows that the catalog does not have, or not under this name."""

DEFAULT_FABRIC_GBITS = {"A100": 200.0, "A800": 200.0, "V100": 50.0}
"""Assumed Gbit/s per GPU between nodes, as in the DGX of that GPU, if a row states none; 400 for later GPUs."""

NVLINK_DOMAIN = 64
"""GPUs of a GB200/GB300 rack's NVLink domain (72) that runs use, since sizes are powers of two."""


def gpu_of(name: str) -> GpuSpec:
    """The GPU of a row, with the catalog's figures if the catalog has it."""
    if name in OWN:
        return OWN[name]
    try:
        return load_gpu(name)
    except SpecError as error:
        known = _same_part(name)
        if known is None:
            raise NotPredictedError(f"no data-sheet figures of {name}: {error}") from None
    return gpu_of(known)


SIZE_TOLERANCE = 0.12
"""Relative tolerance of memory sizes: a GPU sold with 192 GB shows 178 GiB."""


def _same_part(name: str) -> str | None:
    """kit's name for a GPU that a table names with maker, socket and memory: ``NVIDIA A100-SXM4-80GB``, ``H100 80GB``.

    PCIe cards are different GPUs. A stated memory size must be that of the GPU.
    """
    words = [word for word in re.split(r"[\s_/-]+", name) if not re.fullmatch(SAID_BESIDE, word, re.IGNORECASE)]
    size = re.fullmatch(r"(\d+)(?:GB|GiB)?", words[-1], re.IGNORECASE) if len(words) > 1 else None
    family = "-".join(words[:-1] if size else words).upper()
    parts = {known: load_gpu(known).memory_gib for known in gpu_names()}
    same = [known for known in parts if re.fullmatch(rf"{re.escape(family)}(-\d+)?", known)]
    if size:
        wanted = float(size.group(1))
        same = [known for known in same if abs(parts[known] / wanted - 1) < SIZE_TOLERANCE]
    return same[0] if same and (len(same) == 1 or size) else None


SAID_BESIDE = r"NVIDIA|AMD|INSTINCT|TESLA|SXM\d?|OAM|HGX|DGX|GPU|NVL\d+|HBM\d\w?"
"""Words in a GPU's name that do not change which GPU it is."""


def cluster_of(row: Row) -> ClusterSpec:
    """The cluster that a row ran on; links per GPU and direction."""
    stated = row["cluster"]
    name, size = str(stated.get("gpu")), stated.get("gpu_memory_gib")
    gpu = gpu_of(f"{name}-{size}" if size and f"{name}-{size}" in gpu_names() else name)
    total = stated.get("num_gpus") or 1
    whole = NVLINK_DOMAIN if gpu.name.startswith("GB") else stated.get("gpus_per_node") or 8
    per_node = min(whole, total)
    fabric = next((gbits for prefix, gbits in DEFAULT_FABRIC_GBITS.items() if gpu.name.startswith(prefix)), 400.0)
    like = (each for each in rows("nodes").values() if each["gpu"] == gpu.name and each.get("default_for_gpu"))
    node: Row = next(like, {})
    return ClusterSpec(
        name=f"{total} x {gpu.name}",
        gpu=gpu,
        gpus_per_node=per_node,
        num_nodes=max(1, -(-total // per_node)),
        intra_node_gbytes_per_s=_link(str(stated.get("intra_node") or ""), gpu),
        inter_node_gbytes_per_s=(number_of(stated.get("inter_node_gbps_per_gpu")) or fabric) / 8,
        host_memory_gbytes_per_s=node.get("host_memory_gbytes_per_s", 0.0) * per_node / node.get("gpus_per_node", 1)
        or None,
        source="published row",
    )


def _link(text: str, gpu: GpuSpec) -> float:
    """GB/s per direction inside a node: half of the stated figure, or else the GPU's own."""
    if found := re.search(r"([\d.]+) ?GB/s", text):
        return float(found.group(1)) / 2
    return 25.0 if "PCIe" in text else gpu.nvlink_gbytes_per_s or gpu.pcie_gbytes_per_s


def generation_of(name: str) -> str:
    """The generation of a GPU by its marketing name; decides attention kernels and workspace sizes."""
    marks = {
        "blackwell": ("GB200", "B200", "Blackwell", "GB300", "B300"),
        "hopper": ("H100", "H200", "H800", "H20", "GH200"),
        "ampere": ("A100", "A800", "A10", "3090"),
    }
    return next((generation for generation, names in marks.items() if any(mark in name for mark in names)), "unknown")
