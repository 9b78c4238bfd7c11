"""What a user has: GPUs, nodes, links, memory, price."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kit.specs.base import SPEC, Text


@dataclass(frozen=True, kw_only=True, config=SPEC)
class GpuSpec:
    """One accelerator, or one CPU process standing in for it (``device: cpu``)."""

    name: Text
    """Catalog name, for example ``H100``."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What torch calls it; ``cpu`` for rehearsals: gloo instead of NCCL."""
    generation: Text | None = None
    """volta, turing, ampere, ada, hopper, blackwell, cdna2, cdna3, cpu: decides kernels, workspaces and recipes of 8
    bits; null: that of the catalog's GPU of this name."""
    memory_gib: float = Field(gt=0)
    """Memory that the driver reports, GiB."""
    bf16_tflops: float = Field(ge=0)
    """Dense bf16 peak without sparsity; 0 where the GPU has no bf16."""
    fp16_tflops: float = Field(ge=0)
    """Dense fp16 peak without sparsity."""
    fp8_tflops: float = Field(default=0.0, ge=0)
    """Dense fp8 peak without sparsity; 0 where the GPU has no fp8."""
    fp32_tflops: float = Field(gt=0)
    """Dense fp32 peak (TF32 tensor cores where torch would use them is not counted)."""
    hbm_gbytes_per_s: float = Field(gt=0)
    """Memory bandwidth, GB/s."""
    nvlink_gbytes_per_s: float = Field(default=0.0, ge=0)
    """All of its links to other GPUs (NVLink, Infinity Fabric) together, GB/s per direction; 0 where it has none."""
    pcie_gbytes_per_s: float = Field(gt=0)
    """Host link, GB/s per direction."""
    source: Text
    """Address of the data sheet, with what was read from it."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class ClusterSpec:
    """Equal nodes of equal GPUs."""

    name: Text
    """Node type, for example ``p4d.24xlarge``; or what the user called it."""
    gpu: GpuSpec
    gpus_per_node: int = Field(gt=0)
    num_nodes: int = Field(gt=0)
    intra_node_gbytes_per_s: float = Field(gt=0)
    """Bandwidth of one GPU to the others of its node (NVLink, else PCIe), GB/s per direction."""
    inter_node_gbytes_per_s: float = Field(ge=0)
    """Fabric bandwidth per GPU, GB/s per direction; 0 for a lone node."""
    host_ram_gib: float | None = Field(default=None, gt=0)
    """Host memory of a node, GiB; null = unknown, which refuses offload."""
    nvme_gib: float | None = Field(default=None, ge=0)
    """Local NVMe of a node, GiB; null = unknown, which refuses offload to it."""
    nvme_gbytes_per_s: float | None = Field(default=None, gt=0)
    """What a node's disks read together, GB/s, as stated or measured; null = one drive is assumed (efficiency.yaml)."""
    price_per_node_hour_usd: float | None = Field(default=None, gt=0)
    """List price of a node per hour, USD, on demand; null = unknown."""
    price_date: Text | None = None
    """Date on which the price was read."""
    source: Text
    """Where the node's figures were read."""

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.gpus_per_node * self.num_nodes
