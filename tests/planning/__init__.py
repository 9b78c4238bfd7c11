"""Specs, cost model and planner."""
