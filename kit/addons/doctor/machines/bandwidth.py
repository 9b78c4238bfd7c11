"""Compares measured speeds with the plan's assumptions, by their effect on **this** plan's step time.

The cost model predicts the same layout again with the measured link. So a slow link fails only if the layout depends on
it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from kit.addons.doctor.machines.remote import LIMIT_S, at_once, last_line, run
from kit.cost.estimate import predict
from kit.cost.hardware import shared
from kit.cost.workload import Workload
from kit.emit.run_directory import RunDirectory
from kit.planner.plan import Plan
from kit.preflight.check_result import HERE, CheckResult, failure, ok, skipped, warning
from kit.specs.cluster import ClusterSpec

MEASUREMENTS = "kit.addons.doctor.machines.measurements"
COLLECTIVE_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
COLLECTIVE_S = 1.0
COLLECTIVES_LIMIT_S = 150
DISK_BYTES = 512 << 20
SLOWER_WARNING, SLOWER_FAILURE = 1.1, 1.5
"""Step time by the measured links over the plan's step time: above the first the check warns, above the second it
fails."""


def measure(hosts: Sequence[str], rundir: RunDirectory | None, port: int) -> list[CheckResult]:
    """Measures the disks of every host, then collectives over all hosts."""
    plan = rundir.plan if rundir else None
    asked = list(hosts) or [HERE]
    found = [_disk(host, rundir) for host in asked] if rundir else []
    try:
        speeds = collectives(asked, plan, port)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        fix = "the measurement is a small torch job: what stops it stops a run; look at the log above"
        return [*found, failure("collectives", f"did not run: {error}"[:400], fix)]
    return [*found, *judged(speeds, plan)]


def collectives(hosts: Sequence[str], plan: Plan | None, port: int) -> dict[str, float]:
    """GB/s by name. Raises ``OSError`` with the message of the first failing rank."""
    per_node = 2 if plan is None else max(1, plan.layout.world_size // plan.cluster.num_nodes)
    device = "cpu" if plan is None else plan.cluster.gpu.device
    world = per_node * len(hosts)
    if world == 1:
        return {}
    first = "127.0.0.1" if hosts[0] == HERE else hosts[0]
    words = ["-m", MEASUREMENTS, "collectives", str(COLLECTIVE_BYTES[device]), str(COLLECTIVE_S)]
    of_all = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": per_node, "MASTER_ADDR": first, "MASTER_PORT": port}
    interfaces = ["lo" if host == HERE else _interface(host, first) for host in hosts]

    def one(rank: int) -> subprocess.CompletedProcess[str]:
        node, local = divmod(rank, per_node)
        own = {"RANK": rank, "LOCAL_RANK": local, "GLOO_SOCKET_IFNAME": interfaces[node]}
        given = {name: str(value) for name, value in (of_all | own).items() if value is not None}
        return run(hosts[node], words, given, COLLECTIVES_LIMIT_S)

    done = at_once(one, range(world), world)
    for each in done:
        if each.returncode != 0:
            raise OSError(last_line(each.stderr, "no word"))
    speeds: dict[str, float] = json.loads(done[0].stdout.splitlines()[-1])
    return speeds


def judged(speeds: Mapping[str, float], plan: Plan | None) -> list[CheckResult]:
    """A result for each kind of link."""
    rates = shared()
    found = [
        _judged_link(speeds, plan, "node-bandwidth", "inside", "intra_node_gbytes_per_s", rates.intra_node_link),
        _judged_link(speeds, plan, "fabric-bandwidth", "between", "inter_node_gbytes_per_s", rates.inter_node_link),
    ]
    copies = {name: speeds[name] for name in ("host_to_device", "device_to_host") if name in speeds}
    said = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in copies.items()) + " GB/s"
    if not copies:
        return [*found, skipped("host-copy", "no GPU to copy to: memory of the host is all there is")]
    if plan is None:
        return [*found, ok("host-copy", said)]
    gpu = plan.cluster.gpu
    slower = dataclasses.replace(gpu, pcie_gbytes_per_s=min(copies.values()) / rates.host_link)
    beside = f"{said}; the plan assumed {gpu.pcie_gbytes_per_s * rates.host_link:.1f}"
    return [*found, _slowdown("host-copy", beside, plan, dataclasses.replace(plan.cluster, gpu=slower))]


def _judged_link(
    speeds: Mapping[str, float], plan: Plan | None, check: str, where: str, field: str, efficiency: float
) -> CheckResult:
    """Compares speeds whose names end with ``where`` with ``field`` of the plan's cluster times ``efficiency``."""
    measured = {name: value for name, value in speeds.items() if name.endswith(where)}
    if not measured:
        return skipped(check, f"one rank {where} nodes: nothing to measure")
    said = ", ".join(f"{name.removesuffix('_' + where)} {value:.2f} GB/s" for name, value in measured.items())
    if plan is None:
        return ok(check, f"{said} (no plan to compare with)")
    reached: Any = {field: min(measured.values()) / efficiency}
    said = f"{said}; the plan assumed {getattr(plan.cluster, field) * efficiency:.2f}"
    return _slowdown(check, said, plan, dataclasses.replace(plan.cluster, **reached))


