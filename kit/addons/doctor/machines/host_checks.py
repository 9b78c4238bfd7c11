"""Checks of one machine: facts → results. A check is rows of a table, of which the first that holds is its result."""

from __future__ import annotations

from dataclasses import replace

from kit.addons.doctor.machines.facts import Facts
from kit.addons.doctor.machines.gpu_checks import GPU_CHECKS, OF_EACH_GPU
from kit.addons.doctor.machines.needs import Requirements
from kit.addons.doctor.machines.rows import Host, Row, good
from kit.extras import EXTRAS, install
from kit.preflight.check_result import CheckResult, State, ok, skipped, warning
from kit.preflight.versions import check_versions
from kit.units import to_gib

LEAST_SHM_GIB = 1.0
"""NCCL takes some 10 MiB per pair of GPUs, and data workers pass whole batches; with less than this, runs die by
SIGBUS."""
LEAST_FILES = 65536
"""Fewest open files allowed: NCCL opens hundreds per rank, and there are shards and data files."""
MEMLOCK_GIB = 1.0
"""RDMA registers host memory; the default of 8 MiB stops it ("Unable to register memory")."""


def _missing(host: Host) -> list[str]:
    return [name for name in host.needs("packages", ("torch",)) if not host["packages"].get(name)]


def _versions(host: Host) -> CheckResult:
    return check_versions(host["packages"].get) or ok("tested-versions", "none outside those tested")


def _uncompilable(host: Host) -> list[str]:
    """What to install before DeepSpeed can compile CPU Adam and asynchronous I/O, which it does on first use."""
    installs = {
        "apt-get install g++": not host["tools"]["g++"],
        "pip install ninja": not host["tools"]["ninja"],
        "apt-get install libaio-dev (Red Hat: libaio-devel)": host.needs("nvme_gib") and not host["libaio"],
        f"the CUDA toolkit {host['torch_cuda']} (nvcc)": host.needs("cuda") and not host["tools"]["nvcc"],
    }
    return [install for install, absent in installs.items() if absent]


def _few_files(state: State, least: int) -> Row:
    return Row(
        state,
        lambda h: 0 <= h["limits"]["nofile"] < least,
        lambda h: f"{h['limits']['nofile']} open files",
        f"ulimit -n {LEAST_FILES}, in limits.conf or the unit",
    )


def _space(host: Host) -> dict[str, float]:
    """Directory → GiB for the kept checkpoints, and for swap files."""
    wanted = (("checkpoint_directory", "checkpoints_gib"), ("nvme_path", "nvme_gib"))
    return {host.needs(path): host.needs(gib) for path, gib in wanted if host.needs(path) and host.needs(gib)}


def _no_space(host: Host) -> tuple[str, str] | None:
    """(said, fix) of the first directory without."""
    for path, gib in _space(host).items():
        found = host["writable"].get(path, {"error": "not looked at"})
        if "error" in found:
            return f"{path}: {found['error']}", "make it writable there, or emit elsewhere (--out)"
        if (free := to_gib(found["free_bytes"])) < gib:
            fix = "make room, keep fewer (run.checkpoint.keep_last), or another disk"
            return f"{path}: {free:.1f} GiB free, {gib:.1f} needed for all that is kept", fix
    return None


