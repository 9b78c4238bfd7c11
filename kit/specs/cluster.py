"""What a user has: GPUs, nodes, links, memory, price."""

from __future__ import annotations

from typing import Annotated, Literal

from kit.errors import SpecError
from kit.specs.validation import Count, Name, Rate, Text, Within, spec

_LARGEST_GIB = 2**20
"""A pebibyte: no GPU, host or node's disks have it."""
_MOST_GPUS_OF_A_NODE = 4096
MOST_NODES = 2**16
"""The largest clusters have 25,000; a search over all ways to split a million takes minutes."""
LARGEST_PRICE = 1e6


@spec
class GpuSpec:
    """One accelerator, or one CPU process standing in for it (``device: cpu``)."""

    name: Name
    """Catalog name, for example ``H100``."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What torch calls it; ``cpu`` for rehearsals: gloo instead of NCCL."""
    generation: Text | None = None
    """volta, turing, ampere, ada, hopper, blackwell, cdna2, cdna3, cpu: decides kernels, workspaces and recipes of 8
    bits; null: that of the catalog's GPU of this name."""
    memory_gib: Annotated[float, Within(ge=1e-3, le=_LARGEST_GIB)]
    """Memory that the driver reports, GiB."""
    bf16_tflops: Rate
    """Dense bf16 peak without sparsity; 0 where the GPU has no bf16."""
    fp16_tflops: Rate
    """Dense fp16 peak without sparsity."""
    fp8_tflops: Rate = 0.0
    """Dense fp8 peak without sparsity; 0 where the GPU has no fp8."""
    fp32_tflops: Annotated[Rate, Within(gt=0)]
    """Dense fp32 peak (TF32 tensor cores where torch would use them is not counted)."""
    hbm_gbytes_per_s: Annotated[Rate, Within(gt=0)]
    """Memory bandwidth, GB/s."""
    nvlink_gbytes_per_s: Rate = 0.0
    """All of its links to other GPUs (NVLink, Infinity Fabric) together, GB/s per direction; 0 where it has none."""
    pcie_gbytes_per_s: Annotated[Rate, Within(gt=0)]
    """Host link, GB/s per direction."""
    source: Text
    """Address of the data sheet, with what was read from it."""


@spec
class ClusterSpec:
    """Equal nodes of equal GPUs."""

    name: Name
    """Node type, for example ``p4d.24xlarge``; or what the user called it."""
    gpu: GpuSpec
    gpus_per_node: Annotated[int, Count(gt=0, le=_MOST_GPUS_OF_A_NODE)]
    num_nodes: Annotated[int, Count(gt=0, le=MOST_NODES)]
    intra_node_gbytes_per_s: Annotated[Rate, Within(gt=0)]
    """Bandwidth of one GPU to the others of its node (NVLink, else PCIe), GB/s per direction."""
    inter_node_gbytes_per_s: Rate
    """Fabric bandwidth per GPU, GB/s per direction; 0 for a lone node."""
    host_ram_gib: Annotated[float, Within(gt=0, le=_LARGEST_GIB)] | None = None
    """Host memory of a node, GiB; null = unknown, which refuses offload."""
    host_memory_gbytes_per_s: Annotated[Rate, Within(gt=0)] | None = None
    """Bandwidth of a node's host memory by its data sheet, GB/s; null = a slow host's is assumed (efficiency.yaml)."""
    nvme_gib: Annotated[float, Within(ge=0, le=_LARGEST_GIB)] | None = None
    """Local NVMe of a node, GiB; null = unknown, which refuses offload to it."""
    nvme_gbytes_per_s: Annotated[Rate, Within(gt=0)] | None = None
    """What a node's disks read together, GB/s, as stated or measured; null = one drive is assumed (efficiency.yaml)."""
    transformer_engine: bool = False
    """Whether NVIDIA's Transformer Engine is installed on the nodes: Megatron's layers are then its own."""
    price_per_node_hour_usd: Annotated[float, Within(gt=0, le=LARGEST_PRICE)] | None = None
    """List price of a node per hour, USD, on demand; null = unknown."""
    price_date: Text | None = None
    """Date on which the price was read."""
    source: Text
    """Where the node's figures were read."""

    def __post_init__(self) -> None:
        if self.num_nodes > 1 and not self.inter_node_gbytes_per_s:
            raise SpecError(
                f"inter_node_gbytes_per_s=0 of {self.name} with num_nodes={self.num_nodes}: ranks of different nodes "
                "exchange data; give the fabric's GB/s per GPU, or use one node"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.gpus_per_node * self.num_nodes
