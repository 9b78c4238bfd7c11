"""Kernels and precision of Hugging Face models: loss, torch.compile, fp8."""
