"""Data, schedule, checkpoints and the loop, on the torch engine."""
