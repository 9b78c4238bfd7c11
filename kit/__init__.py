"""kit: from a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model.

Importing this package imports no torch; the engines are imported when a run starts.
"""

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
