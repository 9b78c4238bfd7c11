"""ZeRO stages 0 to 3 with offload, on Hugging Face models and over Megatron's tensor parallelism; see ``strategy``."""
