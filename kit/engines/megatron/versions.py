"""The versions of megatron-core that the engine was tested with, and what it changes in them on every device.

What it replaces on machines without CUDA is in ``cpu.py``.
"""

from __future__ import annotations

import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer
from megatron.core.transformer.moe import moe_utils

TESTED = ("0.16.1", "0.19.2")
"""The newest for Python 3.11, which CI runs, and one for Python 3.12 (scripts/parity-py312.sh)."""


def use_adam(adam: type) -> None:
    """Have ``get_megatron_optimizer`` build this optimizer, which keeps its step count as apex's does, also where
    Transformer Engine or apex is installed: one implementation means one set of numbers to predict and to compare."""
    megatron.core.optimizer.Adam = adam
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed = megatron.core.optimizer.distrib_optimizer
    distributed.Adam = adam
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True
    distributed.USING_TE_OPTIMIZER = False


def define_missing_gemm() -> None:
    """router_gating_linear compares this name with None, but without Transformer Engine it does not exist."""
    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None
