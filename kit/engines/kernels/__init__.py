"""Kernels and precision of Hugging Face models.

Its rooms, in the order in which data walks:

    prepare_model           recompute, attention and compilation of a plan, and the loss of a micro batch
    fp8                     GEMMs of linear layers
    ring_attention          context parallelism
    selective_recompute, offloaded_inputs
                            what is computed again, and where its inputs are until then
    tiled_mlp               MLPs in tiles of tokens
    compiled_blocks         torch.compile, a block at a time
    loss, chunked_loss      the sum over labels; without the logits of all tokens
"""
