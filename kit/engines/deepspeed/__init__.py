"""ZeRO stages 0 to 3 with offload, on Hugging Face models and over Megatron's tensor parallelism; see ``strategy``.

Its rooms, in the order in which data walks:

    ops, build                    compiled operators, and an engine as DeepSpeed builds it
    strategy, data_parallel, ulysses, autotp, over_megatron
                                  how ranks split the work on one sample
    whole_model                   the model below stage 3
    engine, grad_norm, eight_bit  steps
    state, nvme, nvme_state       master weights and moments, where ZeRO has them
"""
