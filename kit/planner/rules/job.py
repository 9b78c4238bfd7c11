"""Rules of what the job trains, whoever shards it: adapters, optimizers, and the objectives of TRL's trainers."""

from __future__ import annotations

from kit.cost.model.lora import named_layers
from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.job import GrpoSpec
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.text import first, listed, one_of

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
    not gathered the weight there, and tensor parallelism has a part of it. Not tested over quantised
    weights or with experts."""
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
        f"{chosen.quantised}=true, which was not tested; use false": chosen.quantised,
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
    reasons = {
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
    return first(reasons, "lora.quantize_moe_experts=true with {}, or leave it out")


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"lora.eight_bit=true with zero_stage={w.layout.zero_stage} on engine={w.layout.engine}: bitsandbytes' 8-bit "
        "layers compute with codes that they hold beside the parameter, so that it cannot be sharded; use zero_stage="
        f"{0 if w.layout.engine == 'torch' else '0, 1 or 2'}, or lora.four_bit=true instead"
    ),
)
def eight_bit_is_whole(w: Workload) -> bool:
    """bitsandbytes/nn/modules.py, Linear8bitLt: forward moves weight.CB to its state, and computes with that. FSDP2's
    parameters have no CB, and ZeRO-3 would free what the layer still holds."""
    sharded = w.layout.zero_stage >= (2 if w.layout.engine == "torch" else 3)
    return sharded and w.job.lora is not None and w.job.lora.eight_bit


@rule()
def lora(w: Workload) -> str | None:
    """LoRA trains on Hugging Face layers and on Megatron's local layers. NVMe offload was not tested with frozen
    weights."""
    chosen, layout = w.job.lora, w.layout
    if chosen is None:
        return None
    whole = layout.implementation == "huggingface" and not layout.uses_nvme
    local = layout.engine == "megatron" and layout.implementation == "local"
    special = f"{chosen.quantised}=true" if chosen.quantised else f"dropout={chosen.dropout:g}"
    reasons = {
        f".{special} with tp={layout.tp} on Hugging Face layers was not tested; leave it out, or use tp=1": (
            whole and layout.tp > 1 and (chosen.quantised or chosen.dropout)
        ),
        "={…} is not supported; leave it out, or use engine=torch, or engine=megatron with implementation=local": (
            not whole and not local
        ),
        f".{chosen.quantised}=true on engine=megatron, whose layers have no quantised weights; use false, or "
        "engine=torch": local and chosen.quantised,
        f".dropout={chosen.dropout:g} on engine=megatron, which has none; use 0, or engine=torch": (
            local and chosen.dropout
        ),
        f".targets=all-linear with {w.model.name} on engine=megatron: peft would adapt routed experts too, by "
        "the names of the shared ones; use targets=attention": (
            local and chosen.targets == "all-linear" and not chosen.target_modules and w.model.num_shared_experts
        ),
    }
    return first(reasons, "lora{}")


@rule(
    message=lambda w: (
        f"optimizer.name={w.job.optimizer.name} on engine={w.layout.engine}, which "
        f"{OPTIMIZERS[w.job.optimizer.name].missing[w.layout.engine]}; use "
        f"engine={one_of(OPTIMIZERS[w.job.optimizer.name].implementations)}, or optimizer.name="
        f"{one_of(name for name, each in OPTIMIZERS.items() if w.layout.engine in each.implementations)}"
    )
)
def optimizer(w: Workload) -> bool:
    """Each engine runs the optimizers of ``OPTIMIZERS`` that name an implementation for it."""
    return w.layout.engine not in OPTIMIZERS[w.job.optimizer.name].implementations


@rule()
def bf16_state(w: Workload) -> str | None:
    """torch: moments have the dtype of the weights (torch/optim/adam.py, _init_group; torchao/optim/adam.py); nothing
    else was tried, and fp8 and PowerSGD start from fp32. DeepSpeed: config.py, _do_error_check; bf16_optimizer.py has
    fp32 state in any case; files of NVMe swapping were not measured. Megatron: optimizer_config.py, whose
    precision-aware optimizer is Transformer Engine's FusedAdam under the distributed optimizer."""
    layout, job = w.layout, w.job
    if layout.optimizer_state_dtype == "fp32":
        return None
    megatron, summed = layout.engine == "megatron", layout.gradient_accumulation_steps > 1
    torch, zero = layout.engine == "torch", layout.engine == "deepspeed"
    alone = layout.zero_stage == 1 and summed and layout.offload_optimizer == "none" and zero
    taken = ("adamw", "adamw-8bit") if torch else ("adamw",)
    reasons = {
        f"optimizer.name={job.optimizer.name}; use {' or '.join(taken)}": job.optimizer.name not in taken,
        f"precision={job.precision}; use bf16": job.precision != "bf16",
        "autocast=true, whose weights are fp32; use false": layout.autocast,
        "LoRA, whose optimizer is small": job.lora is not None,
        f"gradient_compression={layout.gradient_compression}, of fp32 gradients": torch
        and layout.gradient_compression != "none",
        f"gradient_dtype={layout.gradient_dtype}, which it includes": torch and layout.gradient_dtype != "fp32",
        "zero_stage=0; use 1 or more": layout.zero_stage == 0 and not torch,
        "zero_stage=1 and several micro batches, whose optimizer has fp32 state; use zero_stage=2 or 3": alone,
        "state on NVMe; use none or cpu": layout.uses_nvme,
        "Megatron's layers under DeepSpeed; use huggingface": zero and layout.implementation != "huggingface",
        f"implementation={layout.implementation}; use transformer_engine": megatron
        and layout.implementation != "transformer_engine",
        "the optimizer on the host; use one of them": megatron and layout.offload_optimizer != "none",
    }
    return first(reasons, f"optimizer_state_dtype={layout.optimizer_state_dtype} with {{}}, or leave it out")


