"""Published rows (``memory_dev.json`` and its like) as workloads of the cost model.

What a row does not state is filled in here and nowhere else, each time with the reason.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from benchmarks.accuracy.cleaned import completed
from benchmarks.accuracy.deepspeed_rows import with_deepspeed
from benchmarks.accuracy.fields import (
    Optimizer,
    date_of,
    kernels_of,
    megatron_layers,
    offload_of,
    optimizer_of,
    precision_of_layers,
    program_of,
    recomputed_layers,
    recomputed_modules,
    require,
)
from benchmarks.accuracy.fsdp_rows import with_fsdp
from benchmarks.accuracy.grouped import expanded
from benchmarks.accuracy.hardware import generation_of
from benchmarks.accuracy.lora_rows import lora_of, lora_spec
from benchmarks.accuracy.models import model_of_row
from benchmarks.accuracy.pipelines import NotPredictedError, Row, stage_layers_of
from benchmarks.accuracy.programs.published import PublishedWorkload
from kit.errors import SpecError
from kit.specs.catalog import parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Layout

Recompute = Literal["none", "selective", "full"]
LOSS_COMPILED, CUDNN_CHOSEN, CUDNN_SAVED = "2025-04-02", "2025-05-14", "2025-12-01"
"""Days of torchtitan's history: from when its loss is compiled with its layers (components/loss.py; in October and
November 2024 it was, too); when it took cuDNN's attention on Blackwell (models/attention.py), and when the policy of
selective recompute began to save its result (op_sac_save_list)."""
ANY_CLUSTER = parse_cluster("8xH100")
"""Memory of a row depends on its GPU's generation alone."""


def load(path: Path) -> list[Row]:
    """Rows of a data file: a list, or a mapping that holds one under ``rows``, or tables under ``groups``.

    Raises ``SpecError`` for what is no such file; a damaged row says so itself when it is asked for (``cleaned``).
    """
    parsed = _parsed(path)
    rows = expanded(parsed) if isinstance(parsed, dict) and "groups" in parsed else parsed
    rows = rows.get("rows") if isinstance(rows, dict) else rows
    if not isinstance(rows, list):
        raise SpecError(f"{path} holds no rows: use a list of them, or an object with rows")
    return completed(rows)


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read as JSON: {error}") from None


def about(path: Path) -> str | None:
    """What a file of independent rows (none of which the cost model's constants were estimated from) says of them."""
    parsed = _parsed(path)
    return str(parsed.get("about", "")) if isinstance(parsed, dict) and parsed.get("independent") else None


