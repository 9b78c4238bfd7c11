"""``kit doctor --hosts`` over three hosts, each fault planted on one: ``python -m tests.system.preflight
[NAME…]``.

Hosts are namespaces (``tests/support/namespaces.py``). First nothing is wrong and nothing may be said; then one host
at a time differs, really: another version of a package lies over its metadata, another file over the data, a route
is cut, a port is taken, /dev/shm is small, sshd hangs. ``--bandwidth`` measures too. Exit code 1 where a fault
is not named on its host, 3 without namespaces.
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from kit.addons.doctor.machines.remote import SOCKETS
from kit.emit.run_directory import RunDirectory
from tests.support import ROOT, namespaces, runs
from tests.support.assets import RECIPE
from tests.support.files import files_in
from tests.support.page import row, table
from tests.support.program import Names, chosen, run

LIMIT_S = 60
LONGEST_S = 30
"""What the doctor promises without the bandwidth part."""


@dataclass(frozen=True)
class Fault:
    """What is done to a host, and what must be said of it."""

    name: str
    script: str
    """Run on the host; ``{scratch}``, ``{data}``, ``{metadata}``."""
    check: str
    says: str
    undo: str
    host: int = 1


_LISTEN = "sleep 60 | {python} {sockets} listen 29500 60 >/dev/null 2>&1 & echo $! > {scratch}/pid"
FAULTS = (
    Fault("version", "mount --bind {scratch}/METADATA {metadata}", "versions", "9.9.9", "umount {metadata}"),
    Fault(
        "content", "mount --bind {scratch}/other.bin {data}.bin", "contents", "train.bin differs", "umount {data}.bin"
    ),
    Fault("missing", "mount -t tmpfs tmpfs {scratch}/run", "shared-files", "not the same", "umount {scratch}/run"),
    Fault(
        "cut", "ip route add unreachable {first}", "reach", "cannot reach node-0", "ip route del unreachable {first}"
    ),
    Fault("port", _LISTEN, "port", "is taken", "kill $(cat {scratch}/pid)"),
    Fault("shm", "mount -o remount,size=8m /dev/shm", "shm", "0.01 GiB free", "mount -o remount,size=1200m /dev/shm"),
    Fault("name", "mount --bind {scratch}/alone /etc/hosts", "names", "does not know", "umount /etc/hosts", host=2),
    Fault("clock", "mount --bind {scratch}/ahead.pth {pth}", "clock", "s ahead", "umount {pth}", host=2),
    Fault("ssh", "", "ssh", "timed out", "", host=2),
)
"""Namespaces share the machine's clock, so it is the interpreter's that is ahead; the last has no script: its sshd is
stopped from outside."""


def main(names: Names, bandwidth: Annotated[bool, typer.Option("--bandwidth")] = False) -> int:
    """Enter namespaces, plant, ask."""
    some = chosen(names, FAULTS)
    return namespaces.main("tests.system.preflight", lambda: plant_all(some, bandwidth))


def plant_all(faults: Sequence[Fault], bandwidth: bool) -> int:
    """Plant one after the other; 0 where the doctor named each on its host, and nothing where nothing was wrong."""
    names = ["node-0", "node-1", "node-2"]
    with tempfile.TemporaryDirectory(prefix="kit-preflight-") as scratch, namespaces.hosts(names) as hosts:
        root = Path(scratch)
        rundir = _prepare(root)
        failures, seconds = _failures(root, rundir)
        wrong = int(bool(failures) or (len(faults) == len(FAULTS) and seconds > LONGEST_S))
        print(table(("planted", "named", "on", "seconds"), [("nothing", failures or "nothing", "–", f"{seconds:.1f}")]))
        for fault in faults:
            host = hosts[fault.host]
            _do(host, fault.script, root, hosts[0].address)
            try:
                failures, seconds = _failures(root, rundir)
            finally:
                _do(host, fault.undo, root, hosts[0].address)
            by_check = [each for each in failures if each["check"] == fault.check and host.name in each["hosts"]]
            right = [f"{fault.check}: {each['said']}" for each in by_check if fault.says in each["said"]]
            wrong += not right
            told = (right[0], host.name) if right else (f"MISSED; failures: {failures}", "")
            print(row((fault.name, *told, f"{seconds:.1f}")), flush=True)
        if bandwidth:
            found, seconds = ask(root, rundir, "--bandwidth")
            ends = ("bandwidth", "speed", "nvme", "copy")
            told = [f"{each['check']}: {each['said']}" for each in found if each["check"].endswith(ends)]
            print("\n".join([*told, f"bandwidth part and all: {seconds:.0f} s"]))
            measured = [line.split(":")[0] for line in told if "all_reduce" in line and "all_gather" in line]
            wrong += len({"node-bandwidth", "fabric-bandwidth"} - {*measured})
    print(f"{len(faults)} faults, {wrong} wrong")
    return 1 if wrong else 0


def _failures(root: Path, rundir: RunDirectory) -> tuple[list[dict[str, Any]], float]:
    found, seconds = ask(root, rundir)
    return [each for each in found if each["state"] == "failure"], seconds


def ask(root: Path, rundir: RunDirectory, *words: str) -> tuple[list[dict[str, Any]], float]:
    """``kit doctor --hosts … --plan … --json`` → its rows, and how long it took."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "kit", "doctor", "--hosts", str(root / "hostfile"), "--plan", str(rundir.path)]
    limit_s, environment = LIMIT_S * (4 if words else 1), {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--json", *words], capture_output=True, text=True, timeout=limit_s, env=environment, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    return list(json.loads(done.stdout)), time.monotonic() - begin


def _prepare(root: Path) -> RunDirectory:
    """A run of three nodes with its data, a hostfile, and what will be laid over files of a host."""
    # A host's Python reads such files as it starts, in some environments twice.
    ahead = "import time; time.own = getattr(time, 'own', time.time); time.time = lambda own=time.own: own() + 400\n"
    version = f"\nVersion: {importlib.metadata.version('transformers')}"
    files_in(root, {
        "hostfile": "".join(f"node-{n} slots=2\n" for n in range(3)),
        "train.bin": b"tokens" * 1000, "train.idx": b"index", "other.bin": b"tokenz" * 1000,
        "alone": "127.0.0.1 localhost\n10.77.0.3 node-2\n",
        "ahead.pth": f"{_pth().read_text(encoding='utf-8')}\n{ahead}",
        "METADATA": _metadata().read_text(encoding="utf-8").replace(version, "\nVersion: 9.9.9", 1),
        "cluster.yaml": "node: 2xcpu\nnum_nodes: 3\ngpus_per_node: 2\ninter_node_gbytes_per_s: 1\n",
    })  # fmt: skip
    layout = ("layout.engine=deepspeed", "layout.zero_stage=2", "layout.micro_batch_size=2", "job.global_batch_size=12")
    data = (f"run.data.train={root / 'train'}", "run.data.validation=null", "run.model_path=null")
    return runs.emit(RECIPE, root / "run", [f"cluster={root / 'cluster.yaml'}", *layout, *data])


def _metadata() -> Path:
    files = importlib.metadata.files("transformers") or []
    return next(Path(str(file.locate())) for file in files if file.name == "METADATA")


def _pth() -> Path:
    return next(Path(file) for folder in site.getsitepackages() for file in sorted(glob.glob(f"{folder}/*.pth")))


def _do(host: namespaces.Host, script: str, root: Path, first: str) -> None:
    if not script:  # process 1 of a namespace hears no SIGSTOP from inside
        stopped = psutil.Process(host.pid).status() == psutil.STATUS_STOPPED
        os.kill(host.pid, signal.SIGCONT if stopped else signal.SIGSTOP)
        return
    words = script.format(
        scratch=root,
        data=root / "train",
        metadata=_metadata(),
        pth=_pth(),
        first=first,
        python=sys.executable,
        sockets=SOCKETS,
    )
    subprocess.run(host.command(["bash", "-c", words]), check=True, timeout=20)


if __name__ == "__main__":
    run(main)
