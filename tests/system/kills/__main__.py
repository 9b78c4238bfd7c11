"""Kill runs with ``kill -9`` at random moments, saves included, resume them, and compare with runs that were let be.

    python -m tests.system.kills [CASE…] [--kills 4] [--seed 0] [--steps 40] [--keep DIRECTORY]

In each case a run is killed so many times: at a random moment since its start, or while a checkpoint is being written;
one random rank, or all. Then it is resumed to its end. Losses, gradient norms, learning rates and validation loss of
every step and the tensors of the last checkpoint must equal the uninterrupted run's bit for bit (fp32, same
layout). Exit code 1 where one does not. ``--plant skip`` resumes with one sample too many, which must show.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from kit.rehearsal.processes import metrics, tail
from kit.training.checkpoint.files import with_checksum
from kit.training.checkpoint.manifest import Checkpoint
from tests.support.checkpoints import same_state
from tests.support.hostile import spoil
from tests.support.program import Names, chosen, faults, run
from tests.system.kills.cases import CASES, STEPS, Case, emit, prepare
from tests.system.kills.processes import WORLD_SIZE, Job

MANIFESTS = "checkpoints/step-*/manifest.json"
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
    spoil, outcomes = bool(faults(plant, False, ["skip"])), {}
    with tempfile.TemporaryDirectory(prefix="kit-kills-") as scratch:
        data = prepare((keep or Path(scratch)) / "data")
        for case in chosen(names, CASES):
            began, generator = time.monotonic(), random.Random(f"{seed} {case.name}")
            outcome = torment(case, data.with_name(case.name), data, kills, steps, generator, spoil and not outcomes)
            outcomes[case.name] = outcome
            met = ", ".join(f"{count} {phase}" for phase, count in sorted(Counter(outcome.phases).items()))
            verdict = f"DIFFERS: {outcome.differs}" if outcome.differs else "equal bit for bit"
            print(f"{case.name:24} {kills} kills ({met}): {verdict}, {time.monotonic() - began:.0f} s", flush=True)
    phases = [phase for outcome in outcomes.values() for phase in outcome.phases]
    wrong = [name for name, outcome in outcomes.items() if outcome.differs]
    print(
        f"{len(phases)} kills over {len(outcomes)} cases (seed {seed}), {phases.count('saving')} of them while a "
        f"checkpoint was being written; {len(outcomes) - len(wrong)} of {len(outcomes)} curves equal bit for bit"
        + (f"; WRONG: {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


def torment(
    case: Case, directory: Path, data: Path, kills: int, steps: int, generator: random.Random, plant: bool
) -> Outcome:
    """One run that is let be, and one that is killed."""
    outcome, started = Outcome(), time.monotonic()
    whole, run = (emit(case, directory / name, data, steps).path for name in ("whole", "run"))
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
        _skip_a_sample(run)
    codes = Job.start(run, "--resume", "auto").wait()
    outcome.differs = f"the resumed run failed: {tail(run)}" if any(codes) else compare(whole, run)
    return outcome


def _kill_once(run: Path, whole_s: float, generator: random.Random, while_saving: bool) -> str | None:
    """Start or resume, and kill; returns what the kill met, or None where the run ended before it."""
    seen, saves, began = _partials(run), dict[tuple[str, int], float](), time.monotonic()
    job = Job.start(run, "--resume", "auto")
    moment, which, wait_s = generator.uniform(0, whole_s), generator.randrange(1, 5), generator.uniform(0, 0.05)
    due = False
    while not due:
        if not job.alive:
            return None
        time.sleep(0.001)
        now = time.monotonic()
        saves |= dict.fromkeys(_partials(run) - seen - saves.keys(), now)  # what died before is not one
        due = len(saves) >= which and now - max(saves.values()) >= wait_s if while_saving else now - began >= moment
    phase = "saving" if _partials(run) else "training" if (run / "metrics.jsonl").exists() else "starting"
    job.kill(generator.choice([[0], [1], list(range(WORLD_SIZE))]))
    return phase


def _partials(run: Path) -> set[tuple[str, int]]:
    """Checkpoints that are being written, or were when a rank died."""
    found = set()
    for path in (run / "checkpoints").glob(".step-*.partial"):
        with contextlib.suppress(FileNotFoundError):  # published in between
            found.add((path.name, path.stat().st_ino))
    return found


def compare(whole: Path, run: Path) -> str:
    """Where the two runs first differ; empty where nowhere."""
    theirs, ours = ([{key: row[key] for key in COMPARED} for row in metrics(path)] for path in (whole, run))
    for expected, found in zip(theirs, ours, strict=False):
        differs = [f"{key} {found[key]!r}, not {expected[key]!r}" for key in COMPARED if expected[key] != found[key]]
        if differs:
            return f"step {expected['step']}: {', '.join(differs)}"
    if len(theirs) != len(ours):
        return f"{len(ours)} steps where there should be {len(theirs)}"
    last = [Checkpoint(max((path / "checkpoints").glob("step-*"))) for path in (run, whole)]
    return "" if same_state(*last) else "weights or moments of the last checkpoint"


def _skip_a_sample(run: Path) -> None:
    """The planted fault: every checkpoint says that one more sample was seen. One is made where every kill came before
    the first."""
    job = None if list(run.glob(MANIFESTS)) else Job.start(run, "--resume", "auto")
    while job and job.alive and not list(run.glob(MANIFESTS)):
        time.sleep(0.001)
    if job:
        job.kill(list(range(WORLD_SIZE)))
    for path in run.glob(MANIFESTS):
        spoil(path, ("counters", "samples_skipped"), 1, with_checksum)


if __name__ == "__main__":
    run(main)
