"""Bytes by formula, each beside a value derived by hand, at sizes where no two terms are alike.

Saved tensors: transformers' modules, megatron-core's and Transformer Engine's layers (arXiv 2205.05198, equations 2 and
4). States: the ZeRO paper (arXiv 1910.02054), DeepSpeed's and Megatron-LM's sources; kit/cost/memory names the files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kit.addons.lint.described import ProgramWorkload
from kit.cost.hardware import cublas_workspaces, overheads
from kit.cost.memory import activations_huggingface as hf
from kit.cost.memory import activations_megatron as local
from kit.cost.memory import activations_transformer_engine as te
from kit.cost.memory import deepspeed_sizes as sizes
from kit.cost.memory import rank_huggingface, rank_megatron
from kit.cost.memory.offload import (
    host_buffer_bytes,
    host_load_gib_per_node,
    host_ram_gib_per_node,
    host_state_bytes,
    nvme_state_bytes,
    offloaded_activation_bytes,
    stored_weight_bytes,
)
from kit.cost.memory.parts import RankParts
from kit.cost.memory.peak import fullest, overhead_gib, parts_of, peak_bytes, phases_of
from kit.cost.memory.states import StateBytes, moment_bytes, state_bytes
from kit.cost.memory.states_and_buffers import engine_memory, fsdp_buffers, rank_states
from kit.cost.model.lora import named_layers
from kit.cost.model.params import RankParameters, count
from kit.specs.job import GrpoSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Layout
from tests.planning.shapes import (
    DENSE,
    EXPERTS,
    GEMMA,
    GPT,
    LATENT,
    MISTRAL,
    MIXED,
    NODE,
    STACKS,
    Rows,
    by_hand,
    other,
    work,
)  # fmt: skip
from tests.planning.shapes import (
    TOKENS as T,
)
from tests.planning.test_time_formulas import LAYER
from tests.support.models import cluster, deepspeed, job, megatron, torch

TE = {"implementation": "transformer_engine"}
LORA, ALL = LoraSpec(rank=7, targets="attention"), LoraSpec(rank=7)
QWEN = replace(DENSE, name="qwen", family="qwen3")
OLMO = replace(DENSE, name="olmo", family="olmo2", hidden_size=480)
PHI = replace(DENSE, name="phi", family="phi3", hidden_size=480)
OSS = replace(EXPERTS, name="oss", family="gpt_oss", num_shared_experts=0, first_dense_layers=0, sliding_window=128)
NEOX = replace(GPT, name="neox", family="gpt_neox", rope_theta=1e4, parallel_residual=True)
FALCON = replace(NEOX, name="falcon", family="falcon", shared_norm=True, num_key_value_heads=2)
OPT = replace(GPT, name="opt", family="opt")
T5 = replace(
    STACKS, name="t5", family="t5", relative_attention_buckets=32, feed_forward_proj="relu", hidden_size=400
)  # fmt: skip
ZERO, DDP, FSDP = deepspeed(zero_stage=2, dp=8), torch(), torch(zero_stage=3, dp=8)
FP32 = {"precision": "fp32"}


def saved(layout: Layout, model: Any = DENSE, has_experts: bool = False, **job: Any) -> dict[str, float]:
    """Bytes a token by operator of transformers' layers."""
    return hf.layer_terms(work(layout, model, **job), has_experts)


def changed(layout: Layout, model: Any, *names: str, **job: Any) -> list[float]:
    """Some of the terms."""
    found = saved(layout, model, **job)
    return [found[name] for name in names]


