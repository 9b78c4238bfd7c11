"""Checkpoints: the hub format between engines, and native ones on the way."""
