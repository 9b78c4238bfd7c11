"""kit: from a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model.

Importing this package imports no torch; the engines are imported when a run starts. The public names are read when
they are first used, so that a command pays only for what it needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.api import load_recipe, plan
    from kit.errors import KitError
    from kit.planner.plan import Plan
    from kit.specs.cluster import ClusterSpec, GpuSpec
    from kit.specs.job import JobSpec, OptimizerSpec
    from kit.specs.layout import Layout, Pins
    from kit.specs.model import ModelSpec
    from kit.specs.recipe import Recipe
    from kit.specs.run import RunSpec

__version__ = "0.1.0"

_HOMES = {
    "kit.api": ("load_recipe", "plan"),
    "kit.errors": ("KitError",),
    "kit.planner.plan": ("Plan",),
    "kit.specs.cluster": ("ClusterSpec", "GpuSpec"),
    "kit.specs.job": ("JobSpec", "OptimizerSpec"),
    "kit.specs.layout": ("Layout", "Pins"),
    "kit.specs.model": ("ModelSpec",),
    "kit.specs.recipe": ("Recipe",),
    "kit.specs.run": ("RunSpec",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME_OF:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
