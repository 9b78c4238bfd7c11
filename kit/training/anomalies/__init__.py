"""Anomalous steps: detection of loss and gradient spikes and of values that are not finite, and the reaction."""
