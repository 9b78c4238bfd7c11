"""Checkpoints: one format, which every engine and layout writes and reads.

Its rooms, in the order in which data walks:

    files, progress, random_state
                                  manifests and their hashes, how far a conversion is, random generators
    manifest, store               a checkpoint on disk, and an engine's state in it
    storage, checkpoints, manager
                                  a run's checkpoints: their names, which are kept, and when one is written
    of_run                        the newest checkpoint of a run, and the model that it started from
    uploads, upload, remote, fetch
                                  copies in object storage
    formats                       who wrote a directory, and how it is opened
    convert, to_huggingface       other formats, offline
"""
