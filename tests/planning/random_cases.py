"""Random questions to the planner, by number: the same number is the same question."""

from __future__ import annotations

import random
from dataclasses import replace

from kit.planner.request import Request
from kit.specs.catalog import described_names, load_model, parse_cluster
from kit.specs.job import JobSpec, LoraSpec

_CLUSTERS = (
    "1xH100", "1xRTX-4090", "2x4xA100-40", "8xA100-80", "8xH100", "4xRTX-4090", "hgx-h200:2", "3x8xH100", "64xA100-80",
    "256xH100", "720xH100",
)  # fmt: skip
_LONGEST = 131072


def random_request(seed: int) -> Request:
    """A model of the catalog on some GPUs; every fifth trains adapters, every fifth in fp32, some of long sequences."""
    rng = random.Random(seed)
    model, cluster = load_model(rng.choice(described_names())), parse_cluster(rng.choice(_CLUSTERS))
    length = rng.choice([512, 2048, 4096, 8192, 32768, _LONGEST])
    lora = rng.choice([None, None, None, None, LoraSpec(rank=rng.choice([8, 64]), four_bit=rng.random() < 0.5)])
    job = JobSpec(
        objective="seq2seq" if model.is_encoder_decoder else "pretrain",
        seq_length=min(length, model.max_position_embeddings) if model.learned_positions else length,
        global_batch_size=rng.choice([64, 96, 510, 720, 1024]),
        precision=rng.choice(["bf16", "bf16", "bf16", "bf16", "fp32"]),
        lora=lora,
    )
    return Request(model=model, cluster=cluster, job=job)


def with_twice_the_nodes(request: Request) -> Request:
    """Twice as many of the same nodes; a lone node gets a fabric."""
    cluster = request.cluster
    links = cluster.inter_node_gbytes_per_s or 50.0
    return replace(request, cluster=replace(cluster, num_nodes=2 * cluster.num_nodes, inter_node_gbytes_per_s=links))


def with_more_memory(request: Request) -> Request:
    """The same GPUs with a quarter more memory."""
    gpu = request.cluster.gpu
    return replace(request, cluster=replace(request.cluster, gpu=replace(gpu, memory_gib=1.25 * gpu.memory_gib)))
