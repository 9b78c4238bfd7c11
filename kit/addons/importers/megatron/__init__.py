"""Megatron-LM's checkpoints in one process: torch_dist, and the old ``torch`` format."""
