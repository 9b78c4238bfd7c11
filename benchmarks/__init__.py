"""Programs that measure and prove; none is needed to train."""
