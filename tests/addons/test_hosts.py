"""Hosts that differ in one thing (kit/addons/doctor/machines: hosts, remote, sockets). What this machine can do is done
for real, over a stand-in for ssh."""

from __future__ import annotations

import copy
import json
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.addons.doctor.machines import hosts, remote, sockets
from kit.errors import SpecError
from kit.preflight.check_result import CheckResult
from tests.addons.machines import H100S, HEALTHY, SSH, gpus, run_of, states, told
from tests.emit.plans import TORCH, stand_in
from tests.support import ROOT
from tests.support.files import file_with
from tests.support.refusals import refusal
from tests.support.runs import free_port


def several(count: int, **changes: Any) -> dict[str, dict[str, Any]]:
    """Healthy hosts; ``changes`` of each by its number, node_1 for the second."""
    return {f"node-{number}": copy.deepcopy(HEALTHY) | changes.get(f"node_{number}", {}) for number in range(count)}


def test_hosts_that_are_alike_pass() -> None:
    assert {result.state for between in hosts._BETWEEN for result in between(several(3))} == {"ok"}


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize(
    ("fact", "value", "state", "said"),
    [
        ("packages", HEALTHY["packages"] | {"torch": "2.9"}, "failure", "torch 2.9, 2.13 on {}"),
        ("packages", HEALTHY["packages"] | {"numpy": None}, "failure", "numpy not installed, 2.1 on {}"),
        ("kit", "b", "failure", "kit b, a on {}"),
        ("nccl", None, "failure", "nccl not installed, 2.27 on {}"),
        ("torch_cuda", "11.8", "failure", "torch_cuda 11.8, 12.8 on {}"),
        ("kernel", "5.4", "warning", "kernel 5.4, 6.8 on {}"),
        ("python", "3.12.1", "warning", "python 3.12.1, 3.11.7 on {}"),
        ("tools", HEALTHY["tools"] | {"g++": "9.1"}, "warning", "g++ 9.1, 12.2 on {}"),
    ],
)
def test_the_odd_host_is_named_beside_one_of_the_others(odd: int, fact: str, value: Any, state: str, said: str) -> None:
    assert told(hosts.versions(several(3, **{f"node_{odd}": {fact: value}}))) == [
        (state, (f"node-{odd}",), said.format("node-0" if odd else "node-1"))
    ]


