"""How long an optimizer step takes: a roofline of each layer, exposed communication, pipeline, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost import flops, traffic
from kit.cost.communication import Groups, groups
from kit.cost.efficiency import attention_flops_per_s, matmul_flops_per_s, memory_bytes_per_s, shared
from kit.cost.params import count, rank_experts, rank_parameters
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec

COMPONENTS = (
    "compute",
    "recompute",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_transfer",
    "pipeline_bubble",
    "data_parallel",
    "offload",
    "optimizer",
)


def bubble_fraction(layout: Layout) -> float:
    """(p−1)/(v·m+p−1): share of a step in which a stage idles (Narayanan et al. 2021, arXiv 2104.04473, 2.2)."""
    p, v, m = layout.pp, layout.vp, layout.gradient_accumulation_steps
    return (p - 1) / (v * m + p - 1)


@dataclass(frozen=True)
class _MicroBatch:
    """Seconds of one micro batch on one stage."""

    forward: float
    compute: float
    """Forward and backward."""
    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.tensor_parallel + self.context_parallel + self.expert_parallel


def step_time_components_s(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> dict[str, float]:
    """Seconds by component, which add up to the step. Pipeline stages wait for the slowest one."""
    links = groups(cluster, layout)
    # Stages between the first and the last are alike.
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    batches = [_micro_batch(model, cluster, job, layout, links, stage) for stage in stages]
    slowest = max(batches, key=lambda batch: batch.total)
    m, p, v = layout.gradient_accumulation_steps, layout.pp, layout.vp
    components = {
        "compute": m * slowest.compute,
        "recompute": m * slowest.recompute,
        "tensor_parallel": m * slowest.tensor_parallel,
        "context_parallel": m * slowest.context_parallel,
        "expert_parallel": m * slowest.expert_parallel,
        "pipeline_transfer": _pipeline_transfer(model, job, layout, links, slowest),
        "pipeline_bubble": (p - 1) / v * slowest.total,
        "data_parallel": _data_parallel(model, job, layout, links, slowest),
        "offload": _offload(model, cluster, job, layout, slowest),
        "optimizer": _optimizer(model, cluster, job, layout),
    }
    return {name: components[name] for name in COMPONENTS}


def _micro_batch(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout, links: Groups, stage: int
) -> _MicroBatch:
    tokens = layout.micro_batch_size * job.seq_length / layout.cp
    layers = model.num_layers // layout.pp
    gpu, precision = cluster.gpu, job.precision
    matmul_rate, memory_rate = matmul_flops_per_s(gpu, precision), memory_bytes_per_s(gpu)
    matmul = layers * tokens * flops.layer_matmul_flops_per_token(model) / layout.tp / matmul_rate
    attention_flops = flops.layer_attention_flops_per_token(model, job.seq_length) / layout.tp
    attention = layers * tokens * attention_flops / attention_flops_per_s(gpu, precision)
    element_wise = layers * tokens * traffic.layer_forward_bytes_per_token(model, precision, layout) / memory_rate
    launches = layers * traffic.layer_forward_kernels(model, layout) * shared().kernel_launch_us * 1e-6
    # A GPU that waits for the next kernel is as slow as the process that launches them.
    layers_forward = max(matmul + attention + element_wise, launches if gpu.device == "cuda" else 0.0)
    parameters = rank_parameters(model, layout.tp, layout.pp, stage)
    parameters += rank_experts(model, layout.pp, layout.ep, layout.etp)
    once = traffic.micro_batch_bytes_per_parameter(precision, layout) * parameters / memory_rate
    forward = layers_forward
    if stage == layout.pp - 1:
        forward += tokens * flops.head_flops_per_token(model) / layout.tp / matmul_rate
        once += tokens * traffic.loss_bytes_per_token(model, layout) / memory_rate
    recomputed = layout.recompute == "full"
    return _MicroBatch(
        forward=forward,
        compute=3 * forward + once,
        recompute=layers_forward if recomputed else 0.0,
        tensor_parallel=_tensor_parallel(model, job, layout, links, layers, tokens, window=matmul),
        context_parallel=_context_parallel(model, job, layout, links, layers),
        expert_parallel=_expert_parallel(model, job, layout, links, layers, tokens),
    )


def _tensor_parallel(
    model: ModelSpec, job: JobSpec, layout: Layout, links: Groups, layers: int, tokens: float, window: float
) -> float:
    """Two all-reduces a layer forward, two backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Sequence parallelism turns each into a reduce-scatter and an all-gather: the same volume. Those of forward (and of
    its repetition) are exposed; those of backward run beside the weight gradients' products, as long as the forward's
    (megatron-core, tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """
    if layout.tp == 1:
        return 0.0
    passes = 2 if layout.recompute == "full" else 1
    one_way = layers * 2 * links.tp.all_reduce_s(tokens * model.hidden_size * _element(job))
    return passes * one_way + max(0.0, one_way - shared().overlap * window)


def _context_parallel(model: ModelSpec, job: JobSpec, layout: Layout, links: Groups, layers: int) -> float:
    """Keys and values of the sequence are gathered in forward, their gradients scattered in backward (context.py)."""
    if layout.cp == 1:
        return 0.0
    width = 2 * model.num_key_value_heads * model.head_dim / layout.tp
    size = layout.micro_batch_size * job.seq_length * width * _element(job)
    passes = 3 if layout.recompute == "full" else 2
    return passes * layers * links.cp.all_gather_s(size)


def _expert_parallel(
    model: ModelSpec, job: JobSpec, layout: Layout, links: Groups, layers: int, tokens: float
) -> float:
    """Tokens to their experts and back: two all-to-alls a layer, each way (megatron-core, moe/token_dispatcher.py).

    A rank sends each of its tokens (a ``tp``-th of the micro batch's, under sequence parallelism) once for each expert;
    (n−1)/n of them leave the rank when experts are equally popular: the volume of an all-gather of n such parts of
    1/n. With tensor parallelism inside experts the ranks of a group then gather each other's tokens, and scatter sums.
    """
    if not model.num_experts:
        return 0.0
    sent = tokens / layout.tp * model.experts_per_token * model.hidden_size * _element(job)
    one_way = links.ep.all_gather_s(sent) + links.etp.all_gather_s(sent * layout.etp)
    passes = 3 if layout.recompute == "full" else 2
    return passes * layers * 2 * one_way


def _pipeline_transfer(model: ModelSpec, job: JobSpec, layout: Layout, links: Groups, batch: _MicroBatch) -> float:
    """Activations forward and gradients back between stages; exposed in 1F1B, under compute when interleaved."""
    if layout.pp == 1:
        return 0.0
    size = layout.micro_batch_size * job.seq_length / layout.cp * model.hidden_size * _element(job)
    per_micro_batch = 2 * layout.vp * links.pp.send_s(size / (layout.tp if layout.sp else 1))
    if layout.vp > 1:
        per_micro_batch = max(0.0, per_micro_batch - shared().overlap * batch.total)
    return layout.gradient_accumulation_steps * per_micro_batch


def _data_parallel(model: ModelSpec, job: JobSpec, layout: Layout, links: Groups, batch: _MicroBatch) -> float:
    """Gradients out, weights in: what no backward hides. Bytes per parameter as each engine sends them."""
    if links.dp.size == 1 and links.expert_dp.size == 1:
        return 0.0
    parameters = max(rank_parameters(model, layout.tp, layout.pp, stage) for stage in (0, layout.pp - 1))
    experts = rank_experts(model, layout.pp, layout.ep, layout.etp)
    m, stage, overlap = layout.gradient_accumulation_steps, layout.zero_stage, shared().overlap
    element = _element(job)
    backward = 2 * batch.forward + batch.recompute
    if layout.engine == "megatron":
        weights = links.dp.all_gather_s(element * parameters) + links.expert_dp.all_gather_s(element * experts)
        gradients = links.dp.all_gather_s(4.0 * parameters) + links.expert_dp.all_gather_s(4.0 * experts)
        reduction = gradients * (1 if layout.zero_stage else 2)
        return _exposed(reduction, overlap * backward) + (weights if layout.zero_stage else 0.0)
    parameters += experts
    # A reduce-scatter takes as long as an all-gather. Stage 3 gathers layer by layer.
    once = links.dp.all_gather_s(element * parameters, messages=model.num_layers if stage == 3 else 1)
    if layout.engine == "torch" and stage == 0:
        return _exposed(2 * links.dp.all_gather_s(4.0 * parameters), overlap * backward)
    if layout.engine == "torch" or stage == 3:
        # Each micro batch gathers the weights for forward, stage 3 for backward too, and scatters gradients: fp32 ones
        # under FSDP2 (MixedPrecisionPolicy.reduce_dtype).
        scatter = links.dp.all_gather_s(4.0 * parameters, model.num_layers) if layout.engine == "torch" else once
        back = scatter + (once if stage == 3 else 0.0)
        return m * (_exposed(once, overlap * batch.forward) + _exposed(back, overlap * backward))
    if stage == 2:
        return m * _exposed(once, overlap * backward) + once
    # Stages 0 and 1 reduce at the end of the last micro batch; stage 1 then gathers the weights.
    if stage == 1 and m == 1:
        return _exposed(once, overlap * backward) + once
    return 2 * once + (once if stage == 1 else 0.0)


def _offload(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout, batch: _MicroBatch) -> float:
    """Gradients to the host, Adam on its processors, weights back (ZeRO-Offload, arXiv 2101.06840).

    CPU Adam is bound by the host's memory: 28 bytes a parameter and the 16-bit copy. Offloaded weights come over PCIe
    for forward and for backward of each micro batch, each rank its part. From NVMe (ZeRO-Infinity, arXiv 2104.07857)
    come the same weights, and once a step masters and moments, read and written, and gradients, written and read.
    """
    if layout.offload_optimizer == "none" and layout.offload_param == "none":
        return 0.0
    total = count(model).total
    share = total / layout.dp
    element = _element(job)
    pcie = cluster.gpu.pcie_gbytes_per_s * 1e9 * shared().host_link
    disk = (cluster.nvme_gbytes_per_s or shared().nvme_gbytes_per_s) * 1e9 * cluster.num_nodes
    m, seconds = layout.gradient_accumulation_steps, 0.0
    if layout.offload_optimizer != "none":
        seconds += 30.0 * total / cluster.num_nodes / (shared().host_memory_gbytes_per_s * 1e9)
        seconds += m * _exposed(element * share / pcie, shared().overlap * 2 * batch.forward)
        seconds += element * share / pcie if layout.offload_param == "none" else 0.0
    if layout.offload_optimizer == "nvme":
        # One sub group after the other, without pipelining: nothing overlaps.
        seconds += (2 * 12.0 + 2 * 4.0) * total / disk
    if layout.offload_param != "none":
        link = 2 * element * share / pcie
        if layout.offload_param == "nvme":
            link = max(link, 2 * element * total / disk)
            seconds += element * total / disk
        seconds += m * _exposed(link, shared().overlap * batch.compute)
    return seconds


def _optimizer(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> float:
    if layout.offload_optimizer != "none":
        return 0.0
    parameters = max(rank_parameters(model, layout.tp, layout.pp, stage) for stage in (0, layout.pp - 1))
    experts = rank_experts(model, layout.pp, layout.ep, layout.etp)
    ranks, expert_ranks = (layout.dp * layout.cp, layout.expert_dp) if layout.zero_stage >= 1 else (1, 1)
    updated = parameters / ranks + experts / expert_ranks
    return traffic.optimizer_bytes_per_parameter(job.precision) * updated / memory_bytes_per_s(cluster.gpu)


def _exposed(seconds: float, window: float) -> float:
    return max(0.0, seconds - window)


def _element(job: JobSpec) -> float:
    return 2.0 if job.precision != "fp32" else 4.0
