"""What is made without validation, because it is known to be good, really is."""

import dataclasses

import pytest
from pydantic import ValidationError

from kit.errors import SpecError
from kit.specs.balancing import BalancingSpec
from kit.specs.base import adapter, trusted
from kit.specs.catalog import gpu_names, load_gpu, load_model, model_names, node_names, parse_cluster
from kit.specs.families import FAMILIES
from kit.specs.job import JobSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Pins
from kit.specs.run import CheckpointSpec, LimitsSpec, LoggingSpec, ScheduleSpec, StabilitySpec
from kit.specs.strict_yaml import Document, parse, to_plain

DEFAULTS = [
    JobSpec, LoraSpec, OptimizerSpec, Pins, CheckpointSpec, LimitsSpec, LoggingSpec, ScheduleSpec, StabilitySpec
]  # fmt: skip


def validated(value):
    """The same value, read by pydantic."""
    return parse(type(value), to_plain(value), Document(name="row", data={}, lines={}))


@pytest.mark.parametrize("name", model_names())
def test_a_model_of_the_catalog_is_what_validation_makes_of_its_row(name):
    model = load_model(name)
    assert repr(model) == repr(validated(model))  # repr tells 80 from 80.0
    assert hash(model) == hash(validated(model))


@pytest.mark.parametrize("name", gpu_names())
def test_a_gpu_of_the_catalog_is_what_validation_makes_of_its_row(name):
    assert repr(load_gpu(name)) == repr(validated(load_gpu(name)))


@pytest.mark.parametrize("name", node_names())
def test_a_node_of_the_catalog_is_what_validation_makes_of_its_row(name):
    cluster = parse_cluster(f"{name}:1")
    assert repr(cluster) == repr(validated(cluster))


@pytest.mark.parametrize("family", [name for name, traits in FAMILIES.items() if traits.balancing])
def test_the_balancing_of_a_family_is_valid(family):
    made = trusted(BalancingSpec, FAMILIES[family].balancing)
    assert repr(made) == repr(validated(made))


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_valid(kind):
    assert repr(kind()) == repr(validated(kind()))


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_value_that_is_given_is_validated(kind):
    first = dataclasses.fields(kind)[0].name
    with pytest.raises(ValidationError):
        kind(**{first: object()})
    with pytest.raises(ValidationError):
        dataclasses.replace(kind(), **{first: object()})
    with pytest.raises(ValidationError):
        kind(no_such_field=1)


def test_a_wrong_row_would_be_noticed():
    wrong = trusted(OptimizerSpec, {"beta1": 2})
    with pytest.raises(SpecError, match=r"beta1=2\.0: should be less than 1"):
        validated(wrong)
    assert repr(trusted(OptimizerSpec, {"weight_decay": 1})) != repr(OptimizerSpec(weight_decay=1))


def test_one_reader_is_made_for_a_type():
    assert adapter(JobSpec) is adapter(JobSpec)
