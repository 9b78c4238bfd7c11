"""What is launched on several hosts: the emitted files of one tiny recipe, each launcher as a person would use it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.emit.run_directory import RunDirectory
from tests.support import namespaces, runs
from tests.support.assets import RECIPE
from tests.support.compare import compare_runs
from tests.support.files import file_with
from tests.support.page import row, table

STEPS = 8
BOUNDS = {"loss": 1e-5, "grad_norm": 1e-3}
"""Relative, at each of the first steps in fp32: the order of sums differs, nothing else. Adam begins by signs, which
amplifies it in the norm."""
COMMON = (
    f"run.steps={STEPS}",
    "run.checkpoint.every_steps=4",
    "run.logging.gradients_at_steps=[]",
    "job.global_batch_size=12",
    "layout.micro_batch_size=2",
)
"""Twelve sequences a step: as many for one process as for two or three."""
ZERO2 = ("layout.engine=deepspeed", "layout.zero_stage=2")
ZERO3 = ("layout.engine=deepspeed", "layout.zero_stage=3")
TORCH = ("layout.engine=torch",)
MEGATRON_TP = ("layout.engine=megatron", "layout.tp=2", "layout.sp=true")


@dataclass(frozen=True)
class Case:
    """A launch: what is run on the first host (``first``), or on every one."""

    name: str
    title: str
    num_hosts: int
    overrides: tuple[str, ...]
    script: str
    """With ``{rank}`` and ``{first}``, the name of host 0; in the run directory."""
    on_every_host: bool
    kill_rank_at_step: int | None = None
    """``kill -9`` of a worker on the last host at this step: the launcher must begin again and resume."""


def nodes(directory: Path, number: int) -> str:
    """The override that plans for so many nodes of one process; their file lies beside the run directory."""
    cluster = file_with(
        directory.with_suffix(".yaml"),
        f"node: 1xcpu\nnum_nodes: {number}\ngpus_per_node: 1\ninter_node_gbytes_per_s: 1\n",
    )
    return f"cluster={cluster}"


Launch = Callable[[], tuple[RunDirectory, Sequence[str]]]
"""Starts and waits; a run directory and the cells that say what it was."""


def launched(
    names: Sequence[str], steps: int, plant: bool, heads: Sequence[str], launches: Callable[..., Mapping[str, Launch]]
) -> int:
    """``launches`` of hosts of these names, a directory and further words for recipes, beside one process of plain
    torch: 0 where all agree, or with ``plant``, another learning rate, all differ."""
    more = ("job.learning_rate=6.1e-3",) if plant else ()
    with tempfile.TemporaryDirectory(prefix="kit-hosts-") as scratch, namespaces.hosts(names) as hosts:
        root = Path(scratch)
        reference = runs.emit(RECIPE, root / "reference", [*COMMON, f"run.steps={steps}", *TORCH])
        return 1 if beside(reference, launches(hosts, root, more), heads, steps, plant) else 0


def beside(
    reference: RunDirectory, launches: Mapping[str, Launch], heads: Sequence[str], steps: int, plant: bool = False
) -> int:
    """Train the reference, launch everything else, print a line each: the cells that come with a run directory, and how
    far loss and gradient norm of its first steps are off. Returns how many are wrong: those that fail or leave their
    bounds, or with ``plant`` those that keep within them."""
    runs.train(reference)
    wrong = 0
    print(table((*heads, "steps", "largest difference of loss", "of gradient norm", "seconds"), []), flush=True)
    for name, launch in launches.items():
        begin = time.monotonic()
        try:
            found, cells = launch()
        except (runs.RunFailed, RuntimeError) as error:
            print(f"FAILED {name}: {error}", flush=True)
            wrong += 1
            continue
        curves = compare_runs(runs.metrics(reference), runs.metrics(found), range(1, steps + 1))
        errors = {key: curve.worst_relative_error for key, curve in curves.items()}
        wrong += all(errors[key] <= BOUNDS[key] for key in BOUNDS) == plant
        figures = (f"{error:.1e}" for error in errors.values())
        print(row((*cells, steps, *figures, f"{time.monotonic() - begin:.0f}")), flush=True)
    print(f"bounds {BOUNDS}; {len(launches)} launches, {wrong} {'agree in spite of the fault' if plant else 'wrong'}")
    return wrong


_STATIC = "NODE_RANK={rank} MASTER_ADDR={first} ./launch.sh"
_ELASTIC = "RDZV_ENDPOINT={first}:29600 ./launch_elastic.sh"
CASES = (
    Case("pdsh", "deepspeed over a hostfile, pdsh: ZeRO-2", 2, ZERO2, "./launch_hosts.sh", False),
    Case(
        "openmpi", "deepspeed over a hostfile, OpenMPI: ZeRO-2", 2, ZERO2, "LAUNCHER=openmpi ./launch_hosts.sh", False
    ),
    Case(
        "no-ssh",
        "deepspeed on each host, no ssh: ZeRO-2",
        2,
        ZERO2,
        "LAUNCHER=no-ssh NODE_RANK={rank} ./launch_hosts.sh",
        True,
    ),
    Case("accelerate", "accelerate launch with machine ranks: ZeRO-3", 3, ZERO3, _STATIC, True),
    Case("static", "torchrun, static, by pdsh: Megatron TP 2 + SP", 2, MEGATRON_TP, "./launch_hosts.sh", False),
    Case("c10d", "torchrun, c10d rendezvous: DDP", 3, TORCH, _ELASTIC, True),
    Case("restart", "the same, a worker killed at step 5: restarted, resumed", 2, TORCH, _ELASTIC, True, 5),
)
