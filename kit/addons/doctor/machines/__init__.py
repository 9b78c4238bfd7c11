"""Checks of machines before a run: each host, what must be the same on all, and what their links give.

Its rooms, in the order in which data walks:

    needs                         what a plan and its run need of a machine
    remote, facts, sockets        hosts are asked, by ssh
    rows                          a row of a check: a result, and when it is that
    gpu_checks, host_checks       tables of rows: one machine
    hosts, results                all machines together
    measurements, bandwidth       speeds of disks and links, beside what the plan assumed
"""
