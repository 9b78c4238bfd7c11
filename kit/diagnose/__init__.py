"""Diagnosis: lint of configurations, doctor for machines and logs, probe of memory without GPUs."""
