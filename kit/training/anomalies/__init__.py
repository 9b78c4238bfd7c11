"""Anomalies."""
