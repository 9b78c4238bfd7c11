"""Tests of kit."""
