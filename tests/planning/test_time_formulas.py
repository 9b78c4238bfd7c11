"""Seconds by formula, each beside a value derived by hand, at sizes where no two terms are alike.

Rings: NCCL's 2(n−1)/n of a message in an all-reduce and (n−1)/n in a gather (arXiv 1909.08053, Thakur et al. 2005).
Layers: multiplications of Megatron-LM and transformers. Bytes of operators: the docstrings of kit/cost/time.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

from kit.cost.collectives import (
    INT4_BYTES,
    INT8_BYTES,
    Group,
    ZeroPlusPlus,
    fills_the_link,
    gradient_bytes,
    group,
    kernel_bytes,
)
from kit.cost.hardware import (
    GemmPerf,
    generation_of,
    gpu_perf,
    gpu_rates,
    has_rates,
    host_bytes_per_s,
    matmul_s,
    peak_flops_per_s,
    runs_rocm,
    shared,
    tile_share,
)
from kit.cost.model.flops import (
    head_flops_per_token,
    layer_attention_flops_per_token,
    layer_matmul_flops_per_token,
    model_flops_per_token,
)
from kit.cost.model.params import RankParameters, count
from kit.cost.time import elementwise
from kit.cost.time.exposed import (
    Exposed,
    context_parallel,
    data_parallel_s,
    expert_parallel,
    forward_gather_s,
    gathered_again,
    tensor_parallel,
    zero_times,
)
from kit.cost.time.layer import (
    attention_forward_s,
    attention_gemms,
    branches_s,
    embedding_s,
    expert_gemms,
    gemms_s,
    generation_s,
    head_s,
    layer_time,
    mlp_gemms,
)
from kit.specs.job import GrpoSpec, LoraSpec, OptimizerSpec
from tests.planning.shapes import (
    DENSE,
    EXPERTS,
    GEMMA,
    GPT,
    LATENT,
    MISTRAL,
    MIXED,
    NODE,
    NODES,
    STACKS,
    Rows,
    by_hand,
    how,
    other,
    work,
)  # fmt: skip
from tests.planning.shapes import (
    TOKENS as T,
)
from tests.support.models import cluster, deepspeed, megatron, torch

E = shared()
NVLINK, PORT = 450e9 * E.intra_node_link, 50e9 * E.inter_node_link
HOP, FAR = E.intra_node_hop_us * 1e-6, E.inter_node_hop_us * 1e-6
GEMM = GemmPerf(flops_per_s=3e14, bytes_per_s=2e12, multiprocessors=100, input_bytes=2.0)
GPU = gpu_perf(NODE, "bf16")._replace(
    matmul=GEMM, others=GEMM._replace(flops_per_s=1e14), attention_flops_per_s=2e14, bytes_per_s=1e12
)
FAR_GPU = GPU._replace(cluster=NODES)
P = RankParameters(dense_matrices=1e9, vectors=1e7, vocabulary=2e8, experts=3e9)
"""4.21e9 in all, of which 1.21e9 have copies on all data-parallel ranks."""
TE = {"implementation": "transformer_engine"}
FP8 = {"precision": "fp8"}
LORA = LoraSpec(rank=7, targets="attention")
ADAPTERS = 6 * 7 * ((320 + 480) + 2 * (320 + 120) + (480 + 320))
"""Rank times inputs and outputs, of four matrices in six layers (arXiv 2106.09685, section 4)."""


def ring(ranks: int, size: float, messages: int = 1) -> float:
    """A gather over ranks of one node."""
    return (ranks - 1) / ranks * size / NVLINK + messages * (ranks - 1) * HOP


def seen(seconds: float, window: float, share: float = E.unhidden) -> float:
    """What a window of compute does not hide, at least a share of it."""
    return max(seconds - E.overlap * window, share * seconds)


LINKS: Rows = [
    ("gather in three messages", lambda: group(NODE, 8, 1).all_gather_s(8e9, 3), 7 / 8 * 8e9 / NVLINK + 3 * 7 * HOP),
    ("all-reduce", lambda: group(NODE, 4, 2).all_reduce_s(8e9), 2 * (3 / 4 * 8e9 / NVLINK + 3 * HOP)),
    ("one rank sends nothing", lambda: [getattr(group(NODES, 1, 16), f"{way}_s")(1e9)
                                         for way in ("all_gather", "all_reduce", "all_to_all")], [0.0, 0.0, 0.0]),
    ("one rank of many nodes", lambda: group(NODES, 1, 16), Group(1, NVLINK, 0.0, 1, NVLINK)),
    ("all ranks of a node", lambda: group(NODES, 8, 1), Group(8, NVLINK, 7 * HOP, 1, NVLINK)),
    ("six ranks, two a node", lambda: group(NODES, 6, 4), Group(6, 2 * PORT, 2 * FAR + 3 * HOP, 3, NVLINK, PORT)),
    ("five ranks, four on one node", lambda: group(NODES, 5, 2), Group(5, 4 * PORT, FAR + 3 * HOP, 2, NVLINK, PORT)),
    ("one rank on each node", lambda: group(NODES, 3, 16), Group(3, PORT, 2 * FAR, 3, NVLINK, PORT)),
    ("all-to-all on a node", lambda: group(NODE, 4, 1).all_to_all_s(8e9), 3 / 4 * 8e9 / NVLINK + 3 * HOP),
    # Of 16 ranks 8 are elsewhere, and 7 on the same node.
    ("all-to-all over nodes", lambda: group(NODES, 16, 1).all_to_all_s(8e9), 8 / 16 * 8e9 / PORT + FAR + 14 * HOP),
    ("all-to-all, NVLink the slower", lambda: group(replace(NODES, inter_node_gbytes_per_s=2e3), 16, 1)
     .all_to_all_s(8e9), 7 / 16 * 8e9 / NVLINK + FAR + 14 * HOP),
    # 32 ranks, four on each of eight nodes: ten latencies of the ring at four ports, in elements of two bytes.
    ("a bucket that fills the link", lambda: fills_the_link(NODES, megatron(dp=16, cp=2, tp=2)),
     int(10 * (7 * FAR + 24 * HOP) * 4 * PORT / 2)),
    ("a bucket of a fiftieth of the memory", lambda: fills_the_link(
        replace(NODES, gpu=replace(NODES.gpu, memory_gib=4.0)), megatron(dp=16, cp=2, tp=2)),
        int(0.02 * 4 * 2**30 / 2)),
]  # fmt: skip

OLD = replace(NODE.gpu, name="V100-like", bf16_tflops=0.0, fp16_tflops=125.0, fp32_tflops=15.0, fp8_tflops=0.0)
GPUS: Rows = [
    ("peaks", lambda: [peak_flops_per_s(OLD, each) for each in ("bf16", "fp16", "fp32", "fp8")],
     [15e12, 125e12, 15e12, 15e12]),
    ("fp8 of the data sheet", lambda: peak_flops_per_s(replace(OLD, fp8_tflops=500.0), "fp8"), 500e12),
    ("fp8 of the catalog", lambda: peak_flops_per_s(replace(NODE.gpu, bf16_tflops=900.0), "fp8"), 1800e12),
    ("unknown precision", lambda: peak_flops_per_s(replace(OLD, fp8_tflops=500.0), "mxfp8"), 15e12),
    ("generations", lambda: [generation_of(each) for each in (
        replace(NODE.gpu, generation="volta"), replace(NODE.gpu, generation=None), OLD, replace(OLD, generation=None))],
     ["volta", "hopper", NODE.gpu.generation or "unknown", "unknown"]),
    ("ROCm", lambda: [runs_rocm(replace(OLD, generation=each)) for each in ("cdna3", "hopper")], [True, False]),
    ("rates are known or the default's", lambda: (has_rates(NODE.gpu), has_rates(OLD), gpu_rates("none").measured),
     (True, False, False)),
    # One socket of six channels is assumed; else the sheet's figure; one thread of each of eight ranks, at most that.
    ("host memory", lambda: [host_bytes_per_s(replace(NODE, host_memory_gbytes_per_s=sheet), threads) / 1e9
                             for sheet, threads in ((None, None), (614.4, None), (614.4, 1), (614.4, 7), (100.0, 1))],
     [108.8, 522.24, 97.6, 522.24, 85.0]),
    ("ZeRO-Offload's table 4: CPU Adam of ten billion", lambda: round(28e10 / host_bytes_per_s(replace(
        NODE, host_memory_gbytes_per_s=None)), 2), 2.57),
    ("a part of a host", lambda: [cluster(text).host_memory_gbytes_per_s for text in (
        "8xH100", "2xA100-40", "dgx-a100-40:2", "hgx-h100", "4xRTX-4090")], [614.4, 102.4, 409.6, None, None]),
    ("rates at a precision", lambda: gpu_perf(NODE, "fp8", "cudnn", True)[1:],
     ("fp8", gpu_rates("H100"), GemmPerf(peak_flops_per_s(NODE.gpu, "fp8") * 0.60, 3350e9 * E.memory_bandwidth, 132,
         1.0),
      GemmPerf(NODE.gpu.bf16_tflops * 1e12 * 0.68, 3350e9 * E.memory_bandwidth, 132, 2.0),
      NODE.gpu.bf16_tflops * 1e12 * 0.55, 3350e9 * E.memory_bandwidth)),
    ("an unknown kernel is flash", lambda: gpu_perf(NODE, "bf16", "other").attention_flops_per_s,
     NODE.gpu.bf16_tflops * 1e12 * 0.36),
    ("attention in fp32", lambda: gpu_perf(NODE, "fp32").attention_flops_per_s, NODE.gpu.fp32_tflops * 1e12 * 0.36),
    ("all products at one precision", lambda: gpu_perf(NODE, "fp8").others.input_bytes, 1.0),
    ("attention where there is no bf16", lambda: gpu_perf(replace(NODE, gpu=OLD), "fp16").attention_flops_per_s,
     125e12 * gpu_rates("none").attention["flash"]),
    # 0.855 of the best single products: stas00's MAMF of 0.776, 0.514, 784.9 of 1,307.4 and 1,565 of 2,516; H20 142.25.
    ("16 bits without rows", lambda: [gpu_rates(each).matmul["bf16"] for each in (
        "B200", "MI300X", "MI325X", "MI355X", "H20")],
     [round(0.855 * each, 2) for each in (0.776, 0.514, 784.9 / 1307.4, 1565 / 2516, 142.25 / 148)]),
    ("fp8 of AMD's", lambda: [gpu_rates(each).matmul["fp8"] for each in ("MI300X", "MI325X")],
     [round(0.855 * 0.514 * 1273 / (2 * 708), 2), round(0.855 * 784.9 / 1307.4 * 1409 / (2 * 831), 2)]),
    ("fp16 of AMD's", lambda: [gpu_rates(each).matmul["fp16"] for each in ("MI300X", "MI325X")],
     [round(0.855 * 0.514 * 654 / 708, 2), round(0.855 * 784.9 / 1307.4 * 787 / 831, 2)]),
    # Forward and backward: 2 and 5 products of scores, at 129.1 and, as on H100, 550/648 of it.
    ("attention on H20", lambda: [round(gpu_rates("H20").attention[each], 2) for each in ("flash", "cudnn", "flash3")],
     [round(83.7 / 148 * 0.60 / 0.73, 2), round(129.1 / 148 * 7 / (2 + 5 * 648 / 550), 2),
      round(126.2 / 148 * 7 / (2 + 5 * 648 / 550), 2)]),
    ("one wave of H20", lambda: tile_share(gpu_rates("H20").multiprocessors, 256 * 6, 128 * 13), 1.0),
    # 10 of 10 multiprocessors have a whole tile of 256 x 128.
    ("whole tiles", lambda: tile_share(10, 256, 1280), 1.0),
    # 300 rows: 10 tiles of 64 x 64 fill the GPU, of 320 rows; three products: nine of 128 x 128 in one wave, of 384.
    ("small tiles", lambda: tile_share(10, 300, 128), 0.4 * 300 / 320),
    ("tiles of three products", lambda: tile_share(10, 300, 128, 3), 0.8 * 0.9 * 300 / 384),
    # 12 tiles of 256 x 128 take two waves of ten: 0.6; 24 of 128 x 128 take three: 0.8 · 0.8; 96 of 64 x 64 ten: 0.384.
    ("a wave that is partly filled", lambda: tile_share(10, 256, 1536), 0.8 * 0.8),
    ("a product bound by compute", lambda: matmul_s(GemmPerf(1e12, 1e11, 10, 2.0), 256, 1280, 64),
     2 * 256 * 1280 * 64 / 1e12 + 256 * 1280 * 2 / 1e11),
    ("a product bound by its inputs", lambda: matmul_s(GemmPerf(1e16, 1e11, 10, 2.0), 256, 1280, 64, 3, 8),
     3 * ((256 + 1280) * 64 * 2 + 256 * 1280 * 8) / 1e11),
    ("no product", lambda: [matmul_s(GEMM, *each) for each in ((0.5, 9, 9), (9, 0.5, 9), (9, 9, 9, 0))], [0.0] * 3),
    ("one row", lambda: matmul_s(GemmPerf(1e18, 1e11, 1, 2.0), 1, 1, 64), (2 * 64 * 2 + 2) / 1e11),
]  # fmt: skip

LAYER = 2 * 320 * 480 + 2 * 320 * 120 + 3 * 320 * 896
"""Matrices of a layer of DENSE."""
GLM = 2 * 320 * 448 + 2 * 320 * 224
"""Those of attention in EXPERTS."""
STACKED = 4 * 384 * 384 + 2 * 384 * 1600
FLOPS: Rows = [
    ("matrices", lambda: layer_matmul_flops_per_token(DENSE), 2 * LAYER),
    # Five of seven layers have a router, three of the experts for a token, and the shared ones.
    ("experts of the mean layer", lambda: layer_matmul_flops_per_token(EXPERTS),
     2 * (7 * GLM + 2 * 3 * 320 * 1152 + 5 * (12 * 320 + 3 * 320 * (3 * 200 + 400))) / 7),
    ("two stacks", lambda: layer_matmul_flops_per_token(STACKS), 2 * (5 * STACKED + 3 * 4 * 384 * 384) / 5),
    ("causal scores", lambda: layer_attention_flops_per_token(DENSE, 1024), 4 * 512 * 480),
    ("latent scores", lambda: layer_attention_flops_per_token(LATENT, 1024), 2 * 512 * 10 * (64 + 48)),
    # w − w²/2s of a window of 256 in 1,024.
    ("a window", lambda: layer_attention_flops_per_token(MISTRAL, 1024), 4 * (256 - 32) * 480),
    ("a window that is as long", lambda: layer_attention_flops_per_token(MISTRAL, 256), 4 * 128 * 480),
    ("every second layer sees all", lambda: layer_attention_flops_per_token(GEMMA, 1024), 4 * (224 + 512) / 2 * 480),
    # Encoder and cross-attention see all, the decoder's own attention half.
    ("scores of two stacks", lambda: layer_attention_flops_per_token(STACKS, 1024),
     4 * 1024 * (1.5 * 3 + 2) / 5 * 384),
    # One window and three whole layers; 6 per element of a state, and products within a chunk of 64.
    ("recurrent layers", lambda: layer_attention_flops_per_token(MIXED, 1024),
     4 * (224 + 3 * 512) / 4 * 480 * 4 / 6 + (6 * 7000 + 2 * 64 * 900) * 2 / 6),
    ("head", lambda: head_flops_per_token(GPT), 2 * 5003 * 384),
    ("a step", lambda: model_flops_per_token(DENSE, 1024), 3 * (6 * 2 * LAYER + 2 * 5003 * 320) + 18 * 4 * 512 * 480),
    ("frozen matrices have no gradient", lambda: model_flops_per_token(DENSE, 1024, frozen=True),
     2 * (6 * 2 * LAYER + 2 * 5003 * 320) + 18 * 4 * 512 * 480),
    # A head of multi-token prediction: a layer, 2h onto h, and the output projection again.
    ("multi-token prediction", lambda: model_flops_per_token(replace(LATENT, mtp_num_layers=2), 1024)
     - model_flops_per_token(LATENT, 1024),
     2 * (3 * (2 * count(LATENT).layer.active + 2 * 2 * 352 * 352 + 2 * 5003 * 352) + 3 * 2 * 512 * 10 * 112)),
]  # fmt: skip

HF, LOCAL = torch(zero_stage=3, dp=8), megatron(tp=2, dp=4)
KERNELS: Rows = [
    ("local", lambda: elementwise.layer_kernels(work(LOCAL), False), 40),
    ("Transformer Engine in fp8", lambda: elementwise.layer_kernels(work(megatron(**TE), **FP8), False), 60 + 40),
    ("transformers", lambda: elementwise.layer_kernels(work(HF), False), 100),
    ("torchao, operator by operator", lambda: elementwise.layer_kernels(work(HF, **FP8), False), 100 + 40 + 80),
    ("torchao, compiled", lambda: elementwise.layer_kernels(work(HF.but(compile_layers=True), **FP8), False), 40 + 40),
    ("three experts of twelve", lambda: elementwise.layer_kernels(work(megatron(ep=4), EXPERTS), True),
     40 + 150 + 12 * 3),
    ("six experts in fp8", lambda: elementwise.layer_kernels(work(megatron(ep=2, **TE), EXPERTS, **FP8), True),
     60 + 40 + 150 + 20 * 6 * 1.5),
    ("one grouped product", lambda: elementwise.layer_kernels(work(HF, EXPERTS), True), 100 + 150 + 12),
    ("in CUDA graphs", lambda: [elementwise.layer_kernels(how(work(megatron(), EXPERTS), graphs=each), True)
                                for each in ("full", "attention")], [0.0, 150 + 12 * 12]),
    ("launches again", lambda: [elementwise.recompute_launches(work(each)) for each in (
        HF, HF.but(recompute="full"), HF.but(recompute="selective"), LOCAL.but(recompute="full"),
        LOCAL.but(recompute="selective"))], [(1.0, 0.0), (1.5, 2.0), (4.5, 4.5), (1.0, 1.0), (1.0, 0.0)]),
    # 1.8 ms a pass at 8 us an operator, for ZeRO-3 alone.
    ("hooks", lambda: [elementwise.hooks(each) for each in (
        work(deepspeed(zero_stage=3)), work(deepspeed(zero_stage=2)), work(HF),
        how(work(deepspeed(zero_stage=3)), deepcompile=True))], [1.8e-3 / 8e-6, 0.0, 0.0, 0.0]),
]  # fmt: skip


def moved(workload: Any, has_experts: bool = False) -> float:
    """Bytes a token of element-wise operators."""
    return elementwise.layer_elementwise_bytes(workload, has_experts) / T


def traffic(layout: Any, model: Any = DENSE, **changes: Any) -> float:
    """Bytes that a micro batch moves for weights and gradients of ``P``, in 1e9."""
    return elementwise.micro_batch_bytes(work(layout, model, **changes), P) / 1e9


BYTES: Rows = [
    # Two norms and residuals of the hidden size, RoPE of queries and keys, the activation.
    ("transformers in 16 bits", lambda: moved(work(HF)), 2 * (36 + 6) * 320 + 10 * 600 + 10 * 896),
    ("transformers in 32 bits", lambda: moved(work(HF, precision="fp32")), 2 * (40 + 12) * 320 + 20 * 600 + 20 * 896),
    ("local, split", lambda: moved(work(LOCAL.but(sp=True))), 2 * (4 + 6) * 320 / 2 + 20 * 600 / 2 + 14 * 896 / 2),
    ("local without sequence parallelism", lambda: moved(work(LOCAL)), 20 * 320 + 20 * 600 / 2 + 14 * 896 / 2),
    ("dropout", lambda: moved(other(work(LOCAL), hidden_dropout=True)) - moved(work(LOCAL)), 2 * 320),
    ("fused", lambda: moved(work(megatron(**TE))), 20 * 320 + 4 * 600 + 6 * 896),
    ("fused, no gate, no RoPE", lambda: moved(work(megatron(**TE), GPT)), 20 * 384 + 4 * 1600),
    ("eager", lambda: moved(how(work(HF), code="eager")), 20 * 320 + 20 * 600 + 10 * 896),
    ("eager, no gate", lambda: moved(how(work(HF), code="eager")) - moved(how(work(HF, GPT), code="eager")),
     20 * (320 - 384) + 20 * 600 + 10 * 896 - 4 * 1600),
    # Six copies of each routed token.
    ("experts", lambda: moved(work(megatron(tp=2, ep=2, sp=True), EXPERTS, expert_load=1.5), True),
     20 * 320 / 2 + 20 * 672 / 2 + 14 * (4.5 * 200 + 400) / 2 + 6 * 2 * 4.5 * 320 / 2),
    ("quantised inputs", lambda: moved(work(megatron(tp=2, **TE), **FP8)) - moved(work(megatron(tp=2, **TE))),
     6 * (2 * 320 + 480 / 2 + 896 / 2)),
    ("quantised in four bits", lambda: moved(how(work(megatron(**TE)), precision="nvfp4"))
     - moved(work(megatron(**TE))), 4 * (2 * 320 + 480 + 896)),
    ("torchao", lambda: moved(work(HF, **FP8)) - moved(work(HF)), 33 * (5 * 320 + 480 + 896)),
    ("torchao without a gate", lambda: moved(work(HF, GPT, **FP8)) - moved(work(HF, GPT)), 33 * (4 * 384 + 384 + 1600)),
    ("torchao, compiled", lambda: moved(work(HF.but(compile_layers=True), **FP8))
     - moved(work(HF.but(compile_layers=True))), 6 * (2 * 320 + 480 + 896)),
    ("torchao leaves experts", lambda: moved(work(HF, EXPERTS, **FP8), True) - moved(work(HF, EXPERTS), True),
     33 * (5 * 320 + 448 + 400)),
    # peft/tuners/lora/dora.py: 34 bytes an element of the four matrices, 38 an output and token.
    ("DoRA", lambda: moved(work(HF, lora=replace(LORA, use_dora=True))) - moved(work(HF, lora=LORA)),
     34 * (2 * 320 * 480 + 2 * 320 * 120) / T + 38 * (480 + 240 + 320)),
    ("the activation alone", lambda: [elementwise.activation_bytes(work(HF, precision=each), 896) / T
                                      for each in ("bf16", "fp32")], [10 * 896, 20 * 896]),
    ("loss", lambda: [elementwise.loss_elementwise_bytes(each) / 5003 for each in (
        work(HF), work(LOCAL), other(work(megatron(**TE)), cross_entropy="fused"))], [36.0, 20.0 / 2, 14.0]),
    # Each chunk of 2,048 tokens adds the head's gradient, 12 bytes an element.
    ("chunked loss", lambda: [elementwise.loss_elementwise_bytes(work(HF.but(chunked_loss=True, **more), lora=lora))
                              / 5003 for more, lora in (({}, None), ({"compile_layers": True}, None),
                                                        ({}, LORA))],
     [44 + 12 * 320 / 2048, 8 + 12 * 320 / 2048, 44.0]),
    ("gradients of local layers", lambda: [traffic(LOCAL), traffic(megatron(**TE)),
                                           1e9 * traffic(megatron(), lora=LORA)], [42.1, 0.0, 10 * ADAPTERS]),
    # ZeRO: 16 where it reduces, 6 for the sum over micro batches; stage 3 is counted with its reduction.
    ("gradients of ZeRO", lambda: [traffic(deepspeed(zero_stage=stage, gradient_accumulation_steps=m)) / 4.21 for
                                   stage, m in ((0, 1), (1, 4), (2, 1), (2, 4), (3, 4))], [16.0, 10.0, 16.0, 16.0,
                                   0.0]),
    ("casts of DDP", lambda: [traffic(torch(), precision=each) for each in ("bf16", "fp32")], [6 * 4.21, 0.0]),
    ("copies of FSDP2", lambda: [traffic(HF), traffic(HF.but(zero_stage=2))], [14 * 4.21, 10 * 4.21]),
    ("copies of adapters", lambda: 1e9 * traffic(HF, lora=LORA), 8 * 4.21e9 + 6 * ADAPTERS),
    ("no copies", lambda: elementwise.micro_batch_bytes(how(work(HF), copies_gathered=False), P), 0.0),
    # torchao, twice: two reads of fp32 and a write; operator by operator three reads and 27 more. Half from bf16.
    ("casts of fp8 weights", lambda: [traffic(layout, **FP8) - rest * 4.21 for layout, rest in (
        (torch(), 6), (torch(compile_layers=True), 6), (HF, 14), (HF.but(compile_layers=True), 14))],
     [2 * (12 + 27), 2 * 9, 2 * (6 + 27), 2 * 5]),
    # 12 + 12, both moments read and written, 2 for the cast; 36 more of ZeRO.
    ("bytes of the optimizer", lambda: [elementwise.optimizer_bytes_per_parameter(each) for each in (
        work(LOCAL), work(LOCAL, precision="fp32"), work(LOCAL, optimizer=OptimizerSpec(name="sgd")),
        work(deepspeed(zero_stage=2)), work(deepspeed()), work(deepspeed(zero_stage=3, optimizer_state_dtype="bf16")))],
     [42, 40, 34, 78, 42, 70]),
]  # fmt: skip


def products(rates: GemmPerf, *gemms: tuple[float, ...], summed: float | None = 2.0) -> tuple[float, float]:
    """(forward, backward): each product with the gradient of its input, and of its weight."""
    forward = sum(matmul_s(rates, *each) for each in gemms)
    backward = sum(matmul_s(rates, rows, inner, columns, number) for rows, columns, inner, number in gemms)
    if summed is not None:
        backward += sum(matmul_s(rates, each[1], each[2], each[0], each[3], output_bytes=summed) for each in gemms)
    return forward, backward


PROJECTIONS = [(T, 480 + 240, 320, 1.0), (T, 320, 480, 1.0)]
MLP = [(T, 2 * 896, 320, 1.0), (T, 320, 896, 1.0)]
FLASH = 2 * 12 * 3 * 1024 * (512 + 64) * 80 / (2e14 * 1024 / (1024 + 512))
"""Half of the scores and the blocks of 128 on the diagonal, at the rate of 1,024 tokens."""
ONE = LoraSpec(rank=8, target_modules=("q_proj",))
BRANCH = tuple(
    seconds + moved * T / 1e12
    for seconds, moved in zip(
        products(GPU.others, (T, 8, 320, 1.0), (T, 480, 8, 1.0)), (10 * 480, 6 * 320 + 4 * 480), strict=True
    )
)
NF4 = (2.0 + 0.5 + 1 / 64 + 4 / (64 * 256)) * (2 * 320 * 480 + 2 * 320 * 120 + 3 * 320 * 896) / 1e12
WHOLE = count(DENSE).total
PASS = 6 * LAYER + 5003 * 320
"""Elements of the matrices that a token meets."""


def generated(layout: Any = HF, **grpo: Any) -> float:
    """Seconds to complete three rows of 1,024 tokens."""
    return generation_s(GPU, work(layout, objective="grpo", grpo=GrpoSpec(**grpo)))


def parts(workload: Any, has_experts: bool = False) -> tuple[float, ...]:
    """(forward, backward, recompute) of a layer."""
    return astuple(layer_time(GPU, workload, has_experts))[:3]


SUMS = tuple(map(sum, zip(products(GEMM, *PROJECTIONS), products(GEMM, *MLP), strict=True)))
FORWARD = SUMS[0] + FLASH + T * (84 * 320 + 10 * 600 + 10 * 896) / 1e12
LAYERS: Rows = [
    ("projections", lambda: attention_gemms(work(LOCAL)), [(T, 240 + 120, 320, 1.0), (T, 320, 240, 1.0)]),
    ("a whole key head a rank", lambda: attention_gemms(work(megatron(tp=6)))[0], (T, 80 + 2 * 40, 320, 1.0)),
    ("latent projections", lambda: attention_gemms(work(LOCAL.but(sp=True), LATENT)), [
        (T / 2, 96 + 24, 352, 1.0), (T, 10 * 88 / 2, 96, 1.0), (T / 2, 160, 352, 1.0), (T, 320, 160, 1.0),
        (T, 352, 240, 1.0)]),
    ("queries in one step", lambda: attention_gemms(
        work(LOCAL, replace(LATENT, latent=replace(LATENT.latent, q_lora_rank=None))))[2:],
     [(T, 320, 352, 1.0), (T, 352, 240, 1.0)]),
    ("all matrices of a mean layer", lambda: attention_gemms(work(HF, MIXED)),
     [(T, 800_000 / 640, 320, 1.0), (T, 320, 800_000 / 640, 1.0)]),
    ("MLPs", lambda: [mlp_gemms(work(LOCAL), 896), mlp_gemms(work(LOCAL, GPT), 1600), mlp_gemms(work(LOCAL), 0),
                      mlp_gemms(work(HF, MIXED), 896)],
     [[(T, 896, 320, 1.0), (T, 320, 448, 1.0)], [(T, 800, 384, 1.0), (T, 384, 800, 1.0)], [], []]),
    # Three experts a rank have the tokens of both tensor-parallel ranks: 1,536 · 3 · 2 / 3, a quarter more at capacity.
    ("experts", lambda: expert_gemms(other(work(megatron(tp=2, ep=4, etp=2), EXPERTS), capacity_factor=1.25)),
     [(T / 2, 12, 320, 1.0), (1.25 * T, 200, 320, 3), (1.25 * T, 320, 100, 3)]),
    ("gradients of weights", lambda: [gemms_s(GEMM, work(each), MLP) for each in (HF, megatron(**TE))],
     [products(GEMM, *MLP), products(GEMM, *MLP, summed=8.0)]),
    ("frozen weights", lambda: gemms_s(GEMM, work(HF, lora=LORA), MLP), products(GEMM, *MLP, summed=None)),
    ("head and loss", lambda: head_s(GPU, work(LOCAL)),
     tuple(each + T * 10 * 5003 / 2 / 1e12 for each in products(GPU.others, (T, 5003 / 2, 320, 1.0)))),
    ("look-up", lambda: embedding_s(GPU, work(LOCAL.but(sp=True))), 12 * T / 2 * 320 / 1e12),
    ("attention", lambda: [attention_forward_s(GPU, work(each)) for each in (HF, LOCAL.but(cp=2))], [FLASH, FLASH / 4]),
    ("ranks that wait for the last", lambda: attention_forward_s(GPU, how(work(LOCAL.but(cp=2)),
                                                                          balanced_context=False)), FLASH / 4 * 1.5),
    ("through a window", lambda: attention_forward_s(GPU, work(HF, MISTRAL)), FLASH * (224 + 64) / (512 + 64)),
    ("through a longer window", lambda: attention_forward_s(GPU, work(HF, replace(MISTRAL, sliding_window=1024))),
     FLASH),
    ("where some layers see all", lambda: attention_forward_s(GPU, work(HF, GEMMA)), FLASH),
    ("narrower values", lambda: attention_forward_s(GPU, work(HF, LATENT)), FLASH * 10 * (64 + 48) / (12 * 80)),
    # Unfused: every score, and 4.5 passes over all of them.
    ("unfused", lambda: attention_forward_s(GPU, work(LOCAL.but(cp=2), GEMMA)),
     matmul_s(GEMM, 1024, 1024, 40, 9, 2.0) + matmul_s(GEMM, 1024, 40, 1024, 9, 2.0) + 4.5 * 2 * 9 * 1024**2 / 1e12),
    ("unfused in fp32", lambda: attention_forward_s(GPU, how(work(HF, precision="fp32"), attention="unfused")),
     matmul_s(GEMM, 1024, 1024, 40, 36, 4.0) + matmul_s(GEMM, 1024, 40, 1024, 36, 4.0) + 4.5 * 4 * 36 * 1024**2 / 1e12),
    ("attention of a mean layer", lambda: attention_forward_s(GPU, work(HF, MIXED)),
     T * layer_attention_flops_per_token(MIXED, 1024) / (2e14 * 1024 / 1536)),
    # FlashAttention-2 has five products in backward and two in forward.
    ("a layer", lambda: parts(work(HF)), (FORWARD, SUMS[1] + 2.5 * FLASH + 2 * (FORWARD - SUMS[0] - FLASH), 0.0)),
    ("full recompute", lambda: parts(work(HF.but(recompute="full")))[2], FORWARD),
    ("a part of it", lambda: parts(other(work(HF.but(recompute="full")), recomputed_share=0.25))[2], FORWARD / 4),
    ("attention alone", lambda: parts(work(LOCAL.but(recompute="selective")))[2], FLASH / 2),
    # An MLP is computed again with its activation, experts with their routing as well; attention is not.
    ("the MLP", lambda: parts(work(LOCAL.but(recompute="selective", recompute_modules=("mlp",))))[2],
     products(GEMM, *mlp_gemms(work(LOCAL), 896))[0] + T * 14 * 448 / 1e12),
    ("both", lambda: parts(work(LOCAL.but(recompute="selective", recompute_modules=("mlp", "core_attn"))))[2]
     - parts(work(LOCAL.but(recompute="selective", recompute_modules=("mlp",))))[2], FLASH / 2),
    # q_proj: B(A(x)) by two products, scaled and added; in fp32 adapters under autocast x and its gradient are cast.
    ("a branch", lambda: branches_s(GPU, work(HF, lora=ONE)), BRANCH),
    ("a branch in fp32 adapters", lambda: branches_s(GPU, work(torch(), lora=ONE)),
     (BRANCH[0] + 12 * 320 * T / 1e12, BRANCH[1] + 12 * 320 * T / 1e12)),
    ("a compiled branch", lambda: branches_s(GPU, work(HF.but(compile_layers=True), lora=ONE)),
     (BRANCH[0] - 4 * 480 * T / 1e12, BRANCH[1] - 2 * 320 * T / 1e12)),
    ("branches of a rank", lambda: branches_s(GPU, work(LOCAL, lora=replace(ONE, target_modules=("o_proj",)))),
     tuple(seconds + moved * T / 1e12 for seconds, moved in zip(
         products(GPU.others, (T, 8, 240, 1.0), (T, 320, 8, 1.0)), (10 * 320, 6 * 240 + 4 * 320), strict=True))),
    # Four bits and their scales are read, 16 bits written: for forward, and again for backward. Nothing is cast.
    ("4-bit weights", lambda: [four - sixteen for layout in (torch(), LOCAL) for four, sixteen in zip(
        branches_s(GPU, work(layout, lora=replace(ONE, four_bit=True))), branches_s(GPU, work(layout, lora=ONE)),
        strict=True)],
     [NF4 - 12 * 320 * T / 1e12] * 2 + [NF4 / 2] * 2),
    # Forward quantises inputs (15 bytes) and brings outputs to 16 bits (12); backward makes 16 bits of weights (7).
    ("8-bit weights", lambda: [eight - sixteen for eight, sixteen in zip(
        branches_s(GPU, work(torch(), lora=replace(ONE, eight_bit=True))), branches_s(GPU, work(torch(), lora=ONE)),
        strict=True)],
     [((15 * (3 * 320 + 480 + 2 * 320 + 896) + 12 * (480 + 2 * 120 + 320 + 2 * 896 + 320)) - 12 * 320) * T / 1e12,
      7 * (2 * 320 * 480 + 2 * 320 * 120 + 3 * 320 * 896) / 1e12 - 12 * 320 * T / 1e12]),
    # Experts are dequantised for forward alone: five layers of seven have them, 12 x 3 matrices in two tensors.
    ("4-bit experts", lambda: [one - other for one, other in zip(*(branches_s(GPU, work(HF, EXPERTS, lora=replace(
        ONE, four_bit=True, quantize_moe_experts=each))) for each in (True, False)), strict=True)],
     [(2.5 + 1 / 64 + 4 / (64 * 256)) * 12 * 3 * 320 * 200 * 5 / 7 / 1e12, 0]),
    ("operators of 4-bit experts", lambda: [elementwise.layer_kernels(work(HF, EXPERTS, lora=replace(
        ONE, four_bit=True, quantize_moe_experts=each)), True) for each in (True, False)],
     [262 + 12 + 7 * (7 * 4 + 2 * 3 + 5 * 3 + each) / 7 for each in (2 * 5, 0)]),
    ("branches computed again", lambda: parts(work(HF.but(recompute="full"), lora=ONE))[2]
     - parts(work(HF.but(recompute="full")))[2], BRANCH[0]),
    ("a layer with branches", lambda: [one - none for one, none in zip(parts(work(HF, lora=ONE))[:2], (
        parts(work(HF))[0], parts(work(HF))[1] - SUMS[1] + products(GEMM, *PROJECTIONS, *MLP, summed=None)[1]),
        strict=True)], BRANCH),
    ("operators of branches", lambda: [elementwise.layer_kernels(work(layout, lora=lora), False) for layout, lora in (
        (HF, ONE), (torch(), ONE), (torch(), replace(ONE, four_bit=True)), (torch(), replace(ONE, eight_bit=True)),
        (HF.but(compile_layers=True), ONE))],
     [112, 117, 112 + 7 * 7, 112 + 10 * 7, 44]),
    ("operators alone", lambda: parts(work(HF.but(recompute="selective")))[2],  # keys, output and up again
     SUMS[0] * (120 + 480 + 896) / (2 * 480 + 2 * 120 + 3 * 896) + FORWARD - SUMS[0] - FLASH),
    ("tiles", lambda: parts(work(HF.but(recompute="full", tiled_mlp=True)))[2],
     FORWARD + products(GEMM, *MLP)[0] + T * 10 * 896 / 1e12),
    ("unfused in backward", lambda: parts(how(work(HF), attention="unfused"))[1] - parts(work(HF))[1],
     2 * attention_forward_s(GPU, how(work(HF), attention="unfused")) - 2.5 * FLASH),
    ("launches", lambda: [getattr(layer_time(GPU, work(HF), False), f"launch_{way}") for way in ("forward",
        "backward")],
     [100 * 8e-6, 1.5 * 100 * 8e-6]),
    ("experts at the rate of others", lambda: layer_time(GPU, work(megatron(ep=4), EXPERTS), True).gemms_forward,
     products(GEMM, (T, 448 + 448, 320, 1.0), (T, 320, 448, 1.0), (T, 800, 320, 1.0), (T, 320, 400, 1.0))[0]
     + products(GPU.others, (T, 12, 320, 1.0), (T, 400, 320, 3), (T, 320, 200, 3))[0]),
    # 512 tokens of a prompt at once; then each of 512 reads weights and half of the keys and values on average.
    ("completions by vLLM", lambda: generated(vllm_gpu_memory_utilization=0.3), 512 * 2 * 3 * PASS / 3e14
     + 512 * (2 * WHOLE + 3 * 2 * 2 * 120 * 6 * (512 + 256)) / 1e12),
    ("no more than the sequence", lambda: generated(vllm_gpu_memory_utilization=0.3, max_completion_length=4096),
     1024 * (2 * WHOLE + 3 * 2 * 2 * 120 * 6 * 512) / 1e12),
    ("launches of transformers", lambda: generated(torch(dp=8)), 512 * 2 * 3 * PASS / 3e14 + 512 * 6 * 100 * 8e-6),
    ("gathers of FSDP2", lambda: [generated(HF.but(zero_stage=stage)) - generated(torch(dp=8)) for stage in (2, 3)],
     [512 * ring(8, 2 * WHOLE, 6)] * 2),
    ("one gather of ZeRO-3", lambda: [generated(deepspeed(dp=8, zero_stage=stage)) - generated(torch(dp=8))
                                      for stage in (2, 3)], [0.0, ring(8, 2 * WHOLE, 6)]),
]  # fmt: skip

SIZE = T * 320 * 2.0
REDUCED = 2 * ring(2, SIZE)
KEYS = ring(4, 3 * 1024 * 2 * 2 * 120)
"""Four ranks gather keys and values of whole sequences."""
SENT = T / 2 * 320 * 2.0


def tensor(layout: Any, experts: bool = False, forward: float = 0.0, backward: float = 0.0, **more: Any) -> Exposed:
    """Of a layer whose products take so long."""
    return tensor_parallel(work(layout, **more), forward, backward, experts)


def context(way: str, attention: float = 0.0, model: Any = DENSE, **more: Any) -> Exposed:
    """Over four ranks."""
    return context_parallel(work(megatron(cp=4, cp_comm_type=way, **more), model), attention)


def experts(
    gpu: Any = GPU, forward: float = 0.0, backward: float = 0.0, load: float = 1.0, once: bool = False, **more: Any
) -> Exposed:
    """Of EXPERTS."""
    asked = work(megatron(**{"tp": 2, "ep": 4, "etp": 2, **more}), EXPERTS, gpu.cluster, expert_load=load)
    return expert_parallel(how(asked, once_per_node=once) if once else asked, forward, backward)


DISPATCH = 2 * (3 / 4 * 3 * SENT / PORT + 3 * FAR)
"""Over four ranks, each on a node of its own, three copies of every token, there and back."""
EXCHANGES: Rows = [
    ("alone", lambda: (tensor(megatron()), context_parallel(work(megatron()), 1.0)), (Exposed(), Exposed())),
    # Two all-reduces in forward and two in backward (arXiv 1909.08053, section 3).
    ("tensor parallel", lambda: tensor(LOCAL), Exposed(2 * REDUCED, 2 * REDUCED, 0.0)),
    ("again", lambda: tensor(LOCAL.but(recompute="full")).recompute, 2 * REDUCED),
    # Inputs that were saved sharded are gathered once more (arXiv 2205.05198, section 4.2).
    ("sequence parallel", lambda: tensor(LOCAL.but(sp=True))[:2], (2 * REDUCED, 2 * REDUCED + 2 * ring(2, SIZE))),
    ("beside experts", lambda: tensor(LOCAL.but(sp=True), experts=True)[:2], (REDUCED, REDUCED + ring(2, SIZE))),
    ("beside products of backward", lambda: tensor(LOCAL, forward=1.0, backward=REDUCED)[:2],
     (2 * REDUCED, (2 - E.overlap) * REDUCED)),
    ("never hidden", lambda: tensor(LOCAL, backward=1.0).backward, 2 * REDUCED * E.unhidden),
    ("DTensor waits", lambda: tensor(torch(tp=2, zero_stage=3), backward=1.0).backward, 2 * REDUCED),
    ("beside products of forward", lambda: tensor_parallel(how(work(LOCAL), overlaps_tensor_parallel=True),
                                                           REDUCED, 0.0, False).forward, (2 - E.overlap) * REDUCED),
    # Between A and B of an adapter: 2·7 numbers a token.
    ("adapters", lambda: [tensor(LOCAL, lora=replace(LORA, targets=each)).forward - 2 * REDUCED
                          for each in ("attention", "all-linear")], [2 * ring(2, T * 28), 4 * ring(2, T * 28)]),
    ("keys are gathered", lambda: context("all_gather", 1.0), Exposed(KEYS, KEYS, 0.0)),
    # An MLP that is computed again sends its half of forward once more; one in a layer of experts has no such half.
    ("the MLP's again", lambda: [
        tensor(LOCAL.but(recompute="selective", recompute_modules=(each,)), experts).recompute / tensor(LOCAL).forward
        for each, experts in (("mlp", False), ("core_attn", False), ("mlp", True))], [0.5, 0, 0]),
    ("experts computed again", lambda: [parts(work(megatron(tp=2, ep=4, recompute="selective", recompute_modules=(
        "moe",)), EXPERTS), experts)[2] > 0 for experts in (True, False)], [True, False]),
    ("gradients in bf16", lambda: [[each.execution.gradient_bytes, elementwise.micro_batch_bytes(each, P) / P.total]
        for each in (work(LOCAL), work(LOCAL.but(gradient_dtype="bf16")))], [[4, 10], [2, 6]]),
    ("sums of fused products in bf16", lambda: [products(GEMM, (64.0, 32.0, 16.0, 1.0), summed=two)[1] - gemms_s(
        GEMM, work(megatron(gradient_dtype=each, **TE)), [(64.0, 32.0, 16.0, 1.0)])[1]
        for each, two in (("fp32", 8.0), ("bf16", 4.0))], [0, 0]),
    ("keys go round", lambda: context("p2p", KEYS / 4)[:2], (KEYS * (1 - E.overlap / 4),
        KEYS * (2 - E.overlap * 2.5 / 4))),
    ("keys go round beside attention", lambda: context("p2p", 1.0)[:2], (E.unhidden * KEYS, 2 * E.unhidden * KEYS)),
    ("keys of half the heads", lambda: context("all_gather", tp=2).forward, ring(4, 3 * 1024 * 2 * 120)),
    ("latent keys", lambda: context("all_gather", model=LATENT).forward, ring(4, 3 * 1024 * 2 * (640 + 480))),
    # arXiv 2309.14509: queries, keys, values and the result change places.
    ("Ulysses", lambda: context("a2a", recompute="full"),
     Exposed(*[ring(4, 3 * 1024 * 2 / 4 * (480 + 480 + 240))] * 3)),
    # Four ranks two apart; and both tensor-parallel ranks of an expert gather tokens and scatter results.
    ("tokens and experts", lambda: experts(), Exposed(*[2 * (ring(4, 3 * SENT) + ring(2, 3 * SENT * 2))] * 2, 0.0)),
    ("whole experts", lambda: experts(etp=1)[:2], (2 * ring(4, 3 * SENT),) * 2),
    ("again in recompute", lambda: [experts(recompute="full", etp=1).recompute, expert_parallel(other(work(
        megatron(tp=2, ep=4), EXPERTS), recompute_modules=frozenset({"moe"})), 0.0, 0.0).recompute],
     [2 * ring(4, 3 * SENT)] * 2),
    ("the fullest rank", lambda: experts(etp=1, load=1.5).forward, 2 * ring(4, 4.5 * SENT)),
    ("no expert parallelism", lambda: experts(ep=1, etp=1).forward, 0.0),
    ("over nodes", lambda: experts(FAR_GPU, etp=8).forward - 2 * ring(8, 3 * SENT * 8), DISPATCH),
    # A token goes once to each other node with one of its three experts, 1 − (3/4)³ of them, and there to each rank.
    ("once to a node", lambda: experts(FAR_GPU, etp=8, once=True, load=1.5).forward
     - 2 * ring(8, 4.5 * SENT * 8), 2 * (1.5 * 3 * (1 - (3 / 4) ** 3) * SENT / PORT + 3 * FAR)),
    ("once to a node, NVLink the slower", lambda: experts(FAR_GPU._replace(
        cluster=replace(NODES, inter_node_gbytes_per_s=2e3)), etp=8, once=True).forward
     - 2 * ring(8, 3 * SENT * 8), 2 * (3 * (1 - (3 / 4) ** 3) * SENT / NVLINK + 3 * FAR)),
    # Two ranks on each of two nodes: half of the nodes, a quarter of the ranks is a token's own.
    ("once to a node of several ranks", lambda: [experts(FAR_GPU._replace(cluster=replace(
        NODES, inter_node_gbytes_per_s=each)), etp=4, once=True).forward - 2 * ring(4, 3 * SENT * 4)
                                                 for each in (50.0, 2e3)],
     [2 * ((1 - (1 / 2) ** 3) * SENT / PORT + FAR + 2 * HOP),
      2 * (3 * (1 - (3 / 4) ** 3) * SENT / NVLINK + FAR + 2 * HOP)]),
    ("one node", lambda: experts(etp=1, once=True, load=1.5).forward,
     2 * (1.5 * 3 * (1 - (3 / 4) ** 3) * SENT / NVLINK + 3 * HOP)),
    ("beside another program's compute", lambda: expert_parallel(how(work(megatron(tp=2, ep=4), EXPERTS),
                                                                          overlaps_experts=True), 1.0, 0.0).forward,
     E.unhidden * 2 * ring(4, 3 * SENT)),
]  # fmt: skip


def data(
    layout: Any, forward: float = 0.0, backward: float = 0.0, p: Any = P, model: Any = DENSE, **more: Any
) -> float:
    """Seconds of a step on ranks with ``p``, whose micro batch computes so long."""
    return data_parallel_s(GPU, work(layout, model, **more), p, forward, backward)


D = replace(P, experts=0.0)
GRADIENTS, WEIGHTS = ring(8, 4 * 1.21e9), ring(8, 2 * 1.21e9)
GATHER, SCATTER = ring(8, 2 * 1.21e9, 6), ring(8, 4 * 1.21e9, 6)
"""Of FSDP2: a message for each layer."""
EACH, SUM = ring(8, 2 * 1.21e9, 42), ring(8, 2 * 1.21e9, 42) + 12 * 1.21e9 / 1e12
"""Of ZeRO-3: a message for each of seven matrices, and three copies of 16-bit gradients."""
U = 0.65
"""Share of the time of sharded weights that is never hidden."""
DATA: Rows = [
    ("one rank", lambda: data(megatron(zero_stage=0)), 0.0),
    ("Megatron", lambda: data(megatron(dp=8, zero_stage=0), p=D), 2 * GRADIENTS),
    ("distributed optimizer", lambda: data(megatron(dp=8), p=D), GRADIENTS + WEIGHTS),
    ("in fp32", lambda: data(megatron(dp=8), p=D, precision="fp32"), 2 * GRADIENTS),
    ("that reduces in full", lambda: data_parallel_s(GPU, how(work(megatron(dp=8)), reduces_in_full=True), D, 0.0, 0.0),
     2 * GRADIENTS + WEIGHTS),
    ("beside compute", lambda: data(megatron(dp=8), 1e-3, 2e-3, D), seen(GRADIENTS, 2e-3) + seen(WEIGHTS, 1e-3)),
    ("not in a plain pipeline", lambda: data(megatron(dp=8, pp=2), 1.0, 1.0, D), GRADIENTS + WEIGHTS),
    ("in an interleaved one", lambda: data(megatron(dp=8, pp=2, vp=2), 1.0, 1.0, D),
        E.unhidden * (GRADIENTS + WEIGHTS)),
    # Experts on two ranks each: dp·tp/(ep·etp) copies, every fourth rank.
    ("experts", lambda: data(megatron(dp=8, ep=4), model=EXPERTS) - GRADIENTS - WEIGHTS, ring(2, 6 * 3e9) + HOP),
    ("experts alone have copies", lambda: data(megatron(tp=2, ep=1), model=EXPERTS), ring(2, 6 * 3e9) + HOP),
    ("ZeRO all-reduces", lambda: [data(deepspeed(dp=8, zero_stage=stage), p=D) for stage in (0, 1, 2)],
     [2 * WEIGHTS, 3 * WEIGHTS, 3 * WEIGHTS]),
    ("ZeRO beside backward", lambda: [data(deepspeed(dp=8, zero_stage=stage, gradient_accumulation_steps=m), 0.0, 1.0,
        D)
                                      for stage, m in ((0, 1), (1, 1), (1, 4), (2, 4))],
     [2 * WEIGHTS, (1 + 2 * E.unhidden) * WEIGHTS, 3 * WEIGHTS, (1 + 8 * E.unhidden) * WEIGHTS]),
    ("ZeRO that waits", lambda: data_parallel_s(GPU, how(work(deepspeed(dp=8, zero_stage=2)), overlaps_gradients=False),
                                                D, 0.0, 1.0), 3 * WEIGHTS),
    ("DDP", lambda: data(torch(dp=8), 0.0, 2e-3, D), seen(2 * GRADIENTS, 2e-3)),
    ("DDP in bf16", lambda: data(torch(dp=8, gradient_compression="bf16"), p=D), 2 * WEIGHTS + 12 * 1.21e9 / 1e12),
    ("adapters", lambda: data(torch(dp=8), p=D, lora=LORA), 2 * GRADIENTS * ADAPTERS / 1.21e9),
    ("FSDP2", lambda: [data(HF.but(zero_stage=stage, gradient_accumulation_steps=m), p=D) for stage, m in
                       ((3, 1), (3, 4), (2, 1))], [2 * GATHER + SCATTER, 4 * (2 * GATHER + SCATTER), GATHER + SCATTER]),
    ("FSDP2 beside compute", lambda: data(HF, 2e-3, 3e-3, D),
     seen(GATHER, 2e-3, U) + seen(GATHER + SCATTER, 3e-3, U)),
    ("FSDP2 in a long window", lambda: data(HF, 1.0, 1.0, D), U * (2 * GATHER + SCATTER)),
    ("FSDP2 over tensor parallelism", lambda: data(torch(zero_stage=3, dp=4, tp=2), p=D),
     2 * ring(4, 2 * 1.21e9, 6) + ring(4, 4 * 1.21e9, 6)),
    ("FSDP2 in fp32", lambda: data(HF, p=D, precision="fp32"), 3 * SCATTER),
    ("FSDP2 with eight-bit weights", lambda: data_parallel_s(GPU, other(work(HF), keeps_bf16_weights=False), D, 0.0,
        0.0),
     2 * ring(8, 1.21e9, 6) + SCATTER),
    ("a pipeline gathers once a step", lambda: data_parallel_s(GPU, how(work(megatron(
        zero_stage=2, dp=8, pp=2, gradient_accumulation_steps=4)), engine="fsdp"), D, 0.0, 0.0), GATHER + SCATTER),
    ("frozen weights are gathered", lambda: data(HF, p=D, lora=LORA), 2 * GATHER + SCATTER * ADAPTERS / 1.21e9),
    ("ZeRO-3", lambda: data(deepspeed(dp=8, zero_stage=3), p=D), 2 * EACH + SUM),
    ("ZeRO-3 without a gate", lambda: data(deepspeed(dp=8, zero_stage=3), p=D, model=GPT),
     3 * ring(8, 2 * 1.21e9, 20) + 12 * 1.21e9 / 1e12),
    ("compiled as a whole", lambda: data_parallel_s(GPU, how(work(deepspeed(dp=8, zero_stage=3)), deepcompile=True), D,
                                                    0.0, 0.0), 3 * EACH),
    # A third gather of what is farther away than what stays: 1.21e8 of two layers of 1.21e9/6.
    ("a third gather", lambda: [gathered_again(work(deepspeed(dp=8, zero_stage=3, recompute=each,
                                                              stage3_max_live_parameters=int(kept))), D)
                                for each, kept in (("full", 1.21e8), ("none", 1), ("full", 1e9))], [0.7, 0.0, 0.0]),
    ("a third gather within a distance", lambda: [gathered_again(how(work(deepspeed(
        dp=8, zero_stage=3, recompute="full")), **own), D) for own in ({"reuse_distance": 1.21e9 / 12},
                                                                       {"deepcompile": True})], [0.75, 0.0]),
    ("third gathers are timed", lambda: data(deepspeed(dp=8, zero_stage=3, recompute="full",
                                                       stage3_max_live_parameters=121_000_000), p=D), 2.7 * EACH + SUM),
    ("a forward's gathers", lambda: [forward_gather_s(work(each), D, 1.0) for each in (
        HF, deepspeed(dp=8, zero_stage=3), HF.but(zero_stage=2), deepspeed(dp=8, zero_stage=2), torch(dp=8))],
     [U * GATHER, U * EACH, U * GATHER, 0.0, 0.0]),
    ("a forward's gathers in the open", lambda: forward_gather_s(work(HF), D, 0.0), GATHER),
    # Two factors of rank 4 in fp32 (arXiv 1905.13727), norms as they are; all experts of a projection are one matrix.
    ("PowerSGD", lambda: [gradient_bytes(model, "powersgd", 4.0,
        count(model).total) * count(model).total for model in (DENSE, GPT)],
     [16 * (6 * (800 + 2 * 440 + 800 + 3 * 1216) + 2 * 5323) + 4 * 13 * 320, 16 * (5 * (4 * 768 + 2 * 1984) + 5387)
      + 4 * (count(GPT).total - 5 * (4 * 384**2 + 2 * 384 * 1600) - 5003 * 384)]),
    ("PowerSGD of experts", lambda: gradient_bytes(replace(EXPERTS, num_layers=1, tied_embeddings=True), "powersgd",
        4.0, 1),
     16 * (768 + 2 * 544 + 768 + 12 + 128000 + 12 + 64000 + 12 + 320 + 5323)),
    ("other hooks", lambda: [(gradient_bytes(DENSE, each, 4.0, 9), kernel_bytes(each)) for each in ("none", "bf16")],
        [(4, 0), (2, 12)]),
    ("PowerSGD's products", lambda: kernel_bytes("powersgd"), 60.0),
    # ZeRO++ (arXiv 2306.10209): int8 gathers, a second copy inside a node, int4 reductions in two steps.
    ("ZeRO++ gathers", lambda: [zero_times(FAR_GPU, ZeroPlusPlus(weights=True, hpz=each), 64, 8e9, 2.0, 3)[:2]
                                for each in (1, 8)],
     [(group(NODES, 64, 1).all_gather_s(INT8_BYTES * 8e9, 3) + 0.096,) * 2,
      (group(NODES, 64, 1).all_gather_s(INT8_BYTES * 8e9, 3) + 0.096, ring(8, INT8_BYTES * 8e9, 3) + 0.096)]),
    ("ZeRO++ scatters", lambda: [zero_times(FAR_GPU, ZeroPlusPlus(gradients=each), 64, 8e9, 2.0, 3)[2]
                                 for each in (True, False)],
     [ring(8, INT4_BYTES * 8e9, 3) + group(NODES, 8, 8).all_gather_s(INT4_BYTES * 1e9, 3) + 0.048,
      group(NODES, 64, 1).all_gather_s(16e9, 3)]),
    # With a copy on each node only the first forward of a step gathers over nodes.
    ("a copy on each node in a step", lambda: data_parallel_s(FAR_GPU, work(deepspeed(
        dp=64, zero_stage=3, zero_hpz=8, gradient_accumulation_steps=3), machines=NODES), D, 0.0, 0.0),
     group(NODES, 64, 1).all_gather_s(2 * 1.21e9, 42) + 2 * EACH
     + 3 * (EACH + group(NODES, 64, 1).all_gather_s(2 * 1.21e9, 42) + 12 * 1.21e9 / 1e12)),
    ("ZeRO++ in a step", lambda: data(deepspeed(dp=8, zero_stage=3, zero_quantized_weights=True,
                                                gradient_accumulation_steps=2), p=D),
     2 * (2 * (ring(8, INT8_BYTES * 1.21e9, 42) + 12 * 1.21e9 / 1e12) + SUM)),
]  # fmt: skip


test_value = by_hand(LINKS, GPUS, FLOPS, KERNELS, BYTES, LAYERS, EXCHANGES, DATA)
