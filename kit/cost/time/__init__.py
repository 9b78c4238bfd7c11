"""Seconds of an optimizer step.

Its rooms, in the order in which data walks:

    elementwise                   traffic of all other operators
    layer                         one layer on one rank
    exposed                       collectives that compute does not hide
    step                          layers, pipeline, optimizer and offload together
"""