CHECKS: dict[str, tuple[Row, ...]] = {
    # The engine's packages are installed.
    "packages": (
        Row(
            "failure",
            _missing,
            lambda h: f"not installed: {', '.join(_missing(h))}",
            lambda h: f"{install(*dict.fromkeys(EXTRAS[name] for name in _missing(h)))} there",
        ),
        good(lambda h: ", ".join(f"{name} {h['packages'][name]}" for name in h.needs("packages", ("torch",)))),
    ),
    # The versions with which kit's suite was run.
    "tested-versions": (
        Row(lambda h: _versions(h).state, _versions, lambda h: _versions(h).said, lambda h: _versions(h).fix),
    ),
    "compilers": (
        Row("skipped", lambda h: not h.needs("cpu_adam"), "no plan that compiles operators"),
        Row(
            "failure",
            _uncompilable,
            "DeepSpeed's operators cannot be compiled",
            lambda h: "; ".join(_uncompilable(h)),
        ),
        good(lambda h: f"g++ {h['tools']['g++']}, ninja {h['tools']['ninja']}"),
    ),
    **GPU_CHECKS,
    # Host memory for offload.
    "host-memory": (
        Row(
            "failure",
            lambda h: to_gib(h["memory"]["MemAvailable"]) < h.needs("host_gib"),
            lambda h: (
                f"{to_gib(h['memory']['MemAvailable']):.1f} GiB available, the plan takes {h.needs('host_gib'):.1f}"
            ),
            "end other programs, use more nodes, or offload to nvme",
        ),
        good(
            lambda h: (
                f"{to_gib(h['memory']['MemAvailable']):.1f} GiB available"
                + (f" of {h.required.host_gib:.1f} needed" if h.required else "")
            )
        ),
    ),
    # /dev/shm, through which NCCL and data workers pass data.
    "shm": (
        Row(
            "failure",
            lambda h: to_gib(h["shm_free_bytes"]) < LEAST_SHM_GIB,
            lambda h: (
                f"/dev/shm has {to_gib(h['shm_free_bytes']):.2f} GiB free; processes die of SIGBUS when it is full"
            ),
            "mount -o remount,size=16G /dev/shm; in Docker --shm-size=16g or --ipc=host",
        ),
        good(lambda h: f"{to_gib(h['shm_free_bytes']):.1f} GiB free"),
    ),
    # Open files, and with RDMA locked memory.
    "ulimits": (
        _few_files("failure", 4096),
        Row(
            "failure",
            lambda h: (
                isinstance(h["gpus"], list)
                and h.needs("num_nodes") > 1
                and 0 <= h["limits"]["memlock"] < MEMLOCK_GIB * 2**30
            ),
            lambda h: f"{h['limits']['memlock'] >> 20} MiB of locked memory: RDMA cannot register its buffers",
            "ulimit -l unlimited, in limits.conf, slurmd's unit (LimitMEMLOCK) or --ulimit memlock=-1",
        ),
        _few_files("warning", LEAST_FILES),
        good(lambda h: f"{h['limits']['nofile']} open files"),
    ),
    # The address of the host's own name, which gloo and others announce to the other nodes.
    "own-name": (
        Row(
            "failure",
            lambda h: not h["addresses_of_own_name"],
            lambda h: f"{h['hostname']} has no address",
            lambda h: f"add it to /etc/hosts with an address that others reach ({', '.join(h['addresses'][:1])})",
        ),
        Row(
            "ok",
            lambda h: not all(address.startswith("127.") for address in h["addresses_of_own_name"]),
            lambda h: ", ".join(h["addresses_of_own_name"]),
        ),
        Row(
            "warning",
            lambda h: h.needs("num_nodes") > 1,
            lambda h: (
                f"{h['hostname']} resolves to {h['addresses_of_own_name'][0]} on itself: other hosts would be sent to "
                "that address"
            ),
            "take it off that line of /etc/hosts; kit's launch files name the interface instead (GLOO_SOCKET_IFNAME)",
        ),
        good(lambda h: f"{h['addresses_of_own_name'][0]}, one node"),
    ),
    # The rendezvous port is free.
    "port": (
        Row(
            "failure",
            lambda h: not all(h["ports"].values()),
            lambda h: f"port {', '.join(port for port, free in h['ports'].items() if not free)} is taken",
            "ss -ltnp shows whose it is, often a former run's; end it, or set another MASTER_PORT",
        ),
        good(lambda h: f"{', '.join(h['ports'])} free"),
    ),
    # A rank that downloads while others wait often causes a time-out; kit's own runs read only local files.
    "hub": (
        Row("ok", lambda h: h.required, "not needed: model and data are local files"),
        Row(
            "warning",
            lambda h: not h["hub_token"],
            "no token: gated models cannot be downloaded",
            "hf auth login, or HF_TOKEN",
        ),
        good("a token is there"),
    ),
    # Space for the kept checkpoints and for swap files.
    "disk": (
        Row("skipped", lambda h: not h.required, "no plan"),
        Row("failure", _no_space, lambda h: (_no_space(h) or ("", ""))[0], lambda h: (_no_space(h) or ("", ""))[1]),
        good(lambda h: "; ".join(f"{gib:.2f} GiB fit" for gib in _space(h).values())),
    ),
}
"""Check → its rows: the first that holds is its result."""


def check_host(facts: Facts, required: Requirements | None, host: str) -> list[CheckResult]:
    """Results of all checks; a check without its fact reports the reason."""
    return [replace(_result(check, Host(facts, required)), hosts=(host,)) for check in CHECKS]


def _result(check: str, host: Host) -> CheckResult:
    of_each = OF_EACH_GPU.get(check, ())
    try:
        if of_each and not (isinstance(host["gpus"], list) and host["gpus"]):
            return skipped(check, "no GPU")
        asked = [(replace(host, gpu=gpu), row) for gpu in (host["gpus"] if of_each else ()) for row in of_each]
        asked += [(host, row) for row in CHECKS[check]]
        return next(row.of(check, each) for each, row in asked if row.when(each))
    except (KeyError, TypeError) as error:
        broken = [f"{name}: {it['error']}" for name, it in host.facts.items() if isinstance(it, dict) and "error" in it]
        if not broken:
            raise
        return warning(check, f"cannot be looked at ({'; '.join(broken)})", f"look there by hand ({error})")
