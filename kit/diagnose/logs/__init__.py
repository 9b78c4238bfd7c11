"""What went wrong, read from the logs of all ranks."""

from kit.diagnose.logs.diagnosis import Cause, diagnose

__all__ = ["Cause", "diagnose"]
