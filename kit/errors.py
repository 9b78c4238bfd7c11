"""Every error that kit raises on purpose.

    KitError                 anything a user can mend; the command line prints it and exits with 2
    ├── SpecError            a recipe, plan or catalog value is unknown, of the wrong type or impossible
    ├── PlanError            no layout is legal or none fits; carries every violated rule
    ├── RunDirectoryError    a run directory exists already, is incomplete, or disagrees with its plan
    ├── DataError            a data set or tokenizer is missing, truncated or does not match the model
    ├── CheckpointError      a checkpoint is missing, truncated, foreign or could not be written
    └── EngineError          an engine cannot do what the plan asks, or is not the engine it should be

A message names the value, the rule and the fix, on one line. Of several lines each is a problem; those that begin with
``HINT`` say what else would do.
"""

from __future__ import annotations

HINT = "hint: "


class KitError(Exception):
    """Base class: the message is meant for the user and needs no traceback."""


class SpecError(KitError):
    """A value that a user wrote is unknown, of the wrong type or impossible."""


class PlanError(KitError):
    """No layout satisfies the rules, or none fits into the memory given."""


class RunDirectoryError(KitError):
    """A run directory cannot be written, read, or no longer matches its plan."""


class DataError(KitError):
    """Training data or a tokenizer cannot be used."""


class CheckpointError(KitError):
    """A checkpoint cannot be read or written."""


class EngineError(KitError):
    """An engine cannot run the plan it was given."""
