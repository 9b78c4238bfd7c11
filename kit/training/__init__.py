"""The training loop of all engines, and its files: metrics, checkpoints, summary."""
