"""``kit doctor`` without a log: checks this machine, or every host of a hostfile and their differences."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.addons.doctor.machines.facts import Facts
from kit.addons.doctor.machines.host_checks import check_host
from kit.addons.doctor.machines.needs import requirements_of
from kit.addons.doctor.machines.remote import all_facts, clock_skews, connections
from kit.addons.doctor.machines.results import merged
from kit.emit.run_directory import RunDirectory
from kit.preflight.check_result import HERE, CheckResult, State, failure, ok, warning

PORT = 29500
CLOCK_WARNING_S, CLOCK_FAILURE_S = 1.0, 60.0
"""A clock difference above the first makes logs of several nodes hard to compare; above the second, make and TLS
fail."""
DIFFERENT: dict[str, State] = {
    "packages": "failure",
    "kit": "failure",
    "torch_cuda": "failure",
    "nccl": "failure",
    "python": "warning",
    "kernel": "warning",
    "tools": "warning",
}
"""Fact that should be equal on all hosts → the state of the check if it differs."""


def examine(hosts: Sequence[str], rundir: RunDirectory | None, port: int = PORT) -> list[CheckResult]:
    """Checks these hosts (by default this machine) for the run ``rundir``, or without a run. Failures come first."""
    required = requirements_of(rundir) if rundir else None
    asked = list(hosts) or [HERE]
    request: dict[str, Any] = {
        "paths": list(required.paths) if required else [],
        "writable": [p for p in (required.checkpoint_directory, required.nvme_path) if p] if required else [],
        "names": list(hosts),
        "ports": [port],
    }
    with contextlib.ExitStack() as until:
        mark = _mark(rundir, until) if rundir and len(asked) > 1 else None
        if mark is not None:
            request["paths"].append(str(mark))
        facts, results = all_facts(asked, request)
    if mark is not None:
        results += _shared({host: own["contents"].pop(str(mark), None) for host, own in facts.items()}, mark)
    for host, own in facts.items():
        results += check_host(own, required, host)
    if len(asked) > 1 and len(facts) > 1:
        for between in _BETWEEN:
            results += between(facts)
        results += clocks(clock_skews(list(facts)))
        if all(own["ports"].get(str(port)) for own in facts.values()):
            results += reach(connections(list(facts), port), port)
    if required is not None and len(asked) not in (1, required.num_nodes):
        said = f"{len(asked)} hosts, and the plan has {required.num_nodes} nodes"
        results.append(failure("hosts", said, "the hostfile of this job, or plan for these nodes"))
    return merged(results)


def _mark(rundir: RunDirectory, until: contextlib.ExitStack) -> Path | None:
    """A temporary file in the run directory, with which hosts check that they share the file system. None if it cannot
    be written, which another check reports."""
    with contextlib.suppress(OSError):
        mark = tempfile.NamedTemporaryFile(dir=rundir.path, prefix=".kit-doctor-")  # noqa: SIM115
        return Path(until.enter_context(mark).name)
    return None


def _shared(seen: dict[str, str | None], mark: Path) -> list[CheckResult]:
    """Checks that every host sees a file that this host has written."""
    blind = tuple(host for host, digest in seen.items() if digest is None)
    if blind:
        fix = "put the run directory on a file system that all nodes mount: all of them write and read checkpoints"
        return [CheckResult("shared-files", "failure", blind, f"{mark.parent} is not the same directory there", fix)]
    return [CheckResult("shared-files", "ok", tuple(seen), f"{mark.parent.name} is one directory")]


def versions(facts: Mapping[str, Facts]) -> list[CheckResult]:
    """Compares versions: packages, CUDA, NCCL and kit must be equal; Python, kernel and compilers should be."""
    found = list[CheckResult]()
    for name, state in DIFFERENT.items():
        flat = {host: own[name] if isinstance(own[name], dict) else {name: own[name]} for host, own in facts.items()}
        for key in sorted({key for values in flat.values() for key in values}):
            found += _odd_ones_out("versions", key, {host: values.get(key) for host, values in flat.items()}, state)
    return found or [_same("versions", facts, "the same packages, compilers and kernels everywhere")]


def machines(facts: Mapping[str, Facts]) -> list[CheckResult]:
    """Checks that GPUs and drivers are equal, because all ranks wait for the slowest."""
    kinds = {
        host: None
        if not isinstance(own["gpus"], list)
        else ", ".join(sorted({f"{len(own['gpus'])} x {gpu['name']}, driver {gpu['driver']}" for gpu in own["gpus"]}))
        for host, own in facts.items()
    }
    found = [*_odd_ones_out("machines", "GPUs", kinds, "failure")]
    return found or [_same("machines", facts, "equal GPUs and drivers")]


def contents(facts: Mapping[str, Facts]) -> list[CheckResult]:
    """Checks that run directory, data and model exist on all hosts and are equal (shared or copied)."""
    found = []
    paths = sorted({path for own in facts.values() for path in own["contents"]})
    for path in paths:
        values = {host: own["contents"].get(path) for host, own in facts.items()}
        absent = tuple(host for host, value in values.items() if value is None)
        if absent:
            fix = "mount the shared file system there, or copy it to the same path"
            found.append(CheckResult("contents", "failure", absent, f"{path} is not there", fix))
        there = {host: value for host, value in values.items() if value is not None}
        found += _odd_ones_out("contents", path, there, "failure", show=False)
    return found or [_same("contents", facts, f"{len(paths)} files, the same everywhere")]


def names(facts: Mapping[str, Facts]) -> list[CheckResult]:
    """Checks that every host resolves every other host's name to an address that is not loopback."""
    unknown = {
        host: [
            name
            for name, addresses in own["names"].items()
            if name != host and all(address.startswith("127.") for address in addresses)
        ]
        for host, own in facts.items()
    }
    fix = "add them to /etc/hosts or DNS, or use addresses"
    found = [failure("names", f"does not know {', '.join(bad)}", fix, host) for host, bad in unknown.items() if bad]
    return found or [_same("names", facts, "every host knows the others")]


