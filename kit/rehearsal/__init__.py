"""Rehearsals: real runs of a plan's scaled-down copy on CPU processes.

Its rooms, in the order in which data walks:

    scaled_down  the copy of the plan
    assets       its model and data
    processes    its processes, started, awaited and killed
    rounding     what lower precision may change
    rehearse     train, kill, resume, export, load
"""
