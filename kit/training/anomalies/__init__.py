"""Anomalous steps: loss and gradient spikes, and values that are not finite.

Its rooms, in the order in which data walks:

    spikes      a step beside the steps before it
    handler     the reaction: a warning, a discarded batch, a checkpoint to go back to, the end of the run
"""
