"""Peak memory of a rank: states, activations, buffers, moment by moment."""
