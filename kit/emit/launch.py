"""``launch.sh`` and ``launch_elastic.sh``: how the processes of one node are started."""

from __future__ import annotations

import shlex

from kit.emit.environment import assignments, interface_lines
from kit.planner.plan import Plan

WORKER = "kit.training"
"""The module each rank runs, on its run directory."""


def by_accelerate(plan: Plan) -> bool:
    """Whether ``accelerate launch`` starts this plan. Megatron and plain torch go by torchrun: accelerate's
    Megatron plugin imports modules that megatron-core does not have, and a plain launch needs no config."""
    return plan.layout.engine == "deepspeed"


def launch_script(plan: Plan) -> str:
    """A bash script that starts this node's processes; on several nodes it runs once on each."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {plan.model.name} on {plan.cluster.name}: {plan.layout.engine}, {plan.layout.world_size} processes.",
        "# Arguments go to the worker: --resume auto|PATH, --stop-at-step N, --profile 5-8.",
        *nsight(plan),
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        'PYTHON="${PYTHON:-python}"',
        *environment(plan),
        *nodes(plan),
        " ".join(["exec", '"$PYTHON"', *_launcher(plan), WORKER, ".", '"$@"']),
    ]
    return "\n".join(lines) + "\n"


def nsight(plan: Plan) -> list[str]:
    """How Nsight Systems is put around it; the worker hands it the steps of ``--profile`` as its capture range."""
    if plan.cluster.gpu.device != "cuda":
        return []
    words = "--trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop"
    return [f"# Nsight Systems: nsys profile {words} -o nsight ./launch.sh --profile 5-8"]


def elastic_script(plan: Plan) -> str:
    """A bash script that runs once on each node and needs no rank: torchrun finds the nodes by a c10d rendezvous, and
    after a failure starts all of them again from the newest checkpoint. The layout fixes how many nodes there are."""
    rendezvous = [
        f"--nnodes {plan.cluster.num_nodes}",
        "--rdzv-backend c10d",
        '--rdzv-endpoint "$RDZV_ENDPOINT"',
        '--rdzv-id "$RDZV_ID"',
        '--max-restarts "${MAX_RESTARTS:-3}"',
    ]
    lines = [
        "#!/usr/bin/env bash",
        f"# {plan.model.name} on {plan.cluster.name}: the same command on each of {plan.cluster.num_nodes} nodes.",
        "# Arguments go to the worker: --stop-at-step N.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        'PYTHON="${PYTHON:-python}"',
        *environment(plan),
        "# One node's address and a port, the same on all; and a name, so that two runs do not meet.",
        ': "${RDZV_ENDPOINT:?host:port of one node, the same on all}"',
        'RDZV_ID="${RDZV_ID:-$(basename "$PWD")}" MASTER_ADDR="${RDZV_ENDPOINT%:*}"',
        *interface_lines(plan),
        f'exec "$PYTHON" -m torch.distributed.run --nproc-per-node {processes_per_node(plan)} {" ".join(rendezvous)} '
        f'-m {WORKER} . --resume auto "$@"',
    ]
    return "\n".join(lines) + "\n"


def environment(plan: Plan) -> list[str]:
    """Lines that set what the processes read."""
    return assignments(plan)


def nodes(plan: Plan) -> list[str]:
    """Lines that ask for what differs between nodes; none on a single one."""
    if plan.cluster.num_nodes == 1:
        return []
    return [
        f"# {plan.cluster.num_nodes} nodes: set these on each, or let slurm.sbatch do it.",
        ': "${NODE_RANK:?rank of this node, from 0}" "${MASTER_ADDR:?address of node 0}"',
        'MASTER_PORT="${MASTER_PORT:-29500}"',
        *interface_lines(plan),
    ]


def _launcher(plan: Plan) -> list[str]:
    """Words between the interpreter and the worker's module; only constants and quoted variables."""
    nodes = plan.cluster.num_nodes
    if by_accelerate(plan):
        words = ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml"]
        if nodes > 1:
            words += [
                "--machine_rank",
                '"$NODE_RANK"',
                "--main_process_ip",
                '"$MASTER_ADDR"',
                "--main_process_port",
                '"$MASTER_PORT"',
            ]
        return [*words, "--module"]
    if plan.layout.world_size == 1:
        return ["-m"]
    return [*torchrun(plan), "-m"]


def torchrun(plan: Plan) -> list[str]:
    """Words between the interpreter and what every process runs; only constants and quoted variables."""
    nodes = plan.cluster.num_nodes
    words = ["-m", "torch.distributed.run", "--nproc-per-node", shlex.quote(str(processes_per_node(plan)))]
    if nodes == 1:
        return [*words, "--standalone"]
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
    return [*words, *rendezvous]


def processes_per_node(plan: Plan) -> int:
    """Ranks that each node runs; a plan may leave GPUs of a lone node idle."""
    return plan.layout.world_size // plan.cluster.num_nodes
