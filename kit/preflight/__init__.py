"""What is wrong with machines before a job starts on them: ``kit doctor`` without a log."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kit.emit.run_directory import RunDirectory
from kit.preflight import cluster_checks
from kit.preflight.check_result import Verdict, merged, table
from kit.preflight.host_checks import check_host
from kit.preflight.remote import HERE, Place, all_facts, clock_skews, connections, read_hostfile
from kit.preflight.requirements import Needs, needs_of

__all__ = ["PORT", "Needs", "Verdict", "examine", "read_hostfile", "table"]

PORT = 29500


def examine(hosts: Sequence[str], rundir: RunDirectory | None, port: int = PORT) -> list[Verdict]:
    """Look at these hosts (none: this machine) for this run (None: for any). Failures come first."""
    needs = needs_of(rundir) if rundir else None
    places = [Place(host) for host in hosts] or [Place(HERE)]
    request: dict[str, Any] = {
        "paths": list(needs.paths) if needs else [],
        "writable": [p for p in (needs.checkpoint_directory, needs.nvme_path) if p] if needs else [],
        "names": list(hosts),
        "ports": [port],
    }
    with _mark(rundir if len(places) > 1 else None) as mark:
        if mark is not None:
            request["paths"].append(str(mark))
        facts, verdicts = all_facts(places, request)
    if mark is not None:
        verdicts += _shared({host: own["contents"].pop(str(mark), None) for host, own in facts.items()}, mark)
    for host, own in facts.items():
        verdicts += check_host(own, needs, host)
    if len(places) > 1 and len(facts) > 1:
        for between in cluster_checks.BETWEEN:
            verdicts += between(facts)
        reached = [place for place in places if place.host in facts]
        verdicts += cluster_checks.clocks(clock_skews(reached))
        if all(own["ports"].get(str(port)) for own in facts.values()):
            verdicts += cluster_checks.reach(connections(reached, port), port)
    if needs is not None and len(places) not in (1, needs.num_nodes):
        said = f"{len(places)} hosts, and the plan has {needs.num_nodes} nodes"
        verdicts.append(Verdict("hosts", "failure", (HERE,), said, "the hostfile of this job, or plan for these nodes"))
    return merged(verdicts)


@contextlib.contextmanager
def _mark(rundir: RunDirectory | None) -> Iterator[Path | None]:
    """A new file in the run directory for as long as hosts are asked whether they see it."""
    if rundir is None:
        yield None
        return
    path = rundir.path / f".kit-doctor-{secrets.token_hex(6)}"
    try:
        path.write_text("seen", encoding="ascii")
    except OSError:
        yield None  # the check of the directory says so
        return
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _shared(seen: dict[str, str | None], mark: Path) -> list[Verdict]:
    """A file made here is there on every host."""
    blind = tuple(host for host, digest in seen.items() if digest is None)
    if blind:
        fix = "put the run directory on a file system that all nodes mount: all of them write and read checkpoints"
        return [Verdict("shared-files", "failure", blind, f"{mark.parent} is not the same directory there", fix)]
    return [Verdict("shared-files", "ok", tuple(seen), f"{mark.parent.name} is one directory")]
