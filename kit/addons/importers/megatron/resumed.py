"""What a checkpoint says beside its tensors, so that Megatron-LM goes on with Adam's state.

The optimizer finds its groups by their multipliers, and takes all else from them (core/optimizer/distrib_optimizer.py,
``load_state_dict``). Before it asks for a tensor, the trainer reads how the state is split (training/checkpointing.py,
``load_checkpoint``), and after it the schedule.
"""

from __future__ import annotations

from typing import Any

from kit.planner.plan import Plan
from kit.specs.job import OptimizerSpec
from kit.specs.model import ModelSpec
from kit.training.counters import Counters

_SPLIT = "fully_reshardable"
"""Every tensor of the state has its parameter's name and shape, so that any tp, pp and dp reads it."""
_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
"""What the trainer demands of a schedule (core/optimizer_param_scheduler.py, ``load_state_dict``). It is None, which
equals nothing on a command line: the trainer stops unless --override-opt-param-scheduler says to take those."""


def values_to_resume(model: ModelSpec, counters: Counters, plan: Plan | None) -> dict[str, Any]:
    """Values for ``common.pt``. ``plan``: of the run that trained; without one, Adam's betas and eps are those of
    ``OptimizerSpec``, and ranks share the experts out.

    Where ranks do so (ep > 1), experts have an optimizer of their own (core/optimizer/__init__.py,
    ``get_megatron_optimizer``): a run with ep > 1 cannot go on with ep = 1, nor the reverse.
    """
    adam = OptimizerSpec() if plan is None else plan.job.optimizer
    states = [
        {
            "optimizer": {"param_groups": [_group(adam, counters, decay, of_experts) for decay in (1.0, 0.0)]},
            "param_state_sharding_type": _SPLIT,
        }
        for of_experts in (False, True)
    ]
    in_two = model.num_experts > 0 and (plan is None or plan.layout.ep > 1)
    return {
        "optimizer": dict(enumerate(states)) if in_two else states[0],
        "content_metadata": {"distrib_optim_sharding_type": _SPLIT, "chained_optim_avoid_prefix": True},
        "opt_param_scheduler": {**dict.fromkeys(_SCHEDULE), "num_steps": counters.samples_seen},
    }


def _group(adam: OptimizerSpec, counters: Counters, decay: float, of_experts: bool) -> dict[str, Any]:
    """A group of parameters. ``decay``: factor of weight decay, 0 for biases and vectors. The schedule sets learning
    rate and weight decay, within the command line's bounds, because the group has none."""
    return {
        "wd_mult": decay,
        "lr_mult": 1.0,
        "is_expert_parallel": of_experts,
        "is_decoupled_lr": False,
        "default_config": True,
        "betas": (adam.beta1, adam.beta2),
        "eps": adam.eps,
        "bias_correction": True,
        "step": counters.optimizer_steps,
    }
