"""A real Slurm on hosts made of namespaces, and the emitted batch script in it."""
