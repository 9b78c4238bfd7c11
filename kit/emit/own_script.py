"""``own_script.py``: starts one rank of a script that knows nothing of kit, or says why it would not train the plan.

Without it accelerate and DeepSpeed end with exit code 0 where they trained something else (accelerate 1.15, state.py,
_prepare_backend): on a machine without GPUs every rank is a run of one process; so is the data loader of each rank of a
DeepSpeed plan for CPUs, while DeepSpeed trains on all ranks.
"""

from __future__ import annotations

from textwrap import indent

from kit.emit import accelerate
from kit.emit.deepspeed import runs_deepspeed
from kit.emit.derived_file import DerivedFile
from kit.emit.trainer import for_trainer
from kit.planner.plan import Plan

NAME = "own_script.py"

_HEAD = '''"""One rank of a script of yours: own_script.py SCRIPT ARGUMENTS, under accelerate launch or deepspeed.

It ends with an error where the launcher would train less than the plan and exit with 0.
"""

import atexit
import os
import runpy
import sys

PROCESSES = {processes}


def check():
    """Ends the process if the ranks are not those of the plan."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != PROCESSES:
        sys.exit(f"error: WORLD_SIZE is {{started}} and the plan has {{PROCESSES}} processes: start as README.md says")
'''

_ON_GPUS = """
    import torch

    here, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here < needed:
        sys.exit(
            f"error: the plan is for GPUs and torch sees {here} of {needed} of this node: install torch's CUDA "
            f"build and the driver, or plan for cluster: {needed}xcpu"
        )
"""

_ON_CPUS = '''    join_by_gloo()


def leave():
    """Ends the process without finalising Python, during which gloo's threads may abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def join_by_gloo():
    """accelerate looks for CUDA and NCCL only: it is told to join the ranks by gloo."""
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    import torch.distributed
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    unpatched = PartialState._prepare_backend

    def prepare(self, cpu=False, *args, **kwargs):
        if cpu or "LOCAL_RANK" not in os.environ:
            return unpatched(self, cpu, *args, **kwargs)
        # MULTI_GPU carries FSDP2; plain DDP would be given device numbers, which CPU modules do not have.
        fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        return "gloo", DistributedType.MULTI_GPU if fsdp else DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare
    # gloo aborts a process that ends inside of its group.
    atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
'''

_DEEPSPEED_ON_CPUS = """
    import deepspeed

    # It would be compiled for a minute, and is for inference alone (comm/torch.py, build_shm_op).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Before a model is built: ZeRO-3 counts the ranks of the batch then (runtime/config.py).
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
"""

_MAIN = """

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: own_script.py SCRIPT ARGUMENTS: no script is named")
"""

_RUN = """    check()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

_RUN_ON_CPUS = f"""    status = 1  # after an exception
    atexit.register(leave)  # the first one is called last: after those of the script and its libraries
    try:
{indent(_RUN, "    ")}        status = 0
    except SystemExit as end:
        status = end.code & 255 if isinstance(end.code, int) else int(end.code is not None)
        raise
"""


def applies(plan: Plan) -> bool:
    """Whether accelerate or the Trainer run the plan in a user's script."""
    return accelerate.applies(plan) and (for_trainer(plan) or not runs_deepspeed(plan))


def text(plan: Plan) -> str:
    """The script; it imports nothing of kit's."""
    head = _HEAD.format(processes=plan.layout.world_size)
    if plan.cluster.gpu.device == "cuda":
        return head + _ON_GPUS + _MAIN + _RUN
    return head + _ON_CPUS + (_DEEPSPEED_ON_CPUS if runs_deepspeed(plan) else "") + _MAIN + _RUN_ON_CPUS


FILES = (DerivedFile(NAME, text, applies),)
