"""Published throughput rows as workloads of the cost model.

What a row does not state is filled in here and nowhere else, each time with the reason.
"""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.accuracy.fields import (
    LLM_FOUNDRY,
    OLD_MEGATRON,
    SAILOR,
    address_of,
    compiled,
    date_of,
    deepcompile,
    dispatcher_of,
    engine_of,
    kernels_of,
    megatron_deepspeed,
    megatron_layers,
    offload_of,
    old_megatron,
    precision_of,
    program_of,
    published_by,
    recent_nvidia,
    recomputed_layers,
    recomputed_modules,
    require,
    torchtitan,
)
from benchmarks.accuracy.hardware import cluster_of
from benchmarks.accuracy.lora_rows import lora_of, lora_spec
from benchmarks.accuracy.models import model_of_row
from benchmarks.accuracy.pipelines import NotPredictedError, Row
from benchmarks.accuracy.programs.published import (
    PublishedExecution,
    PublishedWorkload,
    chunks_with_ends,
)
from kit.cost.time.elementwise import LOW_PRECISIONS
from kit.cost.workload import UNHIDDEN
from kit.specs.job import JobSpec
from kit.specs.layout import Layout

ROWWISE = 0.67
"""Rate of fp8 GEMMs with a scale a row (CUTLASS) over those with one a tensor (cuBLAS)."""
POWER_LIMITED = 0.54 / 0.68
"""Rate of GEMMs under a power limit of about three quarters: torchtitan's H100, 500 of 700 W, over the H100's."""
FP32_ADAPTERS = "2024-07"
"""From peft 0.12 of this month on, adapters of 16-bit weights are in fp32 (autocast_adapter_dtype)."""
GROUPED_EXPERTS = "2025-12"
"""From transformers 5 of this month on, the experts of a layer are one parameter and one grouped GEMM. Before, each was
a module: ZeRO-3 gathers it, and the host launches it, by itself, in an order that the tokens decide."""
ONE_TENSOR = "2022"
"""DeepSpeed before this year gathered lists of tensors (release 0.5.9 of January 2022 rewrote ZeRO-3's collectives)."""


