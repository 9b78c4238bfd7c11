"""Scales a plan down to a few CPU processes: the same engine and kinds of parallelism, a tiny model of the same family.

Every parallel size above one becomes two; but an interleaved pipeline has four stages of two chunks, and hpZ four
data-parallel ranks. Settings that a CPU does not support are replaced, and listed in ``ScaledDown.replaced``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs.catalog import parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import TRL, JobSpec, LoraSpec, Precision
from kit.specs.layout import ZERO_KEYS, Layout, Pins, describe
from kit.specs.model import ModelSpec

VOCAB_SIZE = 256
"""One token per byte, so that any text is data without a tokenizer."""
HEAD_DIM = 8
HEADS = 4
SEQ_LENGTH = 64
EPS = 1e-4
"""Adam's epsilon. With 1e-8 the first steps would be the gradient's sign, which rounding decides for small
gradients."""
MOST_PROCESSES = 16
_LOSSY, _KERNELS = "its kernels run on CUDA only, or it changes numbers", "it makes or chooses kernels for CUDA"
_REPLACED: dict[str, tuple[Any, str]] = {
    "zero_quantized_weights": (False, _LOSSY),
    "zero_quantized_gradients": (False, _LOSSY),
    "gradient_compression": ("none", _LOSSY),
    "gradient_dtype": ("fp32", _LOSSY),
    "optimizer_state_dtype": ("fp32", _LOSSY),
    "fp8_param_gather": (False, _LOSSY),
    "bf16_stochastic_round": (False, _LOSSY),
    "compile_layers": (False, _KERNELS),
    "attention_kernel": ("default", _KERNELS),
}
"""Field of the layout → (its value in the copy, the reason)."""
_OF_BF16 = ("autocast", "offload_optimizer", "optimizer_offload_fraction")
"""Fields of the layout that the run in bf16 keeps, whatever the one in fp32 has."""
_STATE = ("optimizer_state_dtype", "bf16_stochastic_round")
"""More of them where weights are rounded stochastically: to the nearest their updates are lost, which has no bound."""
_NOT_ON_A_CPU = {"fp16": "DeepSpeed refuses fp16 on a CPU", "fp8": "its GEMMs need Transformer Engine"}
_EMULATED = "GEMMs in fp8 -> emulated: operands rounded to 8 bits by torchao, multiplied in fp32"


@dataclass(frozen=True)
class ScaledDown:
    """The scaled-down copy of a plan, and its differences from the plan."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    pins: Pins
    replaced: tuple[str, ...]
    """Replaced settings, ``setting -> replacement``: a CPU cannot run them, or they would blur the comparison."""
    covers: str
    """The scaled-down copy's layout in one line."""
    job_in_bf16: JobSpec | None
    """The job in the recipe's own precision, or in the nearest that a CPU supports. None for a recipe in fp32."""
    pins_in_bf16: Pins


def scaled_down(plan: Plan) -> ScaledDown:
    """The scaled-down copy of a plan. Raises SpecError for a model without a family, because the constraints on its
    sizes are not known."""
    if plan.model.approximate is not None:
        raise SpecError(
            f"model={plan.model.name} is of type {plan.model.model_type}, which is planned approximately: no smaller "
            "model of it can be made up; rehearse the recipe with a model of a described family (docs/model-types.md)"
        )
    layout, replaced = _small(plan.layout)
    model = _tiny(plan.model, layout)
    job, replaced_in_job = _short(plan.job, layout)
    pins = Pins(**{field.name: getattr(layout, field.name) for field in dataclasses.fields(Pins)})
    in_bf16 = plan.job.precision != "fp32"
    kept = {
        name: getattr(plan.layout, name) for name in (*_OF_BF16, *(_STATE if plan.layout.bf16_stochastic_round else ()))
    }
    rounded: Precision = "fp8" if _emulates(plan.job, plan.layout) else "bf16"
    return ScaledDown(
        model=model,
        cluster=parse_cluster(f"{layout.world_size}xcpu"),
        job=job,
        pins=pins,
        replaced=(*replaced, *replaced_in_job, *_left_out(plan)),
        covers=describe(layout),
        job_in_bf16=dataclasses.replace(job, precision=rounded) if in_bf16 else None,
        pins_in_bf16=pins.but(**kept) if in_bf16 else pins,
    )


def _left_out(plan: Plan) -> list[str]:
    """A rehearsal tests what kit decides, and at small sizes other keys may be refused."""
    return [f"extra: {key}={value} -> left out: not of the plan" for key, value in plan.extra.flat().items()]


