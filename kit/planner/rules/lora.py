"""Rules of LoRA: which layers get adapters, and which engines train them."""

from __future__ import annotations

from kit.cost.model.lora import named_layers
from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.text import first, listed

_FUSED_ON_MEGATRON = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


@rule()
def lora_layers(w: Workload) -> str | None:
    """Layers are listed by the names that kit knows of the model, so that their sizes are counted."""
    chosen = w.job.lora
    if chosen is None or not (chosen.target_modules or chosen.rank_pattern or chosen.alpha_pattern):
        return None
    known = named_layers(w.model)
    for key in ("target_modules", "rank_pattern", "alpha_pattern"):
        if unknown := [name for name in getattr(chosen, key) if name not in known]:
            fix = f"use {listed(known)}" if known else "leave it out, or use lora.targets"
            return f"lora.{key} has {unknown[0]}, which kit does not know of {w.model.name}; {fix}"
        if key != "target_modules" and (idle := [name for name in getattr(chosen, key) if name not in chosen.layers]):
            return f"lora.{key} has {idle[0]}, which gets no adapter; leave it out, or add it to lora.target_modules"
    if chosen.rank_pattern and w.model.num_shared_experts and "up_proj" in chosen.layers:
        return f"lora.rank_pattern with adapters on the shared experts of {w.model.name}; list lora.target_modules"
    if w.layout.engine != "megatron":
        return None
    for fused in _FUSED_ON_MEGATRON:
        if (some := fused & set(chosen.target_modules)) and some != fused:
            return (
                f"lora.target_modules has {', '.join(sorted(some))} alone on engine=megatron, where "
                f"{', '.join(sorted(fused))} are one layer; list all of them, or use engine=torch"
            )
    if chosen.rank_pattern or chosen.alpha_pattern:
        return (
            "lora.rank_pattern or alpha_pattern on engine=megatron, whose fused layers have one rank; use engine=torch"
        )
    return None


@rule()
def dora(w: Workload) -> str | None:
    """peft's layer reads the frozen weight beside its adapter (peft/tuners/lora/dora.py, DoraLinearLayer). ZeRO-3 has
    not gathered the weight there, and tensor parallelism has a part of it. Not tested over 4 bits or with experts."""
    chosen, layout = w.job.lora, w.layout
    if chosen is None or not chosen.use_dora:
        return None
    reasons = {
        f"implementation={layout.implementation}, whose layers have no DoRA; use engine=torch": (
            layout.implementation != "huggingface"
        ),
        "zero_stage=3 on engine=deepspeed, which has not gathered the weight when peft reads it; use at most 2, or "
        "engine=torch": layout.engine == "deepspeed" and layout.zero_stage == 3,
        f"tp={layout.tp}, where a rank has a part of the weight; use tp=1": layout.tp > 1,
        "four_bit=true, which was not tested; use false": chosen.four_bit,
        f"the experts of {w.model.name}; use false": w.model.num_experts > 0,
    }
    return first(reasons, "lora.use_dora=true with {}, or leave it out")


@rule()
def quantised_experts(w: Workload) -> str | None:
    """bitsandbytes dequantises the experts of a layer together (nn/parametrize.py), and autograd keeps them for
    backward: only under full recompute they are those of one layer. Not tested where ranks share them."""
    chosen, layout = w.job.lora, w.layout
    if chosen is None or not chosen.quantize_moe_experts:
        return None
    broken = {
        "four_bit=false; use true": not chosen.four_bit,
        f"{w.model.name}, which has no experts; use false": not w.model.num_experts,
        f"objective={w.job.objective}, whose trainer is TRL; use sft": w.trl is not None,
        f"engine={layout.engine}; use torch": layout.engine != "torch",
        "zero_stage>0, tp>1 or ep>1, where ranks share experts; use DDP, or one GPU": (
            layout.zero_stage > 0 or layout.tp > 1 or layout.ep > 1
        ),
        f"recompute={layout.recompute}, which keeps the experts of all layers in 16 bits; use full": (
            layout.recompute != "full"
        ),
    }
    found = next((why for why, is_broken in broken.items() if is_broken), None)
    return found and f"lora.quantize_moe_experts=true with {found}, or leave it out"


@rule()
def lora(w: Workload) -> str | None:
    """LoRA trains on Hugging Face layers and on Megatron's local layers. NVMe offload was not tested with frozen
    weights."""
    chosen, layout = w.job.lora, w.layout
    if chosen is None:
        return None
    if layout.implementation == "huggingface" and not layout.uses_nvme:
        if layout.tp > 1 and (chosen.four_bit or chosen.dropout):
            what = "four_bit=true" if chosen.four_bit else f"dropout={chosen.dropout:g}"
            return f"lora.{what} with tp={layout.tp} on Hugging Face layers was not tested; leave it out, or use tp=1"
        return None
    if layout.engine != "megatron" or layout.implementation != "local":
        return (
            "lora={…} is not supported; leave it out, or use engine=torch, or engine=megatron with implementation=local"
        )
    reasons = {
        "four_bit=true on engine=megatron, whose layers have no 4-bit weights; use false, or engine=torch": (
            chosen.four_bit
        ),
        f"dropout={chosen.dropout:g} on engine=megatron, which has none; use 0, or engine=torch": chosen.dropout,
        f"targets=all-linear with {w.model.name} on engine=megatron: peft would adapt routed experts too, by the names "
        "of the shared ones; use targets=attention": (
            chosen.targets == "all-linear" and not chosen.target_modules and w.model.num_shared_experts
        ),
    }
    return first(reasons, "lora.{}")
