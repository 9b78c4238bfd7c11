"""Differences planted on hosts of namespaces, and whether the doctor names them."""
