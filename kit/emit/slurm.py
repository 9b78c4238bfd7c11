"""``slurm.sbatch``: one task per node, which runs ``launch.sh``. Before the time limit the job saves and requeues."""

from __future__ import annotations

import math
import re

from kit.cost.hardware import runs_rocm
from kit.emit.derived_file import DerivedFile
from kit.emit.launch import processes_per_node
from kit.planner.plan import Plan
from kit.specs.catalog.rows import rows
from kit.specs.cluster import ClusterSpec

MARGIN = 1.25
"""Requested time over predicted time. A run that reaches the limit resumes from its last checkpoint."""
LONGEST_HOURS = 24.0
"""Most hours requested per job, because most sites allow no more. A longer run requeues and resumes."""
LEAST_NOTICE_S = 300
"""Seconds between the signal and the limit: enough to end a step and write a checkpoint to slow storage."""
STEPS_OF_NOTICE = 3
"""Notice in steps: the current step ends before the save, so long steps need more notice."""


def applies(plan: Plan) -> bool:
    """Whether the plan gets a batch script: it has GPUs or several nodes."""
    return plan.cluster.gpu.device == "cuda" or plan.cluster.num_nodes > 1


def notice_s(plan: Plan) -> int:
    """Seconds before the limit at which ranks get the signal to save, in whole minutes."""
    return max(LEAST_NOTICE_S, math.ceil(STEPS_OF_NOTICE * plan.predicted.step_time_s / 60) * 60)


def takes_whole_nodes(cluster: ClusterSpec) -> bool:
    """Whether the job has its nodes for itself: a lone node of the catalog may be planned with fewer GPUs than it
    has."""
    row = rows("nodes").get(cluster.name)
    return cluster.gpu.device == "cuda" and (row is None or cluster.gpus_per_node >= row["gpus_per_node"])


def _host(cluster: ClusterSpec) -> str:
    """Host memory and CPUs. Without them Slurm gives a job one CPU a task and the site's default memory."""
    if takes_whole_nodes(cluster):
        return "# Whole nodes: all of their CPUs, and all of their memory (0).\n#SBATCH --exclusive\n#SBATCH --mem=0\n"
    if cluster.gpu.device == "cpu":
        return ""
    known = cluster.host_ram_gib is not None
    words = "--cpus-per-task=N" + " --mem=MEMORY" * (not known)
    memory = f"#SBATCH --mem={math.floor(cluster.host_ram_gib or 0.0)}G\n" * known
    return (
        f"# A part of a node, whose cores {'' if known else 'and memory '}kit does not know: ask for your share by\n"
        f"# sbatch {words} slurm.sbatch.\n{memory}"
    )


def sbatch(plan: Plan) -> str:
    """Text of the batch script. Submit it from inside the run directory."""
    job_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", plan.model.name)
    days = plan.predicted.days
    hours = max(1, math.ceil(min(LONGEST_HOURS if days is None else days * 24 * MARGIN, LONGEST_HOURS)))
    predicted = f"at most {plan.predicted.step_time_s:.3g} s a step; the number of steps follows from the data"
    predicted = predicted if days is None else f"{days:.2f} days for the whole run"
    cluster = plan.cluster
    devices = "--rocm" if runs_rocm(cluster.gpu) else "--nv"  # Apptainer's user guide, "GPU Support"
    gpus = f"#SBATCH --gpus-per-node={cluster.gpus_per_node}\n" if cluster.gpu.device == "cuda" else ""
    return f"""#!/usr/bin/env bash
#SBATCH --job-name={job_name}
#SBATCH --nodes={cluster.num_nodes}
#SBATCH --ntasks-per-node=1
{gpus}{_host(cluster)}#SBATCH --time={hours}:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
# Preempted, or on a node that failed, the job goes back to the queue and resumes there.
#SBATCH --requeue
# Before the limit this script is told, and tells the ranks: they write a checkpoint, and the job is queued again.
#SBATCH --signal=B:USR1@{notice_s(plan)}
# Predicted: {predicted}.
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:?submit with sbatch from inside the run directory}}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# Jobs that share a node must not share a port.
MASTER_PORT="$((20000 + SLURM_JOB_ID % 40000))"
export MASTER_ADDR MASTER_PORT

# Of a node's CPUs, as many as Slurm gave to the job: srun would take one.
cpus=() processes={processes_per_node(plan)}
if [ -n "${{SLURM_CPUS_ON_NODE:-}}" ]; then cpus=(--cpus-per-task="$SLURM_CPUS_ON_NODE"); fi
if [ "${{SLURM_CPUS_ON_NODE:-$processes}}" -lt "$processes" ]; then
  echo "warning: Slurm gave $SLURM_CPUS_ON_NODE CPUs to $processes processes: sbatch --cpus-per-task=N slurm.sbatch" >&2
fi

told="" step=""
# Again every ten seconds: a rank that is still importing does not hear it yet.
tell() {{
  told=yes
  [ -z "$step" ] || (while kill -USR1 "$step" 2>/dev/null; do sleep 10; done) &
}}
trap tell USR1
# USR1 reaches every process of the step. Launchers must not die of it: they ignore it, and ranks handle it.
# CONTAINER_IMAGE=name or path.sqsh runs it in a container by enroot and pyxis, APPTAINER_IMAGE=path.sif by Apptainer.
pyxis=() apptainer=()
if [ -n "${{CONTAINER_IMAGE:-}}" ]; then
  pyxis=(--container-image="$CONTAINER_IMAGE" --container-mounts="$PWD:$PWD" --container-workdir="$PWD")
elif [ -n "${{APPTAINER_IMAGE:-}}" ]; then
  apptainer=(apptainer exec {devices} --bind "$PWD" --pwd "$PWD" "$APPTAINER_IMAGE")
fi
srun --kill-on-bad-exit=1 "${{cpus[@]}}" "${{pyxis[@]}}" "${{apptainer[@]}}" \\
  bash -c 'trap "" USR1; NODE_RANK="$SLURM_NODEID" exec ./launch.sh --resume auto' &
step=$!
[ -z "$told" ] || tell
# A signal ends "wait" before the step ends; 127 means that it was waited for already.
code=0
while :; do
  wait "$step" && last=0 || last=$?
  if [ "$last" = 127 ]; then break; fi
  code=$last
  if ! kill -0 "$step" 2>/dev/null; then break; fi
done
if [ -n "$told" ] && [ "$code" != 0 ]; then
  echo "stopped before the time limit (exit code $code): queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


FILES = (DerivedFile("slurm.sbatch", sbatch, applies, own_loop=True),)
