"""Steps that are not like the others: each fault is planted, and what follows is compared with a run without it."""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kit.engines.torch.engine import TorchEngine
from kit.errors import SpecError
from kit.planner.length import length
from kit.planner.schedule import batch_size
from kit.specs.run import BatchRampSpec, CheckpointSpec, ScheduleSpec, StabilitySpec
from kit.training import determinism
from kit.training.anomalies import handler
from kit.training.anomalies.spikes import OK, SpikeDetector, StepDecision
from kit.training.checkpoint.checkpoints import RunCheckpoints
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.data.loader import DataLoader
from kit.training.stopping import Watchdog
from tests.support import tiny
from tests.support.calls import before
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training import runs


def events(rundir):
    """(event, step) of each line of events.jsonl."""
    return [(event["event"], event["step"]) for event in runs.events(rundir)]


# Judging


def test_the_window_is_the_last_values():
    generator, detector = random.Random(1), SpikeDetector(StabilitySpec(window_steps=16, sigmas=6.0))
    last = deque(maxlen=16)
    for _ in range(100):
        value = generator.choice((1.0, generator.gauss(3, 1)))  # some are equal
        detector.record(value, None)
        last.append(value)
        median = statistics.median(last)
        spread = max(1.4826 * statistics.median(abs(each - median) for each in last), 0.01 * abs(median))
        if len(last) >= 4:
            why = f"is above {median + 6 * spread:.4g} (median {median:.4g} of {len(last)} steps)"
            assert why in detector.check_loss(1000.0).why


@pytest.mark.parametrize(
    ("window", "limit"),
    [
        ([1.0, 3.0, 3.5, 2.5, 9.0], 3.0 + 2 * 1.4826 * 0.5),  # the median distance from 3 is 0.5
        ([-3.0] * 5, -3.0 + 2 * 0.01 * 3.0),  # nothing varies: a hundredth of the median
    ],
)
def test_what_is_above_the_limit_is_a_spike(window, limit):
    detector = SpikeDetector(StabilitySpec(window_steps=8, sigmas=2.0))
    detector.reset([(value, -value) for value in window])
    assert detector.check_loss(limit - 1e-9) is OK
    verdict = detector.check_loss(limit + 1e-9)
    assert (verdict.action, verdict.kind, verdict.why[:5]) == ("warn", "loss spike", "loss ")
    verdict = detector.check_norm(1e3)
    assert (verdict.kind, verdict.why[:14]) == ("gradient spike", "gradient norm ")


def test_noise_is_none_and_a_spike_does_not_hide_the_next():
    generator, stability = random.Random(0), SpikeDetector(StabilitySpec())
    for _ in range(500):
        loss, norm = generator.gauss(3, 0.05), generator.lognormvariate(0, 0.2)
        assert not stability.check_loss(loss)
        assert not stability.check_norm(norm)
        stability.record(loss, norm)
    for _ in range(3):
        assert stability.check_loss(9.0)
        stability.record(9.0, 1.0)


@pytest.mark.parametrize(("window_steps", "least"), [(32, 8), (8, 2)])
def test_none_before_there_is_a_past(window_steps, least):
    """A quarter of the window; steps without a norm are none of the norm's."""
    stability = SpikeDetector(StabilitySpec(window_steps=window_steps))
    for _ in range(least):
        assert stability.check_loss(100.0) is OK
        stability.record(1.0, None)
    assert stability.check_loss(100.0)
    assert stability.check_norm(100.0) is OK


def test_what_is_not_finite():
    stability = SpikeDetector(StabilitySpec(not_finite="discard"))
    assert stability.check_loss(math.nan).action == "discard"
    assert stability.check_norm(math.inf).why == "gradient norm is inf"


