"""Published rows (``memory_dev.json`` and its like) as setups of the cost model.

What a row does not state is filled in here and nowhere else, each time with the reason.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from benchmarks.accuracy.cleaned import completed
from benchmarks.accuracy.deepspeed_rows import with_deepspeed
from benchmarks.accuracy.grouped import expanded
from benchmarks.accuracy.hardware import generation_of
from benchmarks.accuracy.pipelines import NotPredictedError, Row, stage_layers_of
from benchmarks.accuracy.programs.rank_params import with_parameters
from benchmarks.accuracy.programs.setup import PublishedSetup
from kit.cost.setup import Attention, CrossEntropy, Experts, Fp8, LatentAttention, Lora, Program, Shape
from kit.errors import SpecError

Recompute = Literal["none", "selective", "full"]


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
    for mark in ("suspect", "weak", "approximate"):
        if row.get(mark):
            return f"marked {mark}"
    if (row.get("inferred") or {}).get("dp") is not None:
        return "data-parallel size only inferred"
    return None


def setup_of(row: Row) -> PublishedSetup:
    """The run that a row measured.

    torchtitan compiles its loss with its layers (components/loss.py); its tables of 2024 are older than that.
    """
    model, job = row["model"], row["job"]
    tp, pp, cp = (job.get(size) or 1 for size in ("tp", "pp", "cp"))
    vp = job.get("vp") or 1
    dp = job.get("dp") or (row.get("inferred") or {}).get("dp")
    if not dp:
        raise NotPredictedError("neither a data-parallel size nor a number of GPUs is stated")
    _require(row)
    micro = job["micro_batch_size"]
    batch = job.get("global_batch_size") or micro * dp
    generation = generation_of(row["cluster"].get("gpu") or "unknown")
    kernels = kernels_of(row)
    detail = job.get("recompute_detail") or ""
    recompute: Recompute = job.get("recompute") or "none"
    if "empty module list" in detail:
        recompute = "none"
    weight_bytes, gradient_bytes, optimizer_bytes = state_widths(row)
    setup = PublishedSetup(
        shape=shape_of(row),
        program=Program(engine="megatron", code="fused", precision="bf16"),  # of no weight for memory
        kernels=kernels,
        attention=attention_of(row, generation),
        seq_length=model["seq_length"],
        micro_batch_size=micro,
        micro_batches=max(batch // (micro * dp), 1),
        dp=dp,
        tp=tp,
        pp=pp,
        vp=vp,
        cp=cp,
        ep=job.get("ep") or 1,
        etp=job.get("etp") or 1,
        sp=bool(job.get("sp")) and tp > 1,
        sharding=sharding_of(row),
        optimizer_instances=job.get("distributed_optimizer_instances") or 1,
        stage_layers=stage_layers_of(row, pp, vp),
        recompute=recompute,
        recompute_every=_stated(detail, "uniform"),
        recompute_layers=_stated(detail, "block") if "method=block" in detail else None,
        recompute_modules=frozenset(re.findall(r"[a-z_]+", detail.partition("modules=")[2]))
        or frozenset({"op"} if "op" in detail or "preset" in detail else ()),
        weight_bytes=weight_bytes,
        main_gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        matrix_optimizer_bytes=optimizer_bytes - 4 if "muon" in (job.get("optimizer") or "") else None,
        optimizer_offload=optimizer_offload(job.get("offload") or ""),
        optimizer_in_backward="fused in backward" in (job.get("optimizer") or ""),
        activation_offload="activation" in (job.get("offload") or ""),
        cross_entropy=cross_entropy_of(job),
        chunked_loss=bool(job.get("chunked_ce")) or kernels == "litgpt",
        compiled=bool(job.get("compile")),
        compiled_loss=kernels == "torchtitan"
        and bool(job.get("compile"))
        and "_2024" not in (row["source"].get("address") or ""),
        gradient_accumulation_fusion=bool(job.get("gradient_accumulation_fusion")),
        defer_embedding_gradient=bool(job.get("defer_embedding_wgrad")),
        # nanotron's table does not state tp_recompute_allgather; rows with tensor parallelism contradict its default.
        gathers_again=kernels != "nanotron",
        deterministic=bool(job.get("deterministic")),
        fp8=Fp8(keeps_bf16_weights=not job["fp8"].get("param_gather")) if job.get("fp8") else None,
        lora=lora_of(job),
        gpu_generation=generation,
    )
    setup = with_parameters(setup)
    return with_deepspeed(row, setup) if kernels == "huggingface" else setup


def _stated(detail: str, method: str) -> int:
    """``num_layers`` of ``method=… num_layers=…``; 1 where another method is meant."""
    found = re.search(rf"method={method} num_layers=(\d+)", detail)
    return int(found.group(1)) if found else 1


def _require(row: Row) -> None:
    """Sizes without which there is nothing to compute."""
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size", "seq_length")
    missing = [name for name in needed if row["model"].get(name) is None]
    missing += [name for name in ("engine", "micro_batch_size") if row["job"].get(name) is None]
    if missing:
        raise NotPredictedError(f"not stated: {', '.join(missing)}")


def shape_of(row: Row) -> Shape:
    """Sizes of the model as allocated."""
    model = row["model"]
    learned = model.get("position") == "learned"
    moe, mla = model.get("moe"), model.get("mla")
    layers = model["num_layers"]
    expert_layers: tuple[bool, ...] = ()
    if moe:
        frequency = moe.get("moe_layer_freq") or 1
        if isinstance(frequency, int):
            expert_layers = tuple(layer % frequency == 0 for layer in range(layers))
        else:
            expert_layers = tuple(bool(flag) for flag in frequency)
    return Shape(
        num_layers=layers,
        hidden_size=model["hidden_size"],
        ffn_hidden_size=model["ffn_hidden_size"],
        num_attention_heads=model["num_attention_heads"],
        num_key_value_heads=model.get("num_key_value_heads") or model["num_attention_heads"],
        head_dim=model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"],
        vocab_size=model["vocab_size"],
        gated_mlp=bool(model.get("gated_mlp")),
        tied_embeddings=bool(model.get("tied_embeddings")),
        norm=model.get("norm") or "rmsnorm",
        learned_positions=(model.get("max_position_embeddings") or model["seq_length"]) if learned else 0,
        linear_bias=model.get("bias") is True,
        qkv_bias=model.get("bias") == "qkv only",
        qk_norm=bool(model.get("qk_layernorm")),
        hidden_dropout=bool(model.get("hidden_dropout")),
        attention_dropout=bool(model.get("attention_dropout")),
        parallel_residual=model.get("family") == "phi",
        latent=LatentAttention(
            q_lora_rank=mla["q_lora_rank"],
            kv_lora_rank=mla["kv_lora_rank"],
            nope_head_dim=mla["qk_head_dim"],
            rope_head_dim=mla["qk_pos_emb_head_dim"],
            value_head_dim=mla["v_head_dim"],
        )
        if mla
        else None,
        experts=Experts(
            num_experts=moe["num_experts"],
            experts_per_token=moe["experts_per_token"],
            ffn_hidden_size=moe["moe_ffn_hidden_size"],
            shared_ffn_hidden_size=moe.get("shared_expert_ffn_hidden_size") or 0,
            capacity_factor=moe.get("expert_capacity_factor"),
            grouped_gemm=bool(moe.get("grouped_gemm")),
        )
        if moe
        else None,
        expert_layers=expert_layers,
        mtp_layers=model.get("mtp_num_layers") or 0,
    )


def megatron(row: Row) -> bool:
    """Whether Megatron's layers ran; Megatron-FSDP has them under the engine ``fsdp``."""
    return row["job"].get("engine") == "megatron" or row["job"].get("transformer_impl") is not None


