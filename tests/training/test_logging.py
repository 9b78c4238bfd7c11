"""What a run says of itself: on a terminal, to trackers, to Prometheus; and a dashboard that asks for what there is."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import socket
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kit.errors import CheckpointError
from kit.specs.run import CheckpointSpec, LoggingSpec
from kit.training.logging import prometheus
from kit.training.logging.terminal import LiveLine, live_line, plain_line
from kit.training.logging.trackers import PACKAGES, Trackers, _wandb_mode
from tests.support import tiny
from tests.support.calls import before
from tests.support.files import file_with
from tests.support.refusals import refusal
from tests.support.runs import free_port
from tests.training import runs
from tests.training.test_metrics import metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
EXPECTED = 60, SimpleNamespace(peak_gib=41.2, step_time_s=0.4)


def needs(package):
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"NOT TESTED: {package} is not installed (extra tracking)")


def test_the_live_line_says_everything():
    parts = {"forward_backward_s": 0.4, "optimizer_s": 0.075, "data_s": 0.025}
    line = live_line(metrics(7, mfu=0.41, memory_gib=39.5, tokens_per_s_per_gpu=64.0, eta_s=3600.0, **parts), *EXPECTED)
    assert line == (
        "step 7/60 | loss 2.0000 | grad norm 1 | lr 0.001 | MFU 41.0 % | 64 tokens/s/GPU | "
        "peak 39.5 of 41.2 GiB predicted | 500 ms (fwd+bwd 80 % optim 15 % data wait 5 %; predicted 400) | ETA 60 min"
    )
    line = live_line(metrics(7, grad_norm=None, event="loss spike: discard", padding_fraction=0.25), *EXPECTED)
    assert line == (
        "step 7/60 | loss 2.0000 | loss spike: discard | lr 0.001 | padding 25 % | 128 tokens/s/GPU | "
        "41 GiB predicted | 500 ms (; predicted 400)"
    )
    line = live_line(metrics(7, grad_norm=None, step_time_s=0.0, data_s=0.0), *EXPECTED)
    assert " | overflow, skipped | " in line
    assert line.endswith(" | 0 ms (; predicted 400)")


def test_a_line_of_a_file_says_everything():
    found = metrics(7, mfu=0.41, padding_fraction=0.25, validation_loss=1.5, validation_losses={"web": 1.25})
    assert plain_line(found, 60) == (
        "step 7/60  loss 2.0000  grad norm 1  lr 0.001  MFU 41.0 %  padding 25 %  500 ms/step  128 tokens/s  "
        "validation loss 1.5000  web 1.2500"
    )
    assert plain_line(metrics(7, grad_norm=None, padding_fraction=0.0), 60) == (
        "step 7/60  loss 2.0000  overflow, skipped  lr 0.001  500 ms/step  128 tokens/s"
    )


def test_one_line_lives_and_what_is_said_stays():
    written = io.StringIO()
    with closing(LiveLine(*EXPECTED, Console(file=written, force_terminal=True, width=250))) as terminal:
        for step in range(1, 31):
            terminal.log_step(metrics(step, loss=float(step)), due=True)
            if step == 15:
                terminal.log("something [happened]")
    shown = written.getvalue()
    assert "something [happened]" in shown
    assert "step 30/60" in shown.split("\x1b[2K")[-1]
    assert shown.count("\n") < 4


# A run


@runs.one_process
def test_a_line_is_about_its_own_step(tmp_path, monkeypatch):
    """The step that waits for data and the step whose checkpoint takes long say so, no other does. The first one,
    which warms up, is not in the median."""
    from kit.training.checkpoint.checkpoints import RunCheckpoints
    from kit.training.data.loader import DataLoader

    waits = {0: 0.6, 4: 0.3}  # by the samples before a step, two a step: the first and the third
    before(monkeypatch, DataLoader, "step", lambda _, position, *more: time.sleep(waits.get(position, 0.0)))
    before(
        monkeypatch,
        RunCheckpoints,
        "write",
        lambda _, save, counters, *more, **options: time.sleep(0.3 * (counters.step == 4)),
    )
    rundir = runs.trained(tmp_path / "run", steps=5, checkpoint=CheckpointSpec(every_steps=2))
    rows = runs.steps(rundir)
    for row in rows:
        parts = row["forward_backward_s"] + row["optimizer_s"]
        assert 0 < parts <= row["step_time_s"]
        assert row["tokens_per_s_per_gpu"] == row["tokens_per_s"]
        assert row["data_s"] == pytest.approx(row["step_time_s"] - parts, abs=1e-6)
    assert [
        (row["data_s"] >= 0.3, row["checkpoint_s"] is None, (row["checkpoint_s"] or 0) >= 0.3, row["eta_s"] is None)
        for row in rows
    ] == [
        (True, True, False, True),
        (False, False, False, False),
        (True, True, False, False),
        (False, False, True, False),
        (False, False, False, False),
    ]
    assert [row["loop_s"] is None or row["loop_s"] > 0 for row in rows] == [True] * 5
    assert rows[1]["eta_s"] >= 3 * 0.6, "three steps more, each of them like the first"
    assert rows[4]["eta_s"] == 0
    times = sorted(row["step_time_s"] for row in rows[1:])
    assert runs.summary(rundir).measured_step_time_s == pytest.approx((times[1] + times[2]) / 2)


@runs.one_process
@needs("tensorboard")
def test_tensorboard(tmp_path):
    """Read back by TensorBoard's own reader, of a run that was resumed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rundir = runs.prepare(tmp_path / "run", logging=LoggingSpec(trackers=("tensorboard",)))
    runs.resumed(rundir, 3, 6)
    events = EventAccumulator(str(rundir.path / "trackers" / "tensorboard" / "run"))
    events.Reload()
    rows = runs.metrics(rundir)
    for key in ("loss", "grad_norm", "learning_rate"):
        told = [(event.step, event.value) for event in events.Scalars(f"train/{key}")]
        assert told == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows]
    assert {"train/step_time_s", "train/tokens_per_s", "train/validation_loss"} <= set(events.Tags()["scalars"])


