"""What a run says of itself: on a terminal, to trackers, to Prometheus; and a dashboard that asks for what there is."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import socket
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.errors import CheckpointError
from kit.rehearsal.processes import free_port
from kit.specs.run import CheckpointSpec, LoggingSpec
from kit.training.logging import prometheus
from kit.training.logging.terminal import LiveLine, live_line
from kit.training.logging.trackers import PACKAGES
from tests.training import runs
from tests.training.test_metrics import metrics

one_process = pytest.mark.usefixtures("one_process")
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
EXPECTED = 60, SimpleNamespace(peak_gib=41.2, step_time_s=0.4)


def needs(package):
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"NOT TESTED: {package} is not installed (extra tracking)")


def test_the_live_line_says_everything():
    line = live_line(
        metrics(
            7,
            mfu=0.41,
            memory_gib=39.5,
            tokens_per_s_per_gpu=64.0,
            forward_backward_s=0.4,
            optimizer_s=0.075,
            data_s=0.025,
            eta_s=3600.0,
        ),
        *EXPECTED,
    )
    assert line == (
        "step 7/60 | loss 2.0000 | norm 1 | lr 0.001 | 64 tok/s/GPU | MFU 41.0% | peak 39.5 of 41.2 GiB predicted | "
        "500 ms (fwd+bwd 80% optim 15% data wait 5%; predicted 400) | ETA 60 min"
    )
    assert "loss spike: discard" in live_line(metrics(7, grad_norm=None, event="loss spike: discard"), *EXPECTED)


def screen(output: str) -> list[str]:
    """What a terminal shows in the end, as far as rich's cursor moves go."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\d*[A-Za-z]|\x1b\[\?\d+[hl]|\x1b\[[\d;]*m|\r|\n)", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part or ""):
            row -= int(part[2:-1] or 1)
        elif part and not part.startswith("\x1b") and part != "\r":
            lines[row] = part.rstrip()
    return [line for line in lines if line]


def test_one_line_lives_and_what_is_said_stays():
    from rich.console import Console

    written = io.StringIO()
    terminal = LiveLine(*EXPECTED, Console(file=written, force_terminal=True, width=250))
    for step in range(1, 31):
        terminal.log_step(metrics(step, loss=float(step)), due=True)
        if step == 15:
            terminal.log("something happened")
    terminal.close()
    assert [line.split(" | ")[0] for line in screen(written.getvalue())] == ["something happened", "step 30/60"]


