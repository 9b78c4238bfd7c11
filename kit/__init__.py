"""kit: from a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model.

Importing this package imports no torch; the engines are imported when a run starts. The public names are those of
``kit.api``, which is imported when the first of them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.api import (
        ClusterSpec,
        GpuSpec,
        JobSpec,
        KitError,
        Layout,
        ModelSpec,
        OptimizerSpec,
        Pins,
        Plan,
        Recipe,
        RunSpec,
        load_recipe,
        plan,
    )

__version__ = "0.1.0"
__all__ = [
    "ClusterSpec",
    "GpuSpec",
    "JobSpec",
    "KitError",
    "Layout",
    "ModelSpec",
    "OptimizerSpec",
    "Pins",
    "Plan",
    "Recipe",
    "RunSpec",
    "__version__",
    "load_recipe",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    return getattr(import_module("kit.api"), name)
