"""Host memory of loading and exporting a model that no rank can hold whole: ``python -m
benchmarks.performance.loading``."""