@pytest.mark.parametrize(
    ("of_loss", "norm", "of_norm", "judged"),
    [
        ("none", 1.0, "none", ("none", "")),
        ("warn", 1.0, "none", ("warn", "loss spike")),
        ("none", 1.0, "warn", ("warn", "gradient spike")),
        ("warn", 1.0, "warn", ("warn", "loss spike")),
        ("warn", 1.0, "discard", ("discard", "gradient spike")),
        ("none", 1.0, "stop", ("stop", "gradient spike")),
        ("discard", "not asked", "stop", ("discard", "loss spike")),
        ("warn", None, "stop", ("warn", "loss spike")),  # an overflow of fp16
    ],
)
def test_the_stricter_of_two_decisions_is_done(of_loss, norm, of_norm, judged):
    engine = SimpleNamespace(gradient_norm=lambda: pytest.fail("asked") if norm == "not asked" else norm)
    logger = SimpleNamespace(history=lambda step, count: ())
    found = handler.AnomalyHandler(engine, StabilitySpec(), None, logger, None, 0)
    decisions = [StepDecision(*each) for each in ((of_loss, "loss spike"), (of_norm, "gradient spike"))]
    decisions = [OK if each.action == "none" else each for each in decisions]
    found.detector = SimpleNamespace(check_loss=lambda loss: decisions[0], check_norm=lambda norm: decisions[1])
    assert (found.judge(2.0).action, found.judge(2.0).kind) == judged


@pytest.fixture
def spoiled(monkeypatch):
    """A function that makes the loss of some steps (by the samples before them) so many times as large as it is."""
    where: dict[int, float] = {}
    real_loss, positions = TorchEngine._loss, [0]

    def loss(self, micro_batch, training=True):
        return real_loss(self, micro_batch, training) * (where.get(positions[-1], 1.0) if training else 1.0)

    before(monkeypatch, DataLoader, "step", lambda _, position, *more: positions.append(position))
    monkeypatch.setattr(TorchEngine, "_loss", loss)
    return where


def prepared(path, **stability):
    spec = StabilitySpec(**({"window_steps": 8, "sigmas": 20.0, "gradient_spike": "off"} | stability))
    return runs.prepare(path, steps=12, stability=spec, checkpoint=CheckpointSpec(every_steps=3, keep_last=2))


@pytest.fixture
def trained(tmp_path, one_process):
    """A function that makes and runs a run of ``prepared``; it and the counters at its end."""

    def run(name="run", **stability):
        rundir = prepared(tmp_path / name, **stability)
        runs.run(rundir)
        return rundir, Checkpoint(rundir.path / "checkpoints" / "step-00000012").manifest.counters

    return run


