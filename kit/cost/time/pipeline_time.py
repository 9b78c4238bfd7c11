"""How long an optimizer step takes: a roofline of each layer, exposed exchanges, pipeline, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import add, attrgetter

from kit.cost.hardware import cpu_adam_s, pcie_bytes_per_s, shared
from kit.cost.model.lora import trained_share
from kit.cost.model.params import RankParameters
from kit.cost.setup import TrainingSetup
from kit.cost.stages import layers_on_stage
from kit.cost.time import elementwise
from kit.cost.time.data_parallel import data_parallel_s, expert_dp
from kit.cost.time.gpu import Machine
from kit.cost.time.layer import embedding_s, head_s, layer_time
from kit.cost.time.model_parallel import Exchange, context_parallel, expert_parallel, tensor_parallel

TIME_COMPONENTS = (
    "compute",
    "recompute",
    "launch",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_transfer",
    "pipeline_bubble",
    "data_parallel",
    "offload",
    "optimizer",
)
"""launch: the GPU waits for the host to issue kernels."""


@dataclass(frozen=True)
class Part:
    """Seconds of one layer or end of a stage, one micro batch, by component."""

    forward: float
    backward: float
    again: float
    launch: float
    tensor: float
    context: float
    expert: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.again + self.launch + self.tensor + self.context + self.expert

    @property
    def forward_window(self) -> float:
        return self.forward + self.launch / 3


_SECONDS = attrgetter(*(item.name for item in fields(Part)))
"""All fields of a part."""


class StepTimeModel:
    """Times setups of one model, machine and program; remembers layers, which many layouts share."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._parts: dict[object, Part] = {}

    def components_s(self, setup: TrainingSetup) -> dict[str, float]:
        """Seconds by component, which add up to the step; without offload, which is added where it is known."""
        stages = _distinct_stages(setup)
        totals = {stage: self._stage(setup, stage) for stage in stages}
        slowest = max(totals.values(), key=lambda part: part.total)
        m, v = setup.micro_batches, setup.vp
        # A micro batch passes every stage once while the pipeline fills and drains; then the slowest sets the pace.
        others = _sum_of_stages(setup, totals) - slowest.total
        transfer = self._transfer(setup, slowest, self._restart_s(setup))
        held = max((setup.parameters[stage] for stage in stages), key=lambda part: part.total)
        return {
            "compute": m * (slowest.forward + slowest.backward),
            "recompute": m * slowest.again,
            "launch": m * slowest.launch,
            "tensor_parallel": m * slowest.tensor,
            "context_parallel": m * slowest.context,
            "expert_parallel": m * slowest.expert,
            "pipeline_transfer": transfer,
            "pipeline_bubble": others / v,
            "data_parallel": data_parallel_s(
                self.machine, setup, held, slowest.forward_window, slowest.total - slowest.forward_window
            ),
            "offload": self._offload(setup, held),
            "optimizer": self._optimizer(setup, held),
        }

    def _stage(self, setup: TrainingSetup, stage: int) -> Part:
        layers = layers_on_stage(setup, stage)
        flags = setup.shape.expert_layers
        with_experts = sum(flags[layer] for layer in layers) if flags else 0
        parts = (
            [(self._layer(setup, False), len(layers) - with_experts), (self._layer(setup, True), with_experts)]
            if flags
            else [(self._layer(setup, False), len(layers))]
        )
        once = self._once(setup, stage, parts[-1][0])
        totals = [0.0] * len(_SECONDS(once))
        for part, count in parts:
            totals = [total + seconds * count for total, seconds in zip(totals, _SECONDS(part), strict=True)]
        return Part(*map(add, totals, _SECONDS(once)))

    def _layer(self, setup: TrainingSetup, has_experts: bool) -> Part:
        key = (
            has_experts,
            setup.micro_batch_size,
            setup.tp,
            setup.cp,
            setup.sp,
            setup.ep,
            setup.etp,
            setup.exchange,
            setup.recompute,
            setup.recompute_layers and (setup.recompute_layers, setup.pp * setup.vp),
        )
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._timed_layer(setup, has_experts)
        return found

    def _timed_layer(self, setup: TrainingSetup, has_experts: bool) -> Part:
        layer = layer_time(self.machine, setup, has_experts)
        tensor = tensor_parallel(self.machine, setup, layer, has_experts)
        context = context_parallel(self.machine, setup, layer)
        expert = expert_parallel(self.machine, setup, layer) if has_experts else Exchange()
        forward = layer.forward + tensor.forward + context.forward + expert.forward
        again = layer.again + tensor.again + context.again + expert.again
        backward = layer.backward + tensor.backward + context.backward + expert.backward
        # A GPU that waits for the next kernel is as slow as the process that launches them.
        again_launch = layer.launch_forward if setup.recompute == "full" else 0.0
        launch = max(0.0, layer.launch_forward - forward) + max(
            0.0, again_launch + layer.launch_backward - backward - again
        )
        if has_experts and setup.program.graphs != "full":
            # The host reads how many tokens each expert gets before it goes on (megatron-core, token_dispatcher.py):
            # the kernels after that are issued while the GPU waits.
            launch = max(launch, elementwise.AFTER_SYNC * (layer.launch_forward + layer.launch_backward))
        return Part(layer.forward, layer.backward, layer.again, launch, tensor.total, context.total, expert.total)

    def _once(self, setup: TrainingSetup, stage: int, layer: Part) -> Part:
        """What a stage does beside its layers: embedding, head and loss, multi-token prediction, sums of gradients."""
        forward = backward = 0.0
        if stage == 0:
            backward += embedding_s(self.machine, setup)
        if stage == setup.pp - 1:
            head = head_s(self.machine, setup)
            heads = 1 + setup.shape.mtp_layers
            forward, backward = forward + heads * head[0], backward + heads * head[1]
        summed = elementwise.micro_batch_bytes(setup, setup.parameters[stage])
        backward += summed / self.machine.bytes_per_s
        extra = setup.shape.mtp_layers if stage == setup.pp - 1 else 0
        return Part(
            forward + extra * layer.forward,
            backward + extra * layer.backward,
            extra * layer.again,
            extra * layer.launch,
            extra * layer.tensor,
            extra * layer.context,
            extra * layer.expert,
        )

    def _transfer(self, setup: TrainingSetup, slowest: Part, restart: float) -> float:
        """Activations forward, gradients back: in 1F1B a stage waits for them, interleaved they run beside compute."""
        if setup.pp == 1:
            return 0.0
        whole = setup.shard_tokens * setup.shape.hidden_size * 2.0
        pieces = setup.tp if setup.program.splits_transfers and not setup.sp else 1
        stride = setup.tp * setup.cp * setup.dp
        link = self.machine.group(2, stride)
        bytes_per_s = link.port_bytes_per_s if link.nodes > 1 else link.bytes_per_s
        gathered = self.machine.group(pieces, 1).all_gather_s(whole)
        per_micro_batch = 2 * setup.vp * (whole / pieces / bytes_per_s + link.latency_s + gathered)
        if setup.vp == 1:
            # Each transfer is waited for on the host (batch_p2p_sync): the next layer is issued to an idle GPU.
            per_micro_batch += restart
        else:
            per_micro_batch = max(0.0, per_micro_batch - shared().overlap * slowest.total)
        return setup.micro_batches * per_micro_batch

    def _restart_s(self, setup: TrainingSetup) -> float:
        """Half of a layer's kernels, in forward and in backward."""
        kernels = elementwise.layer_kernels(setup, bool(setup.shape.expert_layers))
        return kernels * self.machine.rates.kernel_launch_us * 1e-6

    def _offload(self, setup: TrainingSetup, held: RankParameters) -> float:
        """Optimizer state in host memory. Stepped there by Adam, which is bound by the host's memory (30 bytes a
        parameter), after gradients came over PCIe and before weights go back; or brought to the device, 24 bytes."""
        where = setup.program.offload_optimizer
        if where == "none":
            return 0.0
        cluster = self.machine.cluster
        own = held.total / (setup.dp * setup.cp)
        pcie = pcie_bytes_per_s(cluster.gpu)
        if where == "device":
            return 24.0 * own / pcie
        on_node = own * cluster.gpus_per_node
        return cpu_adam_s(on_node) + 6.0 * own / pcie

    def _optimizer(self, setup: TrainingSetup, held: RankParameters) -> float:
        if setup.program.offload_optimizer == "host":
            return 0.0
        sharded = setup.sharding != "none"
        ranks, expert_ranks = (setup.dp * setup.cp, expert_dp(setup)) if sharded else (1, 1)
        updated = held.dense / ranks + held.experts / expert_ranks
        return (
            trained_share(setup.adapters, held)
            * elementwise.optimizer_bytes_per_parameter(setup.program.precision, setup.program.moment_bytes)
            * updated
            / self.machine.bytes_per_s
        )


def _distinct_stages(setup: TrainingSetup) -> list[int]:
    """Stages that may differ: without a stated split the first two, and the last two."""
    if setup.stage_layers or setup.shape.expert_layers or setup.shape.num_layers % (setup.pp * setup.vp):
        return list(range(setup.pp))
    return sorted({0, min(1, setup.pp - 1), setup.pp - 1})


def _sum_of_stages(setup: TrainingSetup, totals: dict[int, Part]) -> float:
    if len(totals) == setup.pp:
        return sum(part.total for part in totals.values())
    return sum(part.total for part in totals.values()) + (setup.pp - len(totals)) * totals[1].total
