"""Rehearse recipes, and write what was shown into ``recipes/evidence.json`` and the table ``recipes/README.md``.

    python -m benchmarks.rehearsals                 all of them, one after the other (make rehearse-all)
    python -m benchmarks.rehearsals NAME…           these
    python -m benchmarks.rehearsals --rotate 2      two, others every day (CI)
    python -m benchmarks.rehearsals --table         only the table, from the evidence that is there
    python -m benchmarks.rehearsals --plant FAULT NAME…    with a fault in the twin: must end red, with exit code 1
    python -m benchmarks.rehearsals --plant-all     every fault on every engine; exit code 0 if each was caught

Each is ``kit rehearse`` in a process of its own. Exit code 1 where one fails. Evidence belongs to a layout: where a
recipe plans otherwise today, it counts no more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from typing import Any

from benchmarks.rehearsal_faults import FAULTS, SHOWS, environment
from kit.emit.shipped import shipped_plan
from kit.planner.describe import describe
from kit.planner.plan import Plan
from kit.rehearsal import NORM_BOUND, WEIGHT_BOUND
from kit.specs.shipped import headline, recipe_names, recipe_path, recipes_directory

EVIDENCE = "evidence.json"
PLANTED = ("llama-3.1-8b-sft-fsdp2-8xh100", "llama-3.1-8b-sft-zero2-8xh100", "qwen3-32b-pretrain-16xh100")
"""A recipe of each engine, for planted faults."""
BOUNDS = {"norm_difference": NORM_BOUND, "weight_difference": WEIGHT_BOUND}


def main() -> int:
    """0 where every rehearsal held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rotate", type=int, metavar="N", help="N recipes, chosen by the date")
    parser.add_argument("--table", action="store_true", help="write the table and run nothing")
    parser.add_argument("--no-write", action="store_true", help="leave the evidence as it is")
    parser.add_argument("--plant", choices=sorted(FAULTS), help="one fault, in the recipes named")
    parser.add_argument("--plant-all", action="store_true", help="every fault, on one recipe of each engine")
    arguments = parser.parse_args()
    if arguments.plant or arguments.plant_all:
        return _plant(arguments)
    directory = recipes_directory()
    file = directory / EVIDENCE
    evidence: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    failed = 0
    for name in [] if arguments.table else _chosen(arguments):
        record = rehearsed(name)
        failed += not record["passed"]
        said = record.get("error") or summary(record)
        print(f"{'ok    ' if record['passed'] else 'FAILED'} {name}: {said}", flush=True)
        if not arguments.no_write:
            evidence[name] = record
            file.write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
    if not arguments.no_write:
        (directory / "README.md").write_text(table(evidence), encoding="utf-8")
    return 1 if failed else 0


def _chosen(arguments: argparse.Namespace) -> list[str]:
    names = [name for name in recipe_names() if not name.startswith("tiny-") and shipped_plan(name) is not None]
    if arguments.names:
        return list(arguments.names)
    if arguments.rotate:
        first = datetime.date.today().toordinal() * arguments.rotate
        return [names[(first + index) % len(names)] for index in range(arguments.rotate)]
    return names


def _plant(arguments: argparse.Namespace) -> int:
    """With ``--plant`` 1 where it was caught, as a comparison that turns red; with ``--plant-all`` 0 where all were."""
    faults = sorted(FAULTS) if arguments.plant_all else [arguments.plant]
    pairs = [(fault, name) for name in arguments.names or PLANTED for fault in faults]
    found = [caught(fault, rehearsed(name, fault), name) for fault, name in pairs]
    print(f"{len(found)} faults planted, {sum(found)} caught")
    return (0 if all(found) else 1) if arguments.plant_all else int(any(found))


