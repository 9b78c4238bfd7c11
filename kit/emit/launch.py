"""Scripts that start a plan's processes. ``launch.sh`` and ``launch_elastic.sh`` start one node; ``launch_hosts.sh``
starts all nodes of ``hostfile``; ``rank.py`` starts one rank under a launcher with its own rank variables."""

from __future__ import annotations

import shlex

from kit.cost.hardware import runs_rocm
from kit.emit.deepspeed import runs_deepspeed
from kit.emit.derived_file import DerivedFile
from kit.emit.environment import assignments, deepspeed_env, interface_lines, names
from kit.planner.elastic import legal_nodes
from kit.planner.plan import Plan

WORKER = "kit.training"
"""The module each rank runs, on its run directory."""
_INTERRUPTIBLE = "kit.training.interruptible"
"""The module that runs torchrun or ``accelerate launch``, so that Ctrl-C ends a run with a checkpoint."""


def _launch_script(plan: Plan) -> str:
    """A bash script that starts this node's processes; on several nodes it runs once on each."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {plan.model.name} on {plan.cluster.name}: {plan.layout.engine}, {plan.layout.world_size} processes.",
        "# Arguments go to the worker: --resume auto|PATH, --stop-at-step N, --profile 5-8.",
        *_nsight(plan),
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        'PYTHON="${PYTHON:-python}"',
        *assignments(plan),
        *nodes(plan),
        " ".join(["exec", '"$PYTHON"', *_launcher(plan), WORKER, ".", '"$@"']),
    ]
    return "\n".join(lines) + "\n"


def _nsight(plan: Plan) -> list[str]:
    """Lines that wrap the command in Nsight Systems. The worker's ``--profile`` steps are its capture range."""
    if plan.cluster.gpu.device != "cuda" or runs_rocm(plan.cluster.gpu):
        return []
    options = "--trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop"
    return [f"# Nsight Systems: nsys profile {options} -o nsight ./launch.sh --profile 5-8"]


def _elastic_script(plan: Plan) -> str:
    """A bash script that runs once on each node and needs no rank: torchrun finds the nodes by a c10d rendezvous, and
    after a failure starts all of them again from the newest checkpoint, on fewer nodes where MIN_NODES allows it. Nodes
    beyond the plan's wait as spares."""
    most, legal = plan.cluster.num_nodes, " ".join(map(str, legal_nodes(plan)))
    rendezvous = [
        f'--nnodes "$MIN_NODES:{most}"',
        "--rdzv-backend c10d",
        '--rdzv-endpoint "$RDZV_ENDPOINT"',
        '--rdzv-id "$RDZV_ID"',
        '--max-restarts "${MAX_RESTARTS:-3}"',
    ]
    lines = [
        "#!/usr/bin/env bash",
        f"# {plan.model.name} on {plan.cluster.name}: the same command on each of {most} nodes, and on spares.",
        "# Arguments go to the worker: --stop-at-step N.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        'PYTHON="${PYTHON:-python}"',
        *assignments(plan),
        "# One node's address and a port, the same on all; and a name, so that two runs do not meet.",
        ': "${RDZV_ENDPOINT:?host:port of one node, the same on all}"',
        'RDZV_ID="${RDZV_ID:-$(basename "$PWD")}" MASTER_ADDR="${RDZV_ENDPOINT%:*}"',
        "# The run goes on with so few nodes; these keep the global batch, are legal and fit.",
        f'MIN_NODES="${{MIN_NODES:-{most}}}" LEGAL_NODES="{legal}"',
        'if [[ ! "$MIN_NODES" =~ ^[0-9]+$ || " $LEGAL_NODES " != *" $MIN_NODES "* ]]; then',
        '  echo "error: MIN_NODES=$MIN_NODES: the plan keeps its global batch on $LEGAL_NODES nodes" >&2',
        "  exit 2",
        "fi",
        f'if [ "$MIN_NODES" -lt {most} ]; then set -- --min-nodes "$MIN_NODES" "$@"; fi',
        *interface_lines(plan),
        f'exec "$PYTHON" -m {_INTERRUPTIBLE} -m torch.distributed.run --nproc-per-node {processes_per_node(plan)} '
        f'{" ".join(rendezvous)} -m {WORKER} . --resume auto "$@"',
    ]
    return "\n".join(lines) + "\n"


def nodes(plan: Plan) -> list[str]:
    """Lines that require the variables that differ between nodes; none for a single node."""
    if plan.cluster.num_nodes == 1:
        return []
    return [
        f"# {plan.cluster.num_nodes} nodes: set these on each, or let slurm.sbatch do it.",
        ': "${NODE_RANK:?rank of this node, from 0}" "${MASTER_ADDR:?address of node 0}"',
        'MASTER_PORT="${MASTER_PORT:-29500}"',
        *interface_lines(plan),
    ]


