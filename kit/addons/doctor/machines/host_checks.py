"""Checks of one machine: facts → results, one small function each. ``required`` is None without a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kit.addons.doctor.machines.facts import Facts
from kit.addons.doctor.machines.needs import Requirements
from kit.extras import EXTRAS, install
from kit.preflight.check_result import CheckResult, failure, judge, ok, skipped, warning
from kit.preflight.versions import check_versions
from kit.units import to_gib

LEAST_SHM_GIB = 1.0
"""NCCL takes some 10 MiB per pair of GPUs, and data workers pass whole batches; with less than this, runs die by
SIGBUS."""
LEAST_FILES = 65536
"""Fewest open files allowed: NCCL opens hundreds per rank, and there are shards and data files."""
MEMLOCK_GIB = 1.0
"""RDMA registers host memory; the default of 8 MiB stops it ("Unable to register memory")."""
DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
"""CUDA's major version → oldest driver branch (docs.nvidia.com, CUDA compatibility, minor version compatibility)."""
HOT_C = 88.0
USED_MIB = 1024.0
"""GPU memory in use above which another process is reported; more than a leftover CUDA context."""


def packages(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks that the engine's packages are installed."""
    wanted = required.packages if required else ("torch",)
    missing = [name for name in wanted if not facts["packages"].get(name)]
    there = ", ".join(f"{name} {facts['packages'].get(name)}" for name in wanted)
    fix = f"{install(*dict.fromkeys(EXTRAS[name] for name in missing))} there"
    return judge("packages", there, (bool(missing), failure, f"not installed: {', '.join(missing)}", fix))


def tested_versions(facts: Facts, required: Requirements | None) -> CheckResult:
    """Compares the packages with the versions that kit's suite was run with."""
    return check_versions(facts["packages"].get) or ok("tested-versions", "none outside those tested")


def compilers(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks for compilers, if DeepSpeed has to compile CPU Adam or asynchronous I/O on first use."""
    if required is None or not required.cpu_adam:
        return skipped("compilers", "no plan that compiles operators")
    tools = facts["tools"]
    absent = [fix for tool, fix in (("g++", "apt-get install g++"), ("ninja", "pip install ninja")) if not tools[tool]]
    if required.nvme_gib and not facts["libaio"]:
        absent.append("apt-get install libaio-dev (Red Hat: libaio-devel)")
    if required.cuda and not tools["nvcc"]:
        absent.append(f"the CUDA toolkit {facts['torch_cuda']} (nvcc)")
    said = "DeepSpeed's operators cannot be compiled"
    good = f"g++ {tools['g++']}, ninja {tools['ninja']}"
    return judge("compilers", good, (bool(absent), failure, said, "; ".join(absent)))


def cuda(facts: Facts, required: Requirements | None) -> CheckResult:
    """Compares torch's CUDA version with the driver, and with nvcc if DeepSpeed compiles operators."""
    if required is not None and not required.cuda:
        return skipped("cuda", "the plan is not for NVIDIA's GPUs, and kit reads nvidia-smi alone")
    built, gpus, nvcc = facts["torch_cuda"], facts["gpus"], facts["tools"]["nvcc"]
    if gpus is None:
        if required is not None:
            return failure("cuda", "no nvidia-smi, and the plan is for GPUs", "install the driver, or plan for cpu")
        return skipped("cuda", "no nvidia-smi")
    if isinstance(gpus, dict):
        return failure("cuda", gpus["error"], "the driver does not answer: dmesg, then reboot or drain the node")
    if built is None:
        return failure("cuda", "torch is built for CPUs", "install torch from the index of your CUDA version")
    major = int(built.split(".")[0])
    oldest = DRIVER_FOR_CUDA.get(major)
    driver = gpus[0]["driver"] if gpus else "0"
    if oldest is not None and int(driver.split(".")[0]) < oldest:
        fix = f"a driver of branch {oldest} or newer, or torch built for an older CUDA"
        return failure("cuda", f"torch is built for CUDA {built}, the driver is {driver}", fix)
    if required is not None and required.cpu_adam and nvcc and nvcc.split(".")[0] != str(major):
        fix = f"CUDA toolkit {built}, or DS_SKIP_CUDA_CHECK=1 if you know that they agree"
        return failure("cuda", f"nvcc is {nvcc} and torch is built for CUDA {built}: DeepSpeed refuses", fix)
    return ok("cuda", f"torch for CUDA {built}, driver {driver}, NCCL {facts['nccl'] or 'of torch'}")


def gpu_count(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks that a node has the planned number of GPUs and the planned memory on each."""
    gpus = facts["gpus"]
    if required is None or not required.cuda or not isinstance(gpus, list):
        return skipped("gpus", "no plan for NVIDIA's GPUs, or none here")
    name = gpus[0]["name"] if gpus else "no GPU"
    smallest = min((gpu["memory_total_mib"] or 0.0 for gpu in gpus), default=0.0) / 1024
    return judge(
        "gpus",
        f"{len(gpus)} x {name}, {smallest:.1f} GiB",
        (
            len(gpus) < required.gpus_per_node,
            failure,
            f"{len(gpus)} GPUs, the plan has {required.gpus_per_node} a node",
            "look for a GPU that fell off the bus (dmesg, Xid 79); drain the node, or plan for fewer",
        ),
        (
            smallest < required.gpu_gib,
            failure,
            f"{name} has {smallest:.1f} GiB, the plan's peak is {required.gpu_gib:.1f}",
            "plan for the GPUs that are there: kit plan RECIPE cluster=local",
        ),
    )


def gpu_health(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks for uncorrected memory errors, rows pending retirement, and clocks throttled by heat or power."""
    gpus = facts["gpus"]
    for gpu in gpus:
        name = f"GPU {gpu['index']}"
        if (gpu["uncorrected_ecc_errors"] or 0) > 0 or gpu["retired_pages_pending"]:
            said = f"{name}: {gpu['uncorrected_ecc_errors'] or 0:.0f} uncorrected memory errors"
            fix = "reset the GPU (nvidia-smi -r) with no job on it; if they come back, drain the node"
            return failure("gpu-health", said + (", retirement pending" if gpu["retired_pages_pending"] else ""), fix)
        if gpu["slowed_by_power"] or gpu["slowed_by_heat"] or (gpu["temperature_c"] or 0) >= HOT_C:
            said = f"{name}: slowed by its hardware at {gpu['sm_mhz']:.0f} of {gpu['max_sm_mhz']:.0f} MHz, "
            said += f"{gpu['temperature_c']:.0f} °C" if gpu["temperature_c"] is not None else "temperature unknown"
            return failure("gpu-health", said, "power or cooling: every rank waits for the slowest; drain the node")
    return ok("gpu-health", f"no memory errors, not slowed, {max(gpu['temperature_c'] or 0 for gpu in gpus):.0f} °C")


def gpu_clocks(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks that no GPU has a clock or power limit below its default, and that all GPUs have the same limits."""
    gpus = facts["gpus"]
    for gpu in gpus:
        for what, unit, found, made_for, fix in (
            ("clock", "MHz", gpu["set_mhz"], gpu["default_mhz"], "nvidia-smi -rac"),
            ("power limit", "W", gpu["power_limit_w"], gpu["default_power_limit_w"], "nvidia-smi -pl {:.0f}"),
        ):
            if found is not None and made_for is not None and found < made_for:
                said = f"GPU {gpu['index']}: its {what} is set to {found:.0f} {unit}, {made_for:.0f} by default"
                return warning("gpu-clocks", said, f"{fix.format(made_for)}: every rank waits for the slowest")
    fastest = {gpu["max_sm_mhz"] for gpu in gpus}
    if len(fastest) > 1:
        said = (
            f"GPUs of {', '.join(f'{mhz or 0:.0f}' for mhz in sorted(fastest, key=lambda mhz: mhz or 0))} MHz at most"
        )
        return warning("gpu-clocks", said, "every rank waits for the slowest: leave it out (CUDA_VISIBLE_DEVICES)")
    return ok("gpu-clocks", f"up to {max(mhz or 0 for mhz in fastest):.0f} MHz, nothing held down")


def dcgm(facts: Facts, required: Requirements | None) -> CheckResult:
    """Runs NVIDIA's quick DCGM diagnosis, if it is installed."""
    found = facts["dcgm"]
    if found is None:
        return skipped("dcgm", "dcgmi is not installed; nvidia-smi's figures stand alone")
    if isinstance(found, dict):
        return warning("dcgm", found["error"], "systemctl status nvidia-dcgm")
    for problem in sorted(found, key=lambda problem: not problem["failed"]):
        where = f" (GPU {problem['gpu']})" if problem["gpu"] else ""
        said = f"{problem['test']}{where}: {problem['said']}"
        if problem["failed"]:
            return failure("dcgm", said, "dcgmi diag -r 3 with no job on it; if it fails again, drain the node")
        return warning("dcgm", said, "a setting of the node: mend it, then dcgmi diag -r 1")
    return ok("dcgm", "its quick tests pass")


def gpu_memory(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks that no other process uses GPU memory."""
    gpus = facts["gpus"]
    for gpu in gpus:
        free_gib = ((gpu["memory_total_mib"] or 0) - (gpu["memory_used_mib"] or 0)) / 1024
        used = gpu["memory_used_mib"] or 0
        if (required is not None and free_gib < required.gpu_gib) or used > USED_MIB:
            said = f"GPU {gpu['index']}: {used / 1024:.1f} GiB are taken, {free_gib:.1f} free"
            said += f", the plan takes {required.gpu_gib:.1f}" if required else ""
            fix = "nvidia-smi shows whose process it is; a former run that did not end: kill it"
            short = required is not None and free_gib < required.gpu_gib
            return failure("gpu-memory", said, fix) if short else warning("gpu-memory", said, fix)
    return ok("gpu-memory", "all free")


def host_memory(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks that enough host memory is available for offload."""
    available, needed = to_gib(facts["memory"]["MemAvailable"]), required.host_gib if required else 0.0
    return judge(
        "host-memory",
        f"{available:.1f} GiB available" + (f" of {needed:.1f} needed" if required else ""),
        (
            available < needed,
            failure,
            f"{available:.1f} GiB available, the plan takes {needed:.1f}",
            "end other programs, use more nodes, or offload to nvme",
        ),
    )


def shared_memory(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks the size of /dev/shm, through which NCCL and data workers pass data."""
    free = to_gib(facts["shm_free_bytes"])
    said = f"/dev/shm has {free:.2f} GiB free; processes die of SIGBUS when it is full"
    fix = "mount -o remount,size=16G /dev/shm; in Docker --shm-size=16g or --ipc=host"
    return judge("shm", f"{free:.1f} GiB free", (free < LEAST_SHM_GIB, failure, said, fix))


def limits(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks ulimits: open files, and with RDMA locked memory."""
    files, locked = facts["limits"]["nofile"], facts["limits"]["memlock"]
    said, fix = f"{files} open files", f"ulimit -n {LEAST_FILES}, in limits.conf or the unit"
    rdma = isinstance(facts["gpus"], list) and required is not None and required.num_nodes > 1
    return judge(
        "ulimits",
        said,
        (0 <= files < 4096, failure, said, fix),
        (
            rdma and 0 <= locked < MEMLOCK_GIB * 2**30,
            failure,
            f"{locked >> 20} MiB of locked memory: RDMA cannot register its buffers",
            "ulimit -l unlimited, in limits.conf, slurmd's unit (LimitMEMLOCK) or --ulimit memlock=-1",
        ),
        (0 <= files < LEAST_FILES, warning, said, fix),
    )


def own_name(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks the address of the host's own name, which gloo and others announce to the other nodes."""
    found = facts["addresses_of_own_name"]
    if not found:
        fix = f"add it to /etc/hosts with an address that others reach ({', '.join(facts['addresses'][:1])})"
        return failure("own-name", f"{facts['hostname']} has no address", fix)
    if all(address.startswith("127.") for address in found):
        said = f"{facts['hostname']} resolves to {found[0]} on itself: other hosts would be sent to that address"
        fix = "take it off that line of /etc/hosts; kit's launch files name the interface instead (GLOO_SOCKET_IFNAME)"
        several = required is not None and required.num_nodes > 1
        return warning("own-name", said, fix) if several else ok("own-name", f"{found[0]}, one node")
    return ok("own-name", ", ".join(found))


def port(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks that the rendezvous port is free."""
    taken = [number for number, free in facts["ports"].items() if not free]
    fix = "ss -ltnp shows whose it is, often a former run's; end it, or set another MASTER_PORT"
    good = f"{', '.join(facts['ports'])} free"
    return judge("port", good, (bool(taken), failure, f"port {', '.join(taken)} is taken", fix))


def hub(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks for a Hugging Face token. A rank that downloads while others wait often causes a time-out; kit's own runs
    read only local files."""
    if required is not None:
        return ok("hub", "not needed: model and data are local files")
    said = "no token: gated models cannot be downloaded"
    return judge("hub", "a token is there", (not facts["hub_token"], warning, said, "hf auth login, or HF_TOKEN"))


def directories(facts: Facts, required: Requirements | None) -> CheckResult:
    """Checks that there is space for the kept checkpoints and for swap files."""
    if required is None:
        return skipped("disk", "no plan")
    wanted = {required.checkpoint_directory: required.checkpoints_gib}
    if required.nvme_path and required.nvme_gib:
        wanted[required.nvme_path] = required.nvme_gib
    for path, gib in wanted.items():
        found = facts["writable"].get(path, {"error": "not looked at"})
        if "error" in found:
            return failure("disk", f"{path}: {found['error']}", "make it writable there, or emit elsewhere (--out)")
        free = to_gib(found["free_bytes"])
        if free < gib:
            fix = "make room, keep fewer (run.checkpoint.keep_last), or another disk"
            return failure("disk", f"{path}: {free:.1f} GiB free, {gib:.1f} needed for all that is kept", fix)
    return ok("disk", "; ".join(f"{gib:.2f} GiB fit" for gib in wanted.values()))


CHECKS: tuple[Callable[[Facts, Requirements | None], CheckResult], ...] = (
    packages,
    tested_versions,
    compilers,
    cuda,
    gpu_count,
    gpu_health,
    gpu_clocks,
    dcgm,
    gpu_memory,
    host_memory,
    shared_memory,
    limits,
    own_name,
    port,
    hub,
    directories,
)


_OF_EACH_GPU = (gpu_health, gpu_clocks, gpu_memory)


def check_host(facts: Facts, required: Requirements | None, host: str) -> list[CheckResult]:
    """Results of all checks; a check without its fact reports the reason."""
    found = []
    for check in CHECKS:
        name = check.__name__.replace("_", "-")
        if check in _OF_EACH_GPU and not (isinstance(facts["gpus"], list) and facts["gpus"]):
            found.append(skipped(name, "no GPU"))
            continue
        try:
            found.append(check(facts, required))
        except (KeyError, TypeError) as error:
            broken = [
                f"{name}: {fact['error']}" for name, fact in facts.items() if isinstance(fact, dict) and "error" in fact
            ]
            if not broken:
                raise
            said = f"cannot be looked at ({'; '.join(broken)})"
            found.append(warning(name, said, f"look there by hand ({error})"))
    return [dataclasses.replace(result, hosts=(host,)) for result in found]
