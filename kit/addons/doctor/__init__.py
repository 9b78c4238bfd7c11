"""The doctor: ``machines`` are looked at before a run, and ``logs`` after it.

Its rooms, in the order in which data walks:

    command     ``kit doctor``
    machines    ``kit doctor [--hosts HOSTFILE] [--plan RUN]``: facts are gathered on every host (``remote``, by ssh),
                ``host_checks`` and ``gpu_checks``, tables of ``rows``, look at each, ``hosts`` at what must be the same
                on all and at who reaches whom.
                ``--bandwidth``: ``measurements`` of disks and collectives, beside what the plan assumed.
    logs        ``kit doctor LOGS``: the cause of a failure.
"""