HUGGING_FACE: Rows = [
    # RMSNorm saves its fp32 input, the normalised tensor and a root; the linear layers their inputs.
    ("16 bits", lambda: saved(ZERO), {"norms": 2 * (6 * 320 + 4) + 2 * 2 * 320, "attention": 2 * 2 * (480 + 120),
                                      "core_attn": 4 * 12, "mlp": 4 * 2 * 896}),
    ("32 bits", lambda: saved(ZERO, **FP32), {"norms": 2 * (8 * 320 + 4) + 2 * 4 * 320,
        "attention": 4 * 2 * (480 + 120),
                                              "core_attn": 4 * 12, "mlp": 4 * 4 * 896}),
    # Every product casts its input: three of attention, two of the MLP.
    ("autocast", lambda: saved(DDP), {"norms": 2 * (8 * 320 + 4), "attention": 2400, "core_attn": 48,
                                      "casts": 2 * 320 * 5, "mlp": 4 * 2 * 896}),
    ("GPT-2", lambda: saved(ZERO, GPT), {"norms": 2 * (2 * 384 + 4) + 2 * 2 * 384, "attention": 8 * 384,
        "core_attn": 24,
                                         "mlp": 5 * 2 * 1600}),
    ("GPT-2 under autocast", lambda: saved(DDP, GPT), {"norms": 2 * (6 * 384 + 8), "attention": 8 * 384,
                                                       "core_attn": 24, "mlp": 16 * 1600}),
    ("split over two", lambda: saved(FSDP.but(tp=2)), {"norms": 5128, "attention": 1200, "core_attn": 24, "mlp": 3584}),
    # Keys and values repeated for all heads, and a bias of every position.
    ("a window", lambda: [saved(ZERO, MISTRAL, seq_length=each).get("window") for each in (1024, 256, 255)],
     [2 * (2 * 9 * 40 + 1024), 2 * (2 * 9 * 40 + 256), None]),
    ("a window, one key head", lambda: [changed(each, replace(MISTRAL, num_key_value_heads=1), "window")
                                        for each in (ZERO, DDP)], [2 * 1024, 2 * (11 * 40 + 1024)]),
    ("a window, split", lambda: changed(FSDP.but(tp=2), MISTRAL, "window"), [2 * (9 * 40 + 1024)]),
    ("a window in half of the layers", lambda: changed(ZERO, replace(
        MISTRAL, family="gemma3_text", query_pre_attn_scalar=40, full_attention_every=2), "window"), [1744.0]),
    # Eager attention: fp32 probabilities, a copy and the cap's tanh; norms on both sides, scaled in fp32.
    ("Gemma 2", lambda: saved(ZERO, GEMMA), {"norms": 4 * (8 * 320 + 4) + 2 * 2 * 320, "attention": 2400 + 4 * 360,
                                             "core_attn": 8 * 12 * 1024, "mlp": 4 * 2 * 896}),
    ("Gemma 2 under autocast", lambda: changed(DDP, GEMMA, "norms", "core_attn"), [4 * (8 * 320 + 4), 8 * 12 * 1024]),
    # With sinks the softmax is in 16 bits, one column wider.
    ("sinks", lambda: [changed(each, OSS, "core_attn") for each in (ZERO, DDP)],
     [2 * 8 * 1024 + 10 * 8, 6 * 8 * 1024 + 12 * 8]),
    ("norms of heads", lambda: changed(ZERO, QWEN, "qk_norm"), [6 * 600 + 4 * 15]),
    ("zero-centred norms of heads", lambda: changed(ZERO, replace(
        MISTRAL, family="gemma3_text", query_pre_attn_scalar=40), "qk_norm"), [8 * 600 + 4 * 15]),
    ("norms of all heads", lambda: changed(ZERO, OLMO, "qk_norm"), [8 * 600 + 8]),
    # RoPE of a fused projection: the views keep all of it.
    ("fused queries and keys", lambda: changed(ZERO, PHI, "attention"), [2400 + 2 * (2 * 480 + 120)]),
    ("fused casts", lambda: [changed(DDP.but(tiled_mlp=each), PHI, "casts", "mlp") for each in (False, True)],
     [2 * 480 * 2, 7168, 2 * 480 + 4 * 480, 0]),
    ("parallel residual", lambda: [changed(each, NEOX, "norms") for each in (ZERO, DDP)],
     [2 * 384 + 4 + 2 * 384 * 2 + 4, 4 * 384 + 8 + 8]),
    ("a shared norm", lambda: [changed(each, FALCON, "norms") for each in (ZERO, DDP)],
     [2 * 384 + 4 + 2 * 384, 4 * 384 + 8]),
    ("Falcon", lambda: changed(ZERO, FALCON, "attention", "window"), [2 * 4 * 384, 2 * 1024]),
    ("Falcon with one key head", lambda: changed(ZERO, replace(FALCON, num_key_value_heads=1), "attention",
        "core_attn"),
     [4 * (384 + 128) + 2 * 384, 4 * 6 * 1024]),
    ("GELU and ReLU", lambda: [changed(ZERO, each, "mlp") for each in (NEOX, OPT)], [2 * 2 * 1600, 2 * 1600]),
    ("T5", lambda: changed(ZERO, T5, "norms", "mlp", "bias"), [
        2 * (8 * 400 + 4) + 4 * 400, 2 * 1600, 3 / 5 * (2 * 6 + 1) * 1024 / 3]),
    ("T5 1.1", lambda: changed(ZERO, replace(T5, feed_forward_proj="gated-gelu"), "mlp"), [7 * 2 * 1600]),
    # A token's copies and results, four tensors of an expert's width.
    ("experts", lambda: saved(ZERO, EXPERTS, True), {
        "norms": 5128, "attention": 4 * 672, "core_attn": 32, "experts": 2 * 3 * (640 + 800), "router": 48,
        "shared_experts": 4 * 2 * 400}),
    ("clamped experts", lambda: saved(ZERO, OSS, True)["experts"], 2 * 3 * (640 + 1400)),
    ("experts under autocast", lambda: saved(DDP, EXPERTS, True)["casts"], 2 * 320 * (3 + 1 + 2)),
    ("gate of shared experts", lambda: [saved(each, replace(
        EXPERTS, family="qwen2_moe", head_dim=40, first_dense_layers=0), True)[name] for each, name in (
            (ZERO, "shared_experts"), (DDP, "casts"))], [8 * 400 + 2 * 320, 2 * 320 * (3 + 1 + 2 + 1)]),
    ("latent attention", lambda: saved(ZERO, LATENT), {
        "norms": 2 * (6 * 352 + 4) + 4 * 352, "latent": 8 * (96 + 160) + 8, "attention": 2 * (1280 + 880 + 480),
        "core_attn": 40, "mlp": 8 * 1152}),
    ("router of latent models", lambda: [saved(each, LATENT, True, **more)["router"] for each, more in (
        (ZERO, {}), (ZERO, FP32), (DDP, {}))], [48 + 4 * 352, 48, 48]),
    ("Ulysses", lambda: [changed(FSDP.but(cp=each, cp_comm_type="a2a"), DENSE, "attention") for each in (2, 6)],
     [2400 + 2 * 480, 2400 + 2 * (480 + 240)]),
    # Four of six layers attend, one through a window; five have an MLP; two have states of 64 tokens each.
    ("a mean layer", lambda: saved(ZERO, MIXED), {
        "norms": 5128, "attention": 2400 * 4 / 6, "core_attn": 48 * 4 / 6, "window": 3488 / 6, "mlp": 7168 * 5 / 6,
        "states": (2 * 2 * 1_200_000 / 320 + 4 * 2 * 7000 / 64) / 6}),
    # Frozen: no tensor before the scale; every adapter its cast, or all of them one input; 7 numbers of seven.
    ("adapters", lambda: [changed(each, DENSE, "norms", "adapters", "mlp", lora=ALL) for each in (DDP, FSDP)],
     [2 * (4 * 320 + 4), 2 * (5 * 320 + 480) + 98, 7168, 2568, 2 * 2 * 320 + 98, 7168]),
    ("adapters of attention", lambda: [changed(each, DENSE, "adapters", "mlp", lora=LORA) for each in (DDP, FSDP)],
     [2 * (3 * 320 + 480) + 56, 7168 - 1792, 2 * 320 + 56, 7168 - 1792]),
    ("adapters with dropout", lambda: [changed(each, DENSE, "adapters", "mlp", lora=replace(ALL, dropout=0.1))
                                       for each in (DDP, FSDP)],
     [2 * 2080 + 2976 + 98, 7168, 3 * (5 * 320 + 480 + 896) + 98, 7168 - 1792]),
    ("adapters of attention with dropout", lambda: changed(FSDP, DENSE, "adapters", "mlp", lora=replace(LORA,
        dropout=0.1)),
     [3 * (3 * 320 + 480) + 56, 7168 - 1792]),
    ("DoRA", lambda: changed(DDP, DENSE, "adapters", lora=replace(LORA, use_dora=True)), [2936 + 4 * 1040]),
    ("adapters of GPT-2", lambda: changed(DDP, GPT, "norms", "adapters", "mlp", lora=ALL),
     [2 * (2 * 384 + 4), 2 * 3 * 384 + 56, 16000]),
    ("adapters of fused layers", lambda: changed(DDP, PHI, "adapters", lora=ALL), [2 * 3 * 480 + 56]),
    ("adapters beside experts", lambda: saved(FSDP, EXPERTS, True, lora=ALL)["adapters"], 2 * 320 + 56),
    ("frozen norms of heads", lambda: [changed(ZERO, each, "qk_norm", lora=LORA) for each in (
        QWEN, replace(MISTRAL, family="gemma3_text", query_pre_attn_scalar=40))], [3660 * 4 / 6, 4860 / 2]),
    ("frozen norms", lambda: [changed(ZERO, each, "norms", lora=LORA) for each in (FALCON, NEOX, GEMMA)],
     [772, 2 * 772, 4 * 1284]),
    ("ReLU before a frozen matrix", lambda: changed(ZERO, OPT, "mlp", lora=LORA), [3200]),
    ("GELU before a frozen matrix", lambda: changed(ZERO, NEOX, "mlp", lora=LORA), [6400 - 3200]),
    # Both normalised inputs and the last product, unless adapters save the very tensors.
    ("inputs of 8-bit layers", lambda: [
        sum(saved(layout, model, kind, lora=replace(lora, eight_bit=True)).values())
        - sum(saved(layout, model, kind, lora=lora).values()) for layout, model, kind, lora in (
            (DDP, DENSE, False, ALL), (ZERO, DENSE, False, ALL), (ZERO, DENSE, False, LORA),
            (ZERO, DENSE, False, replace(ALL, dropout=0.1)), (ZERO, FALCON, False, LORA), (ZERO, EXPERTS, True, ALL))],
     [2 * (2 * 320 + 896), 0, 2 * (320 + 896), 2 * (2 * 320 + 896), 2 * 1600, 2 * 320]),
    ("inputs that a checkpoint does not free", lambda: [hf.kept_inputs(work(ZERO, model, lora=lora), kind) / T
        for model, kind, lora in ((DENSE, False, QLORA), (DENSE, False, INT8), (EXPERTS, True, INT8),
        (OSS, True, INT8), (LATENT, False, INT8), (FALCON, False, INT8))],
     [0, 2 * (2 * 320 + 480 + 896), 2 * (2 * 320 + 448 + 400), 2 * (320 + 448),
      2 * (2 * 352 + 480 + 96 + 160 + 1152), 2 * (384 + 384 + 1600)]),
    ("a layer", lambda: hf.layer_bytes(work(ZERO), False), T * 14744),
    ("inputs of layers", lambda: [hf.layer_input(work(each, **more)) / T / 320 for each, more in (
        (ZERO, {}), (DDP, {}), (DDP, {"lora": LORA}), (FSDP, {}), (FSDP, FP32))], [2, 4, 2, 2, 4]),
    ("the last norm", lambda: [hf.after_layers(work(each, **more)) / T for each, more in (
        (ZERO, {}), (DDP, {}), (DDP, {"lora": LORA}))], [6 * 320 + 4 + 640, 8 * 320 + 4 + 6 * 320, 4 * 320 + 4]),
    ("cross-attention", lambda: hf.cross_attention(work(ZERO, STACKS)) / T, 8 * 384 + 24 + 3080 / 2),
    ("casts to fp8", lambda: [hf.fp8_cast_workspace(work(FSDP.but(compile_layers=each), precision="fp8"))
                              for each in (False, True)], [9 * 896 * T, 2 * 896 * T]),
    ("casts of short rows", lambda: hf.fp8_cast_workspace(work(FSDP, GPT, seq_length=16)), 9 * 1600 * 384),
    ("layers that adapters may name", lambda: [named_layers(DENSE), [*named_layers(GPT)]],
     [{"q_proj": (320, 480), "k_proj": (320, 120), "v_proj": (320, 120), "o_proj": (480, 320),
       "gate_proj": (320, 896), "up_proj": (320, 896), "down_proj": (896, 320)}, []]),
    # Megatron: 16-bit logits and an fp32 copy; in fp32 the gradients of logits, head and input are more.
    ("Megatron's loss", lambda: [local.local_loss_bytes(work(megatron(), **each), 5003 * T) for each in ({}, FP32)],
     [(2 + 4) * 5003 * T, 4 * (5003 * T + 5003 * 320 + 2 * 320 * T)]),
    ("logits", lambda: [hf.loss_bytes(work(ZERO, each)) / T / 5003 for each in (DENSE, GEMMA)], [12, 14]),
    # 2,048 tokens in 16 and 32 bits; the head's gradient and the product added to it; gradients of all inputs.
    ("chunks of logits", lambda: [hf.loss_bytes(work(each.but(chunked_loss=True), model, **more)) for each, model, more
                                  in ((FSDP, DENSE, {}), (DDP, DENSE, {}), (FSDP, DENSE, FP32), (FSDP, GEMMA, {}),
                                      (FSDP, DENSE, {"lora": LORA}))],
     [5003 * (6 * 2048 + 6 * 320) + 2 * 320 * T, 5003 * (6 * 2048 + 6 * 320) + 4 * 320 * T,
      5003 * (4 * 2048 + 4 * 320) + 4 * 320 * T, 5003 * (10 * 2048 + 6 * 320) + 2 * 320 * T,
      5003 * 6 * 2048 + 2 * 320 * T]),
]  # fmt: skip

SP = megatron(tp=2, sp=True)


def of_megatron(layout: Layout, model: Any = DENSE, has_experts: bool = False, **job: Any) -> dict[str, float]:
    """Bytes a token of a rank's sequences, by operator, of kit's local layers."""
    workload = work(layout, model, **job)
    return {name: each / workload.tokens for name, each in local.layer_terms(workload, has_experts).items()}


