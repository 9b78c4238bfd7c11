"""Random models, clusters, jobs and legal layouts that fit; and what must hold of a plan without asking any engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

from kit.addons.lint.known_keys import KnownKeys, known_keys
from kit.cost.estimate import predict
from kit.cost.hardware import usable_gib
from kit.cost.workload import Workload
from kit.emit.accelerate import accelerate_config
from kit.emit.accelerate import applies as by_accelerate
from kit.emit.deepspeed import ds_config
from kit.emit.megatron import applies as megatron_applies
from kit.emit.megatron import megatron_settings
from kit.errors import KitError
from kit.planner.candidates import all_layouts, layouts
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.rules import is_legal
from kit.specs.catalog import described_names, load_model, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import ENGINES, EngineName, Pins, divisors

CLUSTERS = (
    "1xH100",
    "8xH100",
    "2x4xA100-40",
    "64xA100-80",
    "256xH100",
    "8xH200",
    "p4d.24xlarge:4",
    "4xRTX-4090",
    "1xTitan-RTX",
    "hgx-h200:2",
    "3x8xH100",
    "4xcpu",
    "2xcpu",
)
TRIES = 40
"""Layouts looked at for one case; a case of which none is legal and fits counts as refused."""


def random_plan(seed: int) -> Plan | None:
    """A plan of a random legal layout that fits, not only of the best one; null where there was none."""
    rng = random.Random(seed)
    model, cluster = load_model(rng.choice(described_names())), parse_cluster(rng.choice(CLUSTERS))
    job = JobSpec(
        seq_length=rng.choice([256, 512, 1024, 2048, 4096, 8192]),
        global_batch_size=rng.choice([64, 96, 256, 510, 512, 1024]),
        precision=rng.choice(["fp32", "bf16", "bf16", "fp16"]),
    )
    engine = rng.choice(ENGINES)
    offload = engine == "deepspeed" and rng.random() < 0.4
    request = Request(model=model, cluster=cluster, job=job, pins=_pins(rng, engine, cluster))
    offered = [*itertools.islice((all_layouts if offload else layouts)(request, engine), 200)]
    rng.shuffle(offered)
    for layout in offered[:TRIES]:
        if not is_legal(Workload(model=model, cluster=cluster, job=job, layout=layout)):
            continue
        predicted = predict(Workload(model, cluster, job, layout))
        if predicted.peak_gib <= usable_gib(cluster.gpu):
            return Plan(model=model, cluster=cluster, job=job, layout=layout, predicted=predicted, decisions=())
    return None


def _pins(rng: random.Random, engine: EngineName, cluster: ClusterSpec) -> Pins:
    """Enough of them that few layouts are left."""
    if engine != "megatron":
        return Pins(engine=engine, recompute=rng.choice([None, "none", "full"]))
    tp = rng.choice(divisors(cluster.gpus_per_node))
    rest = [pp for pp in divisors(cluster.num_gpus // tp) if pp <= 16]
    return Pins(engine=engine, tp=tp, pp=rng.choice(rest), cp=rng.choice([1, 1, 2]))


# ---------------------------------------------------------------- what must hold


def emitted(plan: Plan) -> dict[str, dict[str, Any]]:
    """The settings files of a plan, parsed."""
    writers = {
        "ds_config.json": (plan.layout.engine == "deepspeed", ds_config),
        "accelerate.yaml": (by_accelerate(plan), accelerate_config),
        "megatron.yaml": (megatron_applies(plan), megatron_settings),
    }
    return {name: write(plan) for name, (applies, write) in writers.items() if applies}


def problems(plan: Plan) -> list[str]:
    """Everything wrong that can be seen without an engine."""
    layout, job, gpus = plan.layout, plan.job, plan.cluster.num_gpus
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    wrong = {
        f"world size {layout.world_size} is not {gpus}": layout.world_size != gpus,
        f"micro batch · accumulation · dp is not {job.global_batch_size}": batch != job.global_batch_size,
        "does not fit": plan.predicted.peak_gib > usable_gib(plan.cluster.gpu),
    }
    found = [words for words, holds in wrong.items() if holds]
    try:
        files = emitted(plan)
    except KitError as error:
        return [*found, f"cannot be emitted: {error}"]
    if "ds_config.json" in files:
        found += deepspeed_problems(files["ds_config.json"], plan)
    if accelerate := files.get("accelerate.yaml"):
        found += unknown_keys(accelerate, known_keys("accelerate"))
        found += ["accelerate.yaml: num_processes"] * (accelerate["num_processes"] != gpus)
    return found + megatron_problems(files["megatron.yaml"], plan) if "megatron.yaml" in files else found


def deepspeed_problems(config: Mapping[str, Any], plan: Plan) -> list[str]:
    """Keys that DeepSpeed would ignore without a word, and the batch at the world size that it will see."""
    sizes = {
        "train_batch_size": plan.job.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.layout.micro_batch_size,
        "gradient_accumulation_steps": plan.layout.gradient_accumulation_steps,
    }
    wrong = [f"ds_config.json: {key} {config.get(key)}" for key, size in sizes.items() if config.get(key) != size]
    return unknown_keys(config, known_keys("DeepSpeed")) + wrong


def megatron_problems(settings: Mapping[str, Any], plan: Plan) -> list[str]:
    """What TransformerConfig takes and the model build, or nobody, refuses."""
    config, sizes, heads = settings["transformer_config"], settings["parallel_state"], plan.model.num_attention_heads
    tp, pp = sizes["tensor_model_parallel_size"], sizes["pipeline_model_parallel_size"]
    vp = sizes.get("virtual_pipeline_model_parallel_size") or 1
    groups, layers = config.get("num_query_groups") or heads, config["num_layers"]
    uneven = layers % (pp * vp) and not config.get("pipeline_model_parallel_layout")
    parts = config.get("sequence_parallel") and (tp == 1 or plan.job.seq_length % (tp * plan.layout.cp))
    wrong = {
        f"{layers} layers on {pp}·{vp} chunks": uneven,
        f"{groups} query groups on tp={tp}": config["num_attention_heads"] % tp or (groups % tp and tp % groups),
        "sequence parallelism": parts,
    }
    return [f"megatron.yaml: {words}" for words, holds in wrong.items() if holds]


def unknown_keys(config: Mapping[str, Any], known: KnownKeys, path: tuple[str, ...] = ()) -> list[str]:
    """Dotted keys that the reader does not know."""
    inside = known.inside(path)
    if inside is None:
        return []
    found = [f"{known.reader} knows no {'.'.join((*path, key))}" for key in config if key not in inside]
    nested = {key: value for key, value in config.items() if key in inside and isinstance(value, Mapping)}
    return found + [words for key, value in nested.items() for words in unknown_keys(value, known, (*path, key))]
