"""Seconds of an optimizer step: layers, exposed collectives, pipeline, optimizer and offload."""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from kit.cost.collectives import fills_the_link, group
from kit.cost.hardware import (
    HOST_STEP_BYTES,
    OVERFLOW_TEST_BYTES,
    TORCH_STEP_BYTES,
    TORCH_SUM_BYTES,
    GpuPerf,
    gpu_perf,
    host_bytes_per_s,
    matmul_s,
    pcie_bytes_per_s,
    shared,
)
from kit.cost.memory.activations_huggingface import layer_input
from kit.cost.memory.offload import stored_weight_bytes
from kit.cost.model.lora import adapted_layers
from kit.cost.model.params import RankParameters, count
from kit.cost.time import elementwise
from kit.cost.time.exposed import (
    Exposed,
    context_parallel,
    data_parallel_s,
    expert_parallel,
    exposed,
    forward_gather_s,
    tensor_parallel,
)
from kit.cost.time.layer import LayerTime, embedding_s, generation_s, head_s, layer_time
from kit.cost.workload import ExecutionModel, Workload
from kit.specs.job import LoraSpec
from kit.specs.layout import Layout


def bubble_fraction(layout: Layout) -> float:
    """(p−1)/(v·m+p−1): share of a step in which a stage idles (Narayanan et al. 2021, arXiv 2104.04473, 2.2)."""
    p, v, m = layout.pp, layout.vp, layout.gradient_accumulation_steps
    return (p - 1) / (v * m + p - 1)


class StepTimer:
    """Predicts step times of one model, cluster and job. Caches results that several layouts share."""

    def __init__(self) -> None:
        self._models: dict[ExecutionModel, StepTimeModel] = {}

    def components_s(self, workload: Workload) -> dict[str, float]:
        """Seconds by component, which add up to the step. Pipeline stages wait for the slowest one."""
        return self._model_of(workload).components_s(workload)

    def layers_s(self, workload: Workload) -> float:
        """Lower bound of the step: the layers of the mean stage, in every micro batch."""
        return self._model_of(workload).layers_s(workload)

    def _model_of(self, workload: Workload) -> StepTimeModel:
        how = workload.execution
        model = self._models.get(how)
        if model is None:
            gpu = gpu_perf(workload.cluster, how.precision, how.attention, how.linear_layers_only)
            model = self._models[how] = StepTimeModel(gpu)
        return model


class Part(NamedTuple):
    """Seconds of one layer, or of the embedding or head, for one micro batch, by component."""

    forward: float
    backward: float
    recompute: float
    launch: float
    tensor: float
    context: float
    expert: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def forward_window(self) -> float:
        return self.forward + self.launch / 3

    def times(self, factor: int) -> Part:
        return Part._make([factor * seconds for seconds in self])

    def plus(self, other: Part) -> Part:
        return Part._make(map(add, self, other))


