"""Runs that are killed at random moments, and must come to the curve of a run that was not."""
