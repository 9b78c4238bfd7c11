"""megatron-core's GPTModel with kit's attention, norms and rotary embedding, for implementation=local.

Its rooms, in the order in which data walks:

    build                         this rank's chunks
    layers, layer_variants, transformer_engine
                                  layers of torch alone, of some families, of Transformer Engine
    attention, mla, cp_all_gather, rope, norms
                                  their parts
    adapted_linear                a linear layer with an adapter
"""