@runs.one_process
class TestSpikes:
    """Step 8, samples 14 and 15, is spoiled; checkpoints are of steps 3, 6, 9, 12."""

    @pytest.fixture(autouse=True)
    def at_step_8(self, spoiled):
        spoiled[14] = 100.0

    def test_warn_changes_nothing(self, trained, capsys, monkeypatch):
        monkeypatch.setattr(handler, "_look_at_output", None)  # a step costs no hook
        off, _ = trained("off", loss_spike="off")
        assert not (off.path / "events.jsonl").exists()
        capsys.readouterr()
        rundir, _ = trained()
        (event,) = runs.events(rundir)
        assert (event["event"], event["step"], event["samples"]) == ("loss spike", 8, [14, 15])
        assert "loss spike at step 8 (samples 14 to 15): loss" in capsys.readouterr().out
        ours, theirs = runs.metrics(rundir), runs.metrics(off)
        assert (ours[7].pop("event"), theirs[7].pop("event")) == ("loss spike: warn", None)
        assert ours == theirs

    def test_discard_leaves_weights_and_moments_alone(self, trained, spoiled):
        """The batch is never applied: spoiled by another factor it leaves the same weights."""
        rows = {}
        for factor in (10.0, 1000.0):
            spoiled[14] = factor
            rundir, counters = trained(str(factor), loss_spike="discard")
            rows[factor] = runs.metrics(rundir)
            assert [row["step"] for row in rows[factor]] == list(range(1, 13))
            assert (rows[factor][7]["grad_norm"], rows[factor][7]["event"]) == (None, "loss spike: discard")
            assert (counters.samples_seen, counters.optimizer_steps) == (24, 11)
        assert rows[10.0][8:] == rows[1000.0][8:]

    @pytest.mark.parametrize("of_loss", ["warn", "off"])
    def test_discard_by_the_gradient_norm(self, trained, of_loss):
        """A factor on the loss is one on the gradient. If the loss is warned of, the stricter of the two is done."""
        rundir, _ = trained(loss_spike=of_loss, gradient_spike="discard")
        assert [(event["event"], event["step"], event["action"]) for event in runs.events(rundir)] == [
            ("gradient spike", 8, "discard")
        ]
        assert runs.metrics(rundir)[7]["grad_norm"] is None

    def test_rewind_skips_the_data_and_says_which(self, trained, tmp_path, spoiled, capsys, monkeypatch):
        """And a kill after it comes to the same."""
        rundir, counters = trained(loss_spike="rewind")
        assert events(rundir) == [("loss spike", 8), ("rewound", 6)]
        assert runs.events(rundir)[1]["skipped_samples"] == [12, 15]
        assert "back to step 6; samples 12 to 15 are left out" in capsys.readouterr().out
        assert [row["step"] for row in runs.metrics(rundir)] == list(range(1, 13))
        assert (counters.samples_seen, counters.samples_skipped) == (24, 4)
        killed = prepared(tmp_path / "killed", loss_spike="rewind")
        runs.resumed(killed, 7, 10, None)  # the first is before the spike, with a checkpoint of step 7
        assert [row["step"] for row in runs.metrics(killed)] == list(range(1, 13))
        assert events(killed)[-1] == ("resumed", 10)
        # The window of a process that was started again is that of one that was not.
        whole_spike, spike = (
            next(e for e in runs.events(each) if e["event"] == "loss spike") for each in (rundir, killed)
        )
        assert spike["why"] == whole_spike["why"]
        # The steps after are those of a run that never had these samples in its order.
        spoiled.clear()
        real = DataLoader.step
        monkeypatch.setattr(DataLoader, "step", lambda self, at, size=None: real(self, at + 4 * (at >= 12), size))
        assert runs.metrics(rundir) == runs.metrics(trained("reference")[0])

    def test_rewound_twice_no_sample_is_read_again(self, trained, spoiled, monkeypatch):
        """The second time to a checkpoint that has left samples out already. The watchdog is told to be patient."""
        spoiled[22], told = 100.0, []
        before(monkeypatch, Watchdog, "beat", lambda _, *said: told.append(said))
        rundir, counters = trained(loss_spike="rewind", window_steps=16)
        spikes = [event for event in runs.events(rundir) if event["event"] == "loss spike"]
        assert [(event["step"], event["samples"]) for event in spikes] == [(8, [14, 15]), (10, [22, 23])]
        # Each is compared with all steps before it, and with none of those that were made again.
        assert [re.search(r"of (\d+) steps", event["why"]).group(1) for event in spikes] == ["7", "9"]
        rewinds = [event for event in runs.events(rundir) if event["event"] == "rewound"]
        assert [(event["step"], event["skipped_samples"]) for event in rewinds] == [(6, [12, 15]), (9, [22, 23])]
        assert counters.samples_skipped == 6
        assert [said for said in told if "rewinding" in said[0]] == [(f"rewinding from step {n}", 10) for n in (8, 10)]

    def test_steps_that_were_left_out_do_not_raise_the_limit(self, trained, spoiled):
        """More of them than half a window: its median would be a spike."""
        spoiled.update(dict.fromkeys(range(12, 24, 2), 10.0))
        rundir, _ = trained(loss_spike="discard", window_steps=8)
        assert [step for _, step in events(rundir)] == list(range(7, 13))

    @pytest.mark.parametrize(
        ("samples", "checkpoint", "rewinds", "said"),
        [
            (range(12, 60, 2), {"every_steps": 3}, 2, r"after 2 rewinds to step 6 .*other data does not help"),
            ((6,), {}, 0, "there is no checkpoint to go back to yet"),
            # A rewind waits for the checkpoint that is being written.
            (range(12, 60, 2), {"every_steps": 3, "asynchronous": True}, 2, "after 2 rewinds to step 6"),
        ],
    )
    def test_rewinding_has_an_end(self, tmp_path, spoiled, monkeypatch, samples, checkpoint, rewinds, said):
        takes_s = 0.3 * checkpoint.get("asynchronous", False)
        before(monkeypatch, RunCheckpoints, "write", lambda *_, **options: time.sleep(takes_s))
        spoiled.update(dict.fromkeys(samples, 10.0))
        rundir = prepared(tmp_path / "run", loss_spike="rewind", max_rewinds=2)
        rundir = runs.with_run(rundir, checkpoint=CheckpointSpec(**checkpoint))
        assert re.search(said, runs.run_failing(rundir))
        assert [event for event, _ in events(rundir)].count("rewound") == rewinds


# Not finite