class StepTimeModel:
    """Predicts step times for one model, GPU and execution model. Caches layers, which many layouts share."""

    def __init__(self, gpu: GpuPerf) -> None:
        self.gpu = gpu
        self._parts: dict[object, Part] = {}

    def components_s(self, workload: Workload) -> dict[str, float]:
        """Seconds by component; their sum is the step time. launch: the GPU waits for the host to launch kernels."""
        layout = workload.layout
        stages = workload.stages.equal
        parts = [self._stage(workload, stage) for stage, _ in stages]
        totals = [part.total for part in parts]
        longest = max(totals)
        slowest = parts[totals.index(longest)]
        m = layout.gradient_accumulation_steps
        # While the pipeline fills and drains, one micro batch passes every stage; otherwise the slowest stage decides.
        others = sum(number * total for (_, number), total in zip(stages, totals, strict=True)) - longest
        parameters = max((workload.parameters[stage] for stage, _ in stages), key=lambda part: part.total)
        window = slowest.forward_window
        components = {
            "compute": m * (slowest.forward + slowest.backward),
            "recompute": m * slowest.recompute,
            "launch": m * slowest.launch,
            "tensor_parallel": m * slowest.tensor,
            "context_parallel": m * slowest.context,
            "expert_parallel": m * slowest.expert,
            "pipeline_transfer": m * self.transfer_s(workload, slowest) if layout.pp > 1 else 0.0,
            "pipeline_bubble": others / layout.vp,
            "data_parallel": data_parallel_s(self.gpu, workload, parameters, window, longest - window)
            + self._small_buckets_s(workload),
            "offload": 0.0,
            "optimizer": self._optimizer_s(workload, parameters),
        } | _trl_components_s(self.gpu, workload, parameters, window)
        return self.with_offload(workload, parameters, components)

    def layers_s(self, workload: Workload) -> float:
        """Lower bound of the step: the layers of the mean stage, in every micro batch."""
        dense, experts = map(sum, zip(*workload.stages.stage_kinds, strict=True))
        seconds = dense * self._layer(workload, False).total if dense else 0.0
        seconds += experts * self._layer(workload, True).total if experts else 0.0
        return seconds * workload.layout.gradient_accumulation_steps / workload.layout.pp

    def _stage(self, workload: Workload, stage: int) -> Part:
        kinds = enumerate(workload.stages.stage_kinds[stage])
        parts = [(self._layer(workload, bool(kind)), number) for kind, number in kinds if number]
        total = self._once(workload, stage)
        for part, count_of in parts:
            total = total.plus(part.times(count_of))
        return total

    def _layer(self, workload: Workload, has_experts: bool) -> Part:
        layout = workload.layout
        key = (
            has_experts,
            layout.micro_batch_size,
            layout.tp,
            layout.cp,
            layout.sp,
            layout.ep,
            layout.etp,
            layout.cp_comm_type,
            layout.recompute,
            layout.tiled_mlp,
            layout.zero_stage,
        )
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._timed_layer(workload, has_experts)
        return found

    def layer_time(self, workload: Workload, has_experts: bool) -> LayerTime:
        """Compute and launch seconds of a layer, without collectives."""
        return layer_time(self.gpu, workload, has_experts)

    def _timed_layer(self, workload: Workload, has_experts: bool) -> Part:
        layer = self.layer_time(workload, has_experts)
        tensor = tensor_parallel(workload, layer.gemms_forward, layer.gemms_backward, has_experts)
        context = context_parallel(workload, layer.attention_forward)
        expert = Exposed()
        if has_experts:
            expert = expert_parallel(workload, layer.forward, layer.backward)
        forward = layer.forward + tensor.forward + context.forward + expert.forward
        recompute = layer.recompute + tensor.recompute + context.recompute + expert.recompute
        backward = layer.backward + tensor.backward + context.backward + expert.backward
        # If launching takes longer than computing, the GPU waits for the host.
        once, again = elementwise.recompute_launches(workload)
        hooks = elementwise.hooks(workload) * self.gpu.rates.kernel_launch_us * 1e-6
        launches = layer.launch_backward + again * layer.launch_forward + (2 if again else 1) * hooks
        launch = max(0.0, once * layer.launch_forward + hooks - forward) + max(0.0, launches - backward - recompute)
        if has_experts and workload.execution.graphs != "full":
            # The host reads the number of tokens of each expert (megatron-core, token_dispatcher.py). The GPU idles
            # while the host launches the next kernels.
            launch = max(launch, elementwise.AFTER_SYNC * (layer.launch_forward + layer.launch_backward))
        return Part(layer.forward, layer.backward, layer.recompute, launch, tensor.total, context.total, expert.total)

    def _once(self, workload: Workload, stage: int) -> Part:
        """Seconds of a stage outside its layers: embedding, head and loss, multi-token prediction, gradient sums."""
        forward, last = 0.0, stage == workload.layout.pp - 1
        backward = elementwise.micro_batch_bytes(workload, workload.parameters[stage]) / self.gpu.bytes_per_s
        if stage == 0:
            backward += embedding_s(self.gpu, workload)
        if last:
            heads = 1 + workload.mtp_layers
            head = head_s(self.gpu, workload)
            forward, backward = forward + heads * head[0], backward + heads * head[1]
        ends = Part(forward, backward, 0.0, 0.0, 0.0, 0.0, 0.0)
        if not (last and workload.mtp_layers):
            return ends
        return ends.plus(self._layer(workload, workload.model.num_experts > 0).times(workload.mtp_layers))

    def transfer_s(self, workload: Workload, slowest: Part) -> float:
        """Seconds of one micro batch's sends between stages, activations forward and gradients back. In 1F1B a stage
        waits for both; the interleaved schedule overlaps them with compute."""
        layout = workload.layout
        link = group(workload.cluster, 2, layout.tp * layout.cp * layout.dp)
        bytes_per_s = link.port_bytes_per_s if link.nodes > 1 else link.bytes_per_s
        whole = workload.shard_tokens * workload.model.hidden_size * 2.0
        seconds = 2 * layout.vp * (self.send_s(workload, whole, bytes_per_s) + link.latency_s)
        if layout.vp > 1:
            return max(0.0, seconds - shared().overlap * slowest.total)
        # The host waits for each transfer (batch_p2p_sync), so it launches the next layer's kernels to an idle GPU:
        # half of them in forward, half in backward.
        kernels = elementwise.layer_kernels(workload, workload.model.num_experts > 0)
        return seconds + kernels * self.gpu.rates.kernel_launch_us * 1e-6

    def send_s(self, workload: Workload, size_bytes: float, bytes_per_s: float) -> float:
        """Seconds to send activations to the next stage, latency apart."""
        return size_bytes / bytes_per_s

    def _small_buckets_s(self, workload: Workload) -> float:
        """Seconds of latency that a small reduce bucket of DeepSpeed adds, compared with a bucket that fills the link.
        A gradient larger than the bucket is reduced alone; a layer has at most nine."""
        layout = workload.layout
        if layout.reduce_bucket_size is None:
            return 0.0
        parameters, most = count(workload.model).total / layout.tp, 9 * workload.num_layers
        sizes = (fills_the_link(workload.cluster, layout), layout.reduce_bucket_size)
        few, many = (min(most, parameters / max(1, size)) for size in sizes)
        passes = layout.gradient_accumulation_steps if layout.zero_stage >= 2 else 1
        return passes * max(0.0, many - few) * group(workload.cluster, layout.dense_dp, layout.tp).latency_s

    def _optimizer_s(self, workload: Workload, parameters: RankParameters) -> float:
        updated = workload.stepped_parameters(parameters)
        seconds = elementwise.optimizer_bytes_per_parameter(workload) * updated / self.gpu.bytes_per_s
        return seconds + (_muon_s(self.gpu, workload) if workload.job.optimizer.name == "muon" else 0.0)

    def with_offload(
        self, workload: Workload, parameters: RankParameters, components: dict[str, float]
    ) -> dict[str, float]:
        """``components`` with the seconds of offload, if the layout has it. ``parameters``: of the fullest rank."""
        layout = workload.layout
        if layout.activation_offloading:
            components = components | {"offload": layout.gradient_accumulation_steps * self._inputs_s(workload)}
        if layout.offload_optimizer == "none" and layout.offload_param == "none":
            return components
        on_device = 1.0 if layout.offload_optimizer == "none" else 1.0 - layout.optimizer_offload_fraction
        optimizer = on_device * components["optimizer"]
        seconds = components["offload"] + _offload_s(workload, parameters, components)
        return components | {"optimizer": optimizer, "offload": seconds}

    def _inputs_s(self, workload: Workload) -> float:
        """Seconds of one micro batch for which layers wait for copies of their inputs: to the host beside the layer's
        forward, back beside recompute and backward of the layer after it. The last layer's has nothing beside it
        (kit/engines/kernels/offloaded_inputs.py)."""
        copy = layer_input(workload) / pcie_bytes_per_s(workload.cluster.gpu)
        seconds = copy
        for has_experts, number in enumerate(workload.stages.stage_kinds[0]):
            if number:
                layer = self._layer(workload, bool(has_experts))
                seconds += number * max(0.0, copy - layer.forward)
                seconds += number * max(0.0, copy - layer.recompute - layer.backward)
        return seconds


