"""ZeRO stages 0 to 3 of DeepSpeed on Hugging Face models, with CPU offload. Import ``engine`` for the engine itself."""
