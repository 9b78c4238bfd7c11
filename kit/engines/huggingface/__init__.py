"""Hugging Face models for the torch and DeepSpeed engines: construction, weights, adapters, experts, routing."""