@rule(
    "torch",
    message=lambda w: (
        f"optimizer.name=paged-adamw-8bit with zero_stage={w.layout.zero_stage}: bitsandbytes' class does not step "
        "DTensors; use zero_stage=0, or optimizer.name=adamw-8bit"
    ),
)
def paged_needs_whole_matrices(w: Workload) -> bool:
    """bitsandbytes/optim/optimizer.py, get_state_buffer: state of the parameter's own shape, by its address."""
    return w.job.optimizer.name == "paged-adamw-8bit" and w.layout.zero_stage > 0


@rule("torch")
def stochastic_round(w: Workload) -> str | None:
    """kit/engines/torch/stochastic_rounding.py: replicas draw the same numbers if they draw as many."""
    layout = w.layout
    if not layout.bf16_stochastic_round:
        return None
    reasons = {
        "rounds weights of optimizer_state_dtype=bf16; set that too, or leave it out": (
            layout.optimizer_state_dtype != "bf16"
        ),
        f"with tp={layout.tp}, whose ranks hold some weights twice and would round them apart; use tp=1, or "
        "bf16_stochastic_round=false": layout.tp > 1,
    }
    return first(reasons, "bf16_stochastic_round=true {}")


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"optimizer.name={w.job.optimizer.name} with offload_optimizer={w.layout.offload_optimizer}, where AdamW steps "
        "on the host; use offload_optimizer=none, or optimizer.name=adamw"
    ),
)
def offload_needs_adam(w: Workload) -> bool:
    """engine.py, _configure_optimizer: an offloaded optimizer must be DeepSpeedCPUAdam (zero_force_ds_cpu_optimizer).
    DeepSpeedCPULion compiles too, but allocates a second moment that it never uses."""
    return w.job.optimizer.name != "adamw" and w.layout.offload_optimizer != "none"


@rule(
    "deepspeed",
    message=lambda w: (
        f"optimizer.name=adafactor with zero_stage={w.layout.zero_stage}, tp={w.layout.tp}: ranks have flat parts of "
        "matrices, without rows and columns; use zero_stage=0 and tp=1, or engine=torch"
    ),
)
def adafactor_needs_whole_matrices(w: Workload) -> bool:
    """ZeRO's optimizers step flat partitions: of those torch.optim.Adafactor would keep a whole second moment."""
    return w.job.optimizer.name == "adafactor" and (w.layout.zero_stage > 0 or w.layout.tp > 1)