def clocks(skew_s: Mapping[str, float]) -> list[CheckResult]:
    """Checks the clocks. ``skew_s``: seconds by which each host's clock is ahead of this host's."""
    fix = "chronyc tracking; start chronyd or systemd-timesyncd"
    found = [
        (failure if abs(skew) > CLOCK_FAILURE_S else warning)(
            "clock", f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}", fix, host
        )
        for host, skew in skew_s.items()
        if abs(skew) > CLOCK_WARNING_S
    ]
    worst = max((abs(skew) for skew in skew_s.values()), default=0.0)
    return found or [CheckResult("clock", "ok", tuple(skew_s), f"within {worst:.2f} s")]


def reach(connections: Mapping[str, Mapping[str, str | None]], port: int) -> list[CheckResult]:
    """Checks connections on the rendezvous port. ``connections[from][to]``: the reason of a failure, or None."""
    fix = "open it between the nodes (security group, firewalld), and all high ports for NCCL and gloo"
    found = [
        failure("reach", f"cannot reach {target} port {port}: {why}", fix, host)
        for host, targets in connections.items()
        for target, why in targets.items()
        if why is not None
    ]
    return found or [CheckResult("reach", "ok", tuple(connections), f"port {port} of each other")]


_BETWEEN: tuple[Callable[[Mapping[str, Facts]], list[CheckResult]], ...] = (versions, machines, contents, names)


def _odd_ones_out(
    check: str, key: str, values: Mapping[str, Any], state: State, show: bool = True
) -> Iterator[CheckResult]:
    """A result for the hosts that differ from the majority."""
    hosts: dict[str, list[str]] = defaultdict(list)
    for host, value in values.items():
        hosts[repr(value)].append(host)
    usual = max(hosts, key=lambda value: len(hosts[value]), default="")
    same = "the same environment on all nodes" if show else "copy again, or look at a stale mount; the others disagree"
    for value, odd in hosts.items():
        if value != usual:
            told = hosts[usual][0]
            said = f"{key} {_words(value)}, {_words(usual)} on {told}" if show else f"{key} differs from that on {told}"
            yield CheckResult(check, state, tuple(odd), said, same)


def _words(value: str) -> str:
    return "not installed" if value == "None" else value.strip("'")


def _same(check: str, facts: Mapping[str, Facts], said: str) -> CheckResult:
    return (
        CheckResult(check, "ok", tuple(facts), said) if len(facts) > 1 else ok(check, "one machine", next(iter(facts)))
    )
