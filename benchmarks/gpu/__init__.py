"""Programs for a machine with a CUDA GPU; each also runs on the CPU with tiny shapes."""
