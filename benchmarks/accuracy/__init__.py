"""Errors of the cost model's predictions against published measurements."""
