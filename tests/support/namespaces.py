"""Hosts as namespaces: each with its own network, name, processes, /proc, /run, /dev/shm and /etc/hosts; sshd is its
process 1.

Everything lives inside one process namespace, whose first process is ``enter``'s: when that ends, however it ends, the
kernel ends every process of every host and removes their networks. The file system is the machine's own, so it is
shared as a cluster's would be. Needs root and a kernel that allows namespaces; says so where either is missing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.files import file_with

INSIDE = "KIT_NAMESPACES"
PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "pdsh": "pdsh",
    "ip": "iproute2",
    "unshare": "util-linux",
}
"""Program → Debian package."""
START_LIMIT_S = 20
NETWORK = "10.77.0"
BRIDGE = "kitbr0"


class NoNamespaces(Exception):
    """This machine cannot have hosts as namespaces; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Host:
    """A running host."""

    name: str
    address: str
    pid: int
    """The namespace's process 1, by its number out here."""

    def command(self, words: Sequence[str]) -> list[str]:
        """Words that run a program on this host, without ssh."""
        return ["nsenter", "-t", str(self.pid), "-a", *words]


def check(extra: Mapping[str, str] | None = None) -> None:
    """Raises ``NoNamespaces`` where hosts cannot be made here; ``extra`` are further programs and their packages."""
    if os.geteuid() != 0:
        raise NoNamespaces(
            "hosts as namespaces need root (sshd, mount, network interfaces): run it as root, or in CI's container"
        )
    needed = {**PACKAGES, **(extra or {})}
    missing = sorted({package for program, package in needed.items() if shutil.which(program, path=_path()) is None})
    if missing:
        raise NoNamespaces(f"not installed: apt-get install {' '.join(missing)}")
    made = subprocess.run(["unshare", "-n", "-u", "-m", "-p", "-i", "--fork", "true"], capture_output=True, text=True)
    if made.returncode != 0:
        raise NoNamespaces(
            f"this kernel or container forbids namespaces ({made.stderr.strip()}): run it with CAP_SYS_ADMIN"
        )


def enter(module: str, arguments: Sequence[str]) -> int:
    """Run ``python -m module`` again as the first process of namespaces of its own. Returns its exit code."""
    unshare = ["unshare", "-n", "-m", "-p", "--fork", "--kill-child", "--mount-proc", sys.executable, "-m", module]
    process = subprocess.Popen([*unshare, *arguments], env={**os.environ, INSIDE: "1"})
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.kill())
    try:
        return process.wait()
    except KeyboardInterrupt:
        return process.wait()
    finally:
        process.kill()


def main(
    module: str,
    run: Callable[[], int],
    programs: Mapping[str, str] | None = None,
    before: Callable[[], object] = lambda: None,
) -> int:
    """Exit code of ``run`` inside of namespaces; 3 where this machine cannot have them, 1 where their daemons do not
    start although they could. ``module``: what calls this; ``before``: what needs the network of this machine."""
    try:
        if inside():
            return run()
        check(programs)
    except NoNamespaces as error:
        print(f"{'FAILED' if inside() else 'NOT RUN'}: {error}", file=sys.stderr)
        return 1 if inside() else 3
    before()
    return enter(module, sys.argv[1:])


def inside() -> bool:
    """Whether this process was started by ``enter``."""
    return os.environ.get(INSIDE) == "1"


@contextlib.contextmanager
def hosts(names: Sequence[str]) -> Iterator[list[Host]]:
    """Start hosts on one bridge, each with Debian's habit: its own name on 127.0.1.1."""
    assert inside(), "hosts are made inside of enter()"
    scratch = Path(tempfile.mkdtemp(prefix="kit-hosts-"))
    try:
        _bridge()
        config = _ssh(scratch)
        addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=1)}
        _run("mount", "--bind", str(_hosts_file(scratch, addresses, None)), "/etc/hosts")
        made = [_start(name, addresses, config, scratch) for name in names]
        for host in made:
            _wait_for_ssh(host)
        yield made
    finally:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False)
        for file in ("/etc/ssh/ssh_config", "/etc/hosts"):
            subprocess.run(["umount", file], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(scratch, ignore_errors=True)


def remote(host: str, script: str, environment: Mapping[str, str]) -> list[str]:
    """Words that run a bash script on a host by ssh, with these variables."""
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in environment.items())
    return ["ssh", host, exports + script]


