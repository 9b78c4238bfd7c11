"""Exchange checkpoints, which every engine reads, and the engines' native checkpoints.

Its rooms, in the order in which data walks:

    counters, random_state, bookmark
                                  what a run is beside its tensors
    files, progress               directories that are complete or absent, and how far one is
    manager, engine_checkpoint, storage
                                  native checkpoints: when, how, and which are kept
    exchange, transfer            the exchange format, written and read by any engine
    uploads, upload_process, remote, fetch
                                  copies in object storage
    to_huggingface, to_universal, convert
                                  other formats, offline
    foreign, inspected            checkpoints of other programs, and what is said of one
"""
