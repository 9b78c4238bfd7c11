"""Checks before a process starts. No module here imports torch at the top.

Its rooms, in the order in which data walks:

    run_checks      ``kit train`` asks on the node where it starts: packages, GPUs, model, data, disk, NVMe, host
                    memory, and the checkpoint to resume from. It stops with every problem at once.
    requirements    checks of this machine against a plan. Workers make them again after they start: of the GPUs that
                    torch sees, and of host memory and swap files where DeepSpeed offloads.
    versions        the versions that kit was tested with (versions.json), and those that lie outside of them.
    check_result    what every check gives.
"""
