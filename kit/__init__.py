"""kit: from a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model."""

__version__ = "0.1.0"
