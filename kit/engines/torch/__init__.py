"""The torch engine: one device, DDP or FSDP2, with or without other parallelism.

Its rooms, in the order in which data walks:

    engine                        one device, DDP or FSDP2
    ddp, fsdp, tensor_parallel, expert_parallel, context_parallel
                                  how ranks split the work
    transformers_plan             which layers and experts transformers would split
    optimizer, lion, gathered_optimizers, eight_bit, paged, stochastic_rounding
                                  what steps
"""
