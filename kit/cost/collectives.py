"""How long collectives take: ring volumes over the link that the group's ranks share.

A ring all-reduce of S bytes over n ranks sends 2(n−1)/n·S through every rank, an all-gather or reduce-scatter
(n−1)/n·S of the full size S (Thakur et al. 2005; NCCL's bus bandwidth counts the same).
"""

from __future__ import annotations

from typing import NamedTuple

from kit.cost.hardware import shared
from kit.specs.cluster import ClusterSpec
from kit.specs.layout import Layout
from kit.units import GIB

LATENCIES = 10
"""A message this many times longer than the link's latency is bandwidth, within a tenth."""
BUCKET_SHARE = 0.02
"""Part of a GPU's memory for a bucket."""


class Group(NamedTuple):
    """Ranks that talk to each other, as the links see them."""

    size: int
    bytes_per_s: float
    """What a ring reaches per rank."""
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
        """Seconds to gather (or reduce-scatter) ``size_bytes`` in full, in so many collectives."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) / self.size * size_bytes / self.bytes_per_s + messages * self.latency_s

    def all_to_all_s(self, size_bytes: float) -> float:
        """Seconds in which each rank sends ``size_bytes`` in equal parts to all, itself included.

        Parts for its own node go over the inner link, the others over its port, at the same time.
        """
        if self.size == 1:
            return 0.0
        on_node = self.size / self.nodes
        inside = (on_node - 1) / self.size * size_bytes / self.inner_bytes_per_s
        across = (self.size - on_node) / self.size * size_bytes / self.port_bytes_per_s if self.nodes > 1 else 0.0
        return max(inside, across) + self.latency_s


def group(cluster: ClusterSpec, size: int, stride: int) -> Group:
    """``size`` ranks, ``stride`` apart.

    Across nodes, the ranks that a group has on one node share out the ring between their network ports (NCCL builds a
    ring per port), so the node's ports in use set the speed, up to the link inside.
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
    """Elements of 2 bytes whose ring over the data-parallel ranks takes ten times as long as its latency: more gains
    less than a tenth. At most a fiftieth of the GPU's memory; DeepSpeed holds two such buckets."""
    ring = group(cluster, layout.dp * layout.cp, layout.tp)
    elements = int(LATENCIES * ring.latency_s * ring.bytes_per_s / 2)
    return min(elements, int(BUCKET_SHARE * cluster.gpu.memory_gib * GIB / 2))
