"""Rehearsals: a recipe's plan shrunk to CPU processes and really run."""

from kit.rehearsal.rehearse import CANNOT_SHOW, EXPORT_BOUND, LOSS_BOUND, NORM_BOUND, Rehearsal, rehearse

__all__ = ["CANNOT_SHOW", "EXPORT_BOUND", "LOSS_BOUND", "NORM_BOUND", "Rehearsal", "rehearse"]
