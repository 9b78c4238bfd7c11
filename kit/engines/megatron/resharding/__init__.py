"""Reads and writes full Hugging Face tensors from and to Megatron's shards."""
