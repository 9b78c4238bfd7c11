"""Rehearsals: a recipe's plan shrunk to CPU processes and really run."""
