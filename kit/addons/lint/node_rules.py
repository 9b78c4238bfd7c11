"""Rules of launch lines for several nodes: who starts them, where they meet, and which rank each has."""

from __future__ import annotations

from kit.addons.lint.accelerate_rules import LOOPBACK
from kit.addons.lint.command_rules import nodes, per_node
from kit.addons.lint.commands import Command
from kit.addons.lint.rule import Case, Rule, table

_EXPANDED_EARLY = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")


def _several(command: Command) -> bool:
    return nodes(command) > 1 and not command.open_ended


def _static(command: Command) -> bool:
    """torch/distributed/run.py: the backend is static unless given; its rank is --node_rank, 0 unless given."""
    return command.launcher == "torchrun" and command.value("rdzv_backend") in (None, "static")


def _without_rank(command: Command) -> bool:
    """No rank where one is needed: torchrun takes 0, accelerate stops (utils/launch.py, int(args.machine_rank))."""
    needs = _static(command) or (command.launcher == "accelerate launch" and command.value("config_file") is None)
    given = command.value("node_rank", "machine_rank") is not None or command.job.ranks_by_environment
    return _several(command) and needs and not given


def _rank(command: Command) -> str:
    return (command.value("node_rank", "machine_rank") or "").strip("${}")


def _same_rank(command: Command) -> bool:
    """A number, where the same line starts on every node."""
    return command.everywhere and (command.job.nodes or nodes(command)) > 1 and _rank(command).isdecimal()


def _early(command: Command) -> bool:
    return command.starter == "srun" and _rank(command) in _EXPANDED_EARLY and "\\$" not in command.text


def _endpoint(command: Command) -> str:
    """The host at which the nodes meet; empty if none is given."""
    static = command.launcher != "torchrun" or (_static(command) and command.value("rdzv_endpoint") is None)
    text = command.value(*(("master_addr", "main_process_ip") if static else ("rdzv_endpoint",))) or ""
    host, colon, port = text.rpartition(":")
    return host.strip("[]") if colon and (port.isdecimal() or "$" in port) and host else text


def _alone(command: Command) -> bool:
    """One node's launch where there are several."""
    option = {"torchrun": ("nnodes",), "accelerate launch": ("num_machines", "config_file")}.get(command.launcher)
    if option is None or command.open_ended or command.value(*option) is not None or command.job.ranks_by_environment:
        return False
    return (command.everywhere and (command.job.nodes or 1) > 1) or (
        command.launcher == "torchrun" and command.job.names_hosts
    )


def _in_one_task(command: Command) -> int | None:
    """Processes that a task starts on its node; None if that is no number."""
    if command.launcher == "torchrun" and command.value("nproc_per_node") in ("gpu", "auto"):
        return command.job.gpus_per_node
    return per_node(command) or None


def _tasks(command: Command) -> int:
    return (command.job.tasks_per_node or 1) if command.everywhere else 1


def _too_many(command: Command) -> bool:
    each, gpus = _in_one_task(command), command.job.gpus_per_node
    return command.launcher != "python" and bool(each and gpus) and (each or 0) * _tasks(command) > (gpus or 0)


table(
    "launch",
    {
        Rule("node-rank", "script", "nodes without a rank, or all with the same", "waits for the others, or stops"): (
            Case(
                "error",
                "",
                _without_rank,
                lambda c: (
                    f"{nodes(c)} nodes and no rank of this one: "
                    + ("all are node 0" if _static(c) else "accelerate launch stops")
                ),
                lambda c: (
                    "--node-rank, another on each node, or --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
                    if _static(c)
                    else "--machine_rank, another on each machine"
                ),
            ),
            Case(
                "error",
                "",
                _same_rank,
                lambda c: f"this line starts on every node, and says node {_rank(c)} on each",
                "take the rank from the environment of each node, such as $JOB_COMPLETION_INDEX, or use "
                "--rdzv-backend c10d",
            ),
            Case(
                "error",
                "",
                _early,
                lambda c: f"the batch script puts in ${_rank(c)} before srun starts: the first node's, on every node",
                lambda c: f"srun bash -c '… ${_rank(c)} …', in single quotes",
            ),
        ),
        "main-process-ip": (
            Case(
                "error",
                "",
                lambda c: nodes(c) > 1 and _endpoint(c) in LOOPBACK,
                lambda c: f"{nodes(c)} nodes that meet at {_endpoint(c)}: each finds itself there alone",
                "use the first node's address",
            ),
            Case(
                "error",
                "",
                lambda c: (
                    _several(c)
                    and c.launcher == "torchrun"
                    and not _static(c)
                    and not c.value("rdzv_endpoint")
                    and bool(c.value("master_addr"))
                ),
                lambda c: f"--rdzv-backend {c.value('rdzv_backend')} reads --rdzv-endpoint, and no --master-addr",
                "--rdzv-endpoint HOST:PORT, the same on all",
            ),
        ),
        Rule("tasks-and-processes", "script", "more processes on a node than GPUs", "two share a GPU, or it stops"): (
            Case(
                "error",
                "",
                _too_many,
                lambda c: (
                    f"{_tasks(c)} tasks a node start {_in_one_task(c)} processes each, and the job has "
                    f"{c.job.gpus_per_node} GPUs a node"
                ),
                "one task a node, which starts a process for each GPU",
            ),
            Case(
                "warning",
                "",
                lambda c: c.job.gpus_per_node is None and _tasks(c) > 1 and (_in_one_task(c) or 1) > 1,
                lambda c: f"each of {_tasks(c)} tasks a node starts {_in_one_task(c)} processes",
                "one task a node, which starts a process for each GPU",
            ),
        ),
        Rule("one-node", "script", "a launch on one node of several", "waits for the others, or trains without them"): (
            Case(
                "error",
                "",
                lambda c: (
                    c.job.kind == "sbatch"
                    and (c.job.nodes or 1) > 1
                    and c.launcher in ("torchrun", "accelerate launch")
                    and not c.job.reaches_hosts
                ),
                lambda c: (
                    f"sbatch runs the script on the first of {c.job.nodes} nodes alone, and nothing starts the others"
                ),
                "put srun before it, with one task a node",
            ),
            Case(
                "warning",
                "",
                _alone,
                lambda c: (
                    f"without {'--nnodes' if c.launcher == 'torchrun' else '--num_machines'} each node trains alone"
                ),
                "give the number of nodes, and an address where they meet",
            ),
        ),
    },
)
