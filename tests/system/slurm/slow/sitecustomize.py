"""Python imports this by itself where the folder is on its path: in its first life a job sleeps at each step, so that
Slurm's clock comes before its end on any machine, however fast. Queued again it runs at its own speed."""

from __future__ import annotations

import os
import time

if "KIT_SLOW_STEP_S" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    from kit.training.step_timing import StepClock

    turn = StepClock.turn

    def slowly(clock: StepClock) -> None:
        """A turn of the training loop, late."""
        time.sleep(float(os.environ["KIT_SLOW_STEP_S"]))
        turn(clock)

    StepClock.turn = slowly  # type: ignore[method-assign]
