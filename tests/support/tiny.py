"""Tiny models, plans and run directories for the tests of this package."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit.cost.estimate import Prediction
from kit.cost.memory.peak import StageMemory
from kit.cost.reliability import Operation
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.cluster import ClusterSpec, GpuSpec
from kit.specs.families import ENCODER_DECODER, FAMILIES, Family, families_with
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import LatentAttention, ModelSpec
from kit.specs.run import CheckpointSpec, DataSpec, LoggingSpec, RunSpec, ScheduleSpec
from tests.support.in_process import kit_main

SEQ_LENGTH = 32
VOCAB_SIZE = 128


@dataclass(frozen=True)
class TinyRunDirectory:
    """What engines and the loop read of ``kit.emit.run_directory.RunDirectory``."""

    path: Path
    plan: Plan
    run: RunSpec
    settings: dict[str, Any]
    megatron: dict[str, Any] = dataclasses.field(default_factory=dict)
    edits: tuple[Any, ...] = ()


def model(family: Family = "llama", **changes: Any) -> ModelSpec:
    """Two layers, hidden 32, 4 heads, 2 key/value heads (4 where there are no fewer)."""
    shape: dict[str, Any] = {
        "name": f"tiny-{family}",
        "family": family,
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if FAMILIES[family].grouped_queries else 4,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "tied_embeddings": family == "gpt2",
        "rope_theta": None if family == "gpt2" else 10000.0,
    }
    if family in ENCODER_DECODER:
        shape |= {"encoder_layers": 2, "num_key_value_heads": 4, "rope_theta": None, "tied_embeddings": True}
    if family == "t5":
        shape |= {"relative_attention_buckets": 8, "feed_forward_proj": "gated-gelu", "tied_embeddings": False}
    if family in families_with("num_experts"):
        shape |= {
            "num_experts": 4,
            "experts_per_token": 2,
            "moe_ffn_hidden_size": 64 if family in ("mixtral", "gpt_oss", "minimax_m2") else 16,
        }
    if family == "qwen2_moe":
        shape |= {"num_shared_experts": 2}
    if family == "ministral3":
        beta = {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
        shape |= {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0} | beta}
    if family == "granite":
        shape |= {"query_pre_attn_scalar": 16}
    if family == "olmo3":
        shape |= {"sliding_window": 64, "local_rope_theta": 10000.0}
    if family == "deepseek_v3":
        latent = LatentAttention(kv_lora_rank=12, nope_head_dim=6, rope_head_dim=4, value_head_dim=7, q_lora_rank=10)
        shape |= {"num_key_value_heads": 4, "latent": latent, "head_dim": latent.query_head_dim}
    return ModelSpec(**(shape | changes))


def cluster(num_processes: int = 1) -> ClusterSpec:
    """CPU processes on one machine."""
    return ClusterSpec(
        name="cpu",
        gpu=GpuSpec(
            name="CPU",
            device="cpu",
            memory_gib=4.0,
            bf16_tflops=0.1,
            fp16_tflops=0.0,
            fp32_tflops=0.1,
            hbm_gbytes_per_s=10.0,
            pcie_gbytes_per_s=10.0,
            source="a stand-in for tests",
        ),
        gpus_per_node=num_processes,
        num_nodes=1,
        intra_node_gbytes_per_s=1.0,
        inter_node_gbytes_per_s=0.0,
        host_ram_gib=64.0,
        nvme_gib=64.0,
        source="a stand-in for tests",
    )


def plan(spec: ModelSpec | None = None, *, job: dict[str, Any] | None = None, **layout: Any) -> Plan:
    """A plan of the torch engine; ``layout`` and ``job`` override its defaults."""
    chosen = Layout(**({"engine": "torch", "implementation": "huggingface", "micro_batch_size": 2} | layout))
    settings: dict[str, Any] = {
        "seq_length": SEQ_LENGTH,
        "global_batch_size": chosen.global_batch_size,
        "total_tokens": 1_000_000,
        "precision": "fp32",
        "learning_rate": 1e-2,
    }
    return Plan(
        model=spec or model(),
        cluster=cluster(chosen.world_size),
        job=JobSpec(**(settings | (job or {}))),
        layout=chosen,
        predicted=Prediction(
            memory=(StageMemory(stage=0, components_gib={"weights": 0.001}),),
            host_ram_gib_per_node=0.0,
            step_time_s=0.1,
            step_time_components_s={"compute": 0.1},
            tokens_per_s=1.0,
            mfu=0.1,
            bubble_fraction=0.0,
            days=1.0,
            cost_usd=None,
            operation=Operation(
                checkpoint_gb=0.0,
                checkpoint_s=0.0,
                checkpoint_interval_s=1.0,
                hours_between_failures=1.0,
                goodput=1.0,
                data_mbytes_per_s=0.0,
                checkpoint_usd_per_month=0.0,
            ),
        ),
        decisions=(),
    )


def run_directory_spec(**run: Any) -> RunSpec:
    """A RunSpec whose data nobody reads."""
    return RunSpec(**({"data": DataSpec(train="nowhere")} | run))


def run_directory(path: Path, chosen: Plan | None = None, **run: Any) -> TinyRunDirectory:
    """An existing directory ``path`` with a plan; ``run`` overrides the RunSpec's defaults."""
    path.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "data": DataSpec(train=str(path / "train"), validation=None),
        "steps": 6,
        "seed": 7,
        "schedule": ScheduleSpec(warmup_steps=2),
        "checkpoint": CheckpointSpec(every_steps=2, keep_last=2),
        "logging": LoggingSpec(every_steps=1),
    }
    return TinyRunDirectory(path=path, plan=chosen or plan(), run=RunSpec(**(settings | run)), settings={})


def emitted(directory: Path, spec: ModelSpec, extra: dict[str, Any], **layout: Any) -> Path:
    """The run directory that ``kit emit`` writes of a recipe with ``extra``, on two CPU processes."""
    job = {"seq_length": SEQ_LENGTH, "global_batch_size": 8, "precision": "fp32"}
    recipe = {"model": strict_yaml.to_plain(spec), "cluster": "2xcpu", "job": job, "layout": layout, "extra": extra}
    recipe["run"] = {"steps": 1, "data": {"train": "train"}}
    (directory / "own.yaml").write_text(strict_yaml.dump(recipe))
    assert kit_main("emit", str(directory / "own.yaml"), "--out", str(directory / "run")).code == 0
    return directory / "run"


def with_layout(rundir: TinyRunDirectory, **layout: Any) -> TinyRunDirectory:
    """Copies the run to another layout."""
    changed = dataclasses.replace(rundir.plan.layout, **layout)
    return dataclasses.replace(rundir, plan=dataclasses.replace(rundir.plan, layout=changed))


def documents(count: int = 40, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[np.ndarray]:
    """Random documents of 1 to 60 tokens with a repeating pattern, so that a model can learn something."""
    generator = np.random.default_rng(seed)
    return [
        (np.arange(length) * stride + start) % vocab_size
        for length, stride, start in zip(
            generator.integers(1, 60, count),
            generator.integers(1, 4, count),
            generator.integers(0, vocab_size, count),
            strict=True,
        )
    ]
