"""Tests of the Megatron engine, on gloo processes."""
