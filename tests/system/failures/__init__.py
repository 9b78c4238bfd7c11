"""Failures provoked on purpose, and what the doctor says of their logs."""