def excluded(row: Row) -> str | None:
    """Why a row does not enter error figures, or null."""
    job = row["job"]
    reasons = {f"marked {mark}": bool(row.get(mark)) for mark in ("suspect", "weak", "approximate")} | {
        "data-parallel size only inferred": (row.get("inferred") or {}).get("dp") is not None,
        "recompute not stated": job.get("engine") == "fsdp" and job.get("recompute") is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def workload_of(row: Row) -> PublishedWorkload:
    """The run that a row measured."""
    model, job = row["model"], row["job"]
    tp, pp, vp, cp, ep, etp = (job.get(size) or 1 for size in ("tp", "pp", "vp", "cp", "ep", "etp"))
    dp = job.get("dp") or (row.get("inferred") or {}).get("dp")
    dp = dp or (row["cluster"].get("num_gpus") or 0) // (tp * pp * cp)
    if not dp:
        raise NotPredictedError("neither a data-parallel size nor a number of GPUs is stated")
    require(row, "micro_batch_size")
    micro = job["micro_batch_size"]
    batch = job.get("global_batch_size") or micro * dp
    generation = generation_of(row["cluster"].get("gpu") or "unknown")
    megatron = megatron_layers(row)
    kernels = kernels_of(row)
    kernels = program_of(row) if kernels == "torchtitan" else kernels
    detail, offload, optimizer = job.get("recompute_detail") or "", offload_of(job), optimizer_of(job)
    compiled = bool(job.get("compile"))
    moe, lora = model.get("moe") or {}, lora_of(row)
    recompute: Recompute = "none" if "empty module list" in detail else job.get("recompute") or "none"
    weight_bytes, gradient_bytes, optimizer_bytes = state_widths(row, optimizer)
    workload = PublishedWorkload(
        model=model_of_row(row, model.get("mtp_num_layers") or 0),
        cluster=ANY_CLUSTER,
        job=JobSpec(
            seq_length=model["seq_length"],
            precision=precision_of_layers(row),
            lora=lora_spec(lora) if lora else None,
        ),
        layout=Layout(
            engine="deepspeed" if job["engine"] == "deepspeed" else "megatron" if megatron else "torch",
            implementation="transformer_engine" if megatron else "huggingface",
            dp=dp,
            tp=tp,
            pp=pp,
            vp=vp,
            cp=cp,
            cp_comm_type="p2p",
            ep=ep,
            etp=etp,
            sp=bool(job.get("sp")) and tp > 1,
            zero_stage=zero_stage_of(row),
            recompute=recompute,
            chunked_loss=_chunked_loss(job, kernels),
            micro_batch_size=micro,
            gradient_accumulation_steps=max(batch // (micro * dp), 1),
        ),
        implementation=kernels,
        attention=attention_of(row, generation),
        generation=generation,
        stated_chunks=stage_layers_of(row, pp, vp),
        weight_bytes=weight_bytes,
        main_gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        matrix_optimizer_bytes=optimizer_bytes - 4 if optimizer.name == "muon" else None,
        optimizer_instances=job.get("distributed_optimizer_instances") or 1,
        # fp32 master shards stay on the GPU as well: parameters are copied to the host, not moved (megatron-core,
        # optimizer/cpu_offloading/hybrid_optimizer.py).
        optimizer_offload=offload.optimizer * (8 / 12 if megatron else 1),
        optimizer_in_backward=optimizer.in_backward,
        keeps_bf16_weights=not (job.get("fp8") or {}).get("param_gather"),
        hidden_dropout=bool(model.get("hidden_dropout")),
        attention_dropout=bool(model.get("attention_dropout")),
        grouped_gemm=bool(moe.get("grouped_gemm")),
        lora=lora,
        recompute_modules=recomputed_modules(detail) if recompute == "selective" else frozenset(),
        recompute_every=_uniform(detail),
        recompute_layers=recomputed_layers(detail, model["num_layers"]),
        parameters_offload=offload.parameters,
        activation_offload=offload.activations and offload.layers is None,
        offloaded_layers=offload.layers or 0,
        graphed_attention="CUDA graphs (attn)" in (row.get("notes") or ""),
        overlapped_layers="overlap-moe-expert-parallel-comm" in (row.get("notes") or ""),
        cross_entropy=cross_entropy_of(job),
        compiled=compiled,
        compiled_loss=compiled and _compiled_loss(row, kernels),
        recomputes_cudnn=kernels == "torchtitan" and CUDNN_CHOSEN <= date_of(row) < CUDNN_SAVED,
        reserved=not row["measured"].get("max_allocated_gib") and bool(row["measured"].get("max_reserved_gib")),
        holds_logits="fsdp_qlora" in str(row["source"].get("address")),
        uncounted_layers=_uncounted_layers(job, model["num_layers"]),
        gradient_accumulation_fusion=bool(job.get("gradient_accumulation_fusion")),
        defer_embedding_gradient=bool(job.get("defer_embedding_wgrad")),
        # nanotron's table does not state tp_recompute_allgather; rows with tensor parallelism contradict its default.
        gathers_again=kernels != "nanotron",
        deterministic=bool(job.get("deterministic")),
    )
    if kernels == "huggingface":
        return with_deepspeed(row, workload) if job["engine"] == "deepspeed" else with_fsdp(row, workload)
    return workload


def _chunked_loss(job: Row, kernels: str) -> bool:
    """Where it is not stated: litgpt's, and torchtune's by its presets (recipes/configs, CEWithChunkedOutputLoss)."""
    stated = job.get("chunked_ce")
    return kernels in ("litgpt", "torchtune") if stated is None else bool(stated)


def _compiled_loss(row: Row, kernels: str) -> bool:
    """torchtitan's loss since a day; of torchtune's the chunked one (its whole one gets fp32 logits from the model)."""
    since = date_of(row) >= LOSS_COMPILED or "2024-10-22" <= date_of(row) < "2024-12"
    return _chunked_loss(row["job"], kernels) if kernels == "torchtune" else kernels == "torchtitan" and since


def _uncounted_layers(job: Row, layers: int) -> int:
    """Layers whose GEMMs run in nvfp4: an operator of torchao's own, which no list of a recompute policy names
    (torchtitan, components/quantization/nvfp4.py)."""
    fp8 = job.get("fp8") or {}
    if "fp4" not in f"{fp8.get('format')} {job.get('precision')}":
        return 0
    first = re.search(r"first (\d+) of", str(fp8.get("recipe")))
    return int(first.group(1)) if first else layers


def _uniform(detail: str) -> int:
    """Layers of a step of Megatron's ``uniform``; 1 where another method is meant."""
    found = re.search(r"method=uniform num_layers=(\d+)", detail)
    return int(found.group(1)) if found else 1


def attention_of(row: Row, generation: str) -> str:
    """What ran where ``auto`` was asked: Transformer Engine's choice.

    It prefers cuDNN's kernel on Hopper and flash-attn on Ampere; on Blackwell cuDNN's is not deterministic, so that a
    deterministic run takes flash-attn (transformer_engine/pytorch/attention/dot_product_attention/utils.py,
    get_attention_backend).
    """
    job = row["job"]
    stated = job.get("attention")
    if "unfused" in (stated, job.get("attention_inferred") if stated == "unknown" else None):
        return "unfused"
    no_cudnn = generation == "ampere" or (generation == "blackwell" and job.get("deterministic"))
    return "flash" if no_cudnn or not megatron_layers(row) else "cudnn"


def zero_stage_of(row: Row) -> int:
    """ZeRO's stage; 1: Megatron's distributed optimizer; 3: FSDP."""
    job = row["job"]
    stage = job.get("zero_stage")
    if stage is None and job["engine"] == "fsdp":
        return 3
    if stage in (2, 3):
        return 2 if stage == 2 and job["engine"] == "deepspeed" else 3
    return 1 if job.get("distributed_optimizer") or stage == 1 else 0


def state_widths(row: Row, optimizer: Optimizer) -> tuple[int, int, float]:
    """Bytes per parameter: weights, accumulated gradients, optimizer with master weights.

    As ``state_bytes`` says. Where it does not: Megatron, nanotron: 16-bit weights with fp32 masters. torchtitan: fp32
    weights. Others, and FSDP with 16-bit moments: everything in 16 bits. Frozen weights have 16 bits under adapters.
    """
    job, engine = row["job"], row["job"]["engine"]
    stated = job.get("state_bytes") or {}
    stated = stated.get("device", stated)
    if stated:
        moments = 0.0 if optimizer.paged else stated.get("moments", 0)
        return stated["weights"], stated.get("grads", stated["weights"]), stated.get("master", 0) + moments
    gradient = 4 if (job.get("grad_dtype") or "fp32") == "fp32" else 2
    fp32 = str(job.get("precision")).startswith("fp32")
    mixed = megatron_layers(row) or engine in ("nanotron", "deepspeed")
    words = f"{job.get('precision')} {'' if job.get('lora') else row.get('notes')}"
    pure = optimizer.short_masters or re.search("parameters and optimizer in bf16|pure bf16|bf16 weights", words)
    short = not fp32 and (
        pure or engine in ("litgpt", "torchtune") or (engine == "fsdp" and optimizer.moment_bytes == 2)
    )
    width = optimizer.moment_bytes or (2.0 if short and not mixed else 4.0)
    moments = 0.0 if optimizer.paged else 2 * width if optimizer.name == "muon" else optimizer.moments * width
    if mixed:
        masters = 0.0 if fp32 or optimizer.short_masters else 4.0
        return 4 if fp32 else 2, 4 if fp32 else gradient, masters + moments
    weights = 2 if job.get("lora") and not fp32 else 4
    return (2, 2, moments) if short else (weights, 4, moments)


def cross_entropy_of(job: Row) -> Literal["unfused", "native", "te"]:
    """Megatron's ``--cross-entropy-loss-fusion`` and its implementation, ``native`` unless said."""
    fused: Literal["native", "te"] = "te" if job.get("cross_entropy_fusion_impl") == "te" else "native"
    return fused if job.get("cross_entropy_fusion") else "unfused"
