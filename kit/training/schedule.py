"""The learning rate: a pure function of the samples seen, so no engine and no checkpoint owns a schedule."""

from __future__ import annotations

import math

from kit.specs.run import ScheduleSpec


def learning_rate(
    samples_seen: int, *, peak: float, schedule: ScheduleSpec, total_steps: int, global_batch_size: int
) -> float:
    """Rate of the optimizer step after which ``samples_seen`` samples will have been seen.

    Counting the step itself makes the first step of a warm-up train (rate peak/warm-up, not 0), and the last step
    of a cosine end on ``min_ratio · peak`` exactly. The warm-up is ``schedule.warmup_steps``, or a tenth of a run
    that is shorter than ten times that. Beyond ``total_steps`` the rate stays where it ended.
    """
    total_samples = total_steps * global_batch_size
    warmup_samples = min(schedule.warmup_steps * global_batch_size, total_samples / 10)
    if samples_seen < warmup_samples:
        return peak * samples_seen / warmup_samples
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (samples_seen - warmup_samples) / (total_samples - warmup_samples))
    cosine = (1 + math.cos(math.pi * progress)) / 2  # Loshchilov & Hutter 2017 (SGDR), eq. 5, without restarts
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * cosine)
