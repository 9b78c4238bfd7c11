"""``slurm.sbatch``: one task a node, each running ``launch.sh``."""

from __future__ import annotations

import math
import re

from kit.planner.plan import Plan

MARGIN = 1.25
"""Time asked for over the time predicted; a run that the limit cuts resumes from its last checkpoint."""
LONGEST_HOURS = 24.0
"""No more than this is asked for at once: most sites allow no longer, and a longer run is resumed anyway."""


def sbatch(plan: Plan) -> str:
    """Text of the batch script. Submit it from inside the run directory."""
    job_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", plan.model.name)
    hours = max(1, math.ceil(min(plan.predicted.days * 24 * MARGIN, LONGEST_HOURS)))
    return f"""#!/usr/bin/env bash
#SBATCH --job-name={job_name}
#SBATCH --nodes={plan.cluster.num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={plan.cluster.gpus_per_node}
#SBATCH --time={hours}:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
# Predicted: {plan.predicted.days:.2f} days for the whole token budget; submit again to go on from the last checkpoint.
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:?submit with sbatch from inside the run directory}}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# Jobs that share a node must not share a port.
MASTER_PORT="$((20000 + SLURM_JOB_ID % 40000))"
export MASTER_ADDR MASTER_PORT
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK="$SLURM_NODEID" exec ./launch.sh --resume auto'
"""
