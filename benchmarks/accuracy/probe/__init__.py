"""The cost model against the probe, full-size plans: ``python -m benchmarks.accuracy.probe``."""