def run_of(row: Row) -> PublishedWorkload:
    """Raises NotPredictedError with the reason for what the model has no physics for."""
    transformers_only(row)
    require(row, "micro_batch_size", "global_batch_size")
    model, job = row["model"], row["job"]
    cluster = cluster_of(row)
    precision = precision_of(row)
    tp, pp, vp, cp, ep = (job.get(size) or 1 for size in ("tp", "pp", "vp", "cp", "ep"))
    dp = job.get("dp") or max(1, cluster.num_gpus // (tp * pp * cp))
    micro, batch = job["micro_batch_size"], job["global_batch_size"]
    execution, offload = execution_of(row, precision), offload_of(job)
    engine, kernels, old, fused_loss = engine_of(row), kernels_of(row), old_megatron(row), execution.code == "compiled"
    lora = lora_of(row)
    sizes = model_of_row(row, int("MTP layer trained" in str(row.get("notes"))))
    apart = engine == "deepspeed" and kernels == "huggingface" and date_of(row) < GROUPED_EXPERTS
    if sizes.num_experts and apart and job.get("zero_stage") == 3:
        raise NotPredictedError("experts that ZeRO-3 gathers one by one")
    workload = PublishedWorkload(
        model=sizes,
        cluster=cluster,
        job=JobSpec(
            seq_length=model["seq_length"],
            global_batch_size=batch,
            precision="fp8" if precision in LOW_PRECISIONS else precision,  # type: ignore[arg-type]
            lora=lora_spec(lora) if lora else None,
        ),
        layout=Layout(
            engine=engine if engine in ("megatron", "deepspeed") else "torch",  # type: ignore[arg-type]
            implementation="huggingface" if kernels == "huggingface" else "transformer_engine",
            dp=dp,
            tp=tp,
            pp=pp,
            vp=vp,
            cp=cp,
            # A ring, unless the notes name Ulysses.
            cp_comm_type="a2a" if "Ulysses" in str(row.get("notes")) and execution.code != "fused" else "p2p",
            ep=ep,
            etp=job.get("etp") or (1 if job.get("ep") else tp),
            sp=bool(job.get("sp")) and tp > 1,
            zero_stage=job.get("zero_stage") or 0,
            offload_optimizer=offload.place if offload.optimizer and not offload.steps_on_device else "none",
            offload_param=offload.place if offload.parameters else "none",
            micro_batch_size=micro,
            gradient_accumulation_steps=max(1, round(batch / (micro * dp))),
        ),
        execution=execution,
        implementation=kernels,
        attention="unfused" if execution.attention == "unfused" else "flash",
        stated_chunks=stage_layers_of(sizes.num_layers, pp * vp, sizes.mtp_num_layers),
        weight_bytes=4 if precision == "fp32" or "amp" in str(job.get("precision")) else 2,
        main_gradient_bytes=gradient_bytes(row),
        hidden_dropout=old,
        attention_dropout=old,
        gradient_accumulation_fusion=engine == "megatron" and not old,
        compiled=fused_loss,
        compiled_loss=fused_loss,
        cross_entropy="te" if recent_nvidia(row) else "unfused",
        lora=lora,
    )
    words = f"{job.get('recompute') or 'none'}: {job.get('recompute_detail') or ''}"
    workload, code = with_recompute(workload, words), row.get("code") or {}
    # Where a row brings what is known of the code that ran, that stands for what its words let one guess.
    execution = replace(workload.execution, **code.get("execution", {}))
    return replace(workload, execution=execution, **code.get("workload", {}))


def transformers_only(row: Row) -> None:
    """Raises NotPredictedError for layers that the model has no physics for, whatever else the row lacks."""
    if "mamba" in str(row["model"].get("family")).lower():
        raise NotPredictedError("hybrid Mamba: layers that are no transformer's")


def with_recompute(workload: PublishedWorkload, words: str) -> PublishedWorkload:
    """``none``, ``full …``, ``full: block, 5 of …``, ``selective: a, b``. That of every second layer is full."""
    layout = workload.layout
    mode = next((mode for mode in ("full", "selective") if words.lower().startswith(mode)), "none")
    layers = None if mode == "none" else recomputed_layers(words, workload.num_layers // (layout.pp * layout.vp))
    modules = recomputed_modules(words) if mode == "selective" and layers is None else frozenset[str]()
    layout = replace(layout, recompute=mode if layers is None else "full")  # type: ignore[arg-type]
    return replace(workload, layout=layout, recompute_modules=modules, recompute_layers=layers)


def before_cudnn(row: Row) -> bool:
    """Transformer Engine's context parallelism ran on flash-attn until release 1.7 of mid-2024. NeMo's releases have
    their month as a name, and tables are published months later."""
    release = re.search(r"NeMo (?:container )?(\d\d)\.(\d\d)", str(row.get("notes") or ""))
    date = f"20{release.group(1)}-{release.group(2)}" if release else date_of(row)
    return (row["job"].get("cp") or 1) > 1 and "2023" <= date < "2024-06"


def execution_of(row: Row, precision: str) -> PublishedExecution:
    """Engine, fusion, overlap."""
    job, notes = row["job"], str(row.get("notes") or "")
    engine = engine_of(row)
    generation = str(row["cluster"].get("gpu"))
    ampere = generation.startswith(("A100", "A800", "V100"))
    if engine == "nanotron" or megatron_layers(row):
        old, sailor = old_megatron(row), published_by(row, SAILOR)
        bf16_optimizer = old and "DeepSpeed" in notes and precision == "bf16"  # of DeepSpeed's PipelineEngine
        kernel = "flash" if ampere or engine == "nanotron" or before_cudnn(row) else "cudnn"
        whole = "CUDA graph full_iteration" in notes
        # Attention has to be among what a graph holds; where the notes say graphs and no scope, it is.
        partial = re.search(r"CUDA graph transformer_engine(/attn|;|\b(?!/))|(?<!no )(?<!without )CUDA graphs", notes)
        return PublishedExecution(
            engine="fsdp" if engine == "fsdp" else "megatron",
            code="fused",
            precision=precision,
            attention="unfused" if old or sailor else attention_of(row) or kernel,
            overlaps_gradients=not old and not sailor and "without ZeRO overlap" not in notes,
            overlaps_tensor_gradients=not old or bool(job.get("sp")),
            overlaps_tensor_parallel=recent_nvidia(row),
            overlaps_experts=bool(job.get("overlap_moe_comm")) or "all-to-all overlapped" in notes,
            once_per_node=dispatcher_of(row) in ("deepep", "hybridep"),
            graphs="full" if whole else "partial" if partial else "none",
            gradient_bytes=float(gradient_bytes(row)),
            splits_transfers=old,
            reduces_in_full=bf16_optimizer,
            # BF16_Optimizer.update_hp_grads: a copy in fp32 is written (6) and added to the sum (12).
            gradient_sum_bytes=18.0 if bf16_optimizer else 10.0,
            # Megatron-FSDP gathers the next layers ahead, on a stream of its own (megatron_fsdp.py, prefetch): as
            # much of that is hidden as of Megatron's own.
            unhidden_sharding=0.0,
        )
    # DeepSpeed's hooks break the graph at every module: compiled ZeRO-3 is no faster than eager in the same table.
    broken = engine == "deepspeed" and job.get("zero_stage") == 3 and not deepcompile(row)
    asynchronous, foundry, titan = "async TP" in notes, published_by(row, LLM_FOUNDRY), torchtitan(row)
    # GPT of DeepSpeed's early tables: Megatron's layers without fused attention, norms in 16 bits. ZeRO-3 of early
    # releases hid none of its collectives: Azure's 46 rows (0.6.2) are as many seconds slower than their compute at
    # micro batch 32 as at 1.
    early, date = megatron_deepspeed(row), date_of(row)
    eager = "eager" if foundry or early else "huggingface"
    transformers = "huggingface" in (kernels_of(row), program_of(row))
    share = (ROWWISE if "rowwise" in str(job.get("precision")) else 1.0) * (
        POWER_LIMITED if "power-limited" in notes else 1.0
    )
    return PublishedExecution(
        engine=engine if engine in ("deepspeed", "ddp") else "fsdp",  # type: ignore[arg-type]
        code="compiled" if compiled(row) and not broken else eager,  # type: ignore[arg-type]
        unhidden_sharding=1.0 if early and date < OLD_MEGATRON else UNHIDDEN,
        # DeepSpeed's default below stage 3 is overlap_comm=false; its compiler always reduces on a stream of its own.
        overlaps_gradients=engine != "deepspeed" or job.get("zero_stage") == 3 or deepcompile(row),
        precision=precision,
        linear_layers_only=precision in LOW_PRECISIONS and not foundry,
        matmul_share=share,
        attention=attention_of(row) or ("flash1" if foundry else "flash"),
        casts_adapters=transformers and date >= FP32_ADAPTERS,
        balanced_context=not titan,
        # accelerate gives each rank of DeepSpeed one thread unless told otherwise (utils/launch.py).
        host_threads=1 if "deepcompile" in address_of(row) else None,
        offload_to_step_on_device=offload_of(job).steps_on_device,
        copies_gathered=titan,
        deepcompile=deepcompile(row),
        copies_of_ranks=early and date < ONE_TENSOR,
        # DTensor waits for each collective; asynchronous tensor parallelism splits them beside the GEMMs.
        overlaps_tensor_parallel=asynchronous,
        overlaps_tensor_gradients=asynchronous,
        gradient_bytes=float(gradient_bytes(row)),
    )


def attention_of(row: Row) -> str | None:
    """The kernel that a field names, or that a program's age decides; null where neither does. ``flash`` alone says no
    version, and is the second."""
    if megatron_deepspeed(row):
        return "unfused"
    words = re.sub(r"[^a-z0-9]", "", str(row["job"].get("attention") or "").lower())
    return next((kernel for kernel, names in KERNELS.items() if any(name in words for name in names)), None)


KERNELS = {
    "unfused": ("unfused", "eager", "math"),
    "cudnn": ("cudnn",),
    "flash3": ("flash3", "flashattn3", "flashattention3", "fa3"),
    "flash4": ("flash4", "flashattn4", "flashattention4", "fa4"),
}
"""Kernel of attention in ``efficiency.yaml`` → words of a row's field."""


def gradient_bytes(row: Row) -> int:
    """What gradients are reduced in: fp32 in Megatron with bf16, fp16 with fp16; FSDP reduces in fp32 unless PURE."""
    job, engine = row["job"], engine_of(row)
    if job.get("grad_dtype"):
        return 4 if job["grad_dtype"] == "fp32" else 2
    if engine == "deepspeed":
        return 2
    if engine == "fsdp" and not recent_nvidia(row):
        return 4 if torchtitan(row) else 2
    return 2 if precision_of(row) == "fp16" else 4


def stage_layers_of(layers: int, chunks: int, mtp_layers: int) -> tuple[tuple[int, ...], ...]:
    """Where layers do not divide: embedding and head (and prediction layers) count as one layer each, as NVIDIA's
    recipes place them; else the first stages have one more."""
    return () if layers % chunks == 0 else chunks_with_ends(layers, chunks, mtp_layers)
