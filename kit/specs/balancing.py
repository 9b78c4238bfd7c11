"""How a router is kept from sending most tokens to a few experts."""

from __future__ import annotations

from typing import Annotated, Literal

from kit.errors import SpecError
from kit.specs.validation import Text, Within, spec

LoadBalancingType = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
_LARGEST_COEFFICIENT = 1e3


@spec
class BalancingSpec:
    """Balancing of experts while a model trains. Fields are named and mean as in megatron-core
    (transformer/transformer_config.py); the default is none at all."""

    moe_router_load_balancing_type: LoadBalancingType = "none"
    """What the auxiliary loss of each layer is taken over (arXiv 2101.03961, equation 4). aux_loss: one micro batch of
    one data-parallel rank, so that it depends on the layout. seq_aux_loss: each sequence. global_aux_loss: loads of all
    ranks and of the step's micro batches so far (arXiv 2501.11873)."""
    moe_aux_loss_coeff: Annotated[float, Within(ge=0, le=_LARGEST_COEFFICIENT)] = 0.0
    """Coefficient of the auxiliary loss, which is 1 for even loads, whatever the number of experts."""
    moe_z_loss_coeff: Annotated[float, Within(ge=0, le=_LARGEST_COEFFICIENT)] = 0.0
    """Coefficient of the router's z-loss (arXiv 2202.08906, equation 5); 0 = none."""
    moe_router_bias_update_rate: Annotated[float, Within(ge=0, le=_LARGEST_COEFFICIENT)] = 0.0
    """After each step this is added to the bias of every expert with less than the mean load, and subtracted from the
    bias of every expert with more (arXiv 2408.15664). Only for routers with sigmoid scores. 0 = biases do not
    change."""
    moe_expert_capacity_factor: Annotated[float, Within(gt=0, le=_LARGEST_COEFFICIENT)] | None = None
    """An expert computes at most this many times the mean load of a micro batch: the tokens with the largest router
    weight for it. Other tokens are dropped. Only engine=megatron. null: no token is dropped."""
    source: Text = "user"
    """Where these values were published."""

    def __post_init__(self) -> None:
        kind, coefficient = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if (kind == "none") != (coefficient == 0):
            fix = "give its type, or 0" if coefficient else "give its coefficient, or none"
            raise SpecError(
                f"moe_router_load_balancing_type={kind} with moe_aux_loss_coeff={coefficient:g}: an auxiliary loss "
                f"needs both; {fix}"
            )

    @property
    def has_loss(self) -> bool:
        """Whether anything is added to the gradient of a router."""
        return bool(self.moe_aux_loss_coeff or self.moe_z_loss_coeff)
