"""Seconds of an optimizer step: GEMMs, element-wise kernels, collectives, pipeline, optimizer."""