MUON_STEPS = 5
"""Newton-Schulz steps of a matrix (torch/optim/_muon.py, DEFAULT_NS_STEPS)."""


def muon_gemms(inputs: int, outputs: int) -> tuple[tuple[int, int, int], ...]:
    """(rows, columns, inner) of the GEMMs of a Newton-Schulz step: the shorter side's Gram matrix, its square, the
    update."""
    short, long = sorted((inputs, outputs))
    return (short, short, long), (short, short, short), (short, long, short)


def _muon_s(gpu: GpuPerf, workload: Workload) -> float:
    """Seconds of Muon's GEMMs in an optimizer step, and of the gathers before them; passes between them do not count.
    Every rank orthogonalises each matrix of its stage, whole (kit/engines/torch/gathered_optimizers.py; Megatron's
    ``muon_tp_mode: duplicated``), so more ranks do not make it faster."""
    layout = workload.layout
    width = 4.0 if layout.engine == "megatron" or workload.job.precision == "fp32" else 2.0
    sharded = layout.engine == "torch" and layout.zero_stage > 0
    over_data = group(workload.cluster, layout.dense_dp if sharded else 1, layout.tp)
    over_tensors = group(workload.cluster, layout.tp, 1)
    seconds = 0.0
    for matrix in adapted_layers(workload.model, LoraSpec(targets="all-linear")):
        size = width * matrix.inputs * matrix.outputs
        gathered = over_data.all_gather_s(size / layout.tp) + over_tensors.all_gather_s(size)
        step = sum(matmul_s(gpu.others, *shape) for shape in muon_gemms(matrix.inputs, matrix.outputs))
        seconds += matrix.number * (gathered + MUON_STEPS * step)
    layers = [*map(sum, workload.stages.stage_kinds)]
    return seconds * max(layers) / sum(layers)


