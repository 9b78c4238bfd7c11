"""What is made without validation, because it is known to be good, really is; and what validation says of the rest."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog import gpu_names, load_gpu, load_model, model_names, node_names, parse_cluster
from kit.specs.families import FAMILIES
from kit.specs.job import BalancingSpec, JobSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Pins
from kit.specs.run import CheckpointSpec, LimitsSpec, LoggingSpec, RunSpec, ScheduleSpec, StabilitySpec
from kit.specs.validation import adapter, trusted
from tests.support.refusals import refusal

DEFAULTS = (
    JobSpec, LoraSpec, OptimizerSpec, Pins, CheckpointSpec, LimitsSpec, LoggingSpec, ScheduleSpec, StabilitySpec
)  # fmt: skip
MADE: dict[str, Callable[[], Any]] = {
    **{f"model {name}": lambda name=name: load_model(name) for name in model_names()},  # type: ignore[misc]
    **{f"gpu {name}": lambda name=name: load_gpu(name) for name in gpu_names()},  # type: ignore[misc]
    **{f"node {name}": lambda name=name: parse_cluster(f"{name}:1") for name in node_names()},  # type: ignore[misc]
    **{f"balancing of {name}": lambda row=traits.balancing: trusted(BalancingSpec, row)  # type: ignore[misc]
       for name, traits in FAMILIES.items() if traits.balancing},
    **{f"defaults of {kind.__name__}": kind for kind in DEFAULTS},
}  # fmt: skip


def validated(value: Any) -> Any:
    """The same value, read by pydantic."""
    return strict_yaml.parse(type(value), strict_yaml.to_plain(value), strict_yaml.Document("row", {}, {}))


def test_what_is_trusted_is_what_validation_makes_of_it() -> None:
    """By repr, which tells 80 from 80.0."""
    rows = {name: (made := make(), validated(made)) for name, make in MADE.items()}
    assert len(rows) > 200
    assert [name for name, (made, same) in rows.items() if (repr(made), hash(made)) != (repr(same), hash(same))] == []


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_value_that_is_given_is_validated(kind: Any) -> None:
    first = dataclasses.fields(kind)[0].name
    for make in (
        lambda: kind(**{first: object()}),
        lambda: dataclasses.replace(kind(), **{first: object()}),
        lambda: kind(no_such_field=1),
    ):
        refusal(ValidationError, make)


def test_a_wrong_row_would_be_noticed() -> None:
    assert "beta1=2.0: should be less than 1" in refusal(SpecError, validated, trusted(OptimizerSpec, {"beta1": 2}))
    assert repr(trusted(OptimizerSpec, {"weight_decay": 1})) != repr(OptimizerSpec(weight_decay=1))
    assert adapter(JobSpec) is adapter(JobSpec), "one reader is made for a type"


def read(kind: Any, text: str) -> None:
    document = strict_yaml.parse_text(text, "r.yaml")
    strict_yaml.parse(kind, document.data, document)


# Bad YAML gives one line per problem: file, line, key, value, rule, nearest valid name.


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (JobSpec, "seq_lenght: 3", "r.yaml:1: seq_lenght: unknown key; did you mean seq_length?"),
        (JobSpec, "precision: double",
         "r.yaml:1: precision=double: should be 'fp32', 'bf16', 'fp16' or 'fp8'; valid are "
         "bf16, fp16, fp32, fp8"),
        (JobSpec, "grad_clip: 1\nglobal_batch_size: '8!'",
         "r.yaml:2: global_batch_size='8!': should be a whole number, "
         "such as 4096, 1.5e9, 500M or 20B"),
        (JobSpec, "seq_length: 0", "r.yaml:1: seq_length=0: should be greater than 0"),
        (JobSpec, "optimizer:\n  beta1: 1.5", "r.yaml:2: optimizer.beta1=1.5: should be less than 1"),
        (JobSpec, "optimizer:\n  betas: 1", "r.yaml:2: optimizer.betas: unknown key; did you mean beta1 or beta2?"),
        (JobSpec, "lora:\n  rnk: 1", "r.yaml:2: lora.rnk: unknown key; did you mean rank?"),
        (JobSpec, "seq_length: 1.5",
         "r.yaml:1: seq_length=1.5: should be a whole number, such as 4096, "
         "1.5e9, 500M or 20B"),
        (JobSpec, "seq_length: true", "r.yaml:1: seq_length=True: should be a valid integer"),
        (RunSpec, "data:\n  blend:\n    web: {path: a, wieght: 1}", "r.yaml:3: data.blend.web.weight: is required and "
         "missing\nr.yaml:3: data.blend.web.wieght: unknown key; did you mean weight?"),
        (RunSpec, "data: {train: x, vall: y}\nschedule: {kind: cosin}\nstepps: 3",
         "r.yaml:1: data.vall: unknown key; the nearest of 10 are validation, validation_sets, allow_many_epochs, "
         "wrap, chat_template\nr.yaml:2: schedule.kind=cosin: did you mean cosine?\n"
         "r.yaml:3: stepps: unknown key; did you mean steps?"),
        (None, "a: 1\na: 2", "r.yaml:2: a: the key is there twice (first in line 1); keep one"),
        (None, "a: [1", "r.yaml:2: not valid YAML"),
        (None, "- 1", "r.yaml: holds a list where a mapping of keys is expected"),
        (None, "a: !!python/object/apply:os.getcwd []", "r.yaml:1: not valid YAML"),
    ],
)  # fmt: skip
def test_each_problem_is_one_line_that_names_place_value_and_rule(kind: Any, text: str, message: str) -> None:
    assert refusal(SpecError, read, kind, text).startswith(message)
