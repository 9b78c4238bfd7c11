"""Plain torch: one device, or distributed data parallelism."""
