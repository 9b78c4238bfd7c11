"""How results of checks are joined and told (machines/results), and the command line on this machine."""

from __future__ import annotations

import json

from kit.addons.doctor.machines.results import merged, table
from kit.errors import RunDirectoryError
from kit.preflight.check_result import failure, ok, require, skipped, warning
from tests.support.in_process import kit_main, kit_refusal
from tests.support.refusals import refusal


def test_failures_are_first_and_hosts_that_say_the_same_are_joined() -> None:
    joined = merged([
        ok("port", "free", "a"),
        failure("shm", "0.1 GiB free", "mount", "a"),
        failure("shm", "0.2 GiB free", "mount", "b"),
        warning("shm", "0.1 GiB free", "mount", "c"),
        failure("shm", "0.1 GiB free", "mount", "d"),
        skipped("dcgm", "not there"),
        *(ok("hub", "there", f"node-{n}") for n in range(5)),
    ])  # fmt: skip
    assert [(result.state, result.hosts) for result in joined] == [
        ("failure", ("a", "d")),
        ("failure", ("b",)),
        ("warning", ("c",)),
        ("skipped", ("localhost",)),
        ("ok", ("a",)),
        ("ok", tuple(f"node-{n}" for n in range(5))),
    ]
    lines = table(joined, 1.25).splitlines()
    assert [lines[number].split() for number in (0, 1, -2)] == [
        ["failure", "shm", "a,", "d", "0.1", "GiB", "free"], ["→", "mount"], ["ok", "hub", "5", "hosts", "there"],
    ]  # fmt: skip
    assert lines[-1] == "2 failure, 1 warning, 1 skipped, 2 ok; 1.2 s"
    assert refusal(RunDirectoryError, require, None, *joined) == "0.1 GiB free; mount\n0.2 GiB free; mount"
    require(None, *joined[2:])


def test_the_command_line_on_this_machine() -> None:
    done = kit_main("doctor", "--json")
    rows = json.loads(done.out)
    assert done.code == (1 if any(row["state"] == "failure" for row in rows) else 0)
    assert {"packages", "own-name", "shm", "ulimits", "port"} <= {row["check"] for row in rows}
    assert "without logs" in kit_refusal(["doctor", "x.log", "--bandwidth"])
