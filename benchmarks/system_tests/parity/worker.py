"""A rank of a run with a fault in it: ``python -m benchmarks.system_tests.parity.worker --plant FAULT RUN_DIR …``.

The rest of the arguments are the real worker's; without ``--plant`` it is the real worker.
"""

from __future__ import annotations

import argparse

from benchmarks.system_tests.parity.faults import FAULTS
from kit.training.__main__ import leave
from kit.training.__main__ import main as worker


def main() -> int:
    """Plant, then train as always."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", choices=sorted(FAULTS), default=None)
    arguments, rest = parser.parse_known_args()
    if arguments.plant:
        FAULTS[arguments.plant].install()
    return worker(rest)


if __name__ == "__main__":
    leave(main())