def _offload_s(workload: Workload, parameters: RankParameters, components: dict[str, float]) -> float:
    """Seconds of offload: copy gradients to the host, run Adam on the CPU, copy weights back (ZeRO-Offload, arXiv
    2101.06840).

    With offloaded weights each rank copies its shard over PCIe for the forward and for the backward of each micro
    batch. With NVMe (ZeRO-Infinity, arXiv 2104.07857) the weights are read from disk; once per step master weights and
    moments are read and written, and gradients written and read.
    """
    cluster, layout = workload.cluster, workload.layout
    element = float(workload.element)
    pcie = pcie_bytes_per_s(cluster.gpu)
    if layout.engine == "megatron":
        # Gradients are reduced on the device, and copied once, in fp32. Nothing is taken to overlap the CPU's Adam. Its
        # traffic is that of stage 2, the nearest: weights are cast on the CPU here too (hybrid_optimizer.py).
        share = layout.optimizer_offload_fraction * workload.stepped_parameters(parameters)
        return _host_step_s(workload, share) + (4.0 + element) * share / pcie
    total = workload.trained_parameters
    share = total / layout.dense_dp
    disk = (cluster.nvme_gbytes_per_s or shared().nvme_gbytes_per_s) * 1e9 * cluster.num_nodes
    m, seconds = layout.gradient_accumulation_steps, 0.0
    compute = (components["compute"] + components["recompute"]) / m
    if layout.engine == "torch":
        # Each micro batch copies its reduced gradients in fp32; torch waits for all copies but the first one's, and
        # adds them on the host (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce).
        copy = 4.0 * share / pcie
        seconds += _host_step_s(workload, share) + exposed(copy, 2 / 3 * compute) + (m - 1) * copy
    elif layout.offload_optimizer != "none":
        seconds += _host_step_s(workload, share)
        # Stage 3 copies each sum to the host and back, for its norm; below, a sum is on the host between micro batches
        # alone. The last one is copied once more, in the optimizer's dtype (partition_grads; copy_grads_in_partition).
        sums = 2 * m if layout.zero_stage == 3 else 2 * m - 2
        window = 2 / 3 * compute * m if workload.execution.overlaps_gradients else 0.0
        seconds += exposed((element * sums + layout.master_bytes) * share / pcie, window)
        seconds += element * share / pcie if layout.offload_param == "none" else 0.0
    if layout.offload_optimizer == "nvme":
        # Sub groups are processed one after the other, without overlap.
        seconds += (2 * 12.0 + 2 * 4.0) * total / disk
    if layout.offload_param != "none":
        weights = stored_weight_bytes(workload)
        link = 2 * weights / layout.dense_dp / pcie
        if layout.offload_param == "nvme":
            link = max(link, 2 * weights / disk)
            seconds += weights / disk
        seconds += m * exposed(link, compute)
    return seconds


def _host_step_s(workload: Workload, share: float) -> float:
    """Seconds in which every rank of a node steps ``share`` parameters in host memory."""
    layout, cluster = workload.layout, workload.cluster
    if layout.engine == "torch":
        moved = TORCH_STEP_BYTES + TORCH_SUM_BYTES * (layout.gradient_accumulation_steps - 1)
    else:
        moved = HOST_STEP_BYTES[max(2, layout.zero_stage)]
        moved += OVERFLOW_TEST_BYTES if layout.zero_stage == 3 and workload.job.precision == "fp16" else 0.0
    return moved * share * cluster.gpus_per_node / host_bytes_per_s(cluster, workload.execution.host_threads)


def _trl_components_s(gpu: GpuPerf, workload: Workload, parameters: RankParameters, forward: float) -> dict[str, float]:
    """Component → seconds of a step. ``forward``: seconds of one micro batch's forward."""
    row = workload.trl
    if row is None:
        return {}
    passes = row.policy_forwards + row.reference_forwards
    each = forward + forward_gather_s(workload, parameters, forward)
    components = {"scoring": passes * workload.layout.gradient_accumulation_steps * each}
    if row.generates:
        components["generation"] = generation_s(gpu, workload)
    return components
