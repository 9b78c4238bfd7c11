"""Each tracker that a run may name, really running: what its own reader finds is what ``metrics.jsonl`` holds.

    python -m tests.system.trackers             W&B (offline), MLflow, Trackio (TensorBoard: tests/training)
    python -m tests.system.trackers mlflow      one

A tracker whose package is not installed is a failure here: pip install wandb mlflow trackio.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from kit.training.logging.trackers import FOLDER, missing
from tests.support.program import Names, chosen, run

KEYS = ("loss", "grad_norm", "learning_rate")
SAME = 1e-6
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
Curve = dict[int, float]
"""Step → value."""


def main(names: Names, here: Annotated[bool, typer.Option("--here", help="one, in this process")] = False) -> int:
    """Exit code 1 where one is missing or tells other values."""
    some = chosen(names, sorted(READERS))
    if here:
        return _run(some[0])
    # Each leaves threads, servers and variables behind: a process of its own.
    words = [sys.executable, "-m", "tests.system.trackers", "--here"]
    wrong = sum(subprocess.run([*words, name], env=os.environ | OFFLINE).returncode != 0 for name in some)
    print(f"{len(some)} trackers, {wrong} wrong")
    return int(wrong > 0)


def _run(name: str) -> int:
    if absent := missing([name]):
        print(f"wrong  {name}: {absent[0]} is not installed")
        return 1
    from kit.specs.run import LoggingSpec
    from tests.support.alone import process_group_of_one
    from tests.training import runs

    with tempfile.TemporaryDirectory(prefix="kit-trackers-") as scratch, process_group_of_one():
        rundir = runs.trained(Path(scratch) / "run", logging=LoggingSpec(trackers=(name,)))
        found, rows = READERS[name](rundir.path / FOLDER), runs.metrics(rundir)
    same = all(found[key].keys() == {row["step"] for row in rows} for key in KEYS)
    far = max(abs(found[key][row["step"]] / row[key] - 1) for key in KEYS for row in rows) if same else math.inf
    print(f"{'ok    ' if far <= SAME else 'wrong '} {name}: {len(rows)} steps of {', '.join(KEYS)}, off by {far:.0e}")
    return int(not far <= SAME)


def _wandb(folder: Path) -> Mapping[str, Curve]:
    """The file that ``wandb sync`` reads."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, Curve] = {key: {} for key in KEYS}
    for data in _wandb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for key in (key for key in KEYS if f"train/{key}" in values):
            found[key][record.history.step.num] = json.loads(values[f"train/{key}"])
    return found


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format behind seven bytes of W&B's: blocks of 32 KiB, pieces of (checksum, length, kind), of which
    kinds 1 and 4 end a record and a rest of fewer than seven bytes ends a block. The package brings no reader."""
    record, at = b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def _mlflow(folder: Path) -> Mapping[str, Curve]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    history = {key: client.get_metric_history(run.info.run_id, f"train/{key}") for key in KEYS}
    return {key: {metric.step: metric.value for metric in metrics} for key, metrics in history.items()}


def _trackio(folder: Path) -> Mapping[str, Curve]:
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    (project,) = SQLiteStorage.get_projects()
    (run,) = SQLiteStorage.get_runs(project)
    logs = SQLiteStorage.get_logs(project, run)
    return {key: {row["step"]: row[f"train/{key}"] for row in logs if f"train/{key}" in row} for key in KEYS}


READERS: dict[str, Callable[[Path], Mapping[str, Curve]]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


if __name__ == "__main__":
    run(main)
