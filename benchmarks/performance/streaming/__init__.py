"""Speed and host memory of weights into and out of Megatron layouts: ``python -m benchmarks.performance.streaming``."""
