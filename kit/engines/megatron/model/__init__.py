"""megatron-core's GPTModel with kit's attention, norms and rotary embedding, for implementation=local."""
