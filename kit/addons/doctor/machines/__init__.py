"""Checks of machines before a run: each host, what must be the same on all, and what their links give."""