@runs.one_process
@needs("prometheus_client")
def test_what_cannot_be_opened_is_named_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(PACKAGES, "wandb", "no_such_package")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for logging, said in (
            (LoggingSpec(trackers=("wandb",)), "names wandb, which needs the package no_such_package; install it"),
            (LoggingSpec(prometheus_port=port), f"prometheus_port={port} on 127.0.0.1 cannot be opened"),
        ):
            assert re.search(said, refusal(CheckpointError, runs.trained, tmp_path / "run", logging=logging))


@runs.one_process
@needs("tensorboard")
def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    from accelerate.tracking import TensorBoardTracker

    def gone(self, values, step=None, **kwargs):
        if step == 3:
            raise ConnectionError("the server is gone")

    before(monkeypatch, TensorBoardTracker, "log", gone)
    assert len(runs.steps(runs.trained(tmp_path / "run", logging=LoggingSpec(trackers=("tensorboard",))))) == 6
    assert capsys.readouterr().out.count("tracker tensorboard failed at step 3 and is left out from here on") == 1


@runs.one_process
@needs("prometheus_client")
def test_prometheus_is_asked_while_the_run_goes_on(tmp_path, monkeypatch):
    from kit.training.data.loader import DataLoader

    port = free_port()
    asked = {}

    def ask(self, position, size=None):
        if position == 6:
            asked["text"] = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()

    before(monkeypatch, DataLoader, "step", ask)
    runs.trained(tmp_path / "run", logging=LoggingSpec(prometheus_port=port))
    assert 'kit_step{engine="torch",model="tiny-llama"} 3.0' in asked["text"].splitlines()
    refusal(OSError, urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics", timeout=5)


@needs("prometheus_client")
def test_every_value_is_exported_under_its_name_and_on_the_dashboard():
    """prometheus_client adds and changes suffixes: what is exported is looked at, not what was asked for."""
    import prometheus_client as client

    fields = {name: field for name, (field, _) in prometheus.GAUGES.items()}
    values = {field: float(number) for number, field in enumerate(fields.values(), 100)} | {"step": 1}
    every = {
        field: {"web": values[field]} if name in prometheus.LABELS else values[field]
        for name, field in fields.items()
        if field != "step"
    }
    with closing(prometheus.Prometheus(free_port(), "127.0.0.1", tiny.plan(), 6)) as endpoint:
        assert endpoint._server.server_address[0] == "127.0.0.1", "it listens on loopback alone"
        endpoint.log_step(metrics(1, event="loss spike: warn", **every))
        endpoint.log_step(metrics(1, event="loss spike: warn"))  # what is null keeps its value
        endpoint.log_checkpoint(1, 7.5)
        text = client.generate_latest(endpoint.registry).decode()
    wire = dict(re.findall(r"^(kit_\w+)\{.*\} (\S+)$", text, re.MULTILINE))
    now = values | {field: getattr(metrics(1), field) for field in fields.values() if getattr(metrics(1), field)}
    expected = {name: now[field] for name, field in fields.items()} | {
        "kit_checkpoint_stall_seconds": 7.5,
        "kit_predicted_memory_peak_gib": 0.001,
        "kit_predicted_step_seconds": 0.1,
        "kit_total_steps": 6,
        "kit_events_total": 2,
    }
    assert {name: float(wire[name]) for name in expected} == expected
    own = 'engine="torch",model="tiny-llama"'
    for line in (
        f'kit_group_gradient_norm{{{own},group="web"}}',
        f'kit_validation_set_loss{{{own},set="web"}}',
        f'kit_events_total{{{own},event="loss spike"}}',
    ):
        assert sorted(re.split("[{,}]", line)) in [
            sorted(re.split("[{,}]", each.rpartition(" ")[0])) for each in text.split("\n")
        ]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert {
        name for panel in panels for each in panel.get("targets", ()) for name in re.findall(r"\bkit_\w+", each["expr"])
    } == expected.keys(), "not exported, or on no panel"


class Recorder:
    """Stands for accelerate's tracker of a service that needs a network."""

    def __init__(self, *arguments, **options):
        self.called = [("", arguments, options)]

    def __getattr__(self, name):
        return lambda *arguments, **options: self.called.append((name, arguments, options))


def test_a_tracker_is_given_numbers_alone(tmp_path, monkeypatch):
    from accelerate import tracking

    monkeypatch.setitem(PACKAGES, "wandb", "json")
    monkeypatch.setattr(tracking, "WandBTracker", Recorder)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    plan = tiny.plan(dp=2, zero_stage=3)
    with closing(Trackers(("wandb",), tmp_path, plan)) as trackers:
        called = trackers._live["wandb"].called
        trackers.log_step(metrics(4, event="loss spike: warn", set_losses={"web": 1.5}))
        trackers.log_checkpoint(4, 0.25)
    made, started, (_, (settings,), _), (_, (row,), at), stall, finished = called
    assert made[1:] == (("tiny-llama",), {"name": tmp_path.name, "dir": str(tmp_path / "trackers"), "mode": "disabled"})
    assert [each[0] for each in (started, stall, finished)] == ["start", "log", "finish"]
    assert {
        "model": "tiny-llama", "plan": plan.digest[:12], "layout/dp": 2, "predicted/peak_gib": 0.001,
        "predicted/step_time_s": 0.1,
    }.items() <= settings.items()  # fmt: skip
    folder = tmp_path / "trackers"
    assert {"TRACKIO_DIR": f"{folder}/trackio", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}.items() <= (
        os.environ.items()
    )
    assert (at, row) == ({"step": 4}, {
        "train/step": 4, "train/loss": 2.0, "train/grad_norm": 1.0, "train/learning_rate": 1e-3, "train/tokens": 64,
        "train/samples_seen": 8, "train/step_time_s": 0.5, "train/tokens_per_s": 128.0, "train/set_losses/web": 1.5,
    })  # fmt: skip
    assert stall[1:] == (({"train/checkpoint_s": 0.25},), {"step": 4})


@pytest.mark.parametrize(
    ("environment", "login", "mode"),
    [
        ({}, False, "offline"),
        ({}, True, "online"),
        ({"WANDB_API_KEY": "k"}, False, "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, True, "offline"),
    ],
)
def test_wandb_asks_no_question(tmp_path, monkeypatch, environment, login, mode):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environment, "NETRC": "", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    if login:
        file_with(tmp_path / ".netrc", "machine api.wandb.ai login user password secret\n").chmod(0o600)
    assert _wandb_mode() == mode
