"""Finds the cause of a failed run in the logs of all ranks."""

from kit.diagnose.logs.cause import Cause
from kit.diagnose.logs.diagnosis import diagnose

__all__ = ["Cause", "diagnose"]
