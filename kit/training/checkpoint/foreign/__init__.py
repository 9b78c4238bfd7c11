"""Checkpoints that other programs wrote: what they are, and their tensors under Hugging Face names."""
