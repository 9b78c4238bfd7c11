"""The training loop and what it writes, once for every engine."""