def _bridge() -> None:
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")


def _ssh(scratch: Path) -> Path:
    """Keys and configurations of server and client; the client's lies over /etc/ssh/ssh_config in this namespace only,
    because ssh takes its home from the password file and not from HOME."""
    for name in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(scratch / name))
    public = (scratch / "host.pub").read_text(encoding="ascii")
    (scratch / "known").write_text(f"node-*,{NETWORK}.* {public}", encoding="ascii")
    client = file_with(
        scratch / "ssh_config",
        f"IdentityFile {scratch}/user\nGlobalKnownHostsFile {scratch}/known\nUserKnownHostsFile /dev/null\n"
        "StrictHostKeyChecking yes\nLogLevel ERROR\n",
    )
    _run("mount", "--bind", str(client), "/etc/ssh/ssh_config")
    return file_with(
        scratch / "sshd_config",
        f"HostKey {scratch}/host\nAuthorizedKeysFile {scratch}/user.pub\nStrictModes no\nPermitRootLogin yes\n"
        "UsePAM no\nPidFile none\nMaxStartups 100\n",
    )


def _hosts_file(scratch: Path, addresses: Mapping[str, str], own: str | None) -> Path:
    """/etc/hosts of one host; ``own`` stands on 127.0.1.1."""
    lines = ["127.0.0.1 localhost"] + ([f"127.0.1.1 {own}"] if own else [])
    lines += [f"{address} {name}" for name, address in addresses.items() if name != own]
    return file_with(scratch / f"hosts.{own or 'all'}", "\n".join(lines) + "\n")


def _start(name: str, addresses: Mapping[str, str], config: Path, scratch: Path) -> Host:
    hosts_file = _hosts_file(scratch, addresses, name)
    script = f"""
set -e
hostname {name}
mount -t proc proc /proc
mount -t tmpfs tmpfs /run && mkdir -p /run/sshd
mount -t tmpfs -o size=1g tmpfs /dev/shm
umount /etc/hosts; mount --bind {hosts_file} /etc/hosts
ip link set lo up
for _ in $(seq 200); do [ -e /sys/class/net/eth0 ] || ip link show eth0 >/dev/null 2>&1 && break; sleep 0.05; done
exec "$(command -v sshd)" -D -e -f {config}
"""
    words = ["unshare", "-n", "-u", "-m", "-p", "-i", "--fork", "--kill-child", "bash", "-c", script]
    log = (scratch / f"{name}.log").open("wb")
    process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "PATH": _path()})
    deadline = time.monotonic() + START_LIMIT_S
    while not (children := psutil.Process(process.pid).children()):
        if time.monotonic() > deadline or process.poll() is not None:
            raise NoNamespaces(f"{name} did not start: {(scratch / f'{name}.log').read_text()}")
        time.sleep(0.02)
    pid = children[0].pid
    outside = f"v{pid}"
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", f"p{pid}")
    _run("ip", "link", "set", outside, "master", BRIDGE, "up")
    _run("ip", "link", "set", f"p{pid}", "netns", str(pid))
    in_network = ["nsenter", "-t", str(pid), "-n", "ip"]
    _run(*in_network, "addr", "add", f"{addresses[name]}/24", "dev", f"p{pid}")
    _run(*in_network, "link", "set", f"p{pid}", "name", "eth0", "up")
    return Host(name, addresses[name], pid)


def _wait_for_ssh(host: Host) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while (told := subprocess.run(["ssh", host.name, "hostname"], capture_output=True, text=True)).returncode != 0:
        if time.monotonic() > deadline:
            raise NoNamespaces(f"{host.name} cannot be reached by ssh: {told.stderr.strip()}")
        time.sleep(0.1)
    assert told.stdout.strip() == host.name, told.stdout


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
