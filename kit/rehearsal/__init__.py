"""Rehearsals: a recipe's plan shrunk to CPU processes and really run."""

from kit.rehearsal.rehearse import (
    CANNOT_SHOW,
    NORM_BOUND,
    WEIGHT_BOUND,
    Rehearsal,
    rehearse,
)

__all__ = ["CANNOT_SHOW", "NORM_BOUND", "WEIGHT_BOUND", "Rehearsal", "rehearse"]
