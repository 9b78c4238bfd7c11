"""What DeepSpeed really holds, beside what the cost model says: ``python -m benchmarks.accuracy.deepspeed_bytes``."""
