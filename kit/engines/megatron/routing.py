"""Scales megatron-core's router losses to the step's loss, and records routing metrics.

megatron-core adds router losses in backward (moe/moe_utils.py, MoEAuxLossAutoScaler). Their gradient must be that of a
mean over micro batches and data-parallel ranks. With ``calculate_per_token_loss``, megatron-core multiplies each loss
by this rank's tokens, to cancel the division by all tokens of the step. This factor is wrong if tensor- or
context-parallel ranks split a sequence, or if labels are masked. So kit turns the factor off, and sets the right one in
``config.grad_scale_func``: tokens of the step / (micro batches · data-parallel ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from kit.engines.kernels.loss import global_tokens
from kit.engines.protocol import MicroBatch
from kit.engines.routing import RoutingRecord
from kit.specs.model import ModelSpec


class MegatronRouting:
    """The routers of one rank's model chunks."""

    def __init__(self, model: ModelSpec, config: TransformerConfig, chunks: Sequence[torch.nn.Module]) -> None:
        self._config = config
        self._routers: dict[int, Any] = {}
        self.adds_losses = bool(config.moe_aux_loss_coeff or config.moe_z_loss_coeff)
        """Whether routers have balancing losses."""
        for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
            layer = router.layer_number - 1 - model.first_dense_layers
            router.calculate_per_token_loss = False
            router.register_forward_hook(partial(self._count, layer))
            self._routers[layer] = router
        layers = model.num_layers + model.mtp_num_layers - model.first_dense_layers  # a head has a layer
        routed = layers if model.has_experts(model.num_layers - 1) else 0
        self._record = RoutingRecord(model.num_experts, routed, torch.cuda.current_device())
        _forget()

    def begin(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        """Collective. Begin a step. Returns the factor of ``grad_scale_func``, a scalar on the device, by which the
        engine must divide its loss; None without balancing losses."""
        self._config.grad_scale_func = None
        self._record.clear()
        if not self.adds_losses:
            return None
        group = parallel_state.get_data_parallel_group()
        tokens = global_tokens(micro_batches, torch.device(torch.cuda.current_device()), group)
        scale = tokens.clamp(min=1).float() / (len(micro_batches) * group.size())
        self._config.grad_scale_func = lambda value: value * scale
        return scale

    def end(self, num_micro_batches: int) -> None:
        """Collective. Sum the routing record of the step over all ranks."""
        data = parallel_state.get_data_parallel_world_size()
        copies = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
        tracked = get_moe_layer_wise_logging_tracker()
        for layer, router in self._routers.items():
            # Values are sums over micro batches. An auxiliary loss is this rank's part, over its own tokens; only
            # global_load_balancing_loss is already over all data-parallel ranks. The z-loss is this rank's mean.
            values = {name: row["values"][router.layer_number - 1] for name, row in tracked.items()}
            z = values.pop("z_loss", 0.0) / copies
            parts = 1 if "global_load_balancing_loss" in values else data
            self._record.add_losses(
                layer, sum(values.values(), start=0.0) / parts / num_micro_batches, z / num_micro_batches
            )
            if router.expert_bias is not None:
                self._record.set_bias(layer, router.expert_bias, copies)
        _forget()
        self._record.reduce()

    def metrics(self) -> Mapping[str, float | None]:
        """Metrics of the last step; empty without experts."""
        return self._record.metrics(self.adds_losses, self._config.moe_router_enable_expert_bias)

    def _count(self, layer: int, router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Count as megatron-core does for its biases: not in evaluation, and once with recompute.
        if router.training and torch.is_grad_enabled():
            routed = output[1]
            self._record.add_tokens(layer, routed.sum(0), routed.shape[0] * router.topk)


def _forget() -> None:
    """Drop the losses that megatron-core has tracked. 0.19 hands out a copy, whose losses the other call zeroes."""
    get_moe_layer_wise_logging_tracker().clear()
    clear_aux_losses_tracker()
