"""Seconds of collectives, the bytes that compressed ones send, and what compression costs.

Seconds are ring volume over the bandwidth of the link that the ranks of a group share. A ring all-reduce of S bytes
over n ranks sends 2(n−1)/n·S through every rank, an all-gather or reduce-scatter (n−1)/n·S of the full size S (Thakur
et al. 2005; NCCL's bus bandwidth counts the same).

ZeRO++ (arXiv 2306.10209) as in DeepSpeed 0.19.8. qwZ: every all-gather of weights sends int8
(partition_parameters.py, CUDAQuantizer). hpZ: the ranks of a node keep a second shard of the weights from the first
all-gather of a step until the optimizer step (stage3.py, invalidate_secondary_tensor), so **only the first forward pass
of a step** gathers across nodes, also with gradient accumulation. qgZ: gradients are reduced in int4, first inside each
node, then between nodes (comm/coalesced_collectives.py, all_to_all_quant_reduce).
"""

from __future__ import annotations

from typing import NamedTuple

from kit.cost.hardware import shared
from kit.specs.cluster import ClusterSpec
from kit.specs.layout import GradientCompression, Layout
from kit.specs.model import ModelSpec
from kit.units import GIB

LATENCIES = 10
"""If sending a message takes this many times the latency, latency adds at most a tenth."""
BUCKET_SHARE = 0.02
"""Largest share of a GPU's memory for one bucket."""


class Group(NamedTuple):
    """A process group: its size, its nodes, and the bandwidth and latency of its links."""

    size: int
    bytes_per_s: float
    """Ring bandwidth per rank."""
    latency_s: float
    """Latency of one trip around the ring."""
    nodes: int = 1
    """Nodes over which the ranks are spread."""
    inner_bytes_per_s: float = 0.0
    """Bandwidth from one rank to others of its node."""
    port_bytes_per_s: float = 0.0
    """Bandwidth from one rank to other nodes."""

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds to sum ``size_bytes`` over the group."""
        return 2 * self.all_gather_s(size_bytes)

    def all_gather_s(self, size_bytes: float, messages: int = 1) -> float:
        """Seconds to all-gather or reduce-scatter ``size_bytes`` (the full size) in ``messages`` collectives."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) / self.size * size_bytes / self.bytes_per_s + messages * self.latency_s

    def all_to_all_s(self, size_bytes: float) -> float:
        """Seconds of an all-to-all in which each rank sends ``size_bytes`` in equal parts to all ranks.

        Parts for the same node use the inner link, other parts the network port, at the same time.
        """
        if self.size == 1:
            return 0.0
        on_node = self.size / self.nodes
        inside = (on_node - 1) / self.size * size_bytes / self.inner_bytes_per_s
        across = (self.size - on_node) / self.size * size_bytes / self.port_bytes_per_s if self.nodes > 1 else 0.0
        return max(inside, across) + self.latency_s


