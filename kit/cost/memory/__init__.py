"""Peak memory of a rank: states, activations, buffers, moment by moment.

Its rooms, in the order in which data walks:

    states                        bytes a parameter, by engine and ZeRO stage
    states_and_buffers, deepspeed_sizes
                                  an engine's buffers, gathered weights, casts
    offload                       host memory and NVMe
    activations_huggingface, activations_megatron, activations_transformer_engine
                                  what a layer saves for backward
    rank_huggingface, rank_megatron
                                  the parts of a rank, by who makes its layers
    phases                        which parts are there at the same time
    peak                          the largest moment of every stage, and whether it fits
"""
