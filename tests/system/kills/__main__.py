"""Kill runs with ``kill -9`` at random moments, saves included, resume them, and compare with runs that were let be.

    python -m tests.system.kills [CASE…] [--kills 4] [--seed 0] [--steps 40] [--keep DIRECTORY]

In each case a run is killed so many times: at a random moment since its start, or while a checkpoint is being written;
one random rank, or all. Then it is resumed to its end. Losses, gradient norms, learning rates and validation loss of
every step and the tensors of the last exchange checkpoint must equal the uninterrupted run's bit for bit (fp32, same
layout). Exit code 1 where one does not. ``--plant skip`` resumes with one sample too many, which must show.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

from kit.engines.base import StateKind
from kit.rehearsal.processes import metrics, tail
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.checkpoint.files import sealed
from tests.support.program import Names, chosen, faults, run
from tests.system.kills.cases import CASES, STEPS, Case, emit, prepare
from tests.system.kills.processes import WORLD_SIZE, Job

COMPARED = ("step", "loss", "grad_norm", "learning_rate", "tokens", "samples_seen", "validation_loss")


@dataclass
class Outcome:
    """Result of one case."""

    phases: list[str] = field(default_factory=list)
    """What each kill met."""
    differs: str = ""


def main(
    names: Names,
    kills: Annotated[int, typer.Option(help="of each case")] = 4,
    seed: int = 0,
    steps: int = STEPS,
    keep: Annotated[Path | None, typer.Option(help="leave the run directories in this new directory")] = None,
    plant: Annotated[str, typer.Option(help="`skip` spoils one resume: the comparison must fail")] = "",
) -> int:
    """0 where every curve and every tensor is equal."""
    spoil, wrong = faults(plant, False, ["skip"]), []
    phases: list[str] = []
    cases = chosen(names, CASES)
    directory = keep or Path(tempfile.mkdtemp(prefix="kit-kills-"))
    data = prepare(directory / "data")
    for case in cases:
        began, generator = time.monotonic(), random.Random(f"{seed} {case.name}")
        outcome = torment(case, directory / case.name, data, kills, steps, generator, bool(spoil and case is cases[0]))
        wrong += [case.name] if outcome.differs else []
        phases += outcome.phases
        met = ", ".join(f"{count} {phase}" for phase, count in sorted(Counter(outcome.phases).items()))
        verdict = f"DIFFERS: {outcome.differs}" if outcome.differs else "equal bit for bit"
        print(f"{case.name:24} {kills} kills ({met}): {verdict}, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{len(phases)} kills over {len(cases)} cases (seed {seed}), {phases.count('saving')} of them while a "
        f"checkpoint was being written; {len(cases) - len(wrong)} of {len(cases)} curves equal bit for bit"
        + (f"; WRONG: {', '.join(wrong)}" if wrong else "")
    )
    if keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if wrong else 0


def torment(
    case: Case, directory: Path, data: Path, kills: int, steps: int, generator: random.Random, plant: bool
) -> Outcome:
    """One run that is let be, and one that is killed."""
    outcome = Outcome()
    whole, run = (emit(case, directory / name, data, steps).path for name in ("whole", "run"))
    started = time.monotonic()
    if any(Job.start(whole).wait()):
        return Outcome(differs=f"the uninterrupted run failed: {tail(whole)}")
    whole_s = time.monotonic() - started
    for number in range(kills):
        while (phase := _kill_once(run, whole_s, generator, while_saving=number % 2 == 1)) is None:
            # It came to its end first, faster than the run before: kill another one, earlier.
            shutil.rmtree(run)
            emit(case, run, data, steps)
            whole_s *= 0.7
        outcome.phases.append(phase)
    if plant:
        _reach_a_checkpoint(run)
        _skip_a_sample(run)
    codes = Job.start(run, "--resume", "auto").wait()
    outcome.differs = f"the resumed run failed: {tail(run)}" if any(codes) else compare(whole, run)
    return outcome


def _kill_once(run: Path, whole_s: float, generator: random.Random, while_saving: bool) -> str | None:
    """Start or resume, and kill; returns what the kill met, or None where the run ended before it."""
    job = Job.start(run, "--resume", "auto")
    moment = generator.uniform(0, whole_s)
    partial = _partial_after(run, generator.randrange(1, 5), generator.uniform(0, 0.05))
    began = time.monotonic()
    while (not partial()) if while_saving else (time.monotonic() - began < moment):
        if not job.alive:
            return None
        time.sleep(0.001)
    victims = generator.choice([[0], [1], list(range(WORLD_SIZE))])
    saving = bool(_partials(run))
    started = (run / "metrics.jsonl").exists()
    job.kill(victims)
    return "saving" if saving else "training" if started else "starting"


def _partial_after(run: Path, which: int, wait_s: float) -> Callable[[], bool]:
    """True once so many checkpoints have been begun and the last of them for a moment; what died before is not one."""
    seen = {_identity(path) for path in _partials(run)}
    begun: list[float] = []

    def poll() -> bool:
        for path in _partials(run):
            if (identity := _identity(path)) not in seen:
                seen.add(identity)
                begun.append(time.monotonic())
        return len(begun) >= which and time.monotonic() - begun[-1] >= wait_s

    return poll


def _identity(path: Path) -> tuple[str, int]:
    try:
        return path.name, path.stat().st_ino
    except FileNotFoundError:  # published in between
        return path.name, 0


def _partials(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(".step-*.partial"))


def compare(whole: Path, run: Path) -> str:
    """Where the two runs first differ; empty where nowhere."""
    theirs, ours = ([{key: row[key] for key in COMPARED} for row in metrics(path)] for path in (whole, run))
    for expected, found in zip(theirs, ours, strict=False):
        differs = [f"{key} {found[key]!r}, not {expected[key]!r}" for key in COMPARED if expected[key] != found[key]]
        if differs:
            return f"step {expected['step']}: {', '.join(differs)}"
    if len(theirs) != len(ours):
        return f"{len(ours)} steps where there should be {len(theirs)}"
    last = [ExchangeCheckpoint(max((path / "checkpoints").glob("exchange-step-*"))) for path in (whole, run)]
    for kind in (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        expected_source, found_source = (checkpoint.source(kind) for checkpoint in last)
        for name in expected_source.names():
            if not torch.equal(expected_source.read(name), found_source.read(name)):
                return f"{kind.value} of {name} at the end"
    return ""


def _reach_a_checkpoint(run: Path) -> None:
    """Where every kill came before the first one, there is nothing to spoil yet."""
    if not list((run / "checkpoints").glob("step-*/manifest.json")):
        job = Job.start(run, "--resume", "auto")
        while job.alive and not list((run / "checkpoints").glob("step-*/manifest.json")):
            time.sleep(0.001)
        job.kill(list(range(WORLD_SIZE)))


def _skip_a_sample(run: Path) -> None:
    """The planted fault: every checkpoint says that one more sample was seen."""
    for path in (run / "checkpoints").glob("step-*/manifest.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        data["counters"]["samples_skipped"] = 1
        path.write_text(json.dumps(sealed(data)), encoding="utf-8")


if __name__ == "__main__":
    run(main)
