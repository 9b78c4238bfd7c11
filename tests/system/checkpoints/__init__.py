"""Other programs' checkpoints, continued by kit and by DeepSpeed."""
