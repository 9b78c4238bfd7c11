"""Outputs of a run's metrics: ``metrics.jsonl``, ``events.jsonl``, terminal, trackers, Prometheus."""