def group(cluster: ClusterSpec, size: int, stride: int) -> Group:
    """The group of ``size`` ranks that are ``stride`` apart.

    NCCL builds one ring per network port. So the bandwidth across nodes is the sum of the ports of the group's ranks on
    one node, at most the bandwidth inside a node.
    """
    efficiency = shared()
    intra = cluster.intra_node_gbytes_per_s * 1e9 * efficiency.intra_node_link
    if size * stride <= cluster.gpus_per_node or size == 1:
        return Group(size, intra, (size - 1) * efficiency.intra_node_hop_us * 1e-6, inner_bytes_per_s=intra)
    on_one_node = max(1, min(size, cluster.gpus_per_node // stride))
    port = cluster.inter_node_gbytes_per_s * 1e9 * efficiency.inter_node_link
    inter = port * on_one_node
    nodes = -(-size // on_one_node)
    hops_us = (nodes - 1) * efficiency.inter_node_hop_us + (size - nodes) * efficiency.intra_node_hop_us
    return Group(size, min(intra, inter), hops_us * 1e-6, nodes, intra, port)


def fills_the_link(cluster: ClusterSpec, layout: Layout) -> int:
    """Bucket size in 16-bit elements at which a ring over the data-parallel ranks takes ten times its latency; larger
    buckets gain less than a tenth. At most a fiftieth of the GPU's memory, because DeepSpeed has two such buckets."""
    ring = group(cluster, layout.dense_dp, layout.tp)
    elements = int(LATENCIES * ring.latency_s * ring.bytes_per_s / 2)
    return min(elements, int(BUCKET_SHARE * cluster.gpu.memory_gib * GIB / 2))


# ---------------------------------------------------------------- compressed: ZeRO++ on ZeRO-3, DDP's hooks

INT8_BYTES = 1.0 + 4 / 8000
"""Bytes sent per weight: one, and its part of an fp32 scale per 8,000 weights (CUDAQuantizer.target_group_size)."""
INT4_BYTES = 0.5 + 4 / 4096
"""Bytes sent per gradient: half, and its part of an fp32 scale. A group has at least one row of a matrix
(all_to_all_quant_reduce)."""
DEQUANTISE_BYTES = 12.0
"""Memory moved per gathered weight, bytes: read int8, write fp16, read fp16 to cast to bf16, write bf16, copy."""
QUANTISE_GRADIENT_BYTES = 6.0
"""Memory moved per gradient, bytes: read 16 bits, write int4, read received int4, sum, write; in two rounds."""

POWERSGD_RANK = 4
"""Columns of each factor. Vogels et al. (arXiv 1905.13727, table 3) reach SGD's accuracy with 2 to 4."""
POWERSGD_BYTES = 60.0
"""Memory moved per gradient: add the error (12), two GEMMs (8), compute the approximation (8), compute the new error
(12), copy into and out of DDP's bucket (20). Counted operator by operator in torch's powerSGD_hook.py."""
CAST_BYTES = 12.0
"""Memory moved per gradient by the bf16 hook: fp32 read, bf16 written, and back (default_hooks.py)."""


class ZeroPlusPlus(NamedTuple):
    """The parts of ZeRO++ that are on."""

    hpz: int = 1
    """Ranks that share a second copy; 1 = none."""
    weights: bool = False
    gradients: bool = False

    @classmethod
    def of(cls, layout: Layout) -> ZeroPlusPlus | None:
        """What a layout asks for, or None."""
        found = cls(layout.zero_hpz, layout.zero_quantized_weights, layout.zero_quantized_gradients)
        return None if found == cls() else found


def gradient_bytes(model: ModelSpec, kind: GradientCompression, width: float, parameters: int) -> float:
    """Bytes sent per gradient, if each is sent once. ``width``: bytes of an uncompressed gradient; ``parameters``:
    number of the model's parameters.

    PowerSGD sends two fp32 factors of each matrix. Vectors, and matrices too small to gain, are sent uncompressed.
    """
    if kind == "none":
        return width
    if kind == "bf16":
        return 2.0
    factors = sum(4.0 * POWERSGD_RANK * (rows + columns) for rows, columns in _matrices(model))
    covered = sum(rows * columns for rows, columns in _matrices(model))
    return (factors + 4.0 * max(0, parameters - covered)) / parameters


def kernel_bytes(kind: GradientCompression) -> float:
    """Memory moved per gradient and step by the hook itself."""
    return {"none": 0.0, "bf16": CAST_BYTES, "powersgd": POWERSGD_BYTES}[kind]


def _matrices(model: ModelSpec) -> list[tuple[int, int]]:
    """(rows, columns) of every matrix in transformers. A layer's experts are one tensor per projection, which DDP's
    hook flattens to (experts, elements of one expert)."""
    h, kv, query = model.hidden_size, model.key_value_width, model.query_width
    layer = [(query, h), (kv, h), (kv, h), (h, query)]
    if model.num_experts:
        wide = model.moe_ffn_hidden_size
        layer += [(model.num_experts, 2 * wide * h), (model.num_experts, wide * h), (model.num_experts, h)]
    else:
        layer += [(model.ffn_hidden_size, h)] * (2 if model.gated_mlp else 1) + [(h, model.ffn_hidden_size)]
    ends = [(model.vocab_size, h)] * (1 if model.tied_embeddings else 2)
    return layer * model.num_layers + ends
