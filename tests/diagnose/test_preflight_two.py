"""The doctor of machines with two of anything: GPUs, hosts, disks, ports. Two inputs differ in one thing, and the
answer names it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.preflight import facts, hosts
from kit.preflight.check_result import CheckResult, merged, table
from kit.preflight.host_checks import check_host
from kit.preflight.requirements import check_gpus, requirements_of
from tests.diagnose.test_preflight import SMI, failures, on_gpus, rundir


@pytest.fixture(scope="module")
def machine() -> dict[str, Any]:
    """This machine's facts, with eight healthy GPUs."""
    return on_gpus(facts.gather({"ports": [29500], "names": []}) | {"ports": {"29500": True}})


def with_gpu(machine: dict[str, Any], index: int, old: str, new: str) -> dict[str, Any]:
    """The facts with one GPU that differs."""
    rows = [SMI.replace("0,", f"{number},", 1) for number in range(8)]
    assert old in rows[index]
    rows[index] = rows[index].replace(old, new)
    return {**copy.deepcopy(machine), "gpus": facts.parse_gpus("".join(rows))}


def states(results: list[CheckResult]) -> dict[str, str]:
    return {result.check: result.state for result in results}


@pytest.mark.parametrize("index", [0, 1, 7])
@pytest.mark.parametrize(
    ("old", "new", "check", "state", "says"),
    [
        (", 0, 345, ", ", 3, 345, ", "gpu-health", "failure", "GPU {}: 3 uncorrected memory errors"),
        ("34, No,", "91, No,", "gpu-health", "failure", "GPU {}: slowed by its hardware at 345 of 1980 MHz, 91 °C"),
        ("81559, 4,", "81559, 9000,", "gpu-memory", "warning", "GPU {}: 8.8 GiB are taken, 70.9 free"),
        ("Enabled, 1980,", "Enabled, 1200,", "gpu-clocks", "warning", "GPU {}: its clock is set to 1200 MHz"),
        ("345, 1980,", "345, 1755,", "gpu-clocks", "warning", "GPUs of 1755, 1980 MHz at most"),
    ],
)
def test_one_gpu_of_eight_that_differs_is_named(
    index: int, old: str, new: str, check: str, state: str, says: str, machine: dict[str, Any]
) -> None:
    results = check_host(with_gpu(machine, index, old, new), None, "node-0")
    found = next(result for result in results if result.check == check)
    assert (found.state, found.hosts) == (state, ("node-0",))
    assert says.format(index) in found.said
    healthy = states(check_host(machine, None, "node-0"))
    assert healthy[check] == "ok"


def test_the_smallest_gpu_decides(machine: dict[str, Any], tmp_path: Path) -> None:
    needs = requirements_of(rundir(tmp_path, "8xH100", zero_stage=3))
    found = failures(check_host(with_gpu(machine, 5, "81559, 4,", "12288, 4,"), needs, "node-0"))
    assert "has 12.0 GiB, the plan's peak is" in found["gpus"]


def test_gpus_of_another_kind_do_not_count(tmp_path: Path) -> None:
    plan = kit.plan("llama-3.1-8b", "2xH100", pins=kit.Pins(engine="deepspeed", zero_stage=3))
    hopper, ampere = ("NVIDIA H100 80GB HBM3", 79.6), ("NVIDIA A100-SXM4-80GB", 79.6)
    assert check_gpus(plan, [hopper, hopper]) is None
    mixed = check_gpus(plan, [hopper, ampere])
    assert mixed is not None
    assert "1 x NVIDIA A100-SXM4-80GB (80 GiB), 1 x NVIDIA H100 80GB HBM3 (80 GiB)" in mixed.said


def test_of_two_directories_the_full_one_is_named(machine: dict[str, Any], tmp_path: Path) -> None:
    made = rundir(tmp_path, "8xH100", zero_stage=3, offload_optimizer="nvme")
    needs = requirements_of(made)
    run, swap = needs.checkpoint_directory, needs.nvme_path
    assert swap is not None
    assert run != swap
    much, little = {"free_bytes": 4 << 40}, {"free_bytes": 1 << 30}
    for full, other, gib in ((run, swap, needs.checkpoints_gib), (swap, run, needs.nvme_gib)):
        found = failures(check_host({**machine, "writable": {full: little, other: much}}, needs, "node-0"))
        assert f"{full}: 1.0 GiB free, {gib:.1f} needed" in found["disk"]
    enough = failures(check_host({**machine, "writable": {run: much, swap: much}}, needs, "node-0"))
    assert "disk" not in enough


