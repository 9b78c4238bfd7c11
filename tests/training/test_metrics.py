"""metrics.jsonl has one line a step, whatever happened to the run."""

from __future__ import annotations

import json
from contextlib import closing

from kit.training.logging.metrics import (
    MetricsLog,
    StepMetrics,
    logged_steps,
    missing_steps,
)
from tests.training.disk import full_disk


def metrics(step, **changes):
    values = {
        "step": step,
        "loss": 2.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 64,
        "samples_seen": 2 * step,
        "step_time_s": 0.5,
        "tokens_per_s": 128.0,
        "mfu": None,
    }
    return StepMetrics(**(values | changes))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_resuming_drops_what_will_be_trained_again_and_what_is_no_step(tmp_path, capsys):
    """Every line is there before the next step; a kill may tear the last one."""
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path, 0)) as log:
        for step in (1, 2, 3, 4):
            log.log_step(metrics(step, loss=float(step)))
            assert [line["step"] for line in lines(path)] == list(range(1, step + 1))
    with open(path, "a") as file:
        file.write('\n{"step": true}\n[]\n{"step": 5, "lo')
    with closing(MetricsLog(path, 2)) as log:
        assert "3 lines of " in capsys.readouterr().out
        log.log_step(metrics(3, loss=30.0, samples_seen=6))
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert lines(path)[2]["samples_seen"] == 6


def test_a_checkpoint_s_time_is_written_into_its_line_and_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path, 0)) as log:
        for step in (1, 2, 3):
            log.log_step(metrics(step))
            if step == 2:
                log.log_checkpoint(step, 1.25)
                log.log_checkpoint(step, 9.0)  # of a rank that says it again
    assert [line["checkpoint_s"] for line in lines(path)] == [None, 1.25, None]


def test_the_past_of_a_run_is_the_steps_that_changed_weights(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path, 0)) as log:
        for step in (1, 2, 3, 5, 6):
            log.log_step(metrics(step, loss=float(step), grad_norm=None if step == 3 else 10.0 * step))
    every = [(1.0, 10.0), (2.0, 20.0), (5.0, 50.0)]
    asked = (path, 5, 9), (path, 5, 2), (path, 0, 9), (tmp_path, 5, 9)
    assert [logged_steps(*each) for each in asked] == [every, every[1:], [], []]
    assert missing_steps(path, 0, 3) is None
    assert "lacks 1 of the 5 steps of this run, step 4: these" in missing_steps(path, 1, 6)
    assert "lacks 3 of the 7 steps of this run, step 4 to 8: these" in missing_steps(path, 1, 8)


def test_a_full_disk_delays_lines_and_does_not_end_the_run(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path, 0)) as log:
        log.log_step(metrics(1))
        with full_disk(path.stat().st_size + 10):
            log.log_step(metrics(2))
            log.log_step(metrics(3))
        log.log_step(metrics(4))
    assert "metrics of step 2 are not on disk yet, the run goes on" in capsys.readouterr().out
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
