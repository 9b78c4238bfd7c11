"""Checkpoints: the exchange format between engines, and native ones on the way."""
