"""Environment variables of the processes, each with its reason: bash lines for scripts, ``.deepspeed_env`` for the
``deepspeed`` launcher.

Without that file the launcher passes on only variables that begin with NCCL, PYTHON, UCX, MV2 or MLFLOW
(launcher/runner.py, 0.19.8).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import NamedTuple

import kit.emit.megatron
from kit.cost.hardware import generation_of, runs_rocm
from kit.planner.plan import Plan
from kit.specs.catalog.rows import rows

FLIGHT_RECORDS = "flight"
"""Folder in the run directory to which ranks dump torch's flight records when a collective times out."""
PASSED_ON = ("GLOO_SOCKET_IFNAME", "HF_HOME", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "PATH", "TORCH_EXTENSIONS_DIR")
"""A caller's own variables that other nodes need as well, if they are set."""


@dataclass(frozen=True)
class Variable:
    """An environment variable with its reason."""

    name: str
    value: str | None
    """None: ``launch.sh`` finds the value at start."""
    why: str
    if_file: bool = False
    """Whether the variable is set only if the file in its value exists."""


class Fabric(NamedTuple):
    """What the processes need of a row of ``fabrics.yaml``."""

    name: str
    title: str
    profile: str | None
    """A script on the host, sourced if it exists."""
    variables: tuple[Variable, ...]


def fabric_of(plan: Plan) -> Fabric | None:
    """Fabric of the plan's node type; None if unknown, as for a user's own cluster."""
    node = "cpu-host" if plan.cluster.gpu.device == "cpu" else plan.cluster.name
    for name, row in rows("fabrics").items():
        if node in row["nodes"]:
            variables = tuple(Variable(name=key, **value) for key, value in row["variables"].items())
            return Fabric(name, row["title"], row["profile"], variables)
    return None


def _variables(plan: Plan) -> tuple[Variable, ...]:
    """Variables of every process, in order, without the fabric's."""
    layout, on_gpus, several = plan.layout, plan.cluster.gpu.device == "cuda", plan.layout.world_size > 1
    rocm = runs_rocm(plan.cluster.gpu)
    chosen = (
        # torch 2.13: all attempts share one store (distributed/elastic/rendezvous/dynamic_rendezvous.py), and
        # distributed/rendezvous.py no longer separates their keys.
        (
            several,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "1",
            "ranks that torchrun starts again must not meet at the addresses of those that died",
        ),
        (
            not on_gpus,
            "OMP_NUM_THREADS",
            "1",
            "one thread a process: those of a rehearsal share a few cores",
        ),
        (
            on_gpus and kit.emit.megatron.applies(plan) and (layout.tp > 1 or layout.cp > 1),
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            "Megatron-LM asks for it where tensors or sequences are split; AMD's runtime does not read it"
            if rocm
            else "kernels start in the order they were issued, so that collectives overlap with the matmul before them",
        ),
        (
            on_gpus and not rocm,
            "PYTORCH_CUDA_ALLOC_CONF",
            "expandable_segments:True",
            "segments that grow in place fragment less when sequence lengths or stages differ",
        ),
        # Old names: torch 2.2 to 2.13 read them; TORCH_FR_* only newer ones.
        (
            on_gpus and several,
            "TORCH_NCCL_TRACE_BUFFER_SIZE",
            "2000",
            "the last 2,000 collectives of each rank are kept, so that a time-out names the rank that did not come",
        ),
        (on_gpus and several, "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "and written when a collective times out"),
    )
    every = tuple(Variable(name, value, why) for wanted, name, value, why in chosen if wanted)
    return every + (_amds(plan) if rocm else ())


def _amds(plan: Plan) -> tuple[Variable, ...]:
    """Variables of ``rocm.yaml`` for the plan's GPUs."""
    generation, several = generation_of(plan.cluster.gpu), plan.layout.world_size > 1
    return tuple(
        Variable(name, row["value"], row["why"])
        for name, row in rows("rocm").items()
        if generation in (row["generations"] or (generation,)) and (several or not row["several"])
    )


def assignments(plan: Plan) -> list[str]:
    """Bash lines that set each variable, below its reason. The caller's own values are kept."""
    fabric = _fabric(plan)
    lines = [line for variable in _variables(plan) for line in _assignment(variable)]
    if plan.cluster.gpu.device == "cuda" and plan.layout.world_size > 1:
        name = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
        lines += [f"mkdir -p {FLIGHT_RECORDS}", f'export {name}="${{{name}:-$PWD/{FLIGHT_RECORDS}/rank_}}"']
    if plan.cluster.gpu.device == "cuda" and {plan.layout.offload_optimizer, plan.layout.offload_param} != {"none"}:
        ranks = plan.layout.world_size // plan.cluster.num_nodes
        lines += [
            "# The optimizer steps on the host, on all of its cores; torchrun and accelerate set one thread a rank.",
            f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((($(nproc) + {ranks - 1}) / {ranks}))}}"',
        ]
    if fabric is None:
        unknown = (
            "# Fabric not known: NCCL looks for InfiniBand and RoCE by itself; docs/launch.md has what others need."
        )
        return [*lines, *[unknown] * (plan.cluster.num_nodes > 1)]
    lines.append(f"# Between nodes: {fabric.title}.")
    lines += [line for variable in fabric.variables if variable.value is not None for line in _assignment(variable)]
    if fabric.profile is not None:
        profile = shlex.quote(fabric.profile)
        lines += [
            "# The host's own settings; they belong to the version of the plugin that is installed there.",
            f"if [ -r {profile} ]; then set +u; source {profile}; set -u; else",
            f'  echo "warning: no {fabric.profile} on $(hostname): NCCL will use plain TCP" >&2',
            "fi",
        ]
    return lines