MEGATRON: Rows = [
    # Norms save their input, the linear layers theirs; the fused projection, and rotated queries and keys.
    ("local", lambda: of_megatron(megatron()), {
        "norms": 2 * (2 * 320 + 4) + 2 * 2 * 320, "attention": 2 * (600 + 720 + 480), "core_attn": 48,
        "rope": 4 * 2 * 40 / 3, "mlp": 5 * 2 * 896}),
    ("local, split", lambda: of_megatron(SP), {
        "norms": 2568 / 2, "attention": 1800, "core_attn": 24, "rope": 4 * 2 * 40 / 3, "mlp": 4480}),
    ("local in fp32", lambda: of_megatron(megatron(), **FP32)["mlp"], 5 * 4 * 896),
    ("without sequence parallelism", lambda: of_megatron(megatron(tp=2))["norms"], 2568),
    ("a whole key head", lambda: of_megatron(megatron(tp=6))["attention"], 2 * (80 + 40 + 80 + 80 + 80)),
    ("a ring", lambda: of_megatron(megatron(cp=2, cp_comm_type="p2p"))["attention"], 2 * (720 + 480)),
    ("gathered keys", lambda: of_megatron(megatron(cp=2))["attention"], 2 * (480 + 2 * 2 * 120 + 2 * 480)),
    ("gathered again", lambda: [of_megatron(megatron(cp=2, cp_comm_type=each, recompute="selective"))["attention"]
                                for each in ("p2p", "all_gather")], [3600, 3600]),
    ("norms of heads", lambda: of_megatron(SP, QWEN)["attention"], 1800 + 2 * 240 + 4 * (6 + 1.5)),
    ("GPT-2", lambda: of_megatron(megatron(), GPT), {
        "norms": 2 * (2 * 384 + 8) + 4 * 384, "attention": 2 * 4 * 384, "core_attn": 24, "mlp": 2 * 2 * 1600}),
    # fp32 norms on both sides; scores after the cap, softmax and its cast.
    ("Gemma 2", lambda: [of_megatron(megatron(), GEMMA)[each] for each in ("norms", "core_attn")],
     [4 * (4 * 320 + 4) + 4 * 320, 8 * 12 * 1024]),
    ("adapters", lambda: [[of_megatron(megatron(), lora=each)[name] for name in ("norms", "mlp", "adapters")]
                          for each in (LORA, ALL, replace(LORA, target_modules=("q_proj", "down_proj")))],
     [1288 + 640, 4 * 1792, 56, 1288 + 1280, 5 * 1792, 98, 1288 + 640, 5 * 1792, 28]),
    ("adapters of GPT-2", lambda: of_megatron(megatron(), GPT, lora=ALL)["adapters"], 2 * 7 * 4),
    ("adapters of fused layers", lambda: of_megatron(megatron(), PHI, lora=ALL)["adapters"], 2 * 7 * 4),
    ("adapters of latent attention", lambda: [of_megatron(megatron(), replace(LATENT, latent=replace(
        LATENT.latent, q_lora_rank=each)), lora=LORA)["adapters"] for each in (160, None)], [70, 56]),
    ("adapters beside experts", lambda: of_megatron(megatron(), EXPERTS, True, lora=ALL)["adapters"], 56),
    ("latent attention", lambda: [of_megatron(each, LATENT)["attention"] for each in (
        SP, megatron(cp=2), megatron(cp=2, recompute="selective"))],
     [536 + 264 * 10, 2 * (536 + (64 + 224 + 96) * 10), 2 * (536 + 264 * 10)]),
    ("queries in one step", lambda: of_megatron(megatron(), replace(LATENT, latent=replace(
        LATENT.latent, q_lora_rank=None)))["attention"], 2 * (216 + 2640)),
    # A token's copy over the ranks of an expert, and six tensors of its width.
    ("experts", lambda: [of_megatron(SP.but(etp=etp, ep=2), EXPERTS, True, **more)["experts"] for etp, more in (
        (1, {}), (2, {}), (1, {"expert_load": 1.5}), (1, {"lora": LORA}))],
     [6 * (160 + 600), 6 * (320 + 600), 9 * (160 + 600), 6 * 500]),
    ("gradients of an MLP", lambda: [local.backward_workspace_bytes(work(SP, each), False) / T
                                     for each in (DENSE, GPT, GEMMA)],
     [4 * 320 + 6 * 448, 4 * 384 + 4 * 800, 4 * 320 + 8 * 6 * 1024]),
    # 1,536 · 3 · 2 tokens arrive: four copies of each; or one of twelve experts and its products in fp32.
    ("gradients of experts", lambda: [local.backward_workspace_bytes(work(SP.but(etp=2, ep=each), replace(
        EXPERTS, moe_ffn_hidden_size=width)), True) / T for each, width in ((1, 200), (4, 2000))],
     [4 * 320 + 4 * 640 * 3, 4 * 320 + (12 * 1000 / 3 + 640) * 3]),
    ("loss", lambda: [local.local_loss_bytes(work(SP, **more), 2502 * T) for more in ({}, FP32)],
     [6 * 2502 * T, 4 * (2502 * T + 2502 * 320 + 640 * T)]),
    ("loss of few tokens", lambda: [local.local_loss_bytes(work(SP, seq_length=16, lora=each), 2502 * 48)
                                    for each in (None, LORA)],
     [2 * (2502 * 48 + 2502 * 320 + 640 * 48), 6 * 2502 * 48]),
    ("gradients of tables", lambda: [local.table_gradients(work(each, model, lora=lora), stage) for each, model, lora,
                                     stage in ((SP, DENSE, None, 0), (SP, GPT, None, 0), (SP.but(pp=5), GPT, None, 0),
                                               (SP.but(pp=2), DENSE, None, 1), (SP, DENSE, LORA, 0))],
     [2 * 2502 * 320, 6 * 2502 * 384, 2 * 2502 * 384, 0, 0]),
]  # fmt: skip

FUSED, OLD = megatron(tp=2, sp=True, **TE), cluster("8xA100-80")


def of_te(layout: Layout, model: Any = DENSE, has_experts: bool = False, **own: Any) -> dict[str, float]:
    """The same of Transformer Engine's layers; ``own``: of the job, or of another program."""
    job = {name: own.pop(name) for name in ("precision", "machines", "lora") if name in own}
    workload = other(work(layout, model, **job), **own)
    return {name: each / workload.tokens for name, each in te.layer_terms(workload, has_experts).items()}


TRANSFORMER_ENGINE: Rows = [
    ("fused", lambda: of_te(FUSED), {
        "residual": 2 * (640 + 4) / 2, "layernorm": 2 * 640 / 2, "dropout": 0, "attention": 2 * 360,
        "attention_output": 2 * 240, "core_attn": 24, "mlp": 6 * 448}),
    # flash-attn's output is saved twice; fp8 saves inputs of linear layers in 8 bits.
    ("flash-attn", lambda: of_te(FUSED, machines=OLD)["attention_output"], 4 * 240),
    ("fp8", lambda: [of_te(FUSED, precision="fp8")[name] for name in ("layernorm", "attention_output", "mlp")],
     [320, 3 * 240, 5 * 448]),
    ("fp32", lambda: [of_te(FUSED, precision="fp32", hidden_dropout=True)[name] for name in ("mlp", "dropout")],
     [12 * 448, 320]),
    ("a whole key head", lambda: of_te(megatron(tp=6, **TE))["attention"], 2 * (80 + 80)),
    ("norms of heads", lambda: of_te(FUSED, QWEN)["attention"], 720 + 2 * 300 + 4 * 300 / 40),
    ("LayerNorm, no gate", lambda: [of_te(FUSED, GPT)[name] for name in ("residual", "mlp")], [2 * 384 + 8, 4 * 800]),
    ("unfused", lambda: [[of_te(FUSED, attention="unfused", attention_dropout=each)[name] for name in (
        "core_attn", "attention_output")] for each in (False, True)], [2 * 6 * 1024, 480, 5 * 6 * 1024, 480]),
    ("latent attention", lambda: of_te(FUSED, LATENT), {
        "residual": 2 * 352 + 4, "layernorm": 2 * 352, "dropout": 0, "attention": (2 * 120 + 2 * 96 + 4 * 160) / 2,
        "mla_up_proj": 2 * 176 * 5, "attention_output": 2 * 48 * 5, "core_attn": 20, "mlp": 6 * 576}),
    ("latent attention in fp8", lambda: of_te(FUSED, LATENT, precision="fp8")["attention"], (240 + 96 + 480) / 2),
    ("queries in one step", lambda: of_te(FUSED, replace(LATENT, latent=replace(LATENT.latent, q_lora_rank=None)))
     ["attention"], (240 + 192) / 2),
    ("experts", lambda: [of_te(FUSED.but(ep=2), EXPERTS, True)[name] for name in (
        "router", "experts", "moe_act", "shared_experts")], [13 * 12 / 2, 3 / 2 * (640 + 800), 3 / 2 * 400, 6 * 200]),
    ("split experts", lambda: [of_te(FUSED.but(etp=2), EXPERTS, True)[name] for name in ("experts", "moe_act")],
     [3 * (640 + 400), 3 * 200]),
    ("experts without sequence parallelism", lambda: [of_te(megatron(tp=4, etp=each, **TE), EXPERTS, True)["experts"]
                                                      for each in (2, 4)], [3 * (640 + 400), 12 * (640 + 200)]),
    ("experts in fp8", lambda: [of_te(FUSED, EXPERTS, True, precision="fp8")[name] for name in (
        "experts", "moe_act", "shared_experts")], [1.5 * (320 + 800), 1.5 * 200, 5 * 200]),
    # Of experts without a gate, GELU's result and its product with the router's weight.
    ("experts without a gate", lambda: [of_te(FUSED, replace(MIXED, num_experts=12, experts_per_token=3,
        moe_ffn_hidden_size=200, approximate=replace(MIXED.approximate, gated_mlp=False)), True)[name]
        for name in ("experts", "moe_act")], [1.5 * (640 + 400), 1.5 * 800]),
]  # fmt: skip

TOTAL = 6 * (LAYER + 640) + 2 * 5003 * 320 + 320
TABLE = 5003 * 320
N8 = replace(NODE, nvme_gib=1e4)


def chosen(layout: Layout, model: Any = DENSE, gib: float = 80.0) -> dict[str, int]:
    """Sizes of buffers on GPUs of so much memory."""
    return sizes.buffer_sizes(model, replace(NODE, gpu=replace(NODE.gpu, memory_gib=gib)), layout)


