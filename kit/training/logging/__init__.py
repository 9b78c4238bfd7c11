"""Outputs of a run's metrics: terminal, trackers, Prometheus. metrics.jsonl is ``kit.training.logging.metrics``."""
