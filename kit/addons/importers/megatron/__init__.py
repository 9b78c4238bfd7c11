"""Megatron-LM's checkpoints in one process: torch_dist, and the old ``torch`` format.

Its rooms, in the order in which data walks:

    opened          which of the two a directory has; writes torch_dist
    torch_format    the old format, a file a rank
    names, source   parameters' names in a checkpoint, and under them Hugging Face tensors, from the shards of all ranks
    offline         full tensors → torch_dist, and back
    resumed         what stands beside the tensors, so that Megatron-LM goes on with Adam's state
"""
