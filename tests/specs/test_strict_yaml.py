"""Bad YAML gives one line per problem: file, line, key, value, rule, nearest valid name."""

import dataclasses

import pytest

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.job import JobSpec
from kit.specs.run import RunSpec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_lenght: 3", "r.yaml:1: seq_lenght: unknown key; did you mean seq_length?"),
        (
            "precision: double",
            "r.yaml:1: precision=double: should be 'fp32', 'bf16', 'fp16' or 'fp8'; valid are bf16, fp16, fp32, fp8",
        ),
        (
            "grad_clip: 1\nglobal_batch_size: '8!'",
            "r.yaml:2: global_batch_size='8!': should be a whole number, such as 4096, 1.5e9, 500M or 20B",
        ),
        ("seq_length: 0", "r.yaml:1: seq_length=0: should be greater than 0"),
        ("optimizer:\n  beta1: 1.5", "r.yaml:2: optimizer.beta1=1.5: should be less than 1"),
        ("optimizer:\n  betas: 1", "r.yaml:2: optimizer.betas: unknown key; did you mean beta1 or beta2?"),
        ("seq_length: 1.5", "r.yaml:1: seq_length=1.5: should be a whole number, such as 4096, 1.5e9, 500M or 20B"),
        ("seq_length: true", "r.yaml:1: seq_length=True: should be a valid integer"),
    ],
)
def test_each_problem_is_one_line_that_names_place_value_and_rule(text: str, message: str) -> None:
    document = strict_yaml.parse_text(text, "r.yaml")
    with pytest.raises(SpecError) as caught:
        strict_yaml.parse(JobSpec, document.data, document)
    assert str(caught.value) == message


def test_all_problems_are_reported_at_once() -> None:
    document = strict_yaml.parse_text("data: {train: x, vall: y}\nschedule: {kind: cosin}\nstepps: 3", "r.yaml")
    with pytest.raises(SpecError) as caught:
        strict_yaml.parse(RunSpec, document.data, document)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "r.yaml:2: a: the key is there twice (first in line 1); keep one"),
        ("a: [1", "r.yaml:2: not valid YAML"),
        ("- 1", "r.yaml: holds a list where a mapping of keys is expected"),
        ("a: !!python/object/apply:os.getcwd []", "r.yaml:1: not valid YAML"),
    ],
)
def test_malformed_documents(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        strict_yaml.parse_text(text, "r.yaml")
    assert str(caught.value).startswith(message)


def test_numbers_and_words_are_what_they_look_like() -> None:
    data = strict_yaml.parse_text("a: 1e-5\nb: off\nc: 12\nd: true\ne: 1.5", "r.yaml").data
    assert data == {"a": 1e-5, "b": "off", "c": 12, "d": True, "e": 1.5}


def test_specs_survive_the_round_trip() -> None:
    job = dataclasses.replace(JobSpec(), learning_rate=1e-5)
    document = strict_yaml.parse_text(strict_yaml.dump(strict_yaml.to_plain(job)), "job.yaml")
    assert strict_yaml.parse(JobSpec, document.data, document) == job
