"""Elastic launch on hosts as namespaces: ``python -m tests.system.hosts.elastic [NAME…]``.

Three hosts run ``launch_elastic.sh`` with ``MIN_NODES``. The last one is killed, the run goes on with fewer, the host
returns, and the run grows again. ``spare``: a third host waits beside a plan of two, and takes the place of the one
that is killed. Loss and gradient norm of every step stand beside one process of plain torch that nothing disturbed.
Exit code 1 where a curve leaves its bound, or the run has other sizes; 3 where this machine cannot have hosts.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer

from kit.emit.run_directory import RunDirectory
from tests.support import ROOT, namespaces, runs
from tests.support.assets import RECIPE, prepare
from tests.support.program import Names, chosen, run
from tests.system.hosts.__main__ import start
from tests.system.hosts.cases import COMMON, TORCH, ZERO2, Launch, launched, nodes

HOSTS = ("node-0", "node-1", "node-2", "node-3")
STEPS = 20
KILLED_AT, RETURNS_AT = 6, 9
LIMIT_S = 400
SLOW = Path(__file__).parents[1] / "slurm" / "slow"
SLOW_STEP_S = 2.0
"""Sleep at each step: a host needs several steps to return."""


@dataclass(frozen=True)
class Case:
    """An elastic run, and the sizes that it must have, in order."""

    name: str
    title: str
    overrides: tuple[str, ...]
    planned: int
    least: int
    killed: int
    """Number of the host that is killed."""
    returns: bool
    sizes: tuple[int, ...]
    spares: int = 0


BY_THREES = (*TORCH, "layout.micro_batch_size=3")
CASES = (
    Case("ddp", "DDP: killed, returned", TORCH, 3, 1, 2, True, (3, 2, 3)),
    Case("zero2", "ZeRO-2: killed, returned", ZERO2, 3, 1, 2, True, (3, 2, 3)),
    Case("megatron", "Megatron: killed, returned", ("layout.engine=megatron",), 3, 1, 2, True, (3, 2, 3)),
    Case("surplus", "DDP, no layout for three: killed, returned", BY_THREES, 4, 1, 3, True, (4, 2, 4)),
    Case("spare", "DDP, plan of two, three started: killed", TORCH, 2, 1, 1, False, (2, 2), 1),
)


def main(
    names: Names,
    plant: Annotated[bool, typer.Option("--plant", help="train with another rate: all comparisons must fail")] = False,
) -> int:
    """Enter namespaces, run, judge."""
    cases = chosen(names, CASES)

    def launches(hosts: Sequence[namespaces.Host], root: Path, more: tuple[str, ...]) -> dict[str, Launch]:
        return {case.name: functools.partial(launch, case, root / case.name, hosts, more) for case in cases}

    ran = functools.partial(launched, HOSTS, STEPS, plant, ("elastic run", "nodes"), launches)
    return namespaces.main("tests.system.hosts.elastic", ran, before=prepare)


def launch(
    case: Case, directory: Path, hosts: Sequence[namespaces.Host], more: Sequence[str]
) -> tuple[RunDirectory, Sequence[str]]:
    """Emit, start on every host, kill one, let it return, wait. Raises ``RunFailed``."""
    overrides = [*COMMON, f"run.steps={STEPS}", *case.overrides, nodes(directory, case.planned), *more]
    rundir, log = runs.emit(RECIPE, directory, overrides), directory / "log.txt"

    def begin(number: int) -> subprocess.Popen[bytes]:
        script = f"MIN_NODES={case.least} RDZV_ENDPOINT={HOSTS[0]}:29600 ./launch_elastic.sh"
        more = {"PYTHONPATH": f"{SLOW}:{ROOT}", "KIT_SLOW_STEP_S": str(SLOW_STEP_S)}
        return start(HOSTS[number], script, directory, log, **more)

    processes = {number: begin(number) for number in range(case.planned)}
    try:
        runs.wait_for_step([*processes.values()], directory, 1, LIMIT_S)
        processes |= {number: begin(number) for number in range(case.planned, case.planned + case.spares)}
        runs.wait_for_step([*processes.values()], directory, KILLED_AT, LIMIT_S)
        kill_all(hosts[case.killed].pid)
        processes.pop(case.killed).wait()
        if case.returns:
            runs.wait_for_step([*processes.values()], directory, RETURNS_AT, LIMIT_S)
            processes[case.killed] = begin(case.killed)
        for process in processes.values():
            runs.wait(process, log, LIMIT_S)
    finally:
        for process in processes.values():
            process.kill()
    sizes = tuple(map(int, re.findall(r"elastic: (\d+) nodes", log.read_text(encoding="utf-8", errors="replace"))))
    if sizes != case.sizes:
        raise runs.RunFailed(f"{case.name} ran on {sizes} nodes, not on {case.sizes}")
    return rundir, (case.title, ", ".join(map(str, sizes)))


def kill_all(pid: int) -> None:
    """SIGKILL to every process of a host but sshd, whose first one is ``pid``."""
    host = os.stat(f"/proc/{pid}/ns/pid").st_ino
    for process in psutil.process_iter(["name"]):
        try:
            if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == host and process.info["name"] != "sshd":
                process.kill()
        except (OSError, psutil.Error):
            continue


if __name__ == "__main__":
    run(main)