def test_of_two_ports_the_taken_one_is_named(machine: dict[str, Any]) -> None:
    for ports, said in (
        ({"29500": True, "29600": False}, "port 29600 is taken"),
        ({"29500": False, "29600": True}, "port 29500 is taken"),
    ):
        assert failures(check_host({**machine, "ports": ports}, None, "node-0"))["port"] == said


def several(machine: dict[str, Any], count: int) -> dict[str, dict[str, Any]]:
    return {f"node-{n}": copy.deepcopy(machine) | {"contents": {}, "names": {}} for n in range(count)}


def test_the_odd_host_is_named_beside_one_of_the_others(machine: dict[str, Any]) -> None:
    """Whichever of the three it is."""
    for odd in range(3):
        three = several(machine, 3)
        three[f"node-{odd}"]["packages"]["transformers"] = "9.9.9"
        three[f"node-{(odd + 1) % 3}"]["kernel"] = "5.4"
        version, kernel = hosts.versions(three)
        other = min({0, 1, 2} - {odd})
        here = machine["packages"]["transformers"]
        assert (version.hosts, version.said) == ((f"node-{odd}",), f"transformers 9.9.9, {here} on node-{other}")
        assert (kernel.hosts, kernel.state) == ((f"node-{(odd + 1) % 3}",), "warning")


def test_two_hosts_with_two_other_versions_are_told_apart(machine: dict[str, Any]) -> None:
    five = several(machine, 5)
    five["node-1"]["nccl"], five["node-3"]["nccl"] = "2.18.1", "2.19.3"
    assert [(result.hosts, result.said.split(",")[0]) for result in hosts.versions(five)] == [
        (("node-1",), "nccl 2.18.1"),
        (("node-3",), "nccl 2.19.3"),
    ]


def test_a_host_need_not_be_reached_by_its_own_name(machine: dict[str, Any]) -> None:
    """Debian maps it to 127.0.1.1; another host's name at such an address is a fault."""
    two = several(machine, 2)
    two["node-0"]["names"] = {"node-0": ["127.0.1.1"], "node-1": ["10.0.0.2"]}
    two["node-1"]["names"] = {"node-0": ["10.0.0.1"], "node-1": ["127.0.1.1"]}
    assert [result.state for result in hosts.names(two)] == ["ok"]
    two["node-1"]["names"]["node-0"] = ["127.0.0.2"]
    assert [(result.hosts, result.said) for result in hosts.names(two)] == [(("node-1",), "does not know node-0")]
    two["node-1"]["names"]["node-0"] = ["127.0.0.2", "10.0.0.1"]
    assert [result.state for result in hosts.names(two)] == ["ok"]


@pytest.mark.parametrize(
    ("skew", "state", "said"),
    [
        (0.9, "ok", "within 0.90 s"),
        (1.1, "warning", "1.1 s ahead"),
        (-1.1, "warning", "1.1 s behind"),
        (59.0, "warning", "59.0 s ahead"),
        (61.0, "failure", "61.0 s ahead"),
        (-61.0, "failure", "61.0 s behind"),
    ],
)
def test_of_two_clocks_the_one_that_is_wrong(skew: float, state: str, said: str) -> None:
    (found,) = hosts.clocks({"node-0": 0.0, "node-1": skew})
    assert found.state == state
    assert said in found.said
    assert found.hosts == (("node-0", "node-1") if state == "ok" else ("node-1",))


def test_two_findings_of_one_check_stay_two(tmp_path: Path) -> None:
    told = [
        CheckResult("shm", "failure", ("a",), "0.1 GiB free", "mount"),
        CheckResult("shm", "failure", ("b",), "0.2 GiB free", "mount"),
        CheckResult("shm", "warning", ("c",), "0.1 GiB free", "mount"),
        CheckResult("shm", "failure", ("d",), "0.1 GiB free", "mount"),
    ]
    assert [(result.state, result.hosts) for result in merged(told)] == [
        ("failure", ("a", "d")),
        ("failure", ("b",)),
        ("warning", ("c",)),
    ]
    assert table(merged(told), 1.0).splitlines()[-1] == "2 failure, 1 warning, 0 skipped, 0 ok; 1.0 s"
