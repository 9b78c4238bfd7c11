"""``make demo``: the main job end to end on a machine without a GPU. A claim that does not hold fails it."""
