"""Training by torch's AdamW in one process, nothing of kit's engines: what their curves are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Groups = list[dict[str, object]]


def trained(
    parameters: Mapping[str, torch.nn.Parameter],
    steps: int,
    *,
    backward: Callable[[int], float],
    clip: Callable[[], float],
    rate: Callable[[int], float],
    build: Callable[[Groups], torch.optim.Optimizer],
    decays: Callable[[str, torch.nn.Parameter], bool] = lambda name, parameter: parameter.ndim > 1,
    of_step: int = 0,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Loss and gradient norm of each step, and the gradients of one before they are clipped.

    ``backward``: step → loss; ``clip``: the norm that it clips by; ``rate``: step → learning rate; ``build``: an
    optimizer of two groups of parameters, those whose weights decay and the others.
    """
    decayed = [each for name, each in parameters.items() if decays(name, each)]
    others = [each for name, each in parameters.items() if not decays(name, each)]
    optimizer = build([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    losses, norms, gradients = [], [], dict[str, torch.Tensor]()
    for step in range(steps):
        losses.append(backward(step))
        if step == of_step:
            gradients = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
        norms.append(clip())
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients
