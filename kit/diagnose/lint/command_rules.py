"""Launch lines: options that no launcher knows, machines that cannot meet, fewer processes than meant, and numbers that
contradict the configuration they name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from kit.diagnose.lint.accelerate_rules import missing_classes
from kit.diagnose.lint.commands import LAUNCHERS, Command, known_options, number
from kit.diagnose.lint.config import AUTO, Config
from kit.diagnose.lint.finding import Finding, Severity
from kit.diagnose.lint.rule import Rule, check
from kit.specs.model import ModelSpec

TRAINER_KEYS = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
}
"""The Trainer's argument → the key it must equal (transformers/integrations/deepspeed.py, fill_match)."""
SWITCHES = {"bf16": "bf16.enabled", "fp16": "fp16.enabled"}
"""The Trainer takes NAME_full_eval for it too."""
NO = ("no", "false", "f", "n", "0")
"""transformers/hf_argparser.py, string_to_bool."""


@check(
    "launch",
    Rule("unknown-option", "script", "options that the launcher does not know, with the nearest one", "it stops"),
)
def unknown_option(file: str, command: Command) -> Iterator[Finding]:
    """argparse stops at it; before the script it is the launcher's, after it the script's."""
    known = known_options().get(command.launcher)
    for option, _ in command.options if known is not None else ():
        if known is None or option in known or option.startswith("$"):
            continue
        near = difflib.get_close_matches(option, list(known), n=1, cutoff=0.75)
        fix = f"did you mean {near[0]}?" if near else f"put it behind {command.program or 'the script'}, or remove it"
        why = f"no option of {command.launcher}, which stops at it"
        yield _finding("unknown-option", "error", file, command, option, why, fix)


@check(
    "launch",
    Rule(
        "former-launcher",
        "script",
        "`python -m torch.distributed.launch`",
        "passes `--local-rank`, which newer scripts do not know",
    ),
)
def former_launcher(file: str, command: Command) -> Iterator[Finding]:
    """torch/distributed/launch.py says so itself."""
    if command.former:
        why = "python -m torch.distributed.launch is deprecated, and hands --local-rank to the script"
        yield _finding(
            "former-launcher", "warning", file, command, "", why, "use torchrun; the script reads LOCAL_RANK"
        )


def wrapped_classes(file: str, command: Command, model: ModelSpec | None) -> Iterator[Finding]:
    """The class that FSDP wraps, against the classes that the model has."""
    option = "fsdp_transformer_layer_cls_to_wrap"
    for why, fix in missing_classes(command.argument(option) or command.value(option), model):
        yield _finding("wrap-class", "error", file, command, f"--{option}", why, fix)


@check(
    "launch", Rule("fsdp-and-deepspeed", "script", "FSDP together with DeepSpeed", "refused, or one of them ignored")
)
def fsdp_and_deepspeed(file: str, command: Command) -> Iterator[Finding]:
    """The Trainer's --fsdp beside --deepspeed; accelerate/commands/launch.py takes one of its --use_… options."""
    both = command.argument("fsdp") and command.argument("deepspeed")
    given = {option.replace("-", "_") for option, _ in command.options}
    if both or {"__use_fsdp", "__use_deepspeed"} <= given:
        why = "FSDP and DeepSpeed both want to split the model: one run takes one of them"
        yield _finding("fsdp-and-deepspeed", "error", file, command, "", why, "keep one of them")


@check("launch")
def command_visible_devices(file: str, command: Command) -> Iterator[Finding]:
    """A rank takes the device of its local number, among those that CUDA_VISIBLE_DEVICES leaves."""
    launcher = next((launcher for launcher in LAUNCHERS if launcher.name == command.launcher), None)
    visible = command.value("gpu_ids") or command.visible
    started = number(command.value(launcher.processes)) if launcher is not None else None
    each = started // (1 if launcher is None or launcher.per_node else nodes_of(command)) if started else None
    if each and visible and re.fullmatch(r"[\d,]+", visible) and len(visible.strip(",").split(",")) < each:
        why = f"{visible} are visible, and {each} processes on a machine take one each"
        yield _finding("visible-devices", "error", file, command, "", why, "start as many processes as GPUs")


def nodes_of(command: Command) -> int:
    """Machines, where their number is written out; else one."""
    return number(command.value("nnodes", "num_nodes", "num_machines")) or 1


