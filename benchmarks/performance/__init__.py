"""Performance."""
