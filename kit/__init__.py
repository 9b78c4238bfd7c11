"""kit: from a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model.

Importing this package imports no torch; the engines are imported when a run starts. The public names are those of
``kit.api``, which is imported when the first of them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    api = import_module("kit.api")
    if name == "__all__":
        return [*api.__all__, "__version__"]
    if name not in api.__all__:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    return getattr(api, name)
