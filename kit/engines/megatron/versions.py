"""Names that differ between versions of megatron-core, and the engine's patches to it on every device.

``cpu.py`` has the patches for machines without CUDA.
"""

from __future__ import annotations

import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer
import megatron.core.optimizer.optimizer_config
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

_NEW_NAME = hasattr(MultiTokenPredictionLayerSubmodules, "mtp_model_layer")
HEADS_LAYER = "mtp_model_layer" if _NEW_NAME else "transformer_layer"
"""The transformer layer of a head of multi-token prediction, in 0.19 and in 0.16. Distributed checkpoints of both say
``transformer_layer`` (transformer/multi_token_prediction.py, ``sharded_state_dict``), and so do kit's weight maps."""


def use_optimizers(adam: type, host_adam: type, sgd: type) -> None:
    """Make ``get_megatron_optimizer`` build these, which keep their step count as apex does.

    Also if Transformer Engine or apex is installed: one implementation gives equal numbers on all machines.
    """
    megatron.core.optimizer.Adam, megatron.core.optimizer.SGD = adam, sgd
    megatron.core.optimizer.CPUAdam = host_adam
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed = megatron.core.optimizer.distrib_optimizer
    distributed.Adam = adam
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True
    distributed.USING_TE_OPTIMIZER = False


def define_missing_gemm() -> None:
    """Define ``te_general_gemm``: router_gating_linear compares it with None, but it does not exist without
    Transformer Engine."""
    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None


def allow_missing_transformer_engine() -> None:
    """Let OptimizerConfig ask for Transformer Engine's version where there is none: it would compare None."""
    if not moe_utils.HAVE_TE:
        megatron.core.optimizer.optimizer_config.is_te_min_version = lambda _: False
