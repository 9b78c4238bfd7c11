"""What the training loop, the data path and saving cost beside the engine."""