def _launcher(plan: Plan) -> list[str]:
    """Arguments between the interpreter and the worker's module; only constants and quoted variables.

    torchrun starts Megatron and plain torch: accelerate's Megatron plugin imports modules that megatron-core does not
    have, and plain torch needs no configuration.
    """
    if runs_deepspeed(plan):
        args = ["-m", _INTERRUPTIBLE, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml"]
        node = {"machine_rank": "NODE_RANK", "main_process_ip": "MASTER_ADDR", "main_process_port": "MASTER_PORT"}
        given = [word for option, name in node.items() for word in (f"--{option}", f'"${name}"')]
        return [*args, *given * (plan.cluster.num_nodes > 1), "--module"]
    if plan.layout.world_size == 1:
        return ["-m"]
    return ["-m", _INTERRUPTIBLE, *torchrun(plan), "-m"]


def torchrun(plan: Plan) -> list[str]:
    """torchrun's arguments, between the interpreter and the worker's module; only constants and quoted variables."""
    nodes = plan.cluster.num_nodes
    args = ["-m", "torch.distributed.run", "--nproc-per-node", shlex.quote(str(processes_per_node(plan)))]
    if nodes == 1:
        return [*args, "--standalone"]
    rendezvous = [
        "--nnodes",
        str(nodes),
        "--node-rank",
        '"$NODE_RANK"',
        "--master-addr",
        '"$MASTER_ADDR"',
        "--master-port",
        '"$MASTER_PORT"',
    ]
    return [*args, *rendezvous]


def processes_per_node(plan: Plan) -> int:
    """Ranks that each node runs; a plan may leave GPUs of a lone node idle."""
    return plan.layout.world_size // plan.cluster.num_nodes


_RANK_PY = '''"""One rank of this run, whoever starts it.

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
'''


def _hostfile(plan: Plan) -> str:
    """Hosts and slots, in the form that DeepSpeed's launcher and OpenMPI read. The host names are placeholders."""
    lines = ["# Replace the names by your hosts'; every host needs the same paths."]
    lines += [f"node-{i} slots={plan.cluster.gpus_per_node}" for i in range(plan.cluster.num_nodes)]
    return "\n".join(lines) + "\n"


def _launch_hosts_script(plan: Plan) -> str:
    """A bash script that starts all nodes from one: by the ``deepspeed`` launcher, or ``launch.sh`` on each by pdsh."""
    by_deepspeed = runs_deepspeed(plan)
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
    carried = " ".join(["MASTER_ADDR", "MASTER_PORT", *names(plan)])
    return [
        *assignments(plan),
        *interface_lines(plan),
        "# The launcher hands on NCCL*, PYTHON*, UCX*, MV2* and MLFLOW*; this file the rest, blank lines not allowed.",
        'DS_ENV_FILE="$(mktemp)"; export DS_ENV_FILE',
        "trap 'rm -f \"$DS_ENV_FILE\"' EXIT",
        f"for name in {carried}; do",
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
    carried = " ".join(["PYTHON", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", *names(plan)])
    return [
        "# Nothing of this shell's environment is sent by itself; what is set here is sent too.",
        'command="cd $(printf %q "$PWD") && exec env NODE_RANK=%n"',
        f"for name in {carried}; do",
        '  if [ -n "${!name:-}" ]; then command+=" $name=$(printf %q "${!name}")"; fi',
        "done",
        'command+=" ./launch.sh"',
        'for word in "$@"; do command+=" $(printf %q "$word")"; done',
        'exec pdsh -S -R ssh -w "$hosts" "$command"',
    ]


def _several_nodes(plan: Plan) -> bool:
    return plan.cluster.num_nodes > 1


def _several_nodes_of_deepspeed(plan: Plan) -> bool:
    return runs_deepspeed(plan) and _several_nodes(plan)


FILES = (
    DerivedFile("launch.sh", _launch_script, own_loop=True),
    DerivedFile("launch_elastic.sh", _elastic_script, _several_nodes, own_loop=True),
    DerivedFile("launch_hosts.sh", _launch_hosts_script, _several_nodes, own_loop=True),
    DerivedFile("hostfile", _hostfile, _several_nodes, own_loop=True),
    DerivedFile(".deepspeed_env", deepspeed_env, _several_nodes_of_deepspeed, own_loop=True),
    DerivedFile("rank.py", lambda plan: _RANK_PY, _several_nodes_of_deepspeed, own_loop=True),
)
