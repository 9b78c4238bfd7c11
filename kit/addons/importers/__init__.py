"""Checkpoints of other programs, and of earlier versions of kit: read, and written for those that have a reader.

Its rooms, in the order in which data walks:

    formats                       one value a format; the entry points name them
    deepspeed, universal, torch_dcp, torchtitan, peft, megatron, kit_native
                                  how each is read
    torch_dist, safe_unpickle     torch's distributed checkpoints, one block at a time
    opaque                        objects of other programs' classes, which stay closed
    stored                        tensors by name, read when they are needed, and counters: of every format
    tensors                       Hugging Face names, and what a file must say of Adam
    model_of                      the model of a checkpoint that does not say it
    to_universal                  what DeepSpeed continues from
    command, inspected, readers   ``kit convert inspect``: what a checkpoint is, and which programs would read a model
"""
