"""What follows when a step is not like the others: a word, a batch left out, a way back, or the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kit.engines.base import MicroBatch
from kit.errors import EngineError
from kit.training.anomalies.not_finite import first_module
from kit.training.anomalies.spikes import GOING_ON, Verdict
from kit.training.checkpoint.collective import gather
from kit.training.checkpoint.transfer import Counters

if TYPE_CHECKING:
    from kit.training.loop import _Run


class Unsteady:
    """Carries out verdicts, the same on every rank."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._rewinds: dict[int, int] = {}

    def decide(
        self, verdict: Verdict, before: Counters, after: Counters, batch: Sequence[MicroBatch]
    ) -> Counters | None:
        """Collective. Counters to go on from after a rewind, or None: go on from ``after``.

        ``before`` and ``after`` the step, whose gradients still wait unless the verdict lets it be made. Raises
        EngineError where the run must end: something is not finite, or there is no way back.
        """
        run, engine = self._run, self._run.engine
        last = after.position - 1
        where = f"step {after.step} (samples {before.position} to {last})"
        run.events.write(
            verdict.kind, after.step, action=verdict.action, why=verdict.why, samples=[before.position, last]
        )
        if verdict.kind == "not finite":
            culprit = first_module(engine, batch)
            run.events.write("not finite", after.step, first=culprit)
            if verdict.action == "stop":
                raise EngineError(
                    f"{verdict.why} at step {after.step}; resume from the last checkpoint with a lower learning_rate "
                    f"or a smaller grad_clip, and look at samples {before.position} to {last} of that step: {culprit}"
                )
        run.teller.say(f"{verdict.kind} at {where}: {verdict.why}; {_SAID[verdict.action]}")
        if verdict.action in GOING_ON:
            return None
        engine.discard()
        return self._rewound(verdict, after) if verdict.action == "rewind" else None

    def _rewound(self, verdict: Verdict, after: Counters) -> Counters:
        """Load the last checkpoint and go on with the data after the bad step."""
        run = self._run
        run.watchdog.beat(f"rewinding from step {after.step}", 10)
        run.saving.settle()
        counters = run.saving.checkpoints.load_newest(run.engine)
        limit = run.rundir.run.stability.max_rewinds
        if counters is None:
            raise EngineError(
                f"{verdict.why} at step {after.step}, and there is no checkpoint to go back to yet; lower the "
                f"learning_rate, or save more often (run.checkpoint.every_steps)"
            )
        times = self._rewinds[counters.step] = self._rewinds.get(counters.step, 0) + 1
        if times > limit:
            raise EngineError(
                f"{verdict.why} at step {after.step}, after {limit} rewinds to step {counters.step} "
                f"(run.stability.max_rewinds); other data does not help: lower the learning_rate"
            )
        skipped = [counters.position, after.position - 1]
        counters = dataclasses.replace(counters, samples_skipped=after.position - counters.samples_seen)
        run.events.write("rewound", counters.step, from_step=after.step, skipped_samples=skipped)
        run.teller.say(f"back to step {counters.step}; samples {skipped[0]} to {skipped[1]} are left out")
        run.teller.rewind(counters.step)
        spec = run.rundir.run.stability
        run.stability.forget(history(run.rundir.path / "metrics.jsonl", counters.step, spec.window_steps))
        return counters


_SAID = {
    "warn": "the run goes on",
    "discard": "the batch is left out",
    "rewind": "going back to the last checkpoint",
    "stop": "the run ends",
}


def history(path: Path, step: int, count: int) -> list[tuple[float, float | None]]:
    """Collective. Loss and gradient norm of the last steps up to ``step`` as the main rank has logged them, so that a
    resumed run judges by the same numbers; steps that were not made are left out. Nothing where there is no log."""
    rows: list[tuple[float, float | None]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if step else []
    except OSError:
        lines = []
    for line in lines:
        try:
            row = json.loads(line)
            if row["step"] <= step and row["grad_norm"] is not None:
                rows.append((row["loss"], row["grad_norm"]))
        except (ValueError, KeyError, TypeError):
            continue  # torn by a crash
    return gather(rows[-count:])[0]
