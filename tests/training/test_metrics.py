"""metrics.jsonl has one line a step, whatever happened to the run."""

from __future__ import annotations

import json

from kit.training.logging.metrics import MetricsLog, StepMetrics
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


def test_every_line_is_there_before_the_next_step(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2):
        log.log_step(metrics(step))
        assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
    log.close()
    assert lines(tmp_path / "metrics.jsonl")[1]["samples_seen"] == 4


def test_resuming_drops_what_will_be_trained_again_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (1, 2, 3, 4):
        log.log_step(metrics(step, loss=float(step)))
    log.close()
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')
    log = MetricsLog(path, 2)
    log.log_step(metrics(3, loss=30.0))
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_full_disk_delays_lines_and_does_not_end_the_run(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.log_step(metrics(1))
    with full_disk(path.stat().st_size + 10):
        log.log_step(metrics(2))
        log.log_step(metrics(3))
    log.log_step(metrics(4))
    log.close()
    assert "metrics of step 2 are not on disk yet, the run goes on" in capsys.readouterr().out
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]


def test_terminal_line():
    line = metrics(7, mfu=0.41, validation_loss=1.5).line(60)
    assert line.startswith("step 7/60  loss 2.0000  grad norm 1  lr 0.001  500 ms/step  128 tokens/s")
    assert line.endswith("MFU 41.0 %  validation loss 1.5000")
