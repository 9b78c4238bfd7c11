"""Do engines agree? Per-parameter gradients, losses and norms, and faults that must show."""
