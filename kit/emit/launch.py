"""``launch.sh`` and ``hostfile``: how the processes of a plan are started."""

from __future__ import annotations

import shlex

import kit.emit.megatron
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
        "# Arguments go to the worker: --resume auto|PATH, --stop-at-step N.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        'PYTHON="${PYTHON:-python}"',
        *environment(plan),
        *nodes(plan),
        " ".join(["exec", '"$PYTHON"', *_launcher(plan), WORKER, ".", '"$@"']),
    ]
    return "\n".join(lines) + "\n"


def hostfile(plan: Plan) -> str:
    """Hosts and slots, in the form that DeepSpeed's launcher and OpenMPI read. The host names are placeholders."""
    lines = ["# Replace the names by your hosts'; every host needs the same paths."]
    lines += [f"node-{i} slots={plan.cluster.gpus_per_node}" for i in range(plan.cluster.num_nodes)]
    return "\n".join(lines) + "\n"


def environment(plan: Plan) -> list[str]:
    """Lines that set what the processes read."""
    layout, lines = plan.layout, []
    if plan.cluster.gpu.device == "cpu":
        lines += [
            "# One thread a process: the processes of a rehearsal share a few cores.",
            "export OMP_NUM_THREADS=1",
        ]
    elif kit.emit.megatron.applies(plan) and (layout.tp > 1 or layout.cp > 1):
        lines += [
            "# Kernels start in the order they were issued, so that collectives overlap with the matmul before them.",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        ]
    if plan.cluster.gpu.device == "cuda":
        lines += [
            "# Segments that grow in place fragment less when sequence lengths or stages differ.",
            'export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"',
        ]
    return lines


def nodes(plan: Plan) -> list[str]:
    """Lines that ask for what differs between nodes; none on a single one."""
    if plan.cluster.num_nodes == 1:
        return []
    return [
        f"# {plan.cluster.num_nodes} nodes: set these on each, or let slurm.sbatch do it.",
        ': "${NODE_RANK:?rank of this node, from 0}" "${MASTER_ADDR:?address of node 0}"',
        'MASTER_PORT="${MASTER_PORT:-29500}"',
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
