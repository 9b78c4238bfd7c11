"""Where a run says how it is doing: a terminal, trackers, Prometheus. metrics.jsonl is
``kit.training.logging.metrics``."""