@one_process
class TestARun:
    def test_metrics_have_the_parts_of_a_step(self, tmp_path):
        rundir = runs.prepare(tmp_path / "run")
        runs.run(rundir)
        rows = [json.loads(line) for line in (rundir.path / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            parts = row["forward_backward_s"] + row["optimizer_s"]
            assert 0 < parts <= row["step_time_s"]
            assert row["tokens_per_s_per_gpu"] == row["tokens_per_s"]
            assert row["data_s"] == pytest.approx(row["step_time_s"] - parts, abs=1e-6)
        for row in rows[1:]:
            assert row["loop_s"] > 0
            assert row["eta_s"] > 0 or row is rows[-1]

    def test_a_line_is_about_its_own_step(self, tmp_path, monkeypatch):
        """The step that waits for data and the step whose checkpoint takes long say so, no other does."""
        from kit.training.checkpoint.engine_checkpoint import NativeCheckpoints
        from kit.training.data.loader import DataLoader

        read, write = DataLoader.step, NativeCheckpoints.write

        def step(self, position, size=None):
            time.sleep(0.3 if position == 4 else 0.0)  # two samples a step: the third
            return read(self, position, size)

        def slow_write(self, save, counters, *more, **options):
            time.sleep(0.3 if counters.step == 4 else 0.0)
            write(self, save, counters, *more, **options)

        monkeypatch.setattr(DataLoader, "step", step)
        monkeypatch.setattr(NativeCheckpoints, "write", slow_write)
        rundir = runs.prepare(tmp_path / "run", checkpoint=CheckpointSpec(every_steps=2))
        runs.run(rundir)
        rows = [json.loads(line) for line in (rundir.path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["data_s"] >= 0.3] == [3]
        assert [row["step"] for row in rows if row["checkpoint_s"] is not None] == [2, 4, 6]
        assert [row["step"] for row in rows if (row["checkpoint_s"] or 0) >= 0.3] == [4]

    def test_the_first_step_is_not_in_the_median(self, tmp_path, monkeypatch):
        """It warms up: kernels are compiled, files are opened."""
        from kit.training.data.loader import DataLoader

        read = DataLoader.step

        def step(self, position, size=None):
            time.sleep(0.6 if position == 0 else 0.0)
            return read(self, position, size)

        monkeypatch.setattr(DataLoader, "step", step)
        summary = runs.run(runs.prepare(tmp_path / "run", steps=2), export_at_end=False)
        assert summary.measured_step_time_s < 0.3

    @needs("tensorboard")
    def test_tensorboard(self, tmp_path):
        """Read back by TensorBoard's own reader."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        rundir = runs.prepare(tmp_path / "run", logging=LoggingSpec(trackers=("tensorboard",)))
        runs.run(rundir)
        events = EventAccumulator(str(rundir.path / "trackers" / "tensorboard" / "run"))
        events.Reload()
        rows = runs.metrics(rundir)
        for key in ("loss", "grad_norm", "learning_rate"):
            told = [(event.step, event.value) for event in events.Scalars(f"train/{key}")]
            assert told == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows]
        assert {"train/step_time_s", "train/tokens_per_s", "train/validation_loss"} <= set(events.Tags()["scalars"])

    def test_a_tracker_that_is_not_installed_is_named_at_the_start(self, tmp_path, monkeypatch):
        monkeypatch.setitem(PACKAGES, "wandb", "no_such_package")
        rundir = runs.prepare(tmp_path / "run", logging=LoggingSpec(trackers=("wandb",)))
        with pytest.raises(CheckpointError, match="names wandb, which needs the package no_such_package; install it"):
            runs.run(rundir)

    @needs("tensorboard")
    def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(self, tmp_path, monkeypatch, capsys):
        from accelerate.tracking import TensorBoardTracker

        real = TensorBoardTracker.log

        def log(self, values, step=None, **kwargs):
            if step == 3:
                raise ConnectionError("the server is gone")
            real(self, values, step=step, **kwargs)

        monkeypatch.setattr(TensorBoardTracker, "log", log)
        rundir = runs.prepare(tmp_path / "run", logging=LoggingSpec(trackers=("tensorboard",)))
        assert runs.run(rundir).step == 6
        printed = capsys.readouterr().out
        assert printed.count("tracker tensorboard failed at step 3 and is left out from here on") == 1

    @needs("prometheus_client")
    def test_prometheus_is_asked_while_the_run_goes_on(self, tmp_path, monkeypatch):
        from kit.training.data.loader import DataLoader

        port = free_port()
        asked, real = {}, DataLoader.step

        def step(self, position, size=None):
            if position == 6:
                asked["text"] = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
                asked["outside"] = _open_elsewhere(port)
            return real(self, position, size)

        monkeypatch.setattr(DataLoader, "step", step)
        rundir = runs.prepare(tmp_path / "run", logging=LoggingSpec(prometheus_port=port))
        runs.run(rundir)
        values = {line.split("{")[0]: float(line.split()[-1]) for line in asked["text"].splitlines() if line[0] != "#"}
        row = runs.metrics(rundir)[2]
        assert values["kit_step"] == 3
        assert values["kit_loss"] == row["loss"]
        assert values["kit_gradient_norm"] == row["grad_norm"]
        assert values["kit_predicted_step_seconds"] == 0.1
        assert not asked["outside"], "it listens on loopback alone"
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)

    @needs("prometheus_client")
    def test_a_port_that_is_taken(self, tmp_path):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            rundir = runs.prepare(tmp_path / "run", logging=LoggingSpec(prometheus_port=port))
            with pytest.raises(CheckpointError, match=f"prometheus_port={port} on 127.0.0.1 cannot be opened"):
                runs.run(rundir)


def _open_elsewhere(port: int) -> bool:
    """Whether another address of this machine answers at the port."""
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        return False
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((own, port)) == 0


class TestDashboard:
    def expressions(self) -> list[str]:
        panels = json.loads(DASHBOARD.read_text())["panels"]
        return [target["expr"] for panel in panels for target in panel.get("targets", ())]

    def test_it_asks_for_exported_metrics_alone(self):
        exported = {*prometheus.GAUGES, *prometheus.PREDICTED, f"{prometheus.EVENTS}_total"}
        asked = {name for expression in self.expressions() for name in re.findall(r"\bkit_\w+", expression)}
        assert asked <= exported, f"not exported: {sorted(asked - exported)}"
        assert exported - asked == set(), "exported, and on no panel"

    def test_it_is_a_dashboard(self):
        dashboard = json.loads(DASHBOARD.read_text())
        assert dashboard["title"]
        assert dashboard["schemaVersion"] >= 36
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(ids) == len(set(ids))
        for panel in dashboard["panels"]:
            assert {"type", "title", "gridPos", "datasource"} <= panel.keys()
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24

    @needs("prometheus_client")
    def test_the_names_are_those_on_the_wire(self):
        """prometheus_client adds and changes suffixes: what is exported is looked at, not what was asked for."""
        import prometheus_client as client

        from tests.support import tiny

        endpoint = prometheus.Prometheus(free_port(), "127.0.0.1", tiny.plan(), 6)
        every = {
            field: {"web": 1.0} if name in prometheus.LABELS else 1.0
            for name, (field, _) in prometheus.GAUGES.items()
            if field != "step"
        }
        endpoint.log_step(metrics(1, event="loss spike: warn", **every))
        text = client.generate_latest(endpoint.registry).decode()
        endpoint.close()
        assert re.search(r'^kit_validation_set_loss\{.*set="web"\} 1.0$', text, re.MULTILINE)
        wire = {line.split("{")[0] for line in text.splitlines() if "{" in line}
        asked = {name for expression in self.expressions() for name in re.findall(r"\bkit_\w+", expression)}
        assert asked <= wire
