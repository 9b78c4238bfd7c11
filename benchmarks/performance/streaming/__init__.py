"""Speed and host memory of weights into and out of layouts: ``python -m benchmarks.performance.streaming``."""
