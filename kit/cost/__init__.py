"""Pure functions from one candidate plan to memory, time and money.

Its rooms, in the order in which data walks:

    workload              the candidate: model, cluster, job, layout
    hardware              rates and overheads of the catalog's GPUs, seconds of a GEMM
    model                 what it is made of: parameters, stages, FLOPs, adapters
    memory                peak memory of a rank, moment by moment
    collectives           seconds of a collective over a link, and bytes of compressed ones
    time                  seconds of a step by component
    reliability           checkpoints, failures, data reading
    estimate              all of it for one layout, and how far predictions of the kind were off
"""