@rule(
    "deepspeed",
    message=lambda w: (
        f"optimizer.name=lion on {w.cluster.gpu.name} with engine=deepspeed, whose FusedLion is a CUDA kernel; use "
        "engine=torch"
    ),
)
def fused_lion_needs_cuda(w: Workload) -> bool:
    """deepspeed/ops/lion/fused_lion.py: currently GPU-only."""
    return w.job.optimizer.name == "lion" and w.cluster.gpu.device == "cpu"


@rule(
    "megatron",
    message=lambda w: (
        f"optimizer.name={w.job.optimizer.name} with zero_stage={w.layout.zero_stage}: megatron-core's distributed "
        "optimizer steps with Adam only; use zero_stage=0, or engine=torch"
    ),
)
def distributed_optimizer_needs_adam(w: Workload) -> bool:
    """optimizer/distrib_optimizer.py, __init__: only Adam, due to checkpointing requirements."""
    return w.job.optimizer.name in ("sgd", "muon") and w.layout.zero_stage > 0


@rule(
    "megatron",
    message=lambda w: (
        f"optimizer.name=muon with tp={w.layout.tp} and num_key_value_heads={w.model.num_key_value_heads}: ranks have "
        "unequal parts of query, key and value; use a tp that divides the heads, or engine=torch"
    ),
)
def muon_needs_whole_heads(w: Workload) -> bool:
    """optimizer/emerging_optimizers.py, orthogonalize: a rank's rows are whole groups of query, key and value."""
    return w.job.optimizer.name == "muon" and w.model.num_key_value_heads % w.layout.tp > 0


@rule(
    "torch",
    message=lambda w: (
        f"optimizer.name=muon with {w.model.name}, whose experts are one tensor of three dimensions; use "
        "optimizer.name=adamw"
    ),
)
def muon_needs_matrices(w: Workload) -> bool:
    """torch/optim/_muon.py: Muon supports parameters of two dimensions only."""
    return w.job.optimizer.name == "muon" and w.model.num_experts > 0


@rule(
    message=lambda w: (
        f"objective={w.job.objective} with chunked_loss, tiled_mlp, compile_layers, activation_offloading, "
        "or gradient_compression: these are of kit's own loop, and TRL's "
        f"{w.trl.trainer if w.trl else ''} trains; leave them out"
    )
)
def trl_has_its_own_loop(w: Workload) -> bool:
    """TRL's trainers read none of these choices."""
    layout = w.layout
    fast = layout.chunked_loss or layout.tiled_mlp or layout.compile_layers or layout.activation_offloading
    return w.trl is not None and (fast or layout.gradient_compression != "none")


@rule(
    message=lambda w: (
        f"objective={w.job.objective} with precision={w.job.precision}, optimizer.name={w.job.optimizer.name}: TRL's "
        "trainers are planned with fp32, bf16 or fp16, and adamw"
    )
)
def trl_precision_and_optimizer(w: Workload) -> bool:
    """The Trainer makes its own optimizer where no ds_config.json names one."""
    return w.trl is not None and (w.job.precision == "fp8" or w.job.optimizer.name != "adamw")


@rule(message="objective=kto with micro_batch_size=1: the KL term takes the answer of another row; use 2")
def kto_needs_two_rows(w: Workload) -> bool:
    """kto_trainer.py, calculate_kl."""
    return w.job.objective == "kto" and w.layout.micro_batch_size < 2


@rule()
def grpo(w: Workload) -> str | None:
    """Completions of a prompt stay in one step, and leave room for the prompt."""
    job = w.job
    if job.objective != "grpo":
        return None if job.grpo is None else f"job.grpo with objective={job.objective}; leave it out, or use grpo"
    chosen = job.grpo or GrpoSpec()
    batch, each = job.global_batch_size, chosen.num_generations
    reasons = {
        f"global_batch_size={batch} is not a multiple of grpo.num_generations={each}; use {max(1, batch // each)} · "
        f"{each}": batch % each,
        f"grpo.max_completion_length={chosen.max_completion_length} leaves no room for the prompt in seq_length="
        f"{job.seq_length}; use a smaller one, or a larger seq_length": chosen.max_completion_length >= job.seq_length,
        "grpo.vllm_gpu_memory_utilization on CPU processes; leave it out": (
            chosen.vllm_gpu_memory_utilization is not None and w.cluster.gpu.device == "cpu"
        ),
    }
    return first(reasons)
