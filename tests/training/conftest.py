"""One gloo process for the tests that need no second one, and the runs that several files look at."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from tests.support.alone import process_group_of_one
from tests.support.s3 import s3_server
from tests.system.kills import cases
from tests.training import runs


@pytest.fixture
def one_process():
    """One process group of one rank (tests/support/alone.py)."""
    with process_group_of_one():
        yield


@pytest.fixture
def s3():
    """Object storage on this machine, with an empty bucket."""
    with s3_server("bucket") as server:
        yield server


@pytest.fixture(scope="package")
def kills_data(tmp_path_factory):
    """The data of ``tests.system.kills``."""
    return cases.prepare(tmp_path_factory.mktemp("kills") / "data")


@pytest.fixture(scope="package")
def whole(tmp_path_factory):
    """An uninterrupted run of six steps of two samples, which no test changes."""
    with process_group_of_one():
        return runs.trained(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="package")
def _stopped(tmp_path_factory):
    with process_group_of_one():
        return runs.trained(tmp_path_factory.mktemp("stopped") / "run", stop_at_step=4)


@pytest.fixture
def stopped(_stopped, tmp_path):
    """A copy of a run like ``whole`` that was stopped after step 4: checkpoints of steps 2 and 4."""
    shutil.copytree(_stopped.path, tmp_path / "stopped")
    return dataclasses.replace(_stopped, path=tmp_path / "stopped")
