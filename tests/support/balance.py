"""What balances experts, written out on the routers of one transformers model that sees all sequences of a step."""

from __future__ import annotations

import torch

from kit.specs.job import BalancingSpec
from kit.specs.model import ModelSpec


class PlainRouters:
    """Losses and biases of a model in one process; ``dp`` ranks would have had micro batches of ``size`` sequences."""

    def __init__(self, spec: ModelSpec, model: torch.nn.Module, balancing: BalancingSpec, dp: int, size: int) -> None:
        self.spec, self.balancing, self.dp, self.size = spec, balancing, dp, size
        self.routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(lambda _, __, output, layer=layer: self._keep(layer, output))

    def _keep(self, layer: int, output: tuple[torch.Tensor, ...]) -> None:
        self.seen[layer] = output[0], output[2]

    def loss(self, sequences: int) -> torch.Tensor:
        """Everything that is added to the mean loss of a step; called after its forward pass."""
        total = torch.zeros(())
        for logits, _ in self.seen.values():
            logits = logits.float().unflatten(0, (sequences, -1))
            total = total + self.balancing.moe_aux_loss_coeff * self.auxiliary(logits)
            total = total + self.balancing.moe_z_loss_coeff * torch.logsumexp(logits, -1).square().mean()
        return total

    def auxiliary(self, logits: torch.Tensor) -> torch.Tensor:
        """E · Σ f_i · P_i of one layer, (sequences, tokens, experts), averaged as its kind says."""
        if self.spec.traits.router == "sigmoid":
            scores = logits.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        else:
            scores = logits.softmax(-1)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(self.spec.experts_per_token, -1).indices, 1.0)
        f = chosen.mean(1) / self.spec.experts_per_token
        p = scores.mean(1)
        kind = self.balancing.moe_router_load_balancing_type
        if kind == "none":
            return torch.zeros(())
        if kind != "seq_aux_loss":
            # (ranks, micro batches, experts): neighbouring sequences make a micro batch, and micro batches a rank.
            f, p = (each.unflatten(0, (self.dp, -1, self.size)).mean(2) for each in (f, p))
        if kind == "global_aux_loss":
            of_step = f.mean(0)
            f = of_step.cumsum(0) / torch.arange(1, len(of_step) + 1)[:, None]
        return self.spec.num_experts * (f * p).sum(-1).mean()

    @torch.no_grad()
    def move_biases(self) -> None:
        """By the loads of the step; called once a step."""
        rate = self.balancing.moe_router_bias_update_rate
        for layer, router in enumerate(self.routers):
            if rate:
                load = torch.bincount(self.seen[layer][1].flatten(), minlength=self.spec.num_experts).double()
                router.e_score_correction_bias += rate * torch.sign(load.mean() - load).float()
