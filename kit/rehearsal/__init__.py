"""Rehearsals: a recipe's plan shrunk to CPU processes and really run."""

from kit.rehearsal.rehearse import (
    CANNOT_SHOW,
    EXPORT_BOUND,
    NORM_BOUND,
    WEIGHT_BOUND,
    Rehearsal,
    rehearse,
)
from kit.rehearsal.rounding import ROUNDED_BOUND

__all__ = ["CANNOT_SHOW", "EXPORT_BOUND", "NORM_BOUND", "ROUNDED_BOUND", "WEIGHT_BOUND", "Rehearsal", "rehearse"]
