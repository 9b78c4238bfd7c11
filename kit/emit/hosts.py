"""``hostfile``, ``launch_hosts.sh`` and ``rank.py``: every node of a plan started from one of them."""

from __future__ import annotations

from kit.emit import environment
from kit.planner.plan import Plan

RANK_PY = '''"""One rank of this run, whoever starts it.

OpenMPI and Slurm tell a process its rank in words of their own; torch reads RANK, LOCAL_RANK and WORLD_SIZE.
"""

import os
import runpy

WORDS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
}

if __name__ == "__main__":
    for name, others in WORDS.items():
        told = next((os.environ[other] for other in others if other in os.environ), None)
        if told is not None:
            os.environ.setdefault(name, told)
    runpy.run_module("kit.training", run_name="__main__", alter_sys=True)
'''


def hostfile(plan: Plan) -> str:
    """Hosts and slots, in the form that DeepSpeed's launcher and OpenMPI read. The host names are placeholders."""
    lines = ["# Replace the names by your hosts'; every host needs the same paths."]
    lines += [f"node-{i} slots={plan.cluster.gpus_per_node}" for i in range(plan.cluster.num_nodes)]
    return "\n".join(lines) + "\n"


def launch_hosts_script(plan: Plan) -> str:
    """A bash script that starts all nodes from one: by the ``deepspeed`` launcher, or ``launch.sh`` on each by pdsh."""
    by_deepspeed = plan.layout.engine == "deepspeed"
    how = (
        "LAUNCHER=pdsh (default), openmpi, slurm, or no-ssh (then on each node with NODE_RANK)"
        if by_deepspeed
        else "pdsh"
    )
    lines = [
        "#!/usr/bin/env bash",
        f"# All {plan.cluster.num_nodes} nodes of the hostfile from this one, by {how}.",
        "# Arguments go to the worker: --resume auto|PATH, --stop-at-step N.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        'PYTHON="${PYTHON:-python}" HOSTFILE="${HOSTFILE:-hostfile}"',
        'hosts="$(awk \'!/^#/ && NF {printf "%s%s", comma, $1; comma = ","}\' "$HOSTFILE")"',
        'export MASTER_ADDR="${MASTER_ADDR:-${hosts%%,*}}" MASTER_PORT="${MASTER_PORT:-29500}"',
        *(_by_deepspeed(plan) if by_deepspeed else _by_pdsh(plan)),
    ]
    return "\n".join(lines) + "\n"


def _by_deepspeed(plan: Plan) -> list[str]:
    names = " ".join(["MASTER_ADDR", "MASTER_PORT", *environment.names(plan)])
    return [
        *environment.assignments(plan),
        *environment.interface_lines(plan),
        "# The launcher hands on NCCL*, PYTHON*, UCX*, MV2* and MLFLOW*; this file the rest, blank lines not allowed.",
        'DS_ENV_FILE="$(mktemp)"; export DS_ENV_FILE',
        "trap 'rm -f \"$DS_ENV_FILE\"' EXIT",
        f"for name in {names}; do",
        '  if [ -n "${!name:-}" ]; then printf \'%s=%s\\n\' "$name" "${!name}"; fi',
        'done > "$DS_ENV_FILE"',
        'words=(--hostfile "$HOSTFILE" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")',
        'case "${LAUNCHER:-pdsh}" in',
        "  pdsh) ;;",
        "  # Without the interface DeepSpeed tells OpenMPI to use eth0, and cores are left to torch.",
        "  openmpi)",
        "    words+=(--launcher openmpi)",
        '    words+=(--launcher_args "--mca btl_tcp_if_include ${GLOO_SOCKET_IFNAME:-eth0} --bind-to none") ;;',
        "  slurm) words+=(--launcher slurm) ;;",
        '  no-ssh) words+=(--no_ssh --node_rank "${NODE_RANK:?rank of this node, from 0}") ;;',
        '  *) echo "error: LAUNCHER=$LAUNCHER: use pdsh, openmpi, slurm or no-ssh" >&2; exit 2 ;;',
        "esac",
        '"$PYTHON" -m deepspeed.launcher.runner "${words[@]}" rank.py . "$@"',
    ]


def _by_pdsh(plan: Plan) -> list[str]:
    names = " ".join(["PYTHON", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", *environment.names(plan)])
    return [
        "# Nothing of this shell's environment travels by itself; what is set here goes along.",
        'command="cd $(printf %q "$PWD") && exec env NODE_RANK=%n"',
        f"for name in {names}; do",
        '  if [ -n "${!name:-}" ]; then command+=" $name=$(printf %q "${!name}")"; fi',
        "done",
        'command+=" ./launch.sh"',
        'for word in "$@"; do command+=" $(printf %q "$word")"; done',
        'exec pdsh -S -R ssh -w "$hosts" "$command"',
    ]
