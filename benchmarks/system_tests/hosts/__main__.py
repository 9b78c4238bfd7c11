"""Emitted launch files on two and three hosts, beside one process: ``python -m benchmarks.system_tests.hosts [NAME…]``.

Hosts are namespaces on this machine (``tests/support/namespaces.py``), whose own names stand for 127.0.1.1 as on
Debian. Each case writes a run directory and its hostfile, launches it over ssh, and compares loss and gradient norm of
every step with one process of plain torch. Exit code 1 where a curve leaves its bound, 3 where this
machine cannot have hosts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.page import ROOT, row, table
from benchmarks.system_tests.hosts.cases import BOUNDS, CASES, COMMON, REFERENCE, STEPS, Case, beside, nodes
from kit.emit.run_directory import RunDirectory
from tests.support import namespaces, runs
from tests.support.assets import RECIPE, prepare

LIMIT_S = 420
"""The first run of a fresh machine compiles DeepSpeed's operators."""
OPENMPI = {"mpirun": "openmpi-bin"}


def main() -> int:
    """Enter namespaces, run, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*(case.name for case in CASES), []], metavar="NAME")
    parser.add_argument("--plant", action="store_true", help="train with another rate: every comparison must fail")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if not arguments.names or case.name in arguments.names]
    programs = OPENMPI if any(case.name == "openmpi" for case in chosen) else None
    module = "benchmarks.system_tests.hosts"
    return namespaces.main(module, lambda: run(chosen, arguments.plant), programs, before=prepare)


def run(cases: list[Case], plant: bool) -> int:
    """All cases beside one reference; 0 where all agree, or with ``plant`` all differ."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kit-hosts-") as scratch, namespaces.hosts(["node-0", "node-1", "node-2"]):
        root = Path(scratch)
        reference = runs.emit(RECIPE, root / "reference", [*COMMON, *REFERENCE])
        runs.train(reference)
        heads = ("launch", "hosts", "steps", "largest difference of loss", "of gradient norm", "seconds")
        print(table(heads, []), flush=True)
        for case in cases:
            begin = time.monotonic()
            try:
                found = launch(case, root / case.name, ("job.learning_rate=6.1e-3",) if plant else ())
            except runs.RunFailed as error:
                print(f"FAILED {case.name}: {error}", flush=True)
                wrong += 1
                continue
            agree, worst = beside(reference, found, STEPS)
            wrong += agree == plant
            print(row((case.title, case.num_hosts, STEPS, *worst, f"{time.monotonic() - begin:.0f}")), flush=True)
    print(f"bounds {BOUNDS}; {len(cases)} launches, {wrong} {'agree in spite of the fault' if plant else 'wrong'}")
    return 1 if wrong else 0


def launch(case: Case, directory: Path, more: tuple[str, ...]) -> RunDirectory:
    """Emit, write the hostfile, start over ssh, wait. Raises ``RunFailed``."""
    rundir = runs.emit(RECIPE, directory, [*COMMON, *case.overrides, nodes(directory, case.num_hosts), *more])
    names = [f"node-{number}" for number in range(case.num_hosts)]
    (directory / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names), encoding="utf-8")
    log = directory / "log.txt"
    processes = [
        _start(name, case.script.format(rank=number, first=names[0]), directory, log)
        for number, name in enumerate(names)
        if case.on_every_host or number == 0
    ]
    if case.kill_rank_at_step is not None:
        _kill_a_worker(directory, case.kill_rank_at_step, processes)
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        try:
            code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            for other in processes:
                other.kill()
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise runs.RunFailed(f"{'no end' if code is None else f'exit code {code}'}:\n" + "\n".join(lines[-40:]))
    return rundir


def _start(host: str, script: str, directory: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "TOKENIZERS_PARALLELISM": "false",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "DS_ACCELERATOR": "cpu",
    }
    with log.open("ab") as stream:
        words = namespaces.remote(host, f"cd {directory} && {script}", environment)
        return subprocess.Popen(words, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)


def _kill_a_worker(directory: Path, step: int, processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGKILL to the newest worker of this run (one of a host that is not the first) once ``step`` is logged."""
    runs.wait_for_step(processes, directory, step, LIMIT_S)
    workers = [process for process in psutil.process_iter(["cmdline"]) if _is_worker(process, directory)]
    if not workers:
        raise runs.RunFailed("no worker found to kill")
    workers[-1].kill()


def _is_worker(process: psutil.Process, directory: Path) -> bool:
    words = process.info["cmdline"] or []
    started = words[1:] if words else []
    if "torch.distributed.run" in started or "kit.training" not in " ".join(started):
        return False
    try:
        return process.cwd() == str(directory) and "python" in Path(words[0]).name
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main())
