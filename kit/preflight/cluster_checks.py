"""Checks between machines: what must be the same everywhere, and who reaches whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kit.preflight.check_result import Verdict, ok

Facts = dict[str, Any]
CLOCK_WARNING_S, CLOCK_FAILURE_S = 1.0, 60.0
"""Logs of several nodes are read side by side; make and TLS fail at more."""
DIFFERENT_IS_WRONG = ("packages", "kit", "torch_cuda", "nccl")
DIFFERENT_IS_ODD = ("python", "kernel", "tools")


def versions(facts: Mapping[str, Facts]) -> list[Verdict]:
    """Packages, CUDA, NCCL, kit itself; then Python, kernel and compilers, which may differ at one's own risk."""
    found = []
    for names, state in ((DIFFERENT_IS_WRONG, "failure"), (DIFFERENT_IS_ODD, "warning")):
        for name in names:
            flat = {host: _flat(name, own[name]) for host, own in facts.items()}
            for key in sorted({key for values in flat.values() for key in values}):
                found += _odd_ones_out("versions", key, {host: values.get(key) for host, values in flat.items()}, state)
    return found or [_same("versions", facts, "the same packages, compilers and kernels everywhere")]


def machines(facts: Mapping[str, Facts]) -> list[Verdict]:
    """GPUs and drivers are equal: all wait for the slowest."""
    kinds = {
        host: None
        if not isinstance(own["gpus"], list)
        else ", ".join(sorted({f"{len(own['gpus'])} x {gpu['name']}, driver {gpu['driver']}" for gpu in own["gpus"]}))
        for host, own in facts.items()
    }
    return _odd_ones_out("machines", "GPUs", kinds, "failure") or [_same("machines", facts, "equal GPUs and drivers")]


def contents(facts: Mapping[str, Facts]) -> list[Verdict]:
    """The run directory, data and model are there and the same on all: a shared file system, or equal copies."""
    found = []
    paths = sorted({path for own in facts.values() for path in own["contents"]})
    for path in paths:
        values = {host: own["contents"].get(path) for host, own in facts.items()}
        absent = tuple(host for host, value in values.items() if value is None)
        if absent:
            fix = "mount the shared file system there, or copy it to the same path"
            found.append(Verdict("contents", "failure", absent, f"{path} is not there", fix))
        there = {host: value for host, value in values.items() if value is not None}
        found += _odd_ones_out("contents", path, there, "failure", show=False)
    return found or [_same("contents", facts, f"{len(paths)} files, the same everywhere")]


def names(facts: Mapping[str, Facts]) -> list[Verdict]:
    """Every host knows every other's name, by an address that is not its own loopback."""
    found = []
    for host, own in facts.items():
        bad = [
            name
            for name, addresses in own["names"].items()
            if name != host and (not addresses or all(address.startswith("127.") for address in addresses))
        ]
        if bad:
            said = f"does not know {', '.join(bad)}"
            found.append(Verdict("names", "failure", (host,), said, "add them to /etc/hosts or DNS, or use addresses"))
    return found or [_same("names", facts, "every host knows the others")]


def clocks(skew_s: Mapping[str, float]) -> list[Verdict]:
    """Seconds that each host's clock is ahead of this one's."""
    found = []
    for host, skew in skew_s.items():
        if abs(skew) > CLOCK_WARNING_S:
            state = "failure" if abs(skew) > CLOCK_FAILURE_S else "warning"
            said = f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
            found.append(Verdict("clock", state, (host,), said, "chronyc tracking; start chronyd or systemd-timesyncd"))  # type: ignore[arg-type]
    worst = max((abs(skew) for skew in skew_s.values()), default=0.0)
    return found or [Verdict("clock", "ok", tuple(skew_s), f"within {worst:.2f} s")]


def reach(connections: Mapping[str, Mapping[str, str | None]], port: int) -> list[Verdict]:
    """Who reaches whom on the rendezvous port: ``connections[from][to]`` is why not, or None."""
    found = []
    for host, targets in connections.items():
        for target, why in targets.items():
            if why is not None:
                fix = "open it between the nodes (security group, firewalld), and all high ports for NCCL and gloo"
                found.append(Verdict("reach", "failure", (host,), f"cannot reach {target} port {port}: {why}", fix))
    return found or [Verdict("reach", "ok", tuple(connections), f"port {port} of each other")]


BETWEEN: tuple[Callable[[Mapping[str, Facts]], list[Verdict]], ...] = (versions, machines, contents, names)


def _odd_ones_out(check: str, key: str, values: Mapping[str, Any], state: str, show: bool = True) -> list[Verdict]:
    """A verdict for the hosts that differ from most."""
    counts = Counter(repr(value) for value in values.values())
    if len(counts) <= 1:
        return []
    usual = counts.most_common(1)[0][0]
    odd: dict[str, list[str]] = {}
    for host, value in values.items():
        if repr(value) != usual:
            odd.setdefault(repr(value), []).append(host)
    told = next(host for host, value in values.items() if repr(value) == usual)
    found = []
    for value, hosts in odd.items():
        said = f"{key} {_words(value)}, {_words(usual)} on {told}" if show else f"{key} differs from that on {told}"
        fix = (
            "the same environment on all nodes" if show else "copy again, or look at a stale mount; the others disagree"
        )
        found.append(Verdict(check, state, tuple(hosts), said, fix))  # type: ignore[arg-type]
    return found


def _words(value: str) -> str:
    return "not installed" if value == "None" else value.strip("'")


def _flat(name: str, value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {name: value}


def _same(check: str, facts: Mapping[str, Facts], said: str) -> Verdict:
    return Verdict(check, "ok", tuple(facts), said) if len(facts) > 1 else ok(check, next(iter(facts)), "one machine")