@runs.one_process
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_the_step_and_the_first_module_are_named(tmp_path, spoiled, factor):
    spoiled[6] = factor
    rundir = prepared(tmp_path / "run")
    said = rf"loss is {factor} at step 4; resume .*samples 6 to 7 of that step: in backward .* lm_head \(Linear\)"
    assert re.search(said, runs.run_failing(rundir))
    assert runs.events(rundir)[-1]["first"].startswith("in backward the gradient at the output of lm_head (Linear)")
    assert not (rundir.path / "summary.json").exists()


@runs.one_process
@pytest.mark.parametrize(
    ("action", "said", "found"),
    [
        ("discard", ["not finite", "not finite"], [None] * 3 + ["not finite: discard"] + [None] * 2),
        ("rewind", ["not finite", "not finite", "rewound"], [None] * 6),
    ],
)
def test_the_run_goes_on(tmp_path, spoiled, action, said, found):
    spoiled[6] = math.nan
    rundir = runs.trained(tmp_path / "run", stability=StabilitySpec(not_finite=action))
    assert [event for event, _ in events(rundir)] == said
    assert [row["event"] for row in runs.metrics(rundir)] == found


class Fails(torch.nn.Module):
    """``factor`` is of the output, and ``backward`` of the gradient at it."""

    def __init__(self, weight, factor, backward=1.0):
        super().__init__()
        self.weight, self.factor, self.backward = torch.nn.Parameter(torch.tensor(weight)), factor, backward

    def forward(self, value):
        output = value * self.factor + self.weight.sum()
        output.register_hook(lambda gradient: gradient * self.backward)
        return output


def first_of(value, *modules):
    """What is said of a step through these modules, which are parts of a container."""
    whole = torch.nn.Sequential(*(Fails(*each) for each in modules))
    engine = SimpleNamespace(
        modules=lambda: dict(whole.named_modules()),
        forward_backward=lambda batches: whole(torch.tensor([value], requires_grad=True)).backward(),
        discard=lambda: None,
    )
    said = handler.first_module(engine, [])
    assert not any(each._forward_hooks for each in whole)
    return said


@runs.one_process
@pytest.mark.parametrize(
    ("value", "weight", "factor", "why"),
    [
        (1.0, [math.inf], 1.0, "and neither is its weight"),
        (math.nan, [1.0], 1.0, "and neither is its input"),
        (1.0, [], math.nan, "though its inputs are"),  # ZeRO-3 has freed the weights
        (1.0, [1.0], math.nan, "though its inputs and weights are"),
    ],
)
def test_the_cause_is_named_as_far_as_it_is_known(value, weight, factor, why):
    said = first_of(value, (weight, factor), ([math.nan], 1.0))
    assert said == f"the output of 0 (Fails) is not finite, {why} (rank 0)"


def test_the_weights_of_a_module_are_its_own():
    """A container is not blamed for what a part of it has."""
    broken = torch.nn.Sequential(Fails([math.nan], 1.0))
    good, bad = torch.ones(1), torch.full((1,), math.inf)
    assert [handler._because(*case) for case in ((broken, [good]), (broken[0], [good]), (broken, [good, bad]))] == [
        "though its inputs and weights are", "and neither is its weight", "and neither is its input"
    ]  # fmt: skip


def test_what_is_looked_at_is_numbers_with_a_point():
    value = torch.ones(1)
    assert handler._tensors(({"a": value}, None, 3.0, torch.ones(1, dtype=torch.int64), [value])) == [value, value]


@runs.one_process
def test_in_backward_the_last_module_that_fails_comes_first():
    said = first_of(1.0, ([1.0], 1.0, math.inf), ([1.0], 1.0, math.nan), ([1.0], 1.0))
    assert said == "in backward the gradient at the output of 1 (Fails) is not finite (rank 0)"


def first_of_ranks(*faulty):
    """``faulty``: number of the module that fails, by rank."""
    mine = faulty[torch.distributed.get_rank()]
    return first_of(1.0, *(([1.0], math.inf if number == mine else 1.0) for number in range(3)))


def test_the_lowest_rank_that_found_something_is_believed():
    expected = {
        (2, 1): "the output of 2 (Fails) is not finite, though its inputs and weights are (rank 0)",
        (None, 1): "the output of 1 (Fails) is not finite, though its inputs and weights are (rank 1)",
        (None, None): "a replay of the step was finite everywhere",
    }
    assert {faulty: set(pool("torch", 2).run(first_of_ranks, *faulty)) for faulty in expected} == {
        faulty: {said} for faulty, said in expected.items()
    }