def interface_lines(plan: Plan) -> list[str]:
    """Bash lines that find the network interface to the other nodes. MASTER_ADDR must be set before them."""
    fabric = _fabric(plan)
    late = [v for v in fabric.variables if v.value is None] if fabric else []
    lines = [
        "# gloo takes the address that the host's own name stands for, on Debian 127.0.1.1: name the interface.",
        "kit_interface() {",
        '  local address; address="$(getent ahostsv4 "$1" | awk \'NR == 1 {print $1}\')"',
        "  # On node 0 itself the name may stand for 127.0.1.1, and its own address is reached over lo.",
        '  case "$address" in 127.*|"") address="$(hostname -I | awk \'{print $1}\')" ;; esac',
        "  ip -o -4 addr show | awk -v a=\"$address/\" 'index($4, a) == 1 {print $2; found = 1} END {exit !found}' ||",
        "    ip -o route get \"$address\" | sed -nE 's/.* dev ([^ ]+) .*/\\1/p'",
        "}",
        'if [ -z "${GLOO_SOCKET_IFNAME:-}" ] && command -v ip >/dev/null; then',
        '  GLOO_SOCKET_IFNAME="$(kit_interface "$MASTER_ADDR")"; export GLOO_SOCKET_IFNAME',
        "fi",
    ]
    for variable in late:
        lines += [f"# {_sentence(variable.why)}", f'export {variable.name}="${{{variable.name}:-$GLOO_SOCKET_IFNAME}}"']
    return lines


def deepspeed_env(plan: Plan) -> str:
    """Text of ``.deepspeed_env``: only NAME=value lines, since DeepSpeed fails at blank lines and exports comments."""
    chosen = (v for v in _all_variables(plan) if v.value is not None and not v.if_file)
    return "".join(f"{v.name}={v.value}\n" for v in chosen)


def names(plan: Plan) -> list[str]:
    """Names of the variables that a launcher must pass to the other nodes."""
    own = [v.name for v in _all_variables(plan)]
    if plan.cluster.gpu.device == "cuda" and plan.layout.world_size > 1:
        own.append("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return list(dict.fromkeys([*own, *PASSED_ON]))


def _all_variables(plan: Plan) -> tuple[Variable, ...]:
    fabric = _fabric(plan)
    return (*_variables(plan), *(fabric.variables if fabric else ()))


def _fabric(plan: Plan) -> Fabric | None:
    return fabric_of(plan) if plan.cluster.num_nodes > 1 else None


def _assignment(variable: Variable) -> list[str]:
    assert variable.value is not None
    name, value = variable.name, variable.value
    assert shlex.quote(value) == value, f"{name}={value}: bash would read it otherwise"
    line = f'export {name}="${{{name}:-{value}}}"'
    if variable.if_file:
        line = f"if [ -r {value} ]; then {line}; fi"
    return [f"# {_sentence(variable.why)}", line]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
