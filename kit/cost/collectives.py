"""Seconds of collectives: ring volume over the bandwidth of the link that the ranks of a group share.

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
