"""Hugging Face models for the torch and DeepSpeed engines.

Its rooms, in the order in which data walks:

    models, count_parameters      a model from a ModelSpec, and the number of its parameters
    loaded, random_weights        its weights, from a directory or random
    text_part, encoder_decoder, buffers
                                  what some families do otherwise
    adapters                      LoRA and QLoRA by peft
    experts, fused_experts, expert_autocast, routing
                                  experts on disk, in memory, in lower precision, in balance
    inputs, packed_attention, whole_length_rope
                                  a micro batch, packed rows, parts of a sequence
"""
