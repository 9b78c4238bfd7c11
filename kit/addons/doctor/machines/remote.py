"""Runs programs on other hosts by ssh, and gathers ``facts`` of all hosts in parallel."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kit.errors import SpecError
from kit.preflight.check_result import HERE, CheckResult, failure

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
LIMIT_S = 25
AT_ONCE = 64
FACTS = "kit.addons.doctor.machines.facts"
SOCKETS = str(Path(__file__).with_name("sockets.py").resolve())
T = TypeVar("T")


def words(host: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """A command line that runs this interpreter on a host, on this machine without ssh. Paths must be the same on all
    hosts."""
    given = dict(environment or {})
    if path := os.environ.get("PYTHONPATH"):
        given.setdefault("PYTHONPATH", os.path.abspath(path) if os.pathsep not in path else path)
    program = ["env", *(f"{name}={value}" for name, value in given.items()), sys.executable, *arguments]
    return program if host == HERE else [*SSH, host, shlex.join(program)]


def read_hostfile(path: Path) -> list[str]:
    """Host names of a hostfile, in order. Raises SpecError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; give the hostfile of the job (name slots=8, one a line)") from None
    hosts = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not hosts:
        raise SpecError(f"{path}: no host in it; write one a line, as in: node-0 slots=8")
    if double := sorted({host for host in hosts if hosts.count(host) > 1}):
        raise SpecError(f"{path}: {', '.join(double)} is listed twice; a host is one line, with all its slots")
    return hosts


def all_facts(hosts: Sequence[str], request: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[CheckResult]]:
    """(host → its facts, a failure for each host that could not be reached)."""

    def ask(host: str) -> dict[str, Any] | CheckResult:
        try:
            done = run(host, ["-m", FACTS, json.dumps(request)])
        except subprocess.TimeoutExpired:
            return failure("ssh", f"no answer in {LIMIT_S} s", "log in by hand; a file system may hang there", host)
        if done.returncode != 0:
            return _why(host, done)
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts

    answers = dict(zip(hosts, at_once(ask, hosts), strict=True))
    facts = {host: answer for host, answer in answers.items() if isinstance(answer, dict)}
    return facts, [answer for answer in answers.values() if isinstance(answer, CheckResult)]


def clock_skews(hosts: Sequence[str]) -> dict[str, float]:
    """Host → seconds by which its clock is ahead of this host's, minus the uncertainty of the round trip."""

    def ask(host: str) -> float:
        before = time.time()
        done = run(host, ["-c", "import time; print(time.time())"])
        after = time.time()
        if done.returncode != 0:
            return 0.0
        skew = float(done.stdout.split()[-1]) - (before + after) / 2
        return math.copysign(max(0.0, abs(skew) - (after - before) / 2), skew)

    return dict(zip(hosts, at_once(ask, hosts), strict=True))


def connections(hosts: Sequence[str], port: int) -> dict[str, dict[str, str | None]]:
    """Lets each host connect to the first host (rendezvous) and to the next host (ring). Empty for a host that could
    not try."""
    started: list[Any] = [  # with pipes, of which the type says that they may not be there
        subprocess.Popen(
            words(host, [SOCKETS, str(port), str(LIMIT_S), *sorted({hosts[0], following} - {host})]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        for host, following in zip(hosts, (*hosts[1:], hosts[0]), strict=True)
    ]
    try:
        for each in started:
            next((line for line in each.stdout if line == "listening\n"), None)
        for each in started:
            with contextlib.suppress(BrokenPipeError):
                each.stdin.write("\n")  # all listen
        return {host: json.loads(each.stdout.readline() or "{}") for host, each in zip(hosts, started, strict=True)}
    finally:
        for each in started:
            each.communicate(timeout=LIMIT_S)  # closes stdin, which ends the listener on its host too


def run(
    host: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None, limit_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs kit's Python with ``arguments`` on a host. The answer is the last line: a login may print others before it.
    Raises TimeoutExpired."""
    program = words(host, arguments, environment)
    return subprocess.run(program, capture_output=True, text=True, timeout=limit_s or LIMIT_S)


def at_once(function: Callable[[Any], T], items: Sequence[Any], most: int = AT_ONCE) -> list[T]:
    """Calls ``function`` for all items in parallel, ``most`` of them at a time; results in order."""
    with ThreadPoolExecutor(max_workers=min(most, max(1, len(items)))) as pool:
        return list(pool.map(function, items))


def _why(host: str, done: subprocess.CompletedProcess[str]) -> CheckResult:
    last = last_line(done.stderr, f"exit code {done.returncode}")[:160]
    if done.returncode == 255:
        return failure("ssh", last, "ssh to it by hand once: name, known hosts, key (ssh-copy-id); then again", host)
    is_elsewhere = "No module named" in last or "No such file" in last
    fix = (
        "the same interpreter and kit at the same path on every node"
        if is_elsewhere
        else "run kit doctor there by hand"
    )
    return failure("environment", last, fix, host)


def last_line(told: str, otherwise: str) -> str:
    """The last line of what a program printed, which names its error."""
    return (told.strip().splitlines() or [otherwise])[-1].strip()
