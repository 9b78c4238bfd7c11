"""Runs programs on other hosts by ssh, and gathers ``facts`` of all hosts in parallel."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Place:
    """A host on which programs run; ``localhost`` is this machine, without ssh."""

    host: str

    def words(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """A command line that runs this interpreter on the host. Paths must be the same on all hosts."""
        given = dict(environment or {})
        if path := os.environ.get("PYTHONPATH"):
            given.setdefault("PYTHONPATH", os.path.abspath(path) if os.pathsep not in path else path)
        words = ["env", *(f"{name}={value}" for name, value in given.items()), sys.executable, *arguments]
        return words if self.host == HERE else [*SSH, self.host, shlex.join(words)]


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


def all_facts(
    places: Sequence[Place], request: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[CheckResult]]:
    """(host → its facts, a failure for each host that could not be reached)."""

    def ask(place: Place) -> dict[str, Any] | CheckResult:
        try:
            done = run(place, ["-m", FACTS, json.dumps(request)])
        except subprocess.TimeoutExpired:
            return failure(
                "ssh", f"no answer in {LIMIT_S} s", "log in by hand; a file system may hang there", place.host
            )
        if done.returncode != 0:
            return _why(place.host, done)
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts

    answers = dict(zip((place.host for place in places), at_once(ask, places), strict=True))
    facts = {host: answer for host, answer in answers.items() if isinstance(answer, dict)}
    return facts, [answer for answer in answers.values() if isinstance(answer, CheckResult)]


def clock_skews(places: Sequence[Place]) -> dict[str, float]:
    """Host → seconds by which its clock is ahead of this host's, minus the uncertainty of the round trip."""

    def ask(place: Place) -> float:
        before = time.time()
        done = run(place, ["-c", "import time; print(time.time())"])
        after = time.time()
        if done.returncode != 0:
            return 0.0
        skew = float(done.stdout.split()[-1]) - (before + after) / 2
        return math.copysign(max(0.0, abs(skew) - (after - before) / 2), skew)

    return dict(zip((place.host for place in places), at_once(ask, places), strict=True))


def connections(places: Sequence[Place], port: int) -> dict[str, dict[str, str | None]]:
    """Lets each host connect to the first host (rendezvous) and to the next host (ring)."""
    names = [place.host for place in places]
    listeners = [
        subprocess.Popen(
            place.words([SOCKETS, "listen", str(port), str(LIMIT_S)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for place in places
    ]
    try:
        for listener in listeners:
            assert listener.stdout is not None
            next((line for line in listener.stdout if line == b"listening\n"), None)

        def ask(index: int) -> dict[str, str | None]:
            targets = sorted({names[0], names[(index + 1) % len(names)]} - {names[index]})
            done = run(places[index], [SOCKETS, "connect", str(port), "3", *targets])
            found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            return found

        return dict(zip(names, at_once(ask, range(len(places))), strict=True))
    finally:
        for listener in listeners:
            listener.communicate(timeout=LIMIT_S)  # closes stdin, which ends the listener on its host too


def run(
    place: Place, arguments: Sequence[str], environment: Mapping[str, str] | None = None, limit_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs kit's Python with ``arguments`` on the host. The answer is the last line: a login may print others before
    it. Raises TimeoutExpired."""
    words = place.words(arguments, environment)
    return subprocess.run(words, capture_output=True, text=True, timeout=limit_s or LIMIT_S)


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