def _disk(host: str, rundir: RunDirectory) -> CheckResult:
    """Measures the NVMe disk that the plan's offload uses; the speed of a checkpoint disk is only reported."""
    plan = rundir.plan
    swaps = plan.layout.uses_nvme
    path = rundir.run.nvme_path if swaps and rundir.run.nvme_path else str(rundir.path)
    check = "nvme" if swaps else "disk-speed"
    try:
        done = run(host, ["-m", MEASUREMENTS, "disk", path, str(DISK_BYTES)])
    except subprocess.TimeoutExpired:
        return warning(check, f"{path}: half a GiB took more than {LIMIT_S} s", "look at the disk", host)
    if done.returncode != 0:
        said = f"{path}: {last_line(done.stderr, 'no word')}"
        fix = "a directory on a disk of the node's own"
        return failure(check, said, fix, host) if swaps else skipped(check, said, host)
    return judged_disk(json.loads(done.stdout.splitlines()[-1]), plan, host)


def judged_disk(speed: Mapping[str, float], plan: Plan, host: str) -> CheckResult:
    """Compares GB/s written and read with the plan's NVMe speed; without NVMe offload only reports the speeds."""
    said = f"writes {speed['write']:.2f}, reads {speed['read']:.2f} GB/s"
    if not plan.layout.uses_nvme:
        return ok("disk-speed", said, host)
    assumed = plan.cluster.nvme_gbytes_per_s or shared().nvme_gbytes_per_s
    changed = dataclasses.replace(plan.cluster, nvme_gbytes_per_s=min(speed.values()))
    return _slowdown("nvme", f"{said}; the plan assumed {assumed:.1f}", plan, changed, host)


def _slowdown(check: str, said: str, plan: Plan, changed: ClusterSpec, host: str = HERE) -> CheckResult:
    """Result by the predicted step time with the measured speed (the cluster ``changed``)."""
    before = predict(plan.workload).step_time_s
    after = predict(Workload(plan.model, changed, plan.job, plan.layout)).step_time_s
    ratio = after / before
    said = f"{said}: this plan's step takes {ratio:.2f} of its prediction ({after:.3g} s)"
    fix = "look at the link (cables, ib_write_bw, plugin in NCCL's log), or plan again with what was measured"
    if ratio > SLOWER_FAILURE:
        return failure(check, said, fix, host)
    return warning(check, said, fix, host) if ratio > SLOWER_WARNING else ok(check, said, host)


def _interface(host: str, first: str) -> str | None:
    """The host's network interface to the other hosts. By default gloo uses the interface of the host's own name."""
    script = (
        "import socket, subprocess, sys\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "mine = subprocess.run(['hostname', '-I'], capture_output=True, text=True).stdout.split()\n"
        "s.connect((sys.argv[1], 9)); a = s.getsockname()[0]\n"
        "a = mine[0] if a.startswith('127.') and mine else a\n"
        "for line in subprocess.run(['ip', '-o', '-4', 'addr'], capture_output=True, text=True).stdout.splitlines():\n"
        "    w = line.split()\n"
        "    if w[3].split('/')[0] == a: print(w[1])\n"
    )
    done = run(host, ["-c", script, first])
    return done.stdout.split()[-1] if done.returncode == 0 and done.stdout.split() else None