def kernels_of(row: Row) -> str:
    """The implementation whose layers ran."""
    engine = row["job"].get("engine")
    if megatron(row):
        return "megatron-local" if row["job"].get("transformer_impl") == "local" else "transformer_engine"
    names: dict[str, str] = {
        "nanotron": "nanotron",
        "litgpt": "litgpt",
        "torchtune": "torchtune",
        "fsdp": "torchtitan",
        "deepspeed": "huggingface",
    }
    if engine not in names:
        raise NotPredictedError(f"no implementation of engine {engine!r} is described")
    return names[engine]


def attention_of(row: Row, generation: str) -> Attention:
    """What ran where ``auto`` was asked: Transformer Engine's choice.

    It prefers cuDNN's kernel on Hopper and flash-attn on Ampere; on Blackwell cuDNN's is not deterministic, so that a
    deterministic run takes flash-attn (transformer_engine/pytorch/attention/dot_product_attention/utils.py,
    get_attention_backend).
    """
    job = row["job"]
    stated = job.get("attention")
    if stated == "unknown" and job.get("attention_inferred") == "unfused":
        stated = "unfused"
    if stated == "unfused":
        return "unfused"
    if not megatron(row) or generation == "ampere":
        return "flash"
    if generation == "blackwell" and job.get("deterministic"):
        return "flash"
    return "cudnn"


