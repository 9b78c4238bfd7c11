"""Specs of models, clusters, jobs, layouts and runs: frozen, validated values."""
