"""Every proof by its name: what it shows, how long it takes on two cores, and what it needs.

    make prove                      the list
    make prove NAME=...             runs one

A proof is one or more commands; the first that fails ends it with its exit code. Each command takes options of its
own, which ``--help`` prints.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

OPS = "make prove NAME=ops"
TRACKERS = "pip install wandb mlflow trackio"
HOSTS = "root"
SLURM = "root, slurm-wlm, munge"
PYTHON311, PYTHON312 = (f"PYTHON=python{each}, and 10 GB of disk for torch's CUDA build" for each in ("3.11", "3.12"))


@dataclass(frozen=True)
class Proof:
    """Commands in bash, and what a person should know before starting them."""

    shows: str
    minutes: float
    commands: tuple[str, ...]
    needs: str = ""
    """What must be there before: root, compiled operators, packages."""


def _proof(shows: str, minutes: float, *commands: str, needs: str = "") -> Proof:
    return Proof(shows, minutes, tuple(f"python -m {command}" for command in commands), needs)


_PARITY, _REHEARSALS = "tests.system.parity", "tests.system.rehearsals"
PROOFS: dict[str, Proof] = {
    "demo": _proof(
        "the main job end to end: plan, three engines, a kill, a change of engine, export, a planted fault",
        4, "tests.system.demo",
    ),
    "lint-corpus": _proof(
        "lint on 167 public files against what their own readers say: precision and recall", 0.1,
        "pytest -q -s tests/addons/test_lint_corpus.py",
    ),
    "doctor-corpus": _proof(
        "the doctor on log lines of 210 public threads, a part of them held out: causes named first, false alarms",
        0.1, "pytest -q -s tests/addons/test_log_corpus.py",
    ),
    "invariants": _proof(
        "the planner's own invariants on 1,000 random questions: sums, pins, memory, MFU, time to answer, lint", 15,
        "tests.planning.test_invariants",
    ),
    "cloud-targets": _proof(
        "files of every recipe for Kubernetes and SkyPilot, accepted by Kubeflow's and SkyPilot's own parsers", 4,
        "tests.system.cloud_targets",
        "tests.system.cloud_targets --plant",
    ),
    "other-trainers": _proof(
        "files of the plans for axolotl, LLaMA-Factory, ms-swift, torchtitan, accelerate, verl and OpenRLHF, read by "
        "their own parsers",
        5, "tests.system.other_trainers",
        "tests.system.other_trainers --plant",
    ),
    "examples": _proof(
        "people's own scripts (Accelerator, Trainer, TRL) launched under kit's files", 10,
        "tests.system.examples",
    ),
    "parity": _proof(
        "layouts of every kind, launched, against plain torch; then planted faults", 6,
        _PARITY, f"{_PARITY} --plant-all",
    ),
    "parity-deepspeed": _proof(
        "DeepSpeed's layouts, changes of layout and faults beside plain torch", 10,
        "tests.deepspeed.test_parity", needs=OPS,
    ),
    "parity-megatron": _proof(
        "families × layouts of Megatron-core, and faults, beside transformers", 25, "tests.megatron.test_parity"
    ),
    "versions-oldest": _proof(
        "make test with the oldest versions of pyproject.toml's ranges, in .venv-oldest; writes docs/versions.md", 15,
        "tests.system.versions oldest", needs=PYTHON311,
    ),
    "versions-next": _proof(
        "the same with a torch newer than CI's, on CI's Python", 15, "tests.system.versions next", needs=PYTHON311
    ),
    "versions-newest": _proof(
        "the same with the newest versions, on the Python that megatron-core's newest needs", 20,
        "tests.system.versions newest", needs=PYTHON312,
    ),
    "parity-all": _proof(
        "launchers and changes of engine (relay), then both tables above", 42,
        f"{_PARITY} --changes", "tests.support.proofs parity-deepspeed", "tests.support.proofs parity-megatron",
        needs=OPS,
    ),
    "rehearse": _proof("one recipe in small, another one every day", 2, f"{_REHEARSALS} --rotate 1 --no-write"),
    "rehearse-faults": _proof("faults planted into rehearsals of each engine", 10, f"{_REHEARSALS} --plant-all"),
    "rehearse-all": _proof("every recipe in small; writes recipes/README.md", 70, _REHEARSALS, needs=OPS),
    "relay": _proof(
        "three launchers that give the same numbers; runs that change engine or layout half-way", 4,
        f"{_PARITY} --changes",
    ),
    "kills": _proof(
        "runs killed at random moments and resumed, bit for bit the same", 8, "tests.system.kills"
    ),
    "mutants": _proof(
        "single bugs drawn by the date's seed and planted one at a time: which are noticed by a test of behaviour", 120,
        "benchmarks.mutants",
    ),
    "failures": _proof(
        "twelve failures provoked on two processes, and what the doctor says of each", 3,
        "tests.system.failures", needs=HOSTS,
    ),
    "hosts": _proof(
        "launch files on two and three hosts (namespaces, sshd, pdsh) beside one process", 5,
        "tests.system.hosts", needs=HOSTS,
    ),
    "elastic": _proof(
        "a host killed, the run goes on with fewer, the host returns, the run grows; a spare; beside a quiet run",
        10, "tests.system.hosts.elastic", needs=HOSTS,
    ),
    "slurm": _proof(
        "the batch script in a real Slurm: time limit, signal, preemption, resume", 5,
        "tests.system.slurm", needs=SLURM,
    ),
    "trackers": _proof(
        "W&B, MLflow and Trackio written by a run and read back", 1, "tests.system.trackers",
        needs=TRACKERS,
    ),
    "accepted": _proof(
        "20,000 random cases, every emitted file handed to the program that reads it", 6,
        "tests.planning.test_accepted",
    ),
    "probe": _proof("the cost model beside the probe, 80 full-size plans", 2, "benchmarks.accuracy.probe"),
    "quality": _proof(
        "published production layouts beside the planner's best", 0.5, "benchmarks.accuracy.quality"
    ),
    "deepspeed-bytes": _proof(
        "bytes that DeepSpeed holds beside the cost model, 45 configurations", 3, "benchmarks.accuracy.deepspeed_bytes",
        needs=OPS,
    ),
    "overhead": _proof(
        "what the training loop, the data path and saving cost beside the engine", 2, "benchmarks.performance.overhead"
    ),
    "streaming": _proof(
        "host memory and speed of weights in and out at ZeRO-3 and on Megatron, and of offline conversions", 3,
        "benchmarks.performance.streaming",
    ),
    "readers": _proof(
        "4,000 damaged and hostile files, each read in bounded time and memory or refused in words", 4,
        "tests.test_readers",
    ),
    "speedrun": _proof(
        "examples/speedrun.sh cpu: from the standard library's text to a small model that answers", 4,
        "tests.system.speedrun",
    ),
    "wheel": _proof(
        "the sdist's wheel in empty environments of Python 3.11 to 3.13: it answers as the checkout does", 2,
        "tests.system.wheel",
    ),
    "docs": Proof(
        "the docs site, built strictly into build/site: no dead link, no page left out", 1,
        (
            "test -e .venv/docs/bin/mkdocs || { python -m venv .venv/docs && .venv/docs/bin/python -m pip install "
            "--quiet --constraint constraints.txt --editable '.[docs]'; }",
            ".venv/docs/bin/mkdocs build --strict",
        ),
    ),
    "model-types": _proof(
        "what is planned of every model type of the installed transformers; writes docs/model-types.md", 2,
        "benchmarks.tables.model_types",
    ),
    "tables": _proof("the planner's tables in docs, written again", 0.5, "benchmarks.tables"),
    "ops": Proof(
        "nothing: compiles what NVMe offload needs, once (libaio-dev, g++)", 3,
        ("DS_ACCELERATOR=cpu python -m kit.engines.deepspeed.ops",),
    ),
}  # fmt: skip
DAILY = ("parity", "relay", "rehearse", "accepted", "readers", "speedrun", "wheel", "probe")
"""Proofs of some minutes that need nothing: ``daily`` runs one of them, the next one tomorrow (CI)."""


def lacking(proof: Proof) -> str:
    """What a proof needs and this machine has not, and how to get it; empty where nothing is missing."""
    return LACKING[proof.needs]()


def _hosts(**programs: str) -> str:
    from tests.support import namespaces

    try:
        namespaces.check(programs)
    except namespaces.NoNamespaces as error:
        return str(error)
    return ""


def _ops() -> str:
    from kit.engines.deepspeed import ops

    return "" if ops.library().exists() else f"DeepSpeed's async_io op is not compiled: {OPS} (three minutes, once)"


def _installed(*packages: str) -> str:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"not installed: pip install {' '.join(absent)}" if absent else ""


def _lacks(needs: str, minor: int) -> str:
    """A name on PATH may be a shim that starts nothing."""
    code = f"import sys; sys.exit(sys.version_info < (3, {minor}))"
    words = [os.environ.get("PYTHON", f"python3.{minor}"), "-c", code]
    with contextlib.suppress(OSError):
        if subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return ""
    return f"no Python 3.{minor} is here: {needs}"


LACKING: dict[str, Callable[[], str]] = {
    "": lambda: "",
    OPS: _ops,
    TRACKERS: lambda: _installed("wandb", "mlflow", "trackio"),
    HOSTS: _hosts,
    SLURM: lambda: _hosts(slurmctld="slurm-wlm", slurmd="slurm-wlm", sbatch="slurm-wlm", munged="munge"),
    PYTHON311: lambda: _lacks(PYTHON311, 11),
    PYTHON312: lambda: _lacks(PYTHON312, 12),
}
"""What a proof needs → says what of it is missing."""


def run(proof: Proof) -> int:
    """Exit code of the last command, or of the first that fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    script = "\n".join(["set -e", *proof.commands])
    return subprocess.run(["bash", "-c", script], cwd=ROOT, env={**os.environ, "PATH": path}, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Print the list, or run one proof and return the exit code of its last command."""
    if not arguments:
        for name, proof in PROOFS.items():
            needs = f" (needs {proof.needs})" if proof.needs else ""
            print(f"{name:17} {proof.minutes:4g} min  {proof.shows}{needs}")
        return 0
    (name,) = arguments
    if name == "daily":
        name = DAILY[datetime.date.today().toordinal() % len(DAILY)]
        print(f"today: {name}", flush=True)
    if name not in PROOFS:
        print(f"error: no proof is called {name}; there are {', '.join(PROOFS)}", file=sys.stderr)
        return 2
    return run(PROOFS[name])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
