"""Every promise of a plan that one GPU can check, in a given number of minutes. Run it by ``benchmarks/gpu/run.sh``.

Each row is a process of its own with a time limit of its own: what fails, hangs, runs out of memory or is not installed
is a row that says so. What the time is not enough for is skipped by name. Results are written after every row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.gpu import devices
from benchmarks.gpu.cases import CASES
from benchmarks.gpu.machine import describe, gpu_id
from benchmarks.gpu.page import page
from benchmarks.gpu.peers import PEERS
from kit.rehearsal.processes import kill
from tests.support import ROOT, program

LEAST_S = 15.0
"""What starts and imports takes about as long: a row is not begun with less."""
PEER_LIMIT_S = 150.0
CURVES_LIMIT_S = 120.0
CURVES = 4
"""Rows of the comparison of devices: the reference, and each engine."""
OPS_LIMIT_S = 240.0
DOCTOR_LIMIT_S = 60.0
LOG_LINES = 30
"""Of a row that failed."""
CPU_PATIENCE = 3.0
"""Limits are a GPU machine's; a CPU dry run shares two cores with whatever else runs there."""


@dataclass(frozen=True)
class Job:
    """One row to be."""

    section: str
    name: str
    spec: dict[str, Any]
    limit_s: float


@dataclass
class Run:
    """Rows so far, and the time that is left."""

    device: str
    scratch: Path
    deadline: float
    out: Path
    result: dict[str, Any] = field(default_factory=dict)

    def row(self, job: Job, index: int) -> dict[str, Any]:
        """Start a worker, wait, and say how it went."""
        left = self.deadline - time.monotonic()
        if left < LEAST_S:
            return {"name": job.name, "status": "skipped", "why": "no time left; give more --minutes"}
        here = self.scratch / f"{index:02d}"
        here.mkdir()
        out = here / "row.json"
        spec = {**job.spec, "device": self.device, "scratch": str(here), "out": str(out)}
        (here / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        began = time.monotonic()
        limit_s = min(left, job.limit_s * (CPU_PATIENCE if self.device == "cpu" else 1.0))
        row = self._outcome(here, out, limit_s)
        return {"name": job.name, **row, "seconds": round(time.monotonic() - began, 1)}

    def _outcome(self, here: Path, out: Path, limit_s: float) -> dict[str, Any]:
        with (here / "log.txt").open("wb") as log:
            command = [sys.executable, "-m", "benchmarks.gpu.worker", str(here / "spec.json")]
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, env=environment(self.device), start_new_session=True
            )
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return {"status": "too slow", "why": f"no end within {limit_s:.0f} s"}
            finally:
                if process.poll() is None:  # too slow, or this program is asked to end: its GPU must be free again
                    kill(process)
        row = dict(json.loads(out.read_text(encoding="utf-8"))) if out.exists() else {"status": "failed"}
        if row["status"] == "failed":  # on a machine that is given back, this is all that remains of it
            print("\n".join((here / "log.txt").read_text(errors="replace").splitlines()[-LOG_LINES:]))
        if out.exists():
            return row
        why = f"killed by signal {-code}; 9 is how Linux ends what takes too much host memory" if code < 0 else "died"
        return row | {"why": f"exit code {code}: {why}"}

    def save(self) -> None:
        """JSON and Markdown, each replaced whole."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((".json", json.dumps(self.result, indent=1) + "\n"), (".md", page(self.result))):
            attempt = self.out.with_suffix(f"{suffix}.tmp")
            attempt.write_text(text, encoding="utf-8")
            attempt.replace(self.out.with_suffix(suffix))


def main(
    device: Literal["cuda", "cpu"] = "cuda",
    minutes: Annotated[float, typer.Option(help="time for everything")] = 8.0,
    only: Annotated[str, typer.Option(help="rows whose `section: name` contains this")] = "",
    without: Annotated[list[str] | None, typer.Option(help="not these; may be given more than once")] = None,
    add: Annotated[
        bool, typer.Option("--add", help="go on with the results that are there: keep rows that are ok")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="where results go, without suffix")] = None,
    scratch: Annotated[Path | None, typer.Option(help="a directory on the disk to be measured (40 GiB)")] = None,
) -> int:
    """0 where devices agree and nothing failed that was begun; rows without memory or time are no failures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    part = describe(device) | {"minutes": minutes, "only": only, "without": without or [], "seconds": 0.0, "doctor": ""}
    if device == "cuda" and part["hardware"] is None:
        raise _refused("torch sees no CUDA device; use --device cpu for a dry run with tiny shapes")
    out = (out or ROOT / "benchmarks" / "results" / f"gpu-{device}-{part['date'][:10]}").with_suffix("")
    with tempfile.TemporaryDirectory(prefix="kit-gpu-", dir=scratch) as directory:
        run = Run(device, Path(directory), began + 60 * minutes, out)
        run.result = kept(out.with_suffix(".json"), part) if add else {"parts": [], "rows": {}}
        run.result["parts"].append(part)
        part["doctor"] = doctor()
        for index, job in enumerate(jobs(device, Path(directory))):
            title = f"{job.section}: {job.name}"
            if only not in title or any(word in title for word in part["without"]):
                continue
            rows = run.result["rows"].setdefault(job.section, [])
            if any(row["name"] == job.name for row in rows):
                continue
            row = run.row(job, index) | {"part": len(run.result["parts"])}
            rows.append(row)
            if job.spec["kind"] == "curves":
                _compare(run, job, row)
            print(f"{job.section}: {_line(row)}", flush=True)
            part["seconds"] = round(time.monotonic() - began, 1)
            run.save()
        in_order(run.result["rows"])
        run.save()
    print(f"{part['seconds']} s; {out.name}.json and .md")
    rows = [row for section in run.result["rows"].values() for row in section]
    bad = [row["name"] for row in rows if row["status"] == "failed" or row.get("agrees") is False]
    print(f"failed: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


def kept(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Parts and rows of an earlier run of the same commit and hardware, only rows that are ok; comparisons of devices
    only when all are there, as the reference is not kept."""
    if not file.exists():
        return {"parts": [], "rows": {}}
    earlier: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if about["changed"]:
        raise _refused(
            f"--add: tracked files differ from commit {about['commit']}, so rows cannot be of one version; commit"
        )
    keys = ("commit", "changed", "hardware", "device")
    for key, value in {(key, str(part.get(key))) for part in earlier["parts"] for key in keys}:
        if value != str(about[key]):
            raise _refused(f"--add: {file.name} has {key}={value}, this is {about[key]}; give another --out")
    rows = {section: [row for row in some if row["status"] == "ok"] for section, some in earlier["rows"].items()}
    if len(rows.get("devices", [])) < CURVES:
        rows.pop("devices", None)
    return {"parts": earlier["parts"], "rows": rows}


def _refused(why: str) -> SystemExit:
    print(f"error: {why}", file=sys.stderr)
    return SystemExit(2)


def in_order(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Cases and peers as their lists have them, whatever part they are of."""
    order = [*(case.name for case in CASES), *PEERS]
    for section in ("predicted", "side by side"):
        rows.get(section, []).sort(key=lambda row: order.index(row["name"]))


def jobs(device: str, scratch: Path) -> list[Job]:
    """What users ask first comes first: peaks, the recipe by each engine, peers, parity; then all other cases."""
    peers = [Job("side by side", name, {"kind": "peer", "name": name}, PEER_LIMIT_S) for name in PEERS]
    ops = Job("compiled ops", "DeepSpeed's ops", {"kind": "ops"}, OPS_LIMIT_S)
    cases = [Job("predicted", case.name, {"kind": "case", "name": case.name}, case.limit_s) for case in CASES]
    return [
        Job("peaks", "peaks", {"kind": "peaks", "name": "peaks"}, 60.0),
        *cases[:1],
        ops,
        *cases[1:5],
        *peers[:4],
        *_curves(device, scratch),
        *cases[5:16],
        *peers[4:],
        *cases[16:],
    ]


def _curves(device: str, scratch: Path) -> Iterator[Job]:
    """The first is the reference of the others."""
    runs = (("reference", "torch", "cpu"), *((engine, engine, device) for engine in ("torch", "deepspeed", "megatron")))
    for folder, engine, on in runs:
        name = f"{engine} on {on}" + (", the reference" if folder == "reference" else "")
        spec = {"kind": "curves", "engine": engine, "on": on, "curves": str(scratch / "curves" / folder)}
        yield Job("devices", name, spec, CURVES_LIMIT_S)


def _compare(run: Run, job: Job, row: dict[str, Any]) -> None:
    """Rows of agreement beside the run that made the curves."""
    place, reference = Path(job.spec["curves"]), run.scratch / "curves" / "reference"
    if row["status"] != "ok" or place == reference:
        return
    if lacking := devices.missing(reference, place):
        row |= {"status": "skipped", "why": f"the reference on the CPU is missing: {', '.join(lacking)}"}
        return
    row["compared"] = devices.agreement(reference, place, run.device)
    row["agrees"] = all(one["agrees"] for one in row["compared"])


def doctor() -> str:
    """What ``kit doctor`` says of this machine, where this version looks at machines."""
    command = [sys.executable, "-m", "kit", "doctor"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCTOR_LIMIT_S, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return f"kit doctor: no end within {DOCTOR_LIMIT_S:g} s"
    return (done.stdout + done.stderr).strip()


def environment(device: str) -> dict[str, str]:
    """Environment of kit's runs and of its peers': what kit's launch.sh sets on a GPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # One GPU: of several that are visible, Hugging Face's Trainer takes all.
    gpu = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": gpu_id()}
    own = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    return {**os.environ, **own, **(gpu if device == "cuda" else {"OMP_NUM_THREADS": "1"})}


def _line(row: dict[str, Any]) -> str:
    words = {"measured_step_s": "{:.4g} s a step", "mfu": "MFU {:.1%}", "memory_ratio": "memory {:.3f} × predicted"}
    told = [form.format(row[key]) for key, form in words.items() if row.get(key)]
    return ", ".join(filter(None, [row["name"], row["status"], *told, row.get("why")]))


if __name__ == "__main__":
    program.run(main)
