"""Peak memory of a rank: states, activations, buffers, moment by moment.

Its rooms, in the order in which data walks:

    states                        bytes a parameter, by engine and ZeRO stage
    parts                         the parts of a rank's memory
    states_and_buffers, deepspeed_sizes
                                  an engine's buffers, gathered weights, casts
    offload                       host memory and NVMe
    activations_huggingface, activations_megatron, activations_transformer_engine
                                  what a layer saves for backward
    rank_huggingface, rank_megatron
                                  the parts of a rank, by who makes its layers
    peak                          the parts that are there at the same time, the largest moment, and whether it fits
"""
