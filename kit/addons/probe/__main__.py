"""``python -m kit.addons.probe PLAN.yaml [--stage N] [--json]``: a process of its own, because it patches torch."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

from kit.errors import KitError


def main() -> int:
    """Exit code 2 for an error of the user's."""
    parser = argparse.ArgumentParser(prog="python -m kit.addons.probe", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan.yaml of a run directory, or one saved by kit plan --save")
    parser.add_argument("--stage", type=int, help="pipeline stage; all that differ if not given")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # engines warn of what a probe does on purpose
    try:
        from kit.addons.probe.run import probe, render
        from kit.planner.plan import Plan

        plan = Plan.load(given.plan)
        stages = plan.workload.stages.distinct if given.stage is None else (given.stage,)
        found = [probe(plan, stage) for stage in stages]
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps([each.as_json() for each in found], indent=1) if given.json else render(plan, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
