"""Finds the cause of a failed run in the logs of all ranks.

Its rooms, in the order in which data walks:

    log_lines                         logs in pieces, and the rank of each line
    patterns, scan                    lines that show a failure
    tracebacks, phases, shapes        where in a run, and in which tensor
    flight_recorder, waits, parting   who waits for whom
    curves, metrics                   causes that no single line shows
    cause, predicted                  a finding, and an out-of-memory beside the plan's prediction
    across_ranks, diagnosis           the root cause by the logs of all ranks
"""

from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.diagnosis import diagnose

__all__ = ["Cause", "diagnose"]
