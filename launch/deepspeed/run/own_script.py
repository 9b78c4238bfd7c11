"""One rank of a script of yours: own_script.py SCRIPT ARGUMENTS, under accelerate launch or deepspeed.

It ends with an error where the launcher would train less than the plan and exit with 0.
"""

import atexit
import os
import runpy
import sys

PROCESSES = 32


def check():
    """Ends the process if the ranks are not those of the plan."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != PROCESSES:
        sys.exit(f"error: WORLD_SIZE is {started} and the plan has {PROCESSES} processes: start as README.md says")

    import torch

    here, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here < needed:
        sys.exit(
            f"error: the plan is for GPUs and torch sees {here} of {needed} of this node: install torch's CUDA "
            f"build and the driver, or plan for cluster: {needed}xcpu"
        )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: own_script.py SCRIPT ARGUMENTS: no script is named")
    check()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
