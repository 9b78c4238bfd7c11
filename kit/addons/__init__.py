"""What kit's core does without, each reached by an entry point of pyproject.toml, as a stranger's package would be.

    configs     ``kit plan FILE``: configurations of other trainers
    lint        ``kit lint``: errors in configurations, those of other programs too
    doctor      ``kit doctor``: machines before a run (``machines``), logs after it (``logs``)
    probe       ``kit probe``: a plan's memory on fake tensors
    ui          ``kit ui``: the planner in a browser
    targets     ``kit emit --target``: files for Kubernetes, SkyPilot and other training programs
    importers   ``kit convert``: checkpoints of other programs, read, written, and described (``inspect``)

Nothing outside of this folder imports from it.
"""
