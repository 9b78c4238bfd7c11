"""Reads and writes full Hugging Face tensors from and to Megatron's shards.

Its rooms, in the order in which data walks:

    groups              which ranks split a parameter, and which have the same slice
    huggingface         full tensors → this rank's shards
    export              this rank's blocks of full tensors
    optimizer_state     the states of a parameter in megatron-core's optimizers
"""
