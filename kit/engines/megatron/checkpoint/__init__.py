"""megatron-core's torch_dist checkpoints: native checkpoints, and reading and writing in one process."""
