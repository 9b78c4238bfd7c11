"""What DeepSpeed really holds, beside what the cost model says: ``python -m benchmarks.deepspeed_bytes``."""