# Batch ramp


RAMP = BatchRampSpec(start=4, increment=4, samples=96)


@pytest.mark.parametrize("samples", [96, 97, 100])
def test_sizes_are_megatrons_where_increments_divide_nothing(samples):
    """megatron-core, num_microbatches_calculator.py: increments come after shares of samples, whole or not."""
    ramp = BatchRampSpec(start=4, increment=4, samples=samples)
    assert [batch_size(seen, ramp, 16) for seen in range(samples + 20)] == [
        min(16, 4 + 4 * int(seen / (samples / 3))) for seen in range(samples + 20)
    ]


def test_steps_of_a_budget():
    plan = tiny.plan(micro_batch_size=4, gradient_accumulation_steps=4, job={"total_tokens": 32 * 160})
    steps, samples = length(plan, tiny.run_directory_spec(steps=None, schedule=ScheduleSpec(batch_ramp=RAMP)))
    assert (steps, samples) == (18, 148)  # another batch of 16 would be 164
    assert length(plan, tiny.run_directory_spec(steps=10, schedule=ScheduleSpec(batch_ramp=RAMP)))[1] == 48


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        ({"start": 6, "increment": 4}, "start=6 is not a multiple of .* = 4; use 4 or 8"),
        ({"start": 4, "increment": 8}, "goes from 4 by 8, which does not meet job.global_batch_size=16"),
        ({"start": 16, "increment": 4}, "does not meet"),
    ],
)
def test_refused(ramp, said):
    plan = tiny.plan(micro_batch_size=4, gradient_accumulation_steps=4)
    spec = ScheduleSpec(batch_ramp=BatchRampSpec(samples=96, **ramp))
    assert re.search(said, refusal(SpecError, length, plan, tiny.run_directory_spec(steps=5, schedule=spec)))


def test_an_interleaved_pipeline_takes_whole_rounds():
    plan = tiny.plan(
        tiny.model(num_layers=4), engine="megatron", implementation="local", pp=2, vp=2,
        micro_batch_size=4, gradient_accumulation_steps=4,
    )  # fmt: skip
    for start, refused in ((4, True), (8, False)):
        spec = ScheduleSpec(batch_ramp=BatchRampSpec(start=start, increment=start, samples=96))
        with pytest.raises(SpecError, match=r"dp · pp \(an interleaved") if refused else nullcontext():
            length(plan, tiny.run_directory_spec(steps=5, schedule=spec))


@runs.one_process
def test_a_ramped_run_resumes_in_the_middle(tmp_path):
    plan = tiny.plan(micro_batch_size=2, gradient_accumulation_steps=3)
    schedule = ScheduleSpec(batch_ramp=BatchRampSpec(start=2, increment=2, samples=12))
    whole, _ = runs.same_curve(tmp_path, plan, schedule=schedule)
    assert [row["batch_size"] for row in runs.metrics(whole)] == [2, 2, 2, 4, 4, 6]
    assert [row["samples_seen"] for row in runs.metrics(whole)] == [2, 4, 6, 10, 14, 20]
    assert runs.metrics(whole)[-1]["learning_rate"] == pytest.approx(1e-3), "the schedule ends with the run"


def test_determinism_is_on_while_it_is_chosen(monkeypatch):
    def now():
        memory = torch.utils.deterministic.fill_uninitialized_memory
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, memory

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    for wanted, inside in ((False, (False, True, True)), (True, (True, False, False))):
        with determinism.chosen(wanted):
            assert now() == inside
        assert now() == (False, True, True)


@runs.one_process
def test_determinism_is_asked_of_torch_and_given_back(tmp_path, monkeypatch):
    """put_ without accumulation has no deterministic kernel. That a step of kit's own has: test_stopping.py."""
    twice = torch.tensor([0, 0]), torch.tensor([1.0, 2.0])
    before(monkeypatch, DataLoader, "step", lambda *_: torch.zeros(4).put_(*twice))
    runs.trained(tmp_path / "loose", deterministic=False, steps=1)
    assert "does not have a deterministic implementation" in refusal(
        RuntimeError, runs.trained, tmp_path / "strict", deterministic=True, steps=1
    )
    assert not torch.are_deterministic_algorithms_enabled()