@check("launch")
def started_once(file: str, command: Command) -> Iterator[Finding]:
    """torch/distributed/run.py: ``--nproc-per-node`` is 1 unless given; a plain python starts one process too. Slurm
    and MPI start one in each of their tasks."""
    if command.in_tasks:
        return
    if command.launcher == "torchrun" and not command.opaque and command.value("nproc_per_node") is None:
        why = "without --nproc-per-node torchrun starts one process a node"
        yield _finding("one-process", "warning", file, command, "", why, "--nproc-per-node gpu, or the number of GPUs")
    if command.launcher == "python" and (named := command.argument("deepspeed", "deepspeed_config")):
        why = f"{named} and no launcher: one process, whatever the number of GPUs"
        fix = "start it by deepspeed, torchrun or accelerate launch"
        yield _finding("one-process", "warning", file, command, "", why, fix)


@check(
    "launch",
    Rule(
        "hostfile", "script", "the deepspeed launcher for several nodes without a hostfile", "uses this machine alone"
    ),
)
def machines_meet(file: str, command: Command) -> Iterator[Finding]:
    """Several machines need one address that all of them know, and a rank each."""
    nodes = number(command.value("nnodes", "num_nodes", "num_machines"))
    rank = number(command.value("node_rank", "machine_rank"))
    if nodes is not None and rank is not None and rank >= nodes:
        fix = f"ranks go from 0 to {nodes - 1}; each machine has its own"
        yield _finding("machine-rank", "error", file, command, "", f"rank {rank} of {nodes} machines", fix)
    if nodes is None or nodes < 2 or command.opaque:
        return
    if command.launcher == "torchrun" and not command.value("master_addr", "rdzv_endpoint"):
        why = f"{nodes} nodes and no address: each waits for the others at 127.0.0.1"
        fix = "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, the same on all, or --master-addr and --node-rank"
        yield _finding("main-process-ip", "error", file, command, "", why, fix)
    if command.launcher == "accelerate launch" and not command.value("main_process_ip", "config_file"):
        why = f"{nodes} machines and no main_process_ip: each waits for itself"
        yield _finding("main-process-ip", "error", file, command, "", why, "--main_process_ip HOST, the same on all")
    if command.launcher == "deepspeed" and not command.value("hostfile", "H", "include"):
        why = f"{nodes} nodes and no --hostfile: only /job/hostfile would be read, else this machine alone is used"
        yield _finding("hostfile", "warning", file, command, "", why, "--hostfile FILE, with name slots=8, one a line")


@check(
    "launch", Rule("chosen-twice", "script", "`--include` or `--exclude` beside a number of GPUs or nodes", "refused")
)
def chosen_twice(file: str, command: Command) -> Iterator[Finding]:
    """launcher/runner.py, main: a selection of hosts and GPUs beside a number of them is refused."""
    if command.launcher != "deepspeed" or not command.value("include", "exclude"):
        return
    for name in ("num_gpus", "num_nodes"):
        if command.value(name) is not None:
            why = f"--{name} beside --include or --exclude is refused"
            yield _finding("chosen-twice", "error", file, command, f"--{name}", why, "keep one of them")


@check(
    None,
    Rule("trainer-mismatch", "script", "an argument of the Trainer that contradicts its DeepSpeed file", "it stops"),
)
def contradicts_config(file: str, command: Command, config: Config) -> Iterator[Finding]:
    """The Trainer compares its arguments with the DeepSpeed file and stops (integrations/deepspeed.py)."""
    if command.argument("deepspeed") is None:
        return
    for name, dotted in TRAINER_KEYS.items():
        given, there = command.argument(name), config.get(dotted)
        if given is None or there in (None, AUTO):
            continue
        try:
            equal = float(given) == float(there)
        except (TypeError, ValueError):
            continue  # a variable, or a matter of another rule
        if not equal:
            why = f"--{name} {given}, and {dotted} is {there}: the Trainer stops at the difference"
            yield _finding("trainer-mismatch", "error", file, command, f"--{name}", why, f'write "auto" for {dotted}')
    for name, dotted in SWITCHES.items():
        there = config.get(dotted)
        asked = any(
            option in (f"--{name}", f"--{name}_full_eval") and str(value).lower() not in NO
            for option, value in command.arguments
        )
        if (there is True and not asked and not command.opaque) or (asked and there is False):
            why = f"{dotted} is {str(there).lower()}, and the command line says {'' if asked else 'not '}--{name}"
            fix = f'write "auto" for {dotted}, or say the same in both'
            yield _finding("trainer-mismatch", "error", file, command, f"--{name}", why, fix)


def processes(command: Command) -> int | None:
    """Ranks of all nodes, where the numbers are written out."""
    launcher = next((launcher for launcher in LAUNCHERS if launcher.name == command.launcher), None)
    if launcher is None:
        return 1  # plain python
    each = number(command.value(launcher.processes))
    return None if each is None else each * (nodes_of(command) if launcher.per_node else 1)


def _finding(rule: str, severity: Severity, file: str, command: Command, key: str, why: str, fix: str) -> Finding:
    return Finding(rule, severity, file, command.line, key, why, fix)