FILLS = 40_162_500
"""Ten latencies of eight ranks, 10 · 7 · 3.4 µs, at 337.5 GB/s, in elements of two bytes."""
NVME = deepspeed(zero_stage=3, dp=16, offload_optimizer="nvme", offload_param="nvme")
SIZES: Rows = [
    ("buckets", lambda: [chosen(deepspeed(zero_stage=each, dp=8)) for each in (0, 2)],
     [{}, {"reduce_bucket_size": FILLS}]),
    ("a matrix on one rank", lambda: [chosen(deepspeed(zero_stage=2), each) for each in (DENSE, EXPERTS)],
     [{"reduce_bucket_size": 320 * 896}, {"reduce_bucket_size": 320 * 448}]),
    ("Megatron has its own", lambda: chosen(megatron(dp=8)), {}),
    ("stage 3", lambda: chosen(FSDP.but(engine="deepspeed")), {
        "reduce_bucket_size": FILLS, "stage3_prefetch_bucket_size": LAYER + 640, "stage3_max_live_parameters": TOTAL,
        "stage3_param_persistence_threshold": 3200}),
    ("prefetch of one matrix", lambda: chosen(deepspeed(zero_stage=3))["stage3_prefetch_bucket_size"], 320 * 896),
    # A twentieth of the memory in 16 bits, at least two layers and the largest parameter.
    ("live weights", lambda: [chosen(deepspeed(zero_stage=3), gib=each)["stage3_max_live_parameters"]
                              for each in (0.05, 0.2)], [2 * (LAYER + 640) + TABLE, int(0.05 * 0.2 * 2**30 / 2)]),
    ("disks", lambda: {name: size for name, size in chosen(NVME).items() if not name.startswith(("red", "stage3"))},
     {"sub_group_size": 50_000_000, "optimizer_buffer_count": 4, "param_buffer_count": 5,
      "param_buffer_size": TABLE // 16}),
    ("sub groups", lambda: [chosen(NVME.but(dp=each, **more))["sub_group_size"] for each, more in (
        (4, {}), (128, {}), (128, {"offload_param": "none"}))], [10**8, 10**7, 10**8]),
    ("pinned", lambda: chosen(NVME.but(param_buffer_count=9, reduce_bucket_size=0)), chosen(NVME)
     | {"param_buffer_count": 9, "reduce_bucket_size": 0}),
    ("shards are rounded up", lambda: sizes.least_param_buffer(DENSE, NVME.but(dp=3, cp=7)), -(-TABLE // 21)),
    ("the largest sub group", lambda: [sizes.largest_sub_group(DENSE, NVME.but(dp=3), each) for each in (10**6, 10**7)],
     [10**6 + -(-TABLE // 3), -(-TOTAL // 3)]),
    # Four times the bytes of one latency, as a power of two from 8 to 128; a thread for each 2 GB/s, at most 8.
    ("queues", lambda: [(sizes.nvme_queue_depth(each), sizes.nvme_threads(each)) for rate in (None, 100.0, 400.0, 3e3)
                        for each in [replace(N8, nvme_gbytes_per_s=rate)]], [(8, 1), (8, 7), (32, 8), (128, 8)]),
    ("threads of a CPU", lambda: sizes.nvme_threads(replace(cluster("2xcpu"), nvme_gbytes_per_s=100.0)), 1),
    ("the largest parameter", lambda: [sizes.largest_parameter(each) for each in (
        DENSE, EXPERTS, replace(EXPERTS, num_experts=24), replace(DENSE, vocab_size=10))],
     [TABLE, TABLE, 24 * 2 * 200 * 320, 320 * 896]),
    ("whole on every rank", lambda: [sizes.persistent_parameters(DENSE, each) for each in (
        38399, 38400, 153600, 286720, TABLE)], [
            0, 460800, 460800 + 1843200, 460800 + 1843200 + 6 * 3 * 286720, 6 * LAYER + 2 * TABLE]),
    ("whole of two stacks", lambda: sizes.persistent_parameters(STACKS, 384 * 384), 4 * 5 * 384 * 384),
    ("weights below stage 3", lambda: [sizes.unsharded_bytes(work(each)) / TOTAL for each in (
        ZERO, ZERO.but(autocast=True), DDP)], [2, 4, 4]),
    ("copies of weights", lambda: [(sizes.owns_weights(each), sizes.flattens_on_host(each)) for each in (
        work(ZERO), work(ZERO.but(tp=2)), work(ZERO.but(tp=2, implementation="local")), work(ZERO, objective="dpo"))],
     [(False, False), (True, False), (False, False), (True, False)]),
    ("copies on the host", lambda: [sizes.flattens_on_host(replace(work(each, **more), cluster=replace(NODE,
        gpu=replace(
        NODE.gpu, memory_gib=gib)))) for each, more, gib in (
            (ZERO, {"objective": "dpo"}, 0.5), (ZERO.but(zero_stage=3), {"objective": "dpo"}, 0.5),
            (ZERO, {"objective": "dpo", "lora": LORA}, 0.5), (ZERO, {}, 0.5))], [True, False, False, False]),
]  # fmt: skip


def state(layout: Layout, *fields: str, precision: Any = "bf16", optimizer: Any = "adamw") -> list[Any]:
    """Bytes a parameter."""
    found = state_bytes(layout, precision, optimizer)
    return [getattr(found, name) for name in fields]


MOMENTS = ("gradients", "gradients_in_forward", "gradients_in_step", "gradients_between_steps", "extra_in_step")
ALL_STATE = ("weights", "gradients", "optimizer")
OPT_FIELDS = ("optimizer", "optimizer_of_matrices", "optimizer_of_vectors")
Z = {stage: deepspeed(zero_stage=stage, dp=8) for stage in range(4)}
M = {stage: each.but(gradient_accumulation_steps=4) for stage, each in Z.items()}
EIGHT = 2 + 8 / 256
STATES: Rows = [
    # Weights, gradients and optimizer together (arXiv 1910.02054, figure 1; Megatron-core's distributed optimizer).
    ("torch, all", lambda: [sum(state(torch(), *ALL_STATE, precision=each)) for each in ("fp32", "bf16")], [16, 16]),
    ("torch sharded, all", lambda: [sum(state(torch(dp=8, zero_stage=stage), *ALL_STATE)) for stage in (3, 2)], [2, 2]),
    ("Megatron, all", lambda: [sum(state(megatron(**sizes), *ALL_STATE, precision=each)) for sizes, each in (
        ({"zero_stage": 0, "dp": 8}, "bf16"), ({"dp": 8}, "bf16"), ({"dp": 4, "cp": 2}, "bf16"),
        ({"zero_stage": 0, "dp": 8}, "fp32"), ({"dp": 8}, "fp32"))],
     [18, 6 + 12 / 8, 6 + 12 / 8, 16, 8 + 8 / 8]),
    ("ZeRO, all", lambda: [sum(state(Z[stage], *ALL_STATE)) for stage in range(4)],
     [16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8]),
    ("ZeRO with accumulation, all", lambda: [sum(state(M[stage], *ALL_STATE)) for stage in (1, 2, 3)],
     [2 + 6 + 12 / 8, 2 + 16 / 8, 18 / 8]),
    ("ZeRO in fp32, all", lambda: [sum(state(Z[stage], *ALL_STATE, precision="fp32")) for stage in (0, 2, 3)],
     [16, 4 + 16 / 8, 20 / 8]),
    ("ZeRO offloaded, all", lambda: [sum(state(each.but(offload_optimizer="cpu"), *ALL_STATE)) for each in (
        Z[2], Z[3].but(offload_param="cpu"))], [2, 0]),
    # Gradients at their peak, in forward, in the step, after it; fp32 copies in the step (docs/deepspeed-bytes.md).
    ("stage 0", lambda: [state(each, *MOMENTS) for each in (Z[0], M[0])], [[2, 0, 2, 0, 4], [2, 2, 2, 0, 4]]),
    ("stage 1", lambda: [state(each, *MOMENTS) for each in (Z[1], M[1])], [[2, 0, 0.25, 0, 0.5], [6, 6, 6, 4, 0]]),
    ("stage 1 in fp16", lambda: state(M[1], *MOMENTS, precision="fp16"), [4.5, 4, 0.5, 0, 0]),
    ("stage 2", lambda: [state(each, *MOMENTS) for each in (Z[2], M[2])],
     [[0.25, 0, 0.25, 0, 0.5], [0.5, 0.5, 0.5, 0, 0]]),
    ("stage 3", lambda: [state(each, *MOMENTS) for each in (Z[3], M[3])],
     [[0.25, 0.25, 0.25, 0.25, 0.5], [0.5, 0.5, 0.5, 0.5, 0.5]]),
    ("fp32", lambda: [state(each, "weights", "optimizer", *MOMENTS, precision="fp32") for each in (Z[0], M[1], M[2])],
     [[4, 8, 4, 0, 4, 0, 0], [4, 1.5, 4, 4, 0.5, 0, 0], [4, 1.5, 0.5, 0.5, 0.5, 0, 0]]),
    ("autocast", lambda: state(Z[2].but(autocast=True), "weights", "optimizer", *MOMENTS), [4, 1.5, .5, 0, .5, 0, 0]),
    # Sums of stages 1 and 2 stay on the device, everything else leaves with the optimizer.
    ("offloaded", lambda: [state(each.but(offload_optimizer="cpu"), "weights", "optimizer", *MOMENTS) for each in (
        Z[1], M[1], Z[2], M[2], M[3])], [[2, 0, 2, 0, 0, 0, 0], [2, 0, 4.5, 4, 0.5, 0, 0], [2, 0, 0, 0, 0, 0, 0],
                                         [2, 0, 0.5, 0.5, 0.5, 0, 0], [0.25, 0, 0, 0, 0, 0, 0]]),
    ("offloaded weights", lambda: state(Z[3].but(offload_param="cpu"), "weights"), [0]),
    ("state in bf16", lambda: [state(each.but(optimizer_state_dtype="bf16"), "optimizer", "extra_in_step")
                               for each in (Z[3], M[2])], [[6 / 8, 0], [6 / 8, 2 / 8]]),
    ("over cp too", lambda: state(Z[3].but(cp=2), "weights", "optimizer"), [2 / 16, 12 / 16]),
    # torch: fp32 everywhere; DDP's buckets hold gradients all the time.
    ("DDP", lambda: [state(torch(dp=each), "weights", "optimizer", *MOMENTS) for each in (1, 8)],
     [[4, 8, 4, 0, 4, 0, 0], [4, 8, 4, 4, 4, 4, 0]]),
    ("FSDP2", lambda: [state(FSDP.but(cp=2, **more), "weights", *MOMENTS, optimizer="adamw-8bit") for more in (
        {}, {"gradient_accumulation_steps": 4}, {"gradient_dtype": "bf16"})],
     [[0.25, 0.25, 0, 0.25, 0, 0], [0.25, 0.25, 0.25, 0.25, 0.25, 0], [0.25, 0.125, 0, 0.125, 0, 0.25]]),
    ("torch in bf16", lambda: [state(each.but(optimizer_state_dtype="bf16"), *OPT_FIELDS, "weights", *MOMENTS,
        optimizer=name) for each, name in ((torch(), "adamw"), (FSDP, "adamw"), (FSDP, "adamw-8bit"))],
     [[4, None, None, 2, 2, 0, 2, 0, 0], [0.5, None, None, 0.25, 0.25, 0, 0.25, 0, 0],
      [EIGHT / 8, None, 0.5, 0.25, 0.25, 0, 0.25, 0, 0.5]]),
    ("FSDP2 on the host", lambda: state(FSDP.but(offload_param="cpu"), "weights", "optimizer", *MOMENTS),
     [0, 0, 0, 0, 0, 0, 0]),
    ("PowerSGD's error", lambda: state(torch(dp=8, gradient_compression="powersgd"), "optimizer"), [12]),
    ("moments in 8 bits", lambda: state(FSDP, *OPT_FIELDS, optimizer="adamw-8bit"), [EIGHT / 8, None, 1]),
    ("moments in 8 bits of ZeRO", lambda: state(Z[3], *OPT_FIELDS, optimizer="adamw-8bit"),
     [(4 + EIGHT) / 8, None, 12 / 8]),
    ("Muon", lambda: [state(each, *OPT_FIELDS, optimizer="muon") for each in (FSDP, megatron(dp=8, zero_stage=0))],
     [[1, 0.5, None], [12, 8, None]]),
    ("Adafactor gathers", lambda: [state(each, "extra_in_step", optimizer="adafactor") for each in (FSDP, Z[0])],
     [[12], [4]]),
    # Megatron: 18 bytes, or 6 + 12/d; an fp32 buffer of gradients.
    ("Megatron", lambda: [state(megatron(dp=4, cp=2, zero_stage=stage), "weights", "optimizer", *MOMENTS,
                                precision=each) for stage, each in ((1, "bf16"), (0, "bf16"), (1, "fp32"))],
     [[2, 1.5, 4, 4, 4, 4, 0], [2, 12, 4, 4, 4, 4, 0], [4, 1, 4, 4, 4, 4, 0]]),
    # The step copies its own shard of bf16 gradients to fp32, unless the optimizer reads them as they are.
    ("Megatron's gradients in bf16", lambda: [state(megatron(dp=4, cp=2, zero_stage=stage, gradient_dtype="bf16",
        optimizer_state_dtype=each), *MOMENTS) for stage, each in ((1, "fp32"), (0, "fp32"), (1, "bf16"))],
     [[2, 2, 2.5, 2, 0], [2, 2, 6, 2, 0], [2, 2, 2, 2, 0]]),
    ("beside its optimizer on the host", lambda: state(megatron(dp=8, offload_optimizer="cpu", gradient_dtype="bf16"),
                                                       *MOMENTS), [2, 2, 2, 2, 0]),
    ("Megatron's optimizer on the host", lambda: state(megatron(dp=8, offload_optimizer="cpu",
                                                                optimizer_offload_fraction=0.75), "optimizer"),
                                                                [3 / 8]),
    ("Megatron's moments in bf16", lambda: state(megatron(dp=8, optimizer_state_dtype="bf16"), "optimizer"), [6 / 8]),
    ("masters and moments", lambda: [(each.master_bytes, *moment_bytes(each, "adamw-8bit")) for each in (
        FSDP, FSDP.but(optimizer_state_dtype="bf16"))], [(4, EIGHT, EIGHT, 8), (2, EIGHT, EIGHT, 4)]),
    # Offload, bytes a parameter of a rank: weights, gradients, optimizer.
    ("host of ZeRO", lambda: [host_state_bytes(each.but(offload_optimizer="cpu"), precision) for each, precision in (
        (Z[2], "bf16"), (M[2], "fp32"), (M[1], "fp32"), (Z[3], "bf16"), (M[3], "bf16"))],
     [[0.25, 0.5, 1.5], [0.5, 1, 1.5], [0.5, 0.5, 1.5], [0, 0.75, 1.5], [0, 1, 1.5]]),
    ("host of weights", lambda: [host_state_bytes(each, "bf16") for each in (
        Z[3].but(offload_param="cpu"), Z[3].but(offload_param="nvme"), M[3].but(offload_optimizer="nvme"), Z[3],
        Z[3].but(offload_param="cpu", autocast=True))],
     [[0.25, 0, 0], [0, 0, 0], [0, 0.5, 0], [0, 0, 0], [0.5, 0, 0]]),
    ("host of bf16 state", lambda: host_state_bytes(Z[3].but(offload_optimizer="cpu", optimizer_state_dtype="bf16"),
                                                    "bf16"), [0, 0.5, 0.75]),
    ("host of torch and Megatron", lambda: [host_state_bytes(each, "bf16") for each in (
        FSDP, FSDP.but(offload_param="cpu"), FSDP.but(offload_param="cpu", gradient_dtype="bf16"), FSDP.but(
            offload_param="cpu", optimizer_state_dtype="bf16"), megatron(dp=8), megatron(offload_optimizer="cpu",
                                                                     optimizer_offload_fraction=0.75))],
     [[0, 0, 0], [0.5, 0.5, 1], [0.5, 0.25, 1], [0.25, 0.25, 0.5], [0, 0, 0], [0, 3, 9]]),
    ("host of adapters by torch", lambda: host_state_bytes(FSDP.but(offload_param="cpu"), "bf16", frozen=True),
     [0.25, 0.5, 1.5]),
    ("disks", lambda: [nvme_state_bytes(each, "bf16") for each in (
        NVME, NVME.but(offload_param="none"), NVME.but(offload_optimizer="none"))],
     [[1 / 8, 1 / 4, 3 / 4], [0, 1 / 4, 3 / 4], [1 / 8, 0, 0]]),
    ("all of a host", lambda: host_state_bytes(Z[2].but(offload_optimizer="cpu"), "bf16").total, 2.25),
]  # fmt: skip

MOST = NVME.but(dp=8)
GROUP = -(-TOTAL // 8)
OFFLOAD: Rows = [
    ("buffers of gradients", lambda: [host_buffer_bytes(work(each.but(offload_optimizer="cpu"))) for each in (Z[2],
        Z[3])],
     [2 * TABLE, 0]),
    # Four of the largest sub group in fp32; five of the largest shard, and one of a sub group's whole weights.
    ("buffers of disks", lambda: [host_buffer_bytes(work(MOST.but(**more))) for more in (
        {}, {"offload_param": "none"}, {"offload_optimizer": "none"})],
     [16 * GROUP + 10 * TABLE / 8 + 2 * GROUP * 8, 16 * GROUP, 10 * TABLE / 8 + 2 * GROUP * 8]),
    # 1.5 times what is pinned: gradients, and below stage 3 the masters, a third of 12 bytes.
    ("host of a node", lambda: [host_ram_gib_per_node(work(each.but(offload_optimizer="cpu"))) * 2**30 for each in (
        Z[2], Z[3], Z[3].but(offload_param="cpu"))],
     [TOTAL * (1.5 * 2 + 16 + 0.5 * (4 + 4)) + 8 * 2 * TABLE, TOTAL * (18 + 3), TOTAL * (18 + 3 + 3)]),
    ("host of a split model", lambda: host_ram_gib_per_node(work(Z[3].but(dp=4, tp=2,
        offload_optimizer="cpu"))) * 2**30,
     TOTAL * 21),
    ("host of two nodes", lambda: host_ram_gib_per_node(work(Z[3].but(dp=16, offload_optimizer="cpu"),
                                                             machines=cluster("16xH100"))) * 2**30, TOTAL * 21 / 2),
    ("host of Megatron's fullest stage", lambda: host_ram_gib_per_node(work(megatron(
        dp=4, pp=2, offload_optimizer="cpu", optimizer_offload_fraction=0.5))) * 2**30,
     8 * (16 + 2) * 0.5 * (3 * (LAYER + 640) + TABLE + 320) / 4),
    ("host of Megatron without offload", lambda: host_ram_gib_per_node(work(megatron(dp=8))), 0.0),
    ("layer inputs", lambda: [offloaded_activation_bytes(work(FSDP.but(activation_offloading=each)), pinned)
                              for each, pinned in ((False, False), (True, False), (True, True))],
     [0, 6 * 2 * 320 * T, 6 * 2**21]),
    ("layer inputs of a node", lambda: host_ram_gib_per_node(work(FSDP.but(activation_offloading=True))) * 2**30,
     8 * 6 * 2**21),
    ("weights in four bits", lambda: [stored_weight_bytes(work(FSDP, lora=each)) for each in (
        None, LORA, replace(LORA, four_bit=True))], [4 * TOTAL, 2 * TOTAL, 0.5 * 6 * LAYER + 2 * (TOTAL - 6 * LAYER)]),
    ("weights of ZeRO and in bf16", lambda: [stored_weight_bytes(work(each)) for each in (
        Z[3], FSDP.but(optimizer_state_dtype="bf16"))], [2 * TOTAL, 2 * TOTAL]),
    # A process of each rank, and the largest parameter in fp32; the first rank builds random weights.
    ("loading", lambda: [(host_load_gib_per_node(work(each, **more)) - 8 * overheads().cpu_process_gib) * 2**30
                         for each, more in (
        (FSDP, {"objective": "sft"}), (FSDP, {}), (torch(dp=8), {}), (Z[2], {}), (Z[3], {}), (megatron(dp=8), {}),
        (FSDP, {"lora": LORA}), (FSDP.but(dp=4, tp=2), {"lora": LORA}), (Z[2].but(implementation="local"), {}))],
     [32 * TABLE, 32 * TABLE + 4 * TOTAL, 32 * TABLE, 32 * TABLE + 4 * TOTAL, 32 * TABLE, 32 * TABLE, 32 * TABLE,
      16 * TABLE + 8 * 2 * TOTAL, 32 * TABLE]),
    ("loading what is flattened on the host", lambda: (host_load_gib_per_node(replace(
        work(Z[2], objective="dpo"), cluster=replace(NODE, gpu=replace(NODE.gpu, memory_gib=0.5))))
        - 8 * overheads().cpu_process_gib) * 2**30, 32 * TABLE + 8 * 4 * TOTAL),
    ("an offloaded reference", lambda: [host_ram_gib_per_node(work(Z[3].but(offload_param=each),
        objective="dpo")) * 2**30
                                        for each in ("cpu", "none")], [3 * TOTAL + 2 * TOTAL, 0]),
]  # fmt: skip

LAYER_TOTAL = LAYER + 640
ROOT = 2 * TABLE + 320


def engine(layout: Layout, *fields: str, model: Any = DENSE, **job: Any) -> list[Any]:
    """Fields of the engine's memory."""
    found = engine_memory(work(layout, model, **job))
    return [getattr(found, name) for name in fields]


P = RankParameters(dense_matrices=1e9, vectors=1e7, vocabulary=2e8, experts=3e9)
QLORA = replace(LORA, four_bit=True)
INT8, NF4 = replace(LORA, eight_bit=True), 0.5 + 1 / 64 + 4 / (64 * 256)
ADAPTED = 6 * 7 * ((320 + 480) + 2 * (320 + 120) + (480 + 320))


def held(layout: Layout, model: Any = DENSE, **job: Any) -> list[float]:
    """States of a rank with ``P``, in 1e9 bytes."""
    return [each / 1e9 for each in rank_states(engine_memory(work(layout, model, **job)), P, 0)[:7]]


ENGINES: Rows = [
    # FSDP2: the root from forward to backward; the next layer, and gradients in 16 bits and in fp32.
    ("FSDP2's buffers", lambda: fsdp_buffers(root=7, head=5, layer=3, attention=1, after_forward=20, element=2,
                                             scattered=0.5), (2 * 27, 2 * (7 + 20 + 5 + 3 - 1) + 4.5 * 3, 6.5 * 7)),
    ("a layer and the next", lambda: fsdp_buffers(root=7, head=5, layer=3, attention=1, after_forward=0, element=2)[:2],
     (14, 2 * (7 + 6 + 5 + 3 - 1) + 12)),
    ("FSDP2", lambda: engine(FSDP, "buffers", "gathered", "root_is_last"), [0, (
        2 * ROOT, 2 * (ROOT + 2 * LAYER_TOTAL + TABLE + LAYER_TOTAL - 384000) + 4 * LAYER_TOTAL, 6 * ROOT), True]),
    # A rank's part of the next layer in fp32, and of this layer's gradients on their way: an eighth each.
    ("FSDP2 on the host", lambda: [engine(FSDP.but(offload_param=place, gradient_dtype=dtype), "gathered")[0][1] -
        engine(FSDP, "gathered")[0][1] for place, dtype in (("cpu", "fp32"), ("cpu", "bf16"), ("none", "bf16"))],
     [LAYER_TOTAL, LAYER_TOTAL, LAYER_TOTAL / 2]),
    ("FSDP2 that stays gathered", lambda: engine(FSDP.but(zero_stage=2), "gathered")[0][:2], (
        2 * (ROOT + 6 * LAYER_TOTAL), 2 * (ROOT + 6 * LAYER_TOTAL + TABLE + LAYER_TOTAL - 384000) + 4 * LAYER_TOTAL)),
    ("FSDP2 over two", lambda: engine(FSDP.but(tp=2), "gathered")[0][1],
     2 * (ROOT + LAYER_TOTAL + TABLE + LAYER_TOTAL / 2 - 192000) + 2 * LAYER_TOTAL),
    ("FSDP2, tied, gradients in bf16", lambda: engine(FSDP.but(gradient_dtype="bf16"), "gathered", model=GPT)[0][2],
     (2 + 4 + 0.5) * (5003 * 384 + 1024 * 384 + 768)),
    # accelerate reduces in the dtype of the gradients, which exist beside the head's.
    ("one unit", lambda: [
        engine_memory(ProgramWorkload(model, NODE, job(), FSDP, fsdp_unit="model")).gathered for model in (DENSE, GPT)],
     [(2 * TOTAL, 2 * TOTAL + 2 * TABLE, 4 * TOTAL), (2 * (G := count(GPT).total), 2 * G + 2 * 384 * (5003 + 1024),
         4 * G)]),
    ("DDP and Megatron", lambda: [engine(each, "buffers", "gathered", "root_is_last") for each in (
        torch(dp=8), megatron(dp=8))], [[0, (0, 0, 0), False]] * 2),
    ("ZeRO-2", lambda: [engine(each, "buffers", "gathered") for each in (Z[2], Z[2].but(offload_optimizer="cpu"))],
     [[0, (0, 4 * FILLS, 4 * FILLS)], [2 * TABLE, (0, 4 * FILLS, 4 * FILLS)]]),
    # Live weights (all of this model), one bucket ahead, and what stays whole on every rank.
    ("ZeRO-3", lambda: engine(Z[3], "buffers", "gathered"), [2 * FILLS, (2 * (TOTAL + LAYER_TOTAL),) * 3]),
    ("ZeRO-3 under autocast", lambda: engine(Z[3].but(autocast=True), "buffers", "gathered"),
     [6 * FILLS, (4 * (TOTAL + LAYER_TOTAL),) * 3]),
    ("a second copy", lambda: engine(Z[3].but(zero_hpz=4), "gathered")[0][0],
        2 * (TOTAL + LAYER_TOTAL) + 2 * TOTAL / 4),
    ("weights on disks", lambda: engine(NVME.but(dp=8), "gathered")[0][0], 2 * (TABLE + 2 * LAYER_TOTAL)),
    ("pinned sizes", lambda: engine(Z[3].but(stage3_max_live_parameters=10**6, stage3_prefetch_bucket_size=10**5,
                                             stage3_param_persistence_threshold=38400), "gathered")[0][0],
     2 * (TABLE + 10**5 + 460800)),
    ("ZeRO-3 over two", lambda: engine(Z[3].but(tp=2, dp=4), "gathered")[0][0], TOTAL + LAYER_TOTAL),
    ("casts of autocast", lambda: [engine(each, "autocast_copies", **more)[0] for each, more in (
        (DDP, {}), (DDP.but(recompute="full"), {}), (FSDP, {}), (DDP, {"lora": LORA}), (DDP, {"precision": "fp8"}))],
     [(2 * (6 * LAYER + TABLE),) * 2, (2 * (6 * LAYER + TABLE), 2 * TABLE), (0, 0), (0, 0), (2 * TABLE, 2 * TABLE)]),
    ("a tied head's gradient", lambda: [engine(each, "deferred_head_gradient", model=model, **more)[0]
                                        for each, model, more in ((DDP, GPT, {}), (Z[2], GPT, {}), (Z[2], GPT, FP32),
                                                                  (FSDP, GPT, {}), (DDP, DENSE, {}), (DDP, GPT,
                                                                  {"lora": LORA}),
                                                                  (megatron(), GPT, {}))],
     [4 * 5003 * 384, 2 * 5003 * 384, 4 * 5003 * 384, 0, 0, 0, 0]),
    ("gradients converted at a time", lambda: [engine(each, "most_step_extra", **more)[0] for each, more in (
        (FSDP, {}), (FSDP, {"optimizer": OptimizerSpec(name="adafactor")}), (Z[3], {}), (Z[3].but(sub_group_size=10**6),
        {}),
        (Z[2], {}), (megatron(zero_stage=0), {"optimizer": OptimizerSpec(name="muon")}), (megatron(), {}))],
     [4 / 8 * TABLE, 12 * TABLE, 4e9, 4e6, float("inf"), 18 * 320 * 896, 0]),
    ("exported", lambda: [engine(each, "save", **more)[0] / 4 for each, more in (
        (DDP, {}), (FSDP, {}), (torch(), {"optimizer": OptimizerSpec(name="adamw-8bit")}),
        (Z[3], {"optimizer": OptimizerSpec(name="adamw-8bit")}), (Z[0].but(tp=2, dp=4), {"optimizer": OptimizerSpec(
            name="adamw-8bit")}), (Z[3], {"optimizer": OptimizerSpec(name="adamw-8bit"), "lora": LORA}), (megatron(),
            {}))],
     [0, 0, TABLE, -(-TOTAL // 8) + TABLE, -(-TOTAL // 2) + TABLE, TABLE, TABLE]),
    ("exported by Megatron", lambda: [engine(megatron(tp=tp), "save", model=replace(DENSE, vocab_size=10))[0]
        for tp in (1, 2)], [4 * 320 * 896, 8 * 320 * 896]),
    # Until the vectors are flat too, the largest weight, and the clone of a rank's shard (stage_1_and_2.py).
    ("loading ZeRO", lambda: [engine(each, "load", **more)[0] for each, more in (
        (Z[2], {}), (M[1], {}), (Z[2].but(offload_optimizer="cpu"), {}), (Z[3], {}), (Z[0].but(tp=2), {}), (FSDP, {}),
        (Z[0], {}), (Z[3].but(tp=2), {"lora": LORA}), (Z[3], {"lora": LORA}))],
     [2 * TOTAL + 4 * TOTAL / 8 + max(2 * TABLE + 2 * TOTAL / 8, 4 * TOTAL / 8),
      2 * TOTAL + 4 * TOTAL / 8 + 2 * TABLE + 4 * TOTAL, 2 * TOTAL + 2 * TABLE + 2 * TOTAL / 8, 0, 2 * TOTAL, 0, 0,
      2 * TOTAL, 0]),
    ("loading four bits", lambda: [engine(each, "load", lora=QLORA)[0] for each in (Z[3], Z[2])],
     [NF4 * 6 * LAYER + 2 * (TOTAL - 6 * LAYER), 0]),
    ("weights beside their flat copy", lambda: engine(Z[2].but(offload_optimizer="cpu"), "load", objective="dpo"),
     [4 * TOTAL]),
    # Frozen weights in 16 bits, adapters in fp32 with AdamW's moments, sharded by FSDP2.
    ("adapters", lambda: [engine(each, "adapters", "of_adapters", "matrix_weights", lora=LORA) for each in (DDP, FSDP)],
     [[(ADAPTED,), StateBytes(4, 8, 4, 4, 4, 4), None],
      [(ADAPTED,), StateBytes(0.5, 1, 0.5, 0.5, 0.5, 0.5), None]]),
    ("adapters in eight bits", lambda: engine(DDP, "of_adapters", lora=LORA,
        optimizer=OptimizerSpec(name="adamw-8bit"))[0]
     .optimizer, EIGHT),
    ("adapters of stages", lambda: engine(megatron(pp=3, tp=2), "adapters", lora=LORA)[0],
     (2 * 7 * ((320 + 240) + 2 * (320 + 60) + (240 + 320)),) * 3),
    ("four bits", lambda: [engine(each, "matrix_weights", lora=QLORA)[0] for each in (DDP, FSDP, Z[2], Z[3],
                                                                                      FSDP.but(offload_param="cpu"))],
     [NF4, 0.5 / 8 + NF4 - 0.5, NF4, 0.5 / 8 + NF4 - 0.5, NF4 - 0.5]),
    ("frozen FSDP2", lambda: [engine(each, "gathered", lora=lora)[0] for each, lora in (
        (FSDP, LORA), (FSDP.but(zero_stage=2), LORA), (FSDP.but(offload_param="cpu"), LORA), (FSDP, QLORA),
        (FSDP.but(zero_stage=2), QLORA))],
     [(2 * ROOT, 2 * ROOT + 4 * LAYER_TOTAL, 2 * ROOT), (2 * ROOT + 12 * LAYER_TOTAL, 2 * ROOT + 12 * LAYER_TOTAL,
         2 * ROOT),
      (2 * ROOT, 2 * ROOT + 4 * LAYER_TOTAL + LAYER_TOTAL / 4, 2 * ROOT),
      (2 * ROOT + 2 * 320 * 896, 2 * ROOT + 2 * (0.5 * LAYER + 2 * 640) + 2 * 320 * 896, 2 * ROOT),
      (*[2 * ROOT + 6 * (0.5 * LAYER + 2 * 640) + 2 * 320 * 896] * 2, 2 * ROOT)]),
    ("adapters on the host", lambda: engine(FSDP.but(offload_param="cpu"), "of_adapters", "dense", lora=LORA),
     [StateBytes(0, 0, 0, 0, 0, 0)] * 2),
    # Weights, optimizer, gradients in forward, at their peak, in the step, between steps, copies in the step.
    ("states of Megatron", lambda: held(megatron(dp=8, ep=2)), [8.42, 12 * (1.21 / 8 + 3 / 4), 16.84, 16.84, 16.84,
        16.84, 0]),
    ("states of ZeRO", lambda: held(M[1]), [8.42, 12 * 4.21 / 8, 6 * 4.21, 6 * 4.21, 6 * 4.21, 4 * 4.21, 0]),
    ("states of Muon", lambda: held(megatron(dp=8, zero_stage=0), optimizer=OptimizerSpec(name="muon"))[1],
     8 * (1 + 3) + 12 * 0.21),
    ("states in eight bits", lambda: held(FSDP, optimizer=OptimizerSpec(name="adamw-8bit"))[1],
     EIGHT * 4.21 / 8 + (8 - EIGHT) / 8 * 0.01),
    ("copies in a step", lambda: [held(each)[6] for each in (Z[2], Z[3].but(sub_group_size=10**7))], [4.21 / 2, 0.04]),
    ("states of adapters", lambda: [each * 1e9 - rest for each, rest in zip(held(DDP, lora=LORA), (
        2 * 4.21e9, 0, 0, 0, 0, 0, 0), strict=True)],
     [4 * ADAPTED, 8 * ADAPTED, 4 * ADAPTED, 4 * ADAPTED, 4 * ADAPTED, 4 * ADAPTED, 0]),
    ("states of adapters of ZeRO", lambda: [each * 1e9 for each in held(M[1], lora=LORA)[1:]],
     [12 * ADAPTED / 8, 6 * ADAPTED, 6 * ADAPTED, 6 * ADAPTED, 4 * ADAPTED, 0]),
    ("states in four bits", lambda: held(DDP, lora=QLORA)[0] * 1e9 - 4 * ADAPTED, NF4 * 1e9 + 2 * 3.21e9),
    # A byte, and an fp32 scale for each of a layer's 480 + 2 x 120 + 320 + 2 x 896 + 320 rows; backward's 16 bits.
    ("states in eight bits", lambda: [held(DDP, lora=INT8)[0] * 1e9 - 4 * ADAPTED, *engine(DDP, "gathered", lora=INT8)],
     [1e9 * (1 + 4 * (480 + 2 * 120 + 320 + 2 * 896 + 320) / LAYER) + 2 * 3.21e9, (2 * 320 * 896, 2 * 320 * 896, 0)]),
    # Experts of three matrices in 4 bits; those of a layer in 16 bits while it computes. Biases of gpt-oss stay.
    ("states with experts in four bits", lambda: [held(DDP, model=model, lora=replace(
        ALL, four_bit=True, quantize_moe_experts=True))[0] * 1e9
        - held(DDP, model=model, lora=replace(ALL, four_bit=True))[0] * 1e9 for model in (EXPERTS, OSS)],
     [3e9 * (NF4 - 2), 3e9 * (NF4 - 2) * (3 * 320 * 200) / (3 * 320 * 200 + 2 * 200 + 320)]),
    ("experts of a layer", lambda: [engine(DDP, "gathered", model=EXPERTS, lora=replace(
        ALL, four_bit=True, quantize_moe_experts=each))[0] for each in (True, False)],
     [(2 * 12 * 3 * 320 * 200, 2 * 12 * 3 * 320 * 200, 0), (2 * 320 * 448, 2 * 320 * 448, 0)]),
    ("kinds of parallelism", lambda: [(overhead_gib(work(each)) - overheads().context_gib) / overheads(
        ).communicator_gib
                                      for each in (torch(), torch(dp=8), megatron(tp=2, dp=4), megatron(
                                          tp=2, cp=2, dp=2, pp=2, ep=2))], [0, 1, 3, 6]),
    # Its half of the GPU is kept, or is there while it generates.
    ("a vLLM, awake and asleep", lambda: [part / NODE.gpu.memory_gib for each in (False, True) for one in [work(
        FSDP, objective="grpo", grpo=GrpoSpec(vllm_gpu_memory_utilization=0.5, vllm_enable_sleep_mode=each))]
        for part in (overhead_gib(one) - overhead_gib(work(FSDP)), parts_of(one, 0).generation / 2**30)],
     [0.5, 0, 0, 0.5]),
    ("a CPU's process", lambda: overhead_gib(work(torch(dp=2), machines=cluster("2xcpu"))),
        overheads().cpu_process_gib),
]  # fmt: skip

S = StateBytes(*[2.0**power for power in range(7)])
"""weights 1, optimizer 2, gradients in forward 4, at the peak 8, in the step 16, between 32, copies 64."""


def moment(name: str, **more: Any) -> float:
    """Bytes of a phase, without the 3 of weights and optimizer, and the same of the fast sum where it is the peak."""
    parts = RankParts(**{"states": S, "buffers": 0.5, "saved_activations": 0.0, "backward_workspace": 0.0} | more)
    phases = phases_of(parts)
    assert peak_bytes(parts) == sum(fullest(*phases.values()).values()) == max(sum(e.values()) for e in phases.values())
    return sum(phases[name].values()) - 3.5


BIG = 2.0**10
PHASES: Rows = [
    # Each moment has what exists then, in powers of two.
    ("loss", lambda: moment("forward", gathered_in_loss=BIG, buffers_in_loss=2 * BIG, saved_activations=4 * BIG,
                            deferred_gradients=8 * BIG, loss=16 * BIG), 4 + 31 * BIG),
    ("casts", lambda: moment("forward", gathered_in_loss=BIG, casts_in_forward=(2 * BIG, 4 * BIG),
                             saved_activations=8 * BIG), 4 + 15 * BIG),
    ("generation", lambda: moment("forward", generation=BIG), 32 + BIG),
    ("the last layer", lambda: moment("backward", gathered=BIG, buffers_in_loss=2 * BIG, saved_activations=12 * BIG,
                                      freed_before_layers=8 * BIG, recomputed_layer=16 * BIG,
                                      backward_workspace=32 * BIG),
     4 + 55 * BIG),
    ("the first layer", lambda: moment("backward", gathered_at_end=BIG, after_backward=2 * BIG,
        recomputed_layer=4 * BIG,
                                       backward_workspace=8 * BIG), 8 + 15 * BIG),
    ("step", lambda: moment("step"), 16 + 64),
    ("load", lambda: [moment("load", load=each) for each in (0.0, BIG)], [32, BIG - 3.5]),
    ("save", lambda: moment("save", save=BIG), 32 + BIG),
    ("cuBLAS", lambda: [cublas_workspaces(each) / 2**20 for each in ("ampere", "hopper", "blackwell")],
     [2 * 8.125, 64, 64]),
]  # fmt: skip


def part(layout: Layout, *fields: str, stage: int = 0, model: Any = DENSE, **job: Any) -> list[Any]:
    """Fields of a rank's parts."""
    found = parts_of(work(layout, model, **job), stage)
    return [getattr(found, name) for name in fields]


TERMS = 14744
"""Bytes a token of a layer under ZeRO, and of its final norm."""
LAST = 6 * 320 + 4 + 640
SAVED = 640 + 2 * (480 + 120 + 896 + 320) + 2 * 480 + 4 * 12
RECOMPUTED = T * (2 * 320 + TERMS + 2 * 2 * 896)
"""The residual's gradient, all of a layer, and two gradients of the MLP's width."""
RANKS: Rows = [
    ("saved", lambda: part(Z[2], "saved_activations", "recomputed_layer", "backward_workspace", "freed_before_layers"),
     [T * (6 * TERMS + LAST), 0, 2 * (3 * 896 + 2 * 320) * T, 0]),
    ("saved inputs", lambda: part(Z[2].but(recompute="full"), "saved_activations", "recomputed_layer",
        "backward_workspace",
                                  "freed_before_layers"), [T * (6 * 640 + LAST), RECOMPUTED, 0, LAST * T]),
    ("saved by 8-bit layers", lambda: [part(Z[2].but(recompute=each), "saved_activations", lora=INT8)[0] - part(
        Z[2].but(recompute=each), "saved_activations", lora=QLORA)[0] for each in ("none", "full")],
     [6 * 2 * (320 + 896) * T, 6 * 2 * (2 * 320 + 480 + 896) * T]),
    ("recompute where all layers have experts", lambda: [part(Z[2].but(recompute="full"), "recomputed_layer",
        model=model)[0] / T
                                                         for model in (OSS, replace(EXPERTS, first_dense_layers=7))],
     [sum(saved(ZERO, OSS, True).values()), sum(saved(ZERO, EXPERTS).values())]),
    ("saved on the host", lambda: part(Z[2].but(recompute="full", activation_offloading=True), "saved_activations",
                                       "recomputed_layer"), [T * LAST, RECOMPUTED + 640 * T]),
    # Input; query, value, gate and the last product; attention's result and a statistic a head.
    ("saved by the list", lambda: part(FSDP.but(recompute="selective"), "saved_activations", "recomputed_layer"),
        [T * (6 * SAVED + LAST), RECOMPUTED - T * (SAVED - 640)]),
    ("two stacks", lambda: [part(Z[2].but(recompute=each), "saved_activations", model=STACKS)[0] / T for each in (
        "none", "full")], [5 * (3080 + 3096 + 2 * 3200) + 3 * (3096 + 1540) + 2 * (772 + 768),
        5 * 768 + 2 * (772 + 768)]),
    ("recompute of two stacks", lambda: part(Z[2].but(recompute="full"), "recomputed_layer", model=STACKS)[0] / T,
     3080 + 3096 + 6400 + 4636),
    ("dense layers and experts", lambda: part(Z[2], "saved_activations", model=EXPERTS)[0] / T,
     2 * (5128 + 2688 + 32 + 8 * 1152) + 5 * (5128 + 2688 + 32 + 8640 + 48 + 3200) + LAST),
    ("gradients of experts", lambda: [part(Z[2], "backward_workspace", model=each)[0] for each in (
        EXPERTS, replace(EXPERTS, num_experts=1200))],
     [2 * 3 * T * (3 * 200 + 2 * 320), 2 * (400 * (1200 * 320 - 3 * T) - 320 * 3 * T)]),
    ("a tied head's gradient", lambda: part(DDP, "backward_workspace", model=GPT),
     [2 * (3 * 1600 + 2 * 384) * T + 4 * 5003 * 384]),
    ("DoRA's temporaries", lambda: part(DDP, "backward_workspace", lora=replace(LORA, use_dora=True, rank=7),
        seq_length=16),
     [480 * (2 * 480 + 18 * 320)]),
    ("casts to fp8", lambda: part(FSDP, "backward_workspace", precision="fp8"),
        [2 * (3 * 896 + 640) * T + 9 * 896 * T]),
    ("casts in forward", lambda: [part(each, "casts_in_forward", "buffers_in_loss") for each in (
        DDP, DDP.but(recompute="full"))], [[(0, 0), 2 * (6 * LAYER + TABLE)],
                                           [(2 * (6 * LAYER + TABLE), 2 * 5003 * T), 2 * TABLE]]),
    ("buffers", lambda: part(Z[3], "buffers", "gathered_in_loss", "gathered", "gathered_at_end", "save"),
     [2 * FILLS + 2**26, *[2 * (TOTAL + LAYER_TOTAL)] * 3, 4 * TABLE]),
    ("FSDP2's root in the loss", lambda: part(FSDP, "gathered_in_loss"), [2 * ROOT]),
    ("FSDP2's root is last", lambda: part(FSDP, "gathered_at_end"),
     [max(engine(FSDP, "gathered")[0][1], 6 * ROOT - 2 * (3 * 896 + 640) * T)]),
    ("tiles of a long row", lambda: part(FSDP.but(tiled_mlp=True), "backward_workspace", seq_length=64)[0] / 192,
     max(640 + 7168 + 1792 * 2 + 640, 4 * 320 + 12 * 320, 960 + 2880 + 4 * 492)),
    ("tiles in recompute", lambda: part(FSDP.but(tiled_mlp=True, recompute="full"), "recomputed_layer",
        model=NEOX)[0] / T,
     768 + (R := sum(saved(ZERO, NEOX).values()) - 6400) + 768 + max(768, (6400 + 3 * 3200 + 768 + 768) / 3)),
    ("tiles", lambda: part(FSDP.but(tiled_mlp=True), "backward_workspace")[0] / T,
     max(640 + max(640, (7168 + 1792 * 2 + 640) / 4), 20 * 320 - 4 * 320, 2 * 480 + 4 * 492 + 2880)),
    # Gradients in attention's backward: queries in fp32, or keys and values of all heads.
    ("attention's backward", lambda: [rank_huggingface.attention_backward(work(each, model, machines)) for each, model,
                                      machines in ((FSDP, DENSE, NODE), (Z[2], GEMMA, NODE), (FSDP, DENSE,
                                      cluster("2xcpu")),
                                                   (FSDP, LATENT, NODE))],
     [960 + 2880 + 4 * 492, 960 + 98304 + 2880, 960 + 2880 + 2 * 240, 960 + 2 * (640 + 1120) + 4 * 650]),
    ("attention's backward in a ring", lambda: rank_huggingface.attention_backward(work(FSDP.but(cp=2,
        cp_comm_type="p2p"))),
     960 + 2880 + 4 * 492 + 4 * (480 + 240) + 2 * (240 + 960)),
    ("attention's backward of Ulysses", lambda: rank_huggingface.attention_backward(work(FSDP.but(cp=2,
        cp_comm_type="a2a"))),
     960 + 2880 + 4 * 492),
    ("reference", lambda: [rank_huggingface.reference_bytes(work(each, objective="dpo")) / TOTAL for each in (
        Z[2], Z[3], FSDP.but(zero_stage=2), DDP)], [2, 2 / 8, 4 / 8, 4]),
    # Megatron: micro batches in flight, the final norm of the last stage, tables.
    ("stages", lambda: [part(megatron(pp=2, dp=4, gradient_accumulation_steps=4), "saved_activations", "loss",
        stage=each)
                        for each in (0, 1)], [[2 * 3 * T * (2568 + 3600 + 48 + 320 / 3 + 8960), 0],
                                              [3 * T * (2568 + 3600 + 48 + 320 / 3 + 8960) + 2 * 640 * T,
                                              6 * 5003 * T]]),
    ("interleaved stages keep what they send", lambda: part(megatron(pp=2, vp=3, gradient_accumulation_steps=4,
        recompute="full"),
                                                            "saved_activations")[0] / 640 / T, (2 + 2 + 3) * 2),
    ("recomputed", lambda: part(SP.but(recompute="full"), "saved_activations", "recomputed_layer"),
     [(6 * 320 + 640) * T, T * (1284 + 1800 + 24 + 320 / 3 + 4480)]),
    ("experts that retain inputs", lambda: rank_megatron.retained_input_gradients(work(megatron(recompute="full"),
        EXPERTS), 0),
     4 * 640 * T),
    ("chunks that retain inputs", lambda: [rank_megatron.retained_input_gradients(work(megatron(
        pp=2, vp=2, first_stage_layers=3, last_stage_layers=4, recompute=recompute), EXPERTS), stage)
        for recompute, stage in (("full", 1), ("full", 0), ("none", 1))],
     [(1 - 1 + 2 * 2) * 640 * T, (0 - 1 + 2 * 2) * 640 * T, 0]),
    ("heads of multi-token prediction", lambda: rank_megatron.after_last_layer(work(SP, replace(LATENT,
        mtp_num_layers=2))) / T,
     2 * 352 + 2 * (rank_megatron.layer_saved(work(SP, LATENT), False) / T + 6 * 352)),
    ("their losses", lambda: part(SP, "deferred_gradients", model=replace(LATENT, mtp_num_layers=2)),
        [4 * 2 * 2502 * T]),
    ("fused loss", lambda: [part(FUSED, "loss", **more)[0] / 2502 / T for more in ({}, FP32)], [6, 4]),
    ("fused gradients", lambda: [rank_megatron.backward_workspace(work(FUSED, each), 0) / T for each in (DENSE, GPT,
        replace(EXPERTS, moe_ffn_hidden_size=2000))],
     [4 * 320 + 6 * 448, 4 * 384 + 4 * 800, 4 * 320 + 2 * (3 * 2000 + 320) * 3 / 2]),
    # Tokens as they are sent and, from other ranks, as they arrive; outputs by expert and by sender.
    ("copies of routed tokens", lambda: [rank_megatron.backward_workspace(work(FUSED.but(ep=ep), EXPERTS,
        expert_load=load), 0) / T for ep, load in ((1, 1.0), (4, 1.0), (4, 1.5))],
     [4 * 320 + 2 * 320 * 3 * 3 / 2, 4 * 320 + 2 * 320 * 4 * 3 / 2, 4 * 320 + 2 * 320 * (3 + 3 * 4.5) / 2]),
    ("unfused gradients", lambda: rank_megatron.backward_workspace(other(work(FUSED), attention="unfused"), 0) / T,
     4 * 320 + 2 * 2 * 6 * 1024),
    # 32 MiB of Transformer Engine, four more of grouped products; a dummy gradient of every shape.
    ("dropout of the embedding", lambda: [rank_megatron.saved_activations(other(work(megatron(pp=2)),
        hidden_dropout=each), 0)
                                          - rank_megatron.saved_activations(work(megatron(pp=2)), 0) for each in (True,
                                          False)],
     [320 * T, 0]),
    ("stages of one kind", lambda: [part(megatron(pp=7, recompute="full"), "recomputed_layer", model=model,
        stage=each)[0]
                                    for model, each in ((replace(EXPERTS, ffn_hidden_size=9000), 6), (EXPERTS, 0))],
     [sum(local.layer_terms(work(megatron(), EXPERTS), kind).values()) for kind in (True, False)]),
    ("ZeRO over Megatron's layers", lambda: part(deepspeed(zero_stage=2, tp=2, dp=4).but(implementation="local"),
        "gathered_in_loss",
                                                 "gathered", "gathered_at_end"), [0, 4 * 17_212_499, 4 * 17_212_499]),
    ("tables of Transformer Engine", lambda: part(FUSED, "after_backward", seq_length=16), [0]),
    ("workspaces", lambda: [rank_megatron.workspace_bytes(work(each, model, machines), 0) - rest * 2**20 for each,
        model,
                            machines, rest in ((SP, DENSE, NODE, 64), (FUSED, DENSE, NODE, 96), (FUSED, DENSE, OLD,
                            20.25),
                                               (FUSED.but(ep=2), EXPERTS, NODE, 64 + 5 * 32))],
     [0, 2 * (LAYER / 2 + 2502 * 320), 2 * (LAYER / 2 + 2502 * 320),
      2 * ((2 * 320 * 672 + 3 * 320 * 1152) / 2 + 3 * 320 * 200 + 2502 * 320)]),
    # Frozen weights have no gradient.
    ("workspaces beside adapters", lambda: [rank_megatron.workspace_bytes(work(FUSED.but(ep=2), EXPERTS, lora=each), 0)
                                            - 224 * 2**20 for each in (ALL, None)],
     [0, 2 * ((2 * 320 * 672 + 3 * 320 * 1152) / 2 + 3 * 320 * 200 + 2502 * 320)]),
    ("workspaces of a first stage in fp8", lambda: rank_megatron.workspace_bytes(work(megatron(
        pp=2, **TE), precision="fp8"), 0) - 96 * 2**20, 2 * LAYER + 2 * 3 * LAYER),
    ("fp8 weights alone", lambda: rank_megatron.workspace_bytes(work(megatron(
        pp=2, fp8_param_gather=True, **TE), precision="fp8"), 0) - 96 * 2**20, 2 * LAYER),
    ("what is computed again", lambda: [
        sorted(rank_megatron.layer_terms(w, kind).keys() - rank_megatron.saved_terms(w, kind).keys())
        for modules, kind in ((("mlp",), False), (("mlp", "core_attn"), False), (("mlp",), True), (("moe",), True),
                              (("moe",), False), (("moe_act", "layernorm"), True))
        for w in [work(FUSED.but(recompute="selective", recompute_modules=modules), EXPERTS)]],
     [["mlp"], ["core_attn", "mlp"], [], ["experts", "moe_act", "router", "shared_experts"], [],
      ["layernorm", "moe_act"]]),
    ("Transformer Engine's MLP begins with its norm", lambda: [
        rank_megatron.saved_terms(w, kind)["layernorm"] / rank_megatron.layer_terms(w, kind)["layernorm"]
        for kind in (False, True)
        for w in [work(FUSED.but(recompute="selective", recompute_modules=("mlp",)), EXPERTS)]], [0.5, 1]),
    ("and then there once more", lambda: part(SP.but(recompute="selective", recompute_modules=("mlp",)),
        "recomputed_layer"), [rank_megatron.layer_terms(work(SP), False)["mlp"]]),
    ("selective recompute", lambda: [sorted(rank_megatron.saved_terms(work(SP.but(recompute=each)),
        False)) for each in (
        "none", "selective")], [["attention", "core_attn", "mlp", "norms", "rope"], ["attention", "mlp", "norms",
        "rope"]]),
    ("gradients of tables", lambda: part(SP, "after_backward", seq_length=16), [max(0,
        2 * 2502 * 320 + 2 * 320 * 24 - 48 * (4 * 320 + 6 * 448))]),
    ("saved by a tensor-parallel export", lambda: [part(each, "save")[0] / TABLE for each in (megatron(), SP)], [4, 8]),
]  # fmt: skip


test_value = by_hand(HUGGING_FACE, MEGATRON, TRANSFORMER_ENGINE, SIZES, STATES, OFFLOAD, ENGINES, PHASES, RANKS)
