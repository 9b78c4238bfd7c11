"""Rehearsals: real runs of a plan's scaled-down copy on CPU processes."""
