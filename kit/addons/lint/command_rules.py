"""Rules of launch lines: unknown options, nodes without a common address, too few processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from kit.addons.lint.accelerate_rules import missing_classes
from kit.addons.lint.commands import LAUNCHERS, Command, known_options, number
from kit.addons.lint.config import Config, truth
from kit.addons.lint.finding import Finding
from kit.addons.lint.known_keys import near
from kit.addons.lint.rule import Case, Each, Rule, check, table
from kit.specs.model import ModelSpec


def _unknown_options(command: Command) -> list[str]:
    """argparse refuses an unknown option. Options before the script are the launcher's, later ones the script's."""
    known = known_options().get(command.launcher)
    given = [option for option, _ in command.options if not option.startswith("$")]
    return [] if known is None else [option for option in given if option not in known]


def wrapped_classes(command: Command, model: ModelSpec | None) -> Iterator[Finding]:
    """Checks that the model has the class that FSDP wraps."""
    option = "fsdp_transformer_layer_cls_to_wrap"
    for why, fix in missing_classes(command.argument(option) or command.value(option), model):
        yield command.finding("wrap-class", "error", f"--{option}", why, fix)


def _both_split(command: Command) -> bool:
    """Whether FSDP and DeepSpeed are both on: the Trainer's --fsdp and --deepspeed, or two of accelerate's --use_…
    options (accelerate/commands/launch.py takes only one)."""
    given = {option.replace("-", "_") for option, _ in command.options}
    both = command.argument("fsdp") and command.argument("deepspeed")
    return bool(both) or {"__use_fsdp", "__use_deepspeed"} <= given


def nodes(command: Command) -> int:
    """Number of nodes if it is a literal number; else 1."""
    return number(command.value("nnodes", "num_nodes", "num_machines")) or 1


def _rank(command: Command) -> int:
    """Rank of this node if it is a literal number; else 0."""
    return number(command.value("node_rank", "machine_rank")) or 0


def processes(command: Command) -> int | None:
    """Number of processes on all nodes; None if the line has variables in place of numbers."""
    if command.launcher == "python":
        return 1
    launcher = next(launcher for launcher in LAUNCHERS if launcher.name == command.launcher)
    each = number(command.value(launcher.processes))
    return None if each is None else each * (nodes(command) if launcher.per_node else 1)


def per_node(command: Command) -> int:
    """Processes that the line starts on a node; 0 if that is no number."""
    return (processes(command) or 0) // nodes(command)


@check(
    None,
    Rule(
        "one-thread",
        "script",
        "an optimizer on the host, and a launcher that gives each process one thread",
        "its step takes one core of many",
    ),
)
def one_thread(command: Command, launch: Config, files: Sequence[Config]) -> Iterator[Finding]:
    """``launch``: accelerate's configuration; ``files``: DeepSpeed's.

    torch/distributed/run.py sets OMP_NUM_THREADS=1 for several processes, where it is not set; accelerate's launcher of
    DeepSpeed calls it (commands/launch.py, deepspeed_launcher), or DeepSpeed's launcher for several machines, which
    sets nothing. What accelerate starts itself has --num_cpu_threads_per_process, 1 where nobody says more
    (utils/launch.py)."""
    of_accelerate, kind = command.launcher == "accelerate launch", launch.get("distributed_type")
    if command.threads or not (of_accelerate or command.launcher == "torchrun"):
        return
    devices = [each.get("zero_optimization.offload_optimizer.device") for each in files if each.stage]
    devices += [command.value("offload_optimizer_device"), launch.get("deepspeed_config.offload_optimizer_device")]
    sharded = kind == "FSDP" and truth(launch.get("fsdp_config.fsdp_offload_params"))
    ranks, alone = per_node(command), False
    if of_accelerate:
        machines, starter = int(launch.number("num_machines") or 1), "deepspeed_multinode_launcher"
        ranks = int(launch.number("num_processes") or 0) // max(1, machines)
        if kind == "DEEPSPEED":
            standard = "standard" in (command.value(starter), launch.get(f"deepspeed_config.{starter}"))
            ranks = ranks if machines == 1 or standard else 0
        else:  # a file that is not named may say DeepSpeed
            told = command.value("num_cpu_threads_per_process") is not None
            ranks, alone = 0 if told else ranks, kind is not None and not told
    if (sharded or any(device in ("cpu", "nvme") for device in devices)) and (alone or ranks > 1):
        why = (
            f"the optimizer steps on the host, and {command.launcher} gives a process one thread, unless told otherwise"
        )
        fix = f"export OMP_NUM_THREADS=$(($(nproc) / {ranks if ranks > 0 else 'PROCESSES_ON_A_NODE'})) above the line"
        yield command.finding("one-thread", "warning", "", why, fix)


def _visible(command: Command) -> str:
    """The visible devices, as set on the line or above it."""
    devices = command.value("gpu_ids") or command.visible
    return devices if re.fullmatch(r"[\d,]+", devices) else ""


def _without(launcher: str, *options: str) -> Callable[[Command], bool]:
    """Whether ``launcher`` starts several nodes without any of ``options``."""
    return lambda c: c.launcher == launcher and nodes(c) > 1 and not c.open_ended and not c.value(*options)


def _script_without_launcher(command: Command) -> str | None:
    return command.argument("deepspeed", "deepspeed_config") if command.launcher == "python" else None


table(
    "launch",
    {
        Rule("unknown-option", "script", "options that the launcher does not know, with the nearest one", "it stops"): (
            Each(
                "error",
                lambda c, option: option,
                _unknown_options,
                lambda c, option: f"no option of {c.launcher}, which stops at it",
                lambda c, option: (
                    f"did you mean {meant}?"
                    if (meant := near(option, known_options()[c.launcher]))
                    else f"put it behind {c.program or 'the script'}, or remove it"
                ),
            ),
        ),
        # torch/distributed/launch.py says so itself.
        Rule(
            "former-launcher",
            "script",
            "`python -m torch.distributed.launch`",
            "passes `--local-rank`, which newer scripts do not know",
        ): (
            Case(
                "warning",
                "",
                lambda c: c.former,
                "python -m torch.distributed.launch is deprecated, and hands --local-rank to the script",
                "use torchrun; the script reads LOCAL_RANK",
            ),
        ),
        Rule("fsdp-and-deepspeed", "script", "FSDP together with DeepSpeed", "refused, or one of them ignored"): (
            Case(
                "error",
                "",
                _both_split,
                "FSDP and DeepSpeed both want to split the model: one run takes one of them",
                "keep one of them",
            ),
        ),
        # A rank takes the device of its local number, among those that CUDA_VISIBLE_DEVICES leaves.
        "visible-devices": (
            Case(
                "error",
                "",
                lambda c: _visible(c) and len(_visible(c).strip(",").split(",")) < per_node(c),
                lambda c: f"{_visible(c)} are visible, and {per_node(c)} processes on a machine take one each",
                "start as many processes as GPUs",
            ),
        ),
        # torch/distributed/run.py: --nproc-per-node is 1 unless given; a plain python starts one process too. Slurm
        # and MPI start one in each of their tasks.
        "one-process": (
            Case(
                "warning",
                "",
                lambda c: (
                    c.launcher == "torchrun" and not c.in_tasks and not c.opaque and c.value("nproc_per_node") is None
                ),
                "without --nproc-per-node torchrun starts one process a node",
                "--nproc-per-node gpu, or the number of GPUs",
            ),
            Case(
                "warning",
                "",
                lambda c: not c.in_tasks and _script_without_launcher(c),
                lambda c: f"{_script_without_launcher(c)} and no launcher: one process, whatever the number of GPUs",
                "start it by deepspeed, torchrun or accelerate launch",
            ),
        ),
        # Several machines need one address that all of them know, and a rank each.
        "machine-rank": (
            Case(
                "error",
                "",
                lambda c: _rank(c) >= nodes(c) and number(c.value("nnodes", "num_nodes", "num_machines")),
                lambda c: f"rank {_rank(c)} of {nodes(c)} machines",
                lambda c: f"ranks go from 0 to {nodes(c) - 1}; each machine has its own",
            ),
        ),
        "main-process-ip": (
            Case(
                "error",
                "",
                _without("torchrun", "master_addr", "rdzv_endpoint"),
                lambda c: f"{nodes(c)} nodes and no address: each waits for the others at 127.0.0.1",
                "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, the same on all, or --master-addr and --node-rank",
            ),
            Case(
                "error",
                "",
                _without("accelerate launch", "main_process_ip", "config_file"),
                lambda c: f"{nodes(c)} machines and no main_process_ip: each waits for itself",
                "--main_process_ip HOST, the same on all",
            ),
        ),
        Rule(
            "hostfile",
            "script",
            "the deepspeed launcher for several nodes without a hostfile",
            "uses this machine alone",
        ): (
            Case(
                "warning",
                "",
                _without("deepspeed", "hostfile", "H", "include"),
                lambda c: (
                    f"{nodes(c)} nodes and no --hostfile: only /job/hostfile would be read, else this machine alone "
                    "is used"
                ),
                "--hostfile FILE, with name slots=8, one a line",
            ),
        ),
        Rule("chosen-twice", "script", "`--include` or `--exclude` beside a number of GPUs or nodes", "refused"): (
            # launcher/runner.py, main, refuses a selection of hosts and GPUs together with their number.
            Each(
                "error",
                lambda c, option: f"--{option}",
                lambda c: [
                    option
                    for option in ("num_gpus", "num_nodes")
                    if c.launcher == "deepspeed" and c.value("include", "exclude") and c.value(option) is not None
                ],
                lambda c, option: f"--{option} beside --include or --exclude is refused",
                "keep one of them",
            ),
        ),
    },
)
