"""Emitted launch files on two and three hosts, beside one process: ``python -m tests.system.hosts [NAME…]``.

Hosts are namespaces on this machine (``tests/support/namespaces.py``), whose own names stand for 127.0.1.1 as on
Debian. Each case writes a run directory and its hostfile, launches it over ssh, and compares loss and gradient norm of
every step with one process of plain torch. Exit code 1 where a curve leaves its bound, 3 where this
machine cannot have hosts.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from kit.emit.run_directory import RunDirectory
from tests.support import ROOT, namespaces, runs
from tests.support.assets import RECIPE, prepare
from tests.support.program import Names, chosen, run
from tests.system.hosts.cases import CASES, COMMON, STEPS, Case, Launch, launched, nodes

LIMIT_S = 420
"""The first run of a fresh machine compiles DeepSpeed's operators."""
OPENMPI = {"mpirun": "openmpi-bin"}


def main(
    names: Names,
    plant: Annotated[bool, typer.Option("--plant", help="train with another rate: all comparisons must fail")] = False,
) -> int:
    """Enter namespaces, run, judge."""
    cases = chosen(names, CASES)
    programs = OPENMPI if any(case.name == "openmpi" for case in cases) else None

    def launches(_: object, root: Path, more: tuple[str, ...]) -> dict[str, Launch]:
        return {case.name: functools.partial(launch, case, root / case.name, more) for case in cases}

    ran = functools.partial(launched, ["node-0", "node-1", "node-2"], STEPS, plant, ("launch", "hosts"), launches)
    return namespaces.main("tests.system.hosts", ran, programs, before=prepare)


def launch(case: Case, directory: Path, more: tuple[str, ...]) -> tuple[RunDirectory, tuple[str, str]]:
    """Emit, write the hostfile, start over ssh, wait. Raises ``RunFailed``."""
    rundir = runs.emit(RECIPE, directory, [*COMMON, *case.overrides, nodes(directory, case.num_hosts), *more])
    names = [f"node-{number}" for number in range(case.num_hosts)]
    (directory / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names), encoding="utf-8")
    log = directory / "log.txt"
    some = enumerate(names if case.on_every_host else names[:1])
    processes = [start(name, case.script.format(rank=n, first=names[0]), directory, log) for n, name in some]
    if case.kill_rank_at_step is not None:
        _kill_a_worker(directory, case.kill_rank_at_step, processes)
    try:
        for process in processes:
            runs.wait(process, log, LIMIT_S)
    finally:
        for process in processes:  # the others of one that failed
            process.kill()
    return rundir, (case.title, str(case.num_hosts))


def start(host: str, script: str, directory: Path, log: Path, **more: str) -> subprocess.Popen[bytes]:
    """Run a script on a host by ssh, in a run directory. ``more``: further variables."""
    environment = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "TOKENIZERS_PARALLELISM": "false",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "DS_ACCELERATOR": "cpu",
        **more,
    }
    with log.open("ab") as stream:
        words = namespaces.remote(host, f"cd {directory} && {script}", environment)
        return subprocess.Popen(words, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)


def _kill_a_worker(directory: Path, step: int, processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGKILL to the newest worker of this run (one of a host that is not the first) once ``step`` is logged."""
    runs.wait_for_step(processes, directory, step, LIMIT_S)
    workers = [process for process in psutil.process_iter(["cmdline", "cwd"]) if _is_worker(process.info, directory)]
    if not workers:
        raise runs.RunFailed("no worker found to kill")
    workers[-1].kill()


def _is_worker(info: dict[str, Any], directory: Path) -> bool:
    program, *words = info["cmdline"] or [""]
    trains = "kit.training" in " ".join(words) and "torch.distributed.run" not in words
    return trains and info["cwd"] == str(directory) and "python" in Path(program).name


if __name__ == "__main__":
    run(main)
