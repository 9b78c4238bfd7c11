"""One rank of this run, whoever starts it.

OpenMPI and Slurm give a process its rank in variables of their own; torch reads RANK, LOCAL_RANK and WORLD_SIZE.
"""

import os
import runpy

VARIABLES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
}

if __name__ == "__main__":
    for name, others in VARIABLES.items():
        told = next((os.environ[other] for other in others if other in os.environ), None)
        if told is not None:
            os.environ.setdefault(name, told)
    runpy.run_module("kit.training", run_name="__main__", alter_sys=True)
