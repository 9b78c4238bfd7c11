"""Finds the cause of a failed run in the logs of all ranks."""

from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.diagnosis import diagnose

__all__ = ["Cause", "diagnose"]
