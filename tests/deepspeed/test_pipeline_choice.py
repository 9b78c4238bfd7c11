"""Why docs/pipeline-choice.md turns PipelineModule and AutoEP down; where one fails, it is time to look again."""

from __future__ import annotations

import inspect

from deepspeed.runtime.pipe import engine, schedule
from transformers.utils import output_capturing

from tests.support.refusals import refusal


def test_pipelines_refuse_zero_2() -> None:
    assert "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism" in inspect.getsource(engine)


def test_pipelines_have_the_bubble_of_plain_1f1b() -> None:
    """2m of 2(m+p−1) slots compute, on every stage of the schedule that ``train_batch`` takes."""
    assert "schedule.TrainSchedule(" in inspect.getsource(engine)
    assert [
        len(list(schedule.TrainSchedule(micro_batches=16, stages=8, stage_id=stage).steps())) for stage in range(8)
    ] == [2 * (16 + 8 - 1)] * 8


def test_transformers_registry_refuses_what_autoep_asks() -> None:
    assert "takes 2 positional arguments but 3 were given" in refusal(
        TypeError, output_capturing._CAN_RECORD_REGISTRY.get, "a class's name", None
    )
