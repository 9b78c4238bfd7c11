"""Exchange checkpoints, which every engine reads, and the engines' native checkpoints."""
