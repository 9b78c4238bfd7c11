"""Reads and writes safetensors files.

Its rooms, in the order in which data walks:

    sharded_safetensors     parts of tensors from files of a model; files of a model from tensors
    parallel_safetensors    files that several processes write at once
"""
