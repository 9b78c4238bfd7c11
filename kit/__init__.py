"""kit: from a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model.

    __main__, cli           ``kit``: parse, call, print
    api                     one function for each command
    specs                   what is given: model, cluster, job, layout, run
    cost                    memory, time and money of one candidate
    planner                 the best candidate, with reasons
    report                  what there is to say of a plan
    emit                    a plan → the files of a run
    preflight               checks before a process starts
    rehearsal               the run in small, on CPU processes
    training, engines       the loop; what it drives: torch, DeepSpeed, Megatron-core
    addons, entry_points    what the core does without, and how it is found
    errors, extras, files, object_storage, units
                            what all of them use

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
