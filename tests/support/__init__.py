"""What tests and proofs share: a tiny model, runs that are started and waited for, comparisons, hosts as namespaces."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout."""