def with_contents(*of_hosts: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    return several(3, **{f"node_{number}": {"contents": each} for number, each in enumerate(of_hosts)})


def with_names(**addresses: list[str]) -> dict[str, dict[str, Any]]:
    """What the second of two hosts knows; Debian maps a host's own name to 127.0.1.1."""
    others = {name.replace("_", "-"): each for name, each in addresses.items()}
    return several(
        2, node_0={"names": {"node-0": ["127.0.1.1"], "node-1": ["10.0.0.2"]}},
        node_1={"names": {"node-1": ["127.0.1.1"], **others}},
    )  # fmt: skip


BOTH, ALL = ("node-0", "node-1"), ("node-0", "node-1", "node-2")
OF_EIGHT = f"8 x {H100S}, driver 550.90.07"
A_AND_C = {"/data/a": "a", "/data/b": "c"}
KNOWN = ("ok", BOTH, "every host knows the others")
MARK = Path("/run/mark")
BETWEEN: list[tuple[Callable[..., list[CheckResult]], tuple[Any, ...], list[tuple[str, tuple[str, ...], str]]]] = [
    (hosts.versions, (several(1),), [("ok", ("node-0",), "one machine")]),
    (hosts.versions, (several(5, node_1={"nccl": "2.18.1"}, node_3={"nccl": "2.19.3"}, node_4={"nccl": "2.18.1"}),), [
        ("failure", ("node-1", "node-4"), "nccl 2.18.1, 2.27 on node-0"),
        ("failure", ("node-3",), "nccl 2.19.3, 2.27 on node-0"),
    ]),
    (hosts.machines, (several(3, node_1={"gpus": gpus(count=7)}, node_2={"gpus": gpus("550.90.07", "551.1", 5)}),), [
        ("failure", ("node-1",), f"GPUs 7 x {H100S}, driver 550.90.07, {OF_EIGHT} on node-0"),
        ("failure", ("node-2",), f"GPUs {OF_EIGHT}, 8 x {H100S}, driver 551.1, {OF_EIGHT} on node-0"),
    ]),
    (hosts.machines, (several(2) | {"x": HEALTHY | {"gpus": None}},), [
        ("failure", ("x",), f"GPUs not installed, {OF_EIGHT} on node-0"),
    ]),
    (hosts.contents, (with_contents(*[{"/data/a": "x"}] * 3),), [("ok", ALL, "1 files, the same everywhere")]),
    (hosts.contents, (with_contents(A_AND_C, A_AND_C | {"/data/a": "b"}, A_AND_C | {"/data/b": None}),), [
        ("failure", ("node-1",), "/data/a differs from that on node-0"),
        ("failure", ("node-2",), "/data/b is not there"),
    ]),
    # another host's name at an address of the loopback is a fault
    (hosts.names, (with_names(node_0=["10.0.0.1"]),), [KNOWN]),
    (hosts.names, (with_names(node_0=["127.0.0.2", "10.0.0.1"]),), [KNOWN]),
    (hosts.names, (with_names(node_0=["127.0.0.2"]),), [("failure", ("node-1",), "does not know node-0")]),
    (hosts.names, (with_names(node_0=[], node_9=[]),), [("failure", ("node-1",), "does not know node-0, node-9")]),
    # of two clocks the one that is wrong
    (hosts.clocks, ({"node-0": 0.0, "node-1": 1.0},), [("ok", BOTH, "within 1.00 s")]),
    (hosts.clocks, ({"node-0": 0.0, "node-1": 1.1},), [("warning", ("node-1",), "its clock is 1.1 s ahead")]),
    (hosts.clocks, ({"node-0": 0.0, "node-1": -1.1},), [("warning", ("node-1",), "its clock is 1.1 s behind")]),
    (hosts.clocks, ({"node-0": 0.0, "node-1": 60.0},), [("warning", ("node-1",), "its clock is 60.0 s ahead")]),
    (hosts.clocks, ({"node-0": 0.0, "node-1": -60.1},), [("failure", ("node-1",), "its clock is 60.1 s behind")]),
    (hosts.reach, ({"node-1": {"node-0": "No route to host"}, "node-0": {"node-1": None}}, 29501), [
        ("failure", ("node-1",), "cannot reach node-0 port 29501: No route to host"),
    ]),
    (hosts.reach, ({"node-1": {"node-0": None}, "node-0": {"node-1": None}}, 29501), [
        ("ok", ("node-1", "node-0"), "port 29501 of each other"),
    ]),
    (hosts._shared, ({"a": "x", "b": None}, MARK), [("failure", ("b",), "/run is not the same directory there")]),
    (hosts._shared, ({"a": "x", "b": "x"}, MARK), [("ok", ("a", "b"), "run is one directory")]),
]  # fmt: skip


@pytest.mark.parametrize(("between", "given", "said"), BETWEEN, ids=range(len(BETWEEN)))
def test_what_differs_between_hosts(between: Any, given: tuple[Any, ...], said: list[tuple[Any, ...]]) -> None:
    assert told(between(*given)) == said


PORT = free_port()  # another one in each process of pytest


@pytest.fixture
def over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, ssh=SSH)["PATH"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("over_ssh")
def test_each_host_is_asked_by_ssh_and_one_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, failed = remote.all_facts(
        ["here", "gone", "old", "bare"],
        {"ports": [PORT], "paths": [str(ROOT / "it's a path")]},
    )
    assert (list(found), found["here"]["contents"]) == (["here"], {str(ROOT / "it's a path"): None})
    fixes = ("by hand once", "same path", "there by hand")
    assert [(each.hosts, each.check, each.said, fix in each.fix) for each, fix in zip(failed, fixes, strict=True)] == [
        (("gone",), "ssh", "ssh: connect to host gone port 22: No route to host", True),
        (("old",), "environment", "ModuleNotFoundError: No module named 'kit'", True),
        (("bare",), "environment", "exit code 7", True),
    ]
    monkeypatch.setattr(remote, "LIMIT_S", 0.3)
    assert told(remote.all_facts(["hung"], {})[1]) == [("failure", ("hung",), "no answer in 0.3 s")]


@pytest.mark.usefixtures("over_ssh")
def test_a_clock_is_as_far_off_as_its_host_says() -> None:
    """Of 2100 and of 1970; one that did not answer is not judged."""
    found = remote.clock_skews(["ahead", "behind", "gone"])
    assert {host: skew + time.time() * (skew != 0) for host, skew in found.items()} == pytest.approx(
        {"ahead": 4102444800, "behind": 400, "gone": 0}, abs=9
    )


@pytest.mark.slow
@pytest.mark.usefixtures("over_ssh")
def test_two_hosts_are_examined_and_compared(tmp_path: Path) -> None:
    """Both are this machine, by two of its addresses: alike in all but their names, which lead nowhere else."""
    both = ["127.0.0.1", "127.0.0.2"]
    made = run_of(tmp_path, **TORCH, dp=4, cluster="2x2xcpu")
    found = {result.check: result for result in hosts.examine(both, made, PORT)}
    alike = {"shared-files", "versions", "machines", "clock", "reach", "port", "packages"}
    assert {check: (result.state, result.hosts) for check, result in found.items() if check in alike} == (
        dict.fromkeys(alike, ("ok", tuple(both)))
    )
    assert (found["shared-files"].said, found["names"].state, found["contents"].hosts) == (
        "run is one directory", "failure", tuple(both),
    )  # fmt: skip
    assert f"{tmp_path / 'train.bin'} is not there" in {r.said for r in hosts.examine(both, made, PORT)}
    assert not list(made.path.glob(".kit-doctor*"))
    alone = {result.check for result in hosts.examine([], made, PORT)}
    assert alone & {"hosts", "versions", "clock", "shared-files", "port"} == {"port"}
    three = states(hosts.examine([*both, "127.0.0.3"], made, PORT))
    assert three["hosts"] == ("failure", "3 hosts, and the plan has 2 nodes")
    with socket.create_server(("", PORT)):
        taken = {result.check: result.state for result in hosts.examine(both, None, PORT)}
    assert (taken["port"], "reach" in taken, "contents" in taken) == ("failure", False, True)


@pytest.mark.usefixtures("over_ssh")
def test_each_host_reaches_the_first_and_the_next() -> None:
    """One that does not start tries nothing, and nobody waits for it; one whose port is taken tries all the same."""
    names = ["127.0.0.1", "gone", "127.0.0.2", "127.0.0.3"]
    found = remote.connections(names, PORT)
    assert {host: {to: why is None for to, why in there.items()} for host, there in found.items()} == {
        "127.0.0.1": {"gone": False},
        "gone": {},
        "127.0.0.2": {"127.0.0.1": True, "127.0.0.3": True},
        "127.0.0.3": {"127.0.0.1": True},
    }


def test_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    for text, says in (
        ("", "no host in it"),
        ("# a\n\n", "no host in it"),
        ("a slots=1\nb\na slots=1\n", "a is listed tw"),
    ):
        assert re.search(says, refusal(SpecError, remote.read_hostfile, file_with(file, text)))
    assert remote.read_hostfile(file_with(file, "# c\n\n  # d\nb slots=8\na\n")) == ["b", "a"]
    assert "No such file" in refusal(SpecError, remote.read_hostfile, tmp_path / "none")


@pytest.mark.slow
def test_a_listener_ends_with_its_input_or_its_time() -> None:
    """It accepts whoever comes while it waits, more than a queue holds; then it says what it could not reach."""
    words = [sys.executable, remote.SOCKETS, str(PORT)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([*words, "30", "127.0.0.1", "127.0.0.2", "no-such-name.invalid"], **pipes) as listener:
        assert listener.stdout.readline() == b"listening\n"
        assert {sockets.reached("127.0.0.1", PORT) for _ in range(400)} == {None}
        assert not select.select([listener.stdout], [], [], 0.3)[0]
        answer = json.loads(listener.communicate(b"\n", timeout=20)[0])
    assert (answer.pop("no-such-name.invalid") is None, answer) == (False, {"127.0.0.1": None, "127.0.0.2": None})
    assert sockets.reached("127.0.0.1", PORT) == "Connection refused"
    with subprocess.Popen([*words, "1"], **pipes) as listener:
        assert listener.wait(timeout=20) == -signal.SIGALRM


def test_the_interpreter_of_another_host_finds_this_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, there in (("kit", str(Path("kit").resolve())), ("/a:b", "/a:b"), ("", "")):
        monkeypatch.setenv("PYTHONPATH", path)
        expected = [f"PYTHONPATH={there}"] * bool(path)
        assert remote.words("localhost", ["-m", "x"], {"A": "1"}) == [
            "env", "A=1", *expected, sys.executable, "-m", "x",
        ]  # fmt: skip
    assert remote.words("node", ["a b"])[-2:] == ["node", f"env {shlex.quote(sys.executable)} 'a b'"]
