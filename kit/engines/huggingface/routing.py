"""Balances the experts of transformers' models by megatron-core's formulas, with hooks on routers.

The losses are megatron-core's, per layer (moe/moe_utils.py, switch_load_balancing_loss_func and z_loss_func).
transformers' own loss (load_balancing_loss_func) pools the layers and is experts_per_token times as large. As in
megatron-core, a router's loss enters backward at the router's output weights. So engines, recompute and partitioned
parameters need no special case.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.routing import RoutingRecord
from kit.specs.job import BalancingSpec, JobSpec
from kit.specs.model import ModelSpec

_Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Output of a router in transformers: logits (tokens, experts); weights of the chosen experts and their numbers, both
(tokens, experts_per_token)."""


_BIAS = "e_score_correction_bias"


class HfRouting:
    """The routers of a transformers model; every rank has all routers."""

    def __init__(
        self,
        model: torch.nn.Module,
        spec: ModelSpec,
        job: JobSpec,
        dp_size: int,
        device: torch.device,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        """``sequence_group``: ranks that split the sequences of one micro batch evenly; None: each rank has whole
        sequences."""
        self._spec, self._dp_size, self._group = spec, dp_size, sequence_group
        self._chosen = job.balancing or BalancingSpec()
        named = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        # The output format of routers is unknown for a model without a family.
        self._routers: list[Any] = named if spec.num_experts and spec.approximate is None else []
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._after, layer))
        # The bias belongs to the router, or to the block around it (modeling_minimax_m2.py).
        self._biased: list[Any] = [module for module in model.modules() if self._routers and hasattr(module, _BIAS)]
        for module in self._biased:
            setattr(module, _BIAS, getattr(module, _BIAS).float())  # also if the model was cast to 16 bits
        self._record = RoutingRecord(spec.num_experts, len(self._routers), device)
        self._loads: dict[int, list[torch.Tensor]] = {}
        """For global_aux_loss: layer → for each micro batch (experts), each expert's share of the tokens."""
        self._scale, self._micro_batches, self.sequences = 1.0, 1, 1
        """``sequences``: number of rows of the next micro batch."""

    def begin(self, micro_batches: int, averaged_over: int, loss_scale: float = 1.0) -> None:
        """Begin a step of ``micro_batches`` micro batches. The engine later sums gradients over all ranks, and divides
        them by ``averaged_over`` and by ``loss_scale``."""
        self._micro_batches = micro_batches
        self._scale = loss_scale * averaged_over / (micro_batches * self._dp_size)
        self._loads.clear()
        self._record.clear()

    def end(self) -> None:
        """Collective. Sum the routing record over all ranks and update the correction biases, as megatron-core does
        (finalize_model_grads.py). A step that is discarded later updates them too."""
        self._record.reduce()
        for layer, (module, tokens) in enumerate(zip(self._biased, self._record.tokens, strict=False)):
            bias = getattr(module, _BIAS)
            bias += self._chosen.moe_router_bias_update_rate * torch.sign(tokens.mean() - tokens).float()
            self._record.set_bias(layer, bias, copies=1)

    def metrics(self) -> Mapping[str, float | None]:
        """Metrics of the last step; empty without experts."""
        return self._record.metrics(self._chosen.has_loss, self._spec.traits.router == "sigmoid")

    def _after(self, layer: int, router: torch.nn.Module, _: Any, routed: _Routed) -> _Routed | None:
        """Forward hook of one router."""
        if not (router.training and torch.is_grad_enabled()):
            return None
        logits, weights, chosen = routed
        # Recompute runs the hook again, in backward. It needs the loss again, but tokens are already counted.
        first = torch._C._current_graph_task_id() == -1
        if first:
            self._record.add_tokens(layer, _count(chosen, self._spec.num_experts), chosen.numel())
        if not self._chosen.has_loss:
            return None
        logits = logits.float()
        auxiliary = self._auxiliary(layer, logits, first)
        # This rank's part of the mean over tokens.
        z = torch.logsumexp(logits, -1).square().mean() / (1 if self._group is None else self._group.size())
        if first:
            share = self._micro_batches * self._dp_size
            self._record.add_losses(layer, auxiliary.detach() / share, z.detach() / share)
        total = self._chosen.moe_aux_loss_coeff * auxiliary + self._chosen.moe_z_loss_coeff * z
        return logits, _AddLoss.apply(weights, total, self._scale), chosen  # type: ignore[no-untyped-call]

    def _auxiliary(self, layer: int, logits: torch.Tensor, first: bool) -> torch.Tensor:
        """This rank's part of the mean over sequence groups of E · Σ f_i · P_i (moe/router.py)."""
        kind = self._chosen.moe_router_load_balancing_type
        if kind == "none":
            return logits.new_zeros(())
        if self._spec.traits.router == "sigmoid":
            scores = logits.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        else:
            scores = logits.softmax(-1)
        # (sequences that are balanced together, tokens, experts)
        scores = scores.unflatten(0, (self.sequences if kind == "seq_aux_loss" else 1, -1))
        chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(self._spec.experts_per_token, -1).indices, 1.0)
        f = chosen.mean(1) / self._spec.experts_per_token
        if kind == "global_aux_loss":
            f = self._of_step(layer, f, first)
        elif self._group is not None:
            dist.all_reduce(f, group=self._group)
            f = f / self._group.size()
        p = scores.mean(1) / (1 if self._group is None else self._group.size())
        return self._spec.num_experts * (f * p).sum(-1).mean()

    def _of_step(self, layer: int, f: torch.Tensor, first: bool) -> torch.Tensor:
        """Mean of the experts' token shares ``f`` over all ranks and over the step's micro batches so far."""
        so_far = self._loads.setdefault(layer, [])
        if first:
            dist.all_reduce(f)
            so_far.append(f / dist.get_world_size())
        return torch.stack(so_far).mean(0)


def _count(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.zeros(experts, device=chosen.device).index_add_(
        0, chosen.flatten(), torch.ones(chosen.numel(), device=chosen.device)
    )


class _AddLoss(torch.autograd.Function):
    """Identity of a tensor. In backward the loss gets the gradient ``scale``, as in megatron-core's
    MoEAuxLossAutoScaler."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.gradient = torch.full_like(loss, scale)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], ctx.gradient, None
