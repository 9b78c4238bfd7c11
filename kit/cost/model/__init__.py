"""What a workload is made of.

Its rooms, in the order in which data walks:

    params    exact parameter counts, of the model and of a rank
    pipeline  the layers of a stage
    flops     model FLOPs of a step
    lora      parameters of adapters
"""
