"""Speeds of links and disks (kit/addons/doctor/machines: bandwidth, measurements), and what they mean for a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kit.addons.doctor.machines import bandwidth, measurements, remote
from kit.specs.catalog import parse_cluster
from tests.addons.machines import SSH, run_of, states, told
from tests.emit.plans import TORCH, ZERO2, ZERO3, plan_of, stand_in

RANK = """#!/bin/bash
[ "$1" = -c ] && { printf '\neth-%s\n' "$NODE"; exit; }
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $GLOO_SOCKET_IFNAME ${*:2}" >> "$SEEN"
[ -z "$FAULT" ] || { echo "Traceback"; echo "$FAULT" >&2; exit 3; }
for i in {1..400}; do [ "$(wc -l < "$SEEN")" -ge "${WORLD_SIZE:-1}" ] && break; sleep 0.1; done; [ $i != 400 ] || exit 4
echo "a warning"; [ "${RANK:-0}" != 0 ] || echo '{"all_reduce_inside": 7.0, "write": 5.0, "read": 6.0}'
"""
"""A rank, which waits for all others as a collective does; the first one tells what was measured."""
MEASURED = "kit.addons.doctor.machines.measurements collectives"


@pytest.fixture
def stood_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks write who they are: beside stand-ins for ssh and the interpreter."""
    monkeypatch.setenv("PATH", stand_in(tmp_path, ssh=SSH, python=RANK)["PATH"])
    monkeypatch.setattr(remote.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "seen"


@pytest.mark.parametrize(
    ("plan", "places", "each", "size", "address"),
    [
        (None, ("node-0", "node-1"), 2, 16 << 20, "node-0:29501 eth-{}"),
        (TORCH | {"dp": 4, "cluster": "2x2xcpu"}, ("node-0", "node-1"), 2, 16 << 20, "node-0:29501 eth-{}"),
        (ZERO2 | {"dp": 16, "cluster": "hgx-h100:2"}, ("node-0", "node-1"), 8, 256 << 20, "node-0:29501 eth-{}"),
        (None, ("localhost",), 2, 16 << 20, "127.0.0.1:29501 lo"),
    ],
)
def test_ranks_of_a_measurement_are_told_who_they_are(
    plan: dict[str, Any] | None,
    places: tuple[str, ...],
    each: int,
    size: int,
    address: str,
    stood_in: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torchrun does. Each node has an interface of its own; a measurement may take longer than other answers."""
    monkeypatch.setattr(remote, "LIMIT_S", 25 if "{}" in address else 0.001)
    made = None if plan is None else plan_of(**plan)
    assert bandwidth.collectives(places, made, 29501)["all_reduce_inside"] == 7.0
    ranks = each * len(places)
    assert sorted(stood_in.read_text().splitlines()) == sorted(
        f"{rank}/{ranks} {rank % each}/{each} {address.format(places[rank // each])} {MEASURED} {size} 1.0"
        for rank in range(ranks)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("disk-speed", {}), ("nvme", {"offload_optimizer": "nvme"})])
def test_the_disk_of_a_run_is_measured(
    name: str, layout: dict[str, str], stood_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_of(stood_in.parent / name, **ZERO3 | {"dp": 2} | layout, cluster="2xcpu")
    judged = states(bandwidth.measure([], made, 29501))
    disk = made.run.nvme_path if layout else made.path
    assert f" kit.addons.doctor.machines.measurements disk {disk} {512 << 20}" in stood_in.read_text()
    assert ("5.0" in judged[name][1], judged["node-bandwidth"][1][:10]) == (True, "all_reduce")
    assert not {"disk-speed", "nvme"} & states(bandwidth.measure([], None, 29501)).keys()
    monkeypatch.setenv("FAULT", "no room")
    judged = states(bandwidth.measure([], made, 29501))
    assert (*judged[name], judged["collectives"][1]) == (
        "failure" if layout else "skipped", f"{disk}: no room", "did not run: no room",
    )  # fmt: skip
    assert bandwidth.collectives(["localhost"], plan_of(**TORCH, cluster="1xcpu"), 29501) == {}


def test_a_slow_link_is_judged_by_this_plan() -> None:
    """A tenth of the fabric stops a plan that gathers weights over it; what its slowest collective reaches counts."""
    plan = plan_of(**ZERO3 | {"dp": 16, "cluster": "16xH100", "gradient_accumulation_steps": 1})
    inside = plan.cluster.intra_node_gbytes_per_s * bandwidth.shared().intra_node_link
    between = plan.cluster.inter_node_gbytes_per_s * bandwidth.shared().inter_node_link
    as_assumed = {"all_reduce_inside": inside, "all_gather_inside": 2 * inside, "all_reduce_between": between}
    ends = f": this plan's step takes 1.00 of its prediction ({plan.predicted.step_time_s:.3g} s)"
    both = f"all_reduce {inside:.2f} GB/s, all_gather {2 * inside:.2f} GB/s"
    assert states(bandwidth.judged(as_assumed, plan)) == {
        "node-bandwidth": ("ok", f"{both}; the plan assumed {inside:.2f}{ends}"),
        "fabric-bandwidth": ("ok", f"all_reduce {between:.2f} GB/s; the plan assumed {between:.2f}{ends}"),
        "host-copy": ("skipped", "no GPU to copy to: memory of the host is all there is"),
    }
    slow = states(bandwidth.judged(as_assumed | {"all_gather_inside": inside / 100}, plan))
    assert (slow["node-bandwidth"][0], slow["fabric-bandwidth"][0]) == ("failure", "ok")
    assert states(bandwidth.judged({"all_reduce_between": between / 30}, plan))["fabric-bandwidth"][0] == "failure"
    assert states(bandwidth.judged({"all_reduce_inside": 7.0, "host_to_device": 3.0}, None)) == {
        "node-bandwidth": ("ok", "all_reduce 7.00 GB/s (no plan to compare with)"),
        "fabric-bandwidth": ("skipped", "one rank between nodes: nothing to measure"),
        "host-copy": ("ok", "host to device 3.0 GB/s"),
    }


@pytest.mark.parametrize(("ratio", "state"), [(1.09, "ok"), (1.11, "warning"), (1.49, "warning"), (1.51, "failure")])
def test_a_step_that_is_longer_by_a_tenth_or_a_half(ratio: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(**ZERO2)
    steps = [replace(plan.predicted, step_time_s=seconds) for seconds in (1.0, ratio)]
    monkeypatch.setattr(bandwidth, "predict", Mock(side_effect=steps))
    assert told([bandwidth._slowdown("nvme", "1 GB/s", plan, plan.cluster, "node-1")]) == [
        (state, ("node-1",), f"1 GB/s: this plan's step takes {ratio:.2f} of its prediction ({ratio:.3g} s)")
    ]


SWAPPING = ZERO3 | {
    "cluster": replace(parse_cluster("dgx-h100"), nvme_gbytes_per_s=33.0), "offload_optimizer": "nvme",
}  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "share", "disk", "copies"),
    [(SWAPPING, 1.0, "ok", "failure"), (SWAPPING, 0.005, "failure", "failure"), (ZERO3, 0.005, "ok", "ok")],
)
def test_copies_and_disks_are_judged_by_this_plan(plan: dict[str, Any], share: float, disk: str, copies: str) -> None:
    """A plan whose state is on NVMe lives on both; one that keeps all on the GPU needs neither."""
    made = plan_of(**plan)
    assumed = made.cluster.nvme_gbytes_per_s or 1.0
    found = bandwidth.judged_disk({"write": share * assumed, "read": 9 * assumed}, made, "node-1")
    assert (found.check, found.state, found.hosts, "1.00 of its prediction" in found.said) == (
        "nvme" if plan is SWAPPING else "disk-speed", disk, ("node-1",), share == 1.0,
    )  # fmt: skip
    state, said = states(bandwidth.judged({"host_to_device": 20.0, "device_to_host": 0.2}, made))["host-copy"]
    assert (state, said.partition(": ")[0]) == (
        copies, f"host to device 20.0, device to host 0.2 GB/s; the plan assumed "
        f"{made.cluster.gpu.pcie_gbytes_per_s * bandwidth.shared().host_link:.1f}",
    )  # fmt: skip


def test_a_disk_is_measured(tmp_path: Path) -> None:
    try:
        found = measurements.disk_speed(tmp_path, 32 << 20)
    except OSError:
        pytest.skip("this file system refuses direct I/O: give pytest --basetemp on a disk")
    assert set(found) == {"write", "read"}
    assert 0 < min(found.values()) <= max(found.values()) < 100  # GB/s: something was written and read


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_bus_bandwidths_are_those_of_nccl_tests(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n of the bytes for an all-reduce, (n-1)/n for an all-gather. Two ranks on
    a node and four in all, in a group whose collectives do nothing and take half a second; rank 0 alone tells."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin, ended = dist.init_process_group, Mock()
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: begin("fake", rank=rank, world_size=4, store=FakeStore())
    )
    monkeypatch.setattr(measurements.os, "_exit", ended)
    monkeypatch.setattr(measurements, "_seconds_each", lambda collective, seconds: (collective() and 0.5) or 0.5)
    for name, value in (("LOCAL_RANK", str(rank)), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    measurements.measure_collectives(1 << 20, 0.1)
    ended.assert_called_once_with(0)
    times = {"all_reduce_inside": 2, "all_gather_inside": 1, "all_reduce_between": 3, "all_gather_between": 1.5}
    expected = {name: size * (1 << 20) / 1e9 for name, size in times.items()}
    assert (json.loads(capsys.readouterr().out or "{}") == pytest.approx(expected)) == (rank == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, 3), (7.5, 7), (1000.0, 200)])
def test_as_many_rounds_as_fit(seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a collective that takes a second: three at least, two hundred at most, after two to warm up and to time."""
    import torch.distributed as dist

    clock, calls = iter(range(99)), []
    for name in ("barrier", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *_: None)
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: float(next(clock)))
    assert measurements._seconds_each(lambda: calls.append(1), seconds) == pytest.approx(1 / rounds)
    assert len(calls) == 2 + rounds