def caught(fault: str, record: dict[str, Any], name: str) -> bool:
    """Whether the rehearsal failed in the figure in which the fault must show."""
    where = SHOWS[fault]
    figure = record.get(where)
    is_caught = not record["passed"] and figure is not None and figure > BOUNDS[where]
    print(f"{'caught' if is_caught else 'MISSED'} {fault} in {name}: {record.get('error') or f'{where} {figure:.0e}'}")
    return is_caught


def rehearsed(name: str, fault: str | None = None) -> dict[str, Any]:
    """Run one; its result, or why there is none, with date and commit."""
    done = subprocess.run(
        [sys.executable, "-m", "kit", "rehearse", name, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=None if fault is None else environment(fault),
    )
    begin = done.stdout.find("{")
    record: dict[str, Any] = json.loads(done.stdout[begin:]) if begin >= 0 else {"passed": False}
    if begin < 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error")] or done.stderr.splitlines()
        record["error"] = errors[-1][:300] if errors else f"exit code {done.returncode}"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record |= {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}
    return record


def summary(record: dict[str, Any]) -> str:
    """One line of numbers."""
    weights = f" (weights {record['weight_difference']:.0e})" if "weight_difference" in record else ""
    return (
        f"{record['processes']} processes, loss {record['loss_difference']:.0e}, norm {record['norm_difference']:.0e}, "
        f"export {record['exported_difference']:.0e}{weights}, {record['seconds']:.0f} s"
    )


def table(evidence: dict[str, Any]) -> str:
    """``recipes/README.md``."""
    rows = []
    for name in recipe_names():
        plan = shipped_plan(name)
        if plan is None:
            rows.append(f"| [{name}]({name}.yaml) | has no plan yet: see its head | | | | | | |")
        elif plan.cluster.gpu.device == "cuda":
            rows.append(_row(name, plan, evidence.get(name)))
    what = "\n".join(f"- **{name}**: {headline(recipe_path(name))}" for name in recipe_names())
    return f"""# Recipes

Written by `python -m benchmarks.rehearsals`; do not edit it here. `kit recipes copy NAME DIR` gives a directory to run
from, `kit rehearse NAME` proves a recipe again.

Evidence, in rising order: *accepted*: every engine's own parser took its files. *rehearsed*: its twin (same
engine, kinds of parallelism, ZeRO stage, offload and recompute, tiny) trained on CPU processes, was killed,
resumed on plain torch's curve, and its export loaded in transformers. Twins compute in fp32 whatever a recipe's
precision, because rounding would hide a fault; `kit rehearse` lists what else was replaced, and `--plant-all` proves
that one can fail. "weights" is the largest difference of an exported weight, where the rehearsal is young enough to
have compared it. *measured*: ran at full size on the named
hardware; none has yet. Memory, speed and cost are predictions ([how good they are](../docs/accuracy.md)).

| recipe | layout | GiB a GPU | tokens/s | days | cost | checkpoint | evidence |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

## What each is for

{what}
"""


def _row(name: str, plan: Plan, record: dict[str, Any] | None) -> str:
    predicted = plan.predicted
    peak = max(stage.peak_gib for stage in predicted.memory)
    cost = "–" if predicted.cost_usd is None else f"${predicted.cost_usd:,.0f}"
    checkpoint = "–" if predicted.operation is None else f"{predicted.operation.checkpoint_gb:,.0f} GB"
    return (
        f"| [{name}]({name}.yaml) | {describe(plan.layout)} | {peak:.0f} of {plan.cluster.gpu.memory_gib:.0f} "
        f"| {predicted.tokens_per_s:,.0f} | {predicted.days:.3g} | {cost} | {checkpoint} | {_evidence(plan, record)} |"
    )


def _evidence(plan: Plan, record: dict[str, Any] | None) -> str:
    if record is None or record.get("layout") != describe(plan.layout):
        return "accepted"
    if not record["passed"]:
        return "accepted; its rehearsal differs, see evidence.json"
    return f"rehearsed {record['date']} at {record['commit']}: {summary(record)}"


if __name__ == "__main__":
    raise SystemExit(main())