def _small(layout: Layout) -> tuple[Layout, list[str]]:
    replaced: list[str] = []
    changes: dict[str, Any] = dict.fromkeys(ZERO_KEYS)
    changes |= {name: min(2, getattr(layout, name)) for name in ("tp", "cp", "ep", "etp", "vp")}
    changes["pp"] = layout.pp if layout.pp == 1 else 4 if layout.vp > 1 else 2
    if layout.first_stage_layers or layout.last_stage_layers:
        # With unequal first and last stages, a shift of layers changes the result. Equal stages would hide it.
        changes |= {"first_stage_layers": 1, "last_stage_layers": 2 if changes["pp"] == 2 else 1, "vp": 1}
    inner = changes["tp"] * changes["cp"] * changes["pp"]
    wanted = 4 if layout.zero_hpz > 1 else min(2, layout.dp)
    changes["dp"] = max(1, min(wanted, MOST_PROCESSES // inner))
    if changes["dp"] < min(2, layout.dp):
        replaced.append(f"dp={layout.dp} -> 1: {MOST_PROCESSES} processes are the limit")
    changes["zero_hpz"] = min(2, layout.zero_hpz)
    changes["micro_batch_size"] = min(2, layout.micro_batch_size)
    changes["gradient_accumulation_steps"] = max(changes["pp"], min(2, layout.gradient_accumulation_steps))
    for name, (plain, why) in _REPLACED.items():
        value = getattr(layout, name)
        if value != plain:
            replaced.append(f"{name}={value} -> {plain}: {why}")
            changes[name] = plain
    if layout.engine == "megatron" and layout.offload_optimizer != "none":
        replaced.append("offload_optimizer=cpu -> none for the curve in fp32: Megatron offloads in bf16 alone")
        changes |= {"offload_optimizer": "none", "optimizer_offload_fraction": 1.0}
    changes["autocast"] = False  # fp32 has no autocast; the run in bf16 keeps it
    if layout.implementation == "transformer_engine":
        replaced.append("implementation=transformer_engine -> local: its kernels run on CUDA only")
        changes["implementation"] = "local"
    return dataclasses.replace(layout, **changes), replaced


def _tiny(model: ModelSpec, layout: Layout) -> ModelSpec:
    """A model of the same family and traits (grouped queries, ties, experts, windows), with the smallest widths that
    the layout can split."""
    layers = max(2, layout.pp * layout.vp)
    if layout.first_stage_layers and layout.last_stage_layers:
        layers = layout.first_stage_layers + layout.last_stage_layers + 2 * (layout.pp - 2)
    grouped = model.num_key_value_heads < model.num_attention_heads
    changes: dict[str, Any] = {
        "name": f"scaled-down-{model.name}",
        "num_layers": layers,
        "hidden_size": HEADS * HEAD_DIM,
        "ffn_hidden_size": 64,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2 if grouped else HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max(256, 2 * SEQ_LENGTH),
    }
    if model.encoder_layers:
        changes["encoder_layers"] = 2
    if model.num_experts:
        changes |= {
            "num_experts": 4,
            "experts_per_token": 2,
            "moe_ffn_hidden_size": 64 if model.moe_ffn_hidden_size == model.ffn_hidden_size else 32,
            "num_shared_experts": min(1, model.num_shared_experts),
            "first_dense_layers": min(1, model.first_dense_layers),
        }
        if model.router_groups > 1:
            changes |= {"num_experts": 8, "router_groups": 2, "router_top_groups": 1}
    if model.latent is not None:
        changes["latent"] = dataclasses.replace(
            model.latent,
            q_lora_rank=None if model.latent.q_lora_rank is None else 2 * HEAD_DIM,
            kv_lora_rank=2 * HEAD_DIM,
            nope_head_dim=HEAD_DIM,
            rope_head_dim=HEAD_DIM,
            value_head_dim=HEAD_DIM,
        )
        changes |= {"head_dim": 2 * HEAD_DIM, "num_key_value_heads": HEADS}
    if model.no_rope_every:
        changes["no_rope_every"] = 2
    if model.sliding_window is not None:
        changes["sliding_window"] = SEQ_LENGTH // 2
    return dataclasses.replace(model, **changes)


def _short(job: JobSpec, layout: Layout) -> tuple[JobSpec, list[str]]:
    replaced = []
    if job.objective in TRL:
        script = f"examples/trl_{job.objective}.py"
        replaced.append(f"objective={job.objective} -> sft, for kit's own loop; make prove NAME=examples runs {script}")
        job = dataclasses.replace(job, objective="sft", grpo=None)
    if job.precision != "fp32":
        replaced.append(f"precision={job.precision} -> fp32 for the exact curve, which rounding would blur")
    if _emulates(job, layout):
        replaced.append(_EMULATED)
    elif job.precision in _NOT_ON_A_CPU:
        replaced.append(f"precision={job.precision} -> bf16 for the rounded curve: {_NOT_ON_A_CPU[job.precision]}")
    if job.optimizer.eps != EPS:
        replaced.append(f"optimizer.eps={job.optimizer.eps:g} -> {EPS:g}: else Adam's first steps are signs")
    balancing = job.balancing
    if balancing is not None:
        kind, size = balancing.moe_router_load_balancing_type, layout.micro_batch_size
        if kind == "global_aux_loss" or (kind == "aux_loss" and size > 1):
            replaced.append(f"{kind} -> seq_aux_loss: it depends on the layout, and plain torch has another")
            balancing = dataclasses.replace(balancing, moe_router_load_balancing_type="seq_aux_loss")
        if balancing.moe_expert_capacity_factor is not None:
            replaced.append("moe_expert_capacity_factor -> null: plain torch drops no tokens")
            balancing = dataclasses.replace(balancing, moe_expert_capacity_factor=None)
    lora: LoraSpec | None = job.lora and dataclasses.replace(job.lora, rank=min(4, job.lora.rank), dropout=0.0)
    return (
        dataclasses.replace(
            job,
            seq_length=SEQ_LENGTH,
            global_batch_size=layout.global_batch_size,
            total_tokens=None,
            epochs=None,
            precision="fp32",
            learning_rate=1e-3,
            optimizer=dataclasses.replace(job.optimizer, eps=EPS),
            lora=lora,
            balancing=balancing,
        ),
        replaced,
    )


def _emulates(job: JobSpec, layout: Layout) -> bool:
    """Whether CPUs can emulate the plan's fp8 (kit/engines/kernels/fp8.py)."""
    return job.precision == "fp8" and layout.engine == "torch"