def sharding_of(row: Row) -> Any:
    """none, optimizer or full."""
    job = row["job"]
    if (job.get("zero_stage") or 0) == 3 or (job.get("zero_stage") == 2 and job["engine"] != "deepspeed"):
        return "full"
    if job.get("zero_stage") == 2:
        return "gradients"
    return "optimizer" if job.get("distributed_optimizer") or job.get("zero_stage") == 1 else "none"


def state_widths(row: Row) -> tuple[int, int, float]:
    """Bytes per parameter: weights, accumulated gradients, optimizer with master weights.

    Megatron's precision-aware optimizer with bf16 moments keeps 4 + 2 + 2 bytes.
    """
    job = row["job"]
    engine, optimizer = job["engine"], job.get("optimizer") or ""
    gradient = {"fp32": 4, "bf16": 2, "fp16": 2}.get(job.get("grad_dtype") or "fp32", 4)
    if megatron(row):
        precise = "bf16 moments" in optimizer or row["id"].startswith("mbridge/moonlight")
        if job.get("precision") == "fp32":
            return 4, 4, 8.0
        if precise:
            return 2, gradient, 8.0
        return 2, gradient, 12.0
    if engine == "nanotron":
        return 2, gradient, 12.0
    if engine == "deepspeed":
        return 2, 2, 12.0
    if engine == "fsdp":
        return 4, 4, 8.0
    return 2, 2, 2.0 if "8-bit" in optimizer else 4.0


def optimizer_offload(offload: str) -> float:
    """Share of optimizer state in host memory: the moments; fp32 master shards stay on the GPU as well.

    megatron-core, optimizer/cpu_offloading/hybrid_optimizer.py: parameters are copied to the host, not moved.
    """
    found = re.search(r"optimizer states to CPU, fraction ([\d.]+)", offload)
    return float(found.group(1)) * 8 / 12 if found else 0.0


def cross_entropy_of(job: Row) -> CrossEntropy:
    """Megatron's ``--cross-entropy-loss-fusion`` and its implementation, ``native`` unless said."""
    if not job.get("cross_entropy_fusion"):
        return "unfused"
    return "te" if job.get("cross_entropy_fusion_impl") == "te" else "native"


def lora_of(job: Row) -> Lora | None:
    """Adapters, their targets under litgpt's names."""
    lora = job.get("lora")
    if not lora:
        return None
    if not lora.get("rank"):
        raise NotPredictedError("adapters of unstated rank")
    names = {"q": "query", "k": "key", "v": "value", "o": "projection"}
    targets = lora.get("targets") or []
    if targets == "all-linear":
        targets = ["query", "key", "value", "projection", "mlp"]
    return Lora(
        rank=lora["rank"],
        targets=frozenset(names.get(target, target) for target in targets),
        four_bit="nf4" in f"{lora.get('quant')} {job.get('quantize')}",
    )
