"""The probe: a plan's memory measured without a GPU, on the real model code with fake tensors.

``kit probe PLAN.yaml --stage 0``. It patches torch for good, so a process that has probed does nothing else.

    command     ``kit probe``
    run         one stage at two small depths, and from these the full depth
    cuda_shims  CUDA and the network, while tensors are fake
    huggingface, megatron
                one rank's model, forward, backward and optimizer, as its engine builds them
    tracker     bytes of live tensors
    result      measured, beside the cost model's prediction
"""
