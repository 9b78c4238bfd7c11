"""slurmctld, a slurmd a host, and munge, without systemd or cgroups: started on hosts of namespaces, gone with them."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.namespaces import Host, NoNamespaces

PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
"""Program → Debian package."""
START_LIMIT_S = 40


@dataclass(frozen=True)
class Slurm:
    """A running cluster; commands go to its first host."""

    hosts: tuple[Host, ...]
    config: Path

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """Output of a Slurm command. Raises ``RuntimeError`` with what it said."""
        inside = ["bash", "-c", 'cd "$1" && shift && exec "$@"', "bash", str(cwd or "/"), *words]
        environment = {**os.environ, "SLURM_CONF": str(self.config)}
        done = subprocess.run(
            self.hosts[0].command(inside), capture_output=True, text=True, env=environment, timeout=60
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def controller_log(self, number: str) -> str:
        """What slurmctld wrote of a job."""
        lines = _on(self.hosts[0], "cat /run/slurm/ctld.log").splitlines()
        return "\n".join(line for line in lines if f"JobId={number} " in line)

    def job(self, number: str) -> dict[str, str]:
        """``scontrol show job`` as a mapping."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", maxsplit=1) for word in words if "=" in word)


CONFIG = """ClusterName=kit
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
StateSaveLocation=/run/slurm/ctld
SlurmdSpoolDir=/run/slurm/d
SlurmctldPidFile=/run/slurm/ctld.pid
SlurmdPidFile=/run/slurm/d.pid
SlurmctldLogFile=/run/slurm/ctld.log
SlurmdLogFile=/run/slurm/d.log
{nodes}
PartitionName=all Nodes={names} MaxTime=INFINITE State=UP Default=YES PriorityTier=1
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
MUNGE = """set -e
mkdir -p /run/munge /run/slurm/d /run/slurm/ctld
printf %s '{key}' > /run/munge/munge.key
chmod 400 /run/munge/munge.key && chmod 755 /run/munge && chown -R munge:munge /run/munge
runuser -u munge -- /usr/sbin/munged --key-file /run/munge/munge.key --socket /run/munge/munge.socket.2 \\
    --pid-file /run/munge/pid --log-file /run/munge/log --seed-file /run/munge/seed
"""


def start(hosts: Sequence[Host], scratch: Path) -> Slurm:
    """Start the daemons and wait until all nodes are idle. Raises ``NoNamespaces``."""
    slurm, script = Slurm(tuple(hosts), scratch / "slurm.conf"), MUNGE.format(key=secrets.token_hex(64))
    nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=2 State=UNKNOWN" for host in hosts)
    names = ",".join(host.name for host in hosts)
    slurm.config.write_text(CONFIG.format(first=hosts[0], nodes=nodes, names=names), encoding="ascii")
    for host in hosts:
        _on(host, script)
    _on(hosts[0], f"/usr/sbin/slurmctld -f {slurm.config}")
    for host in hosts:
        _on(host, f"/usr/sbin/slurmd -f {slurm.config} -N {host.name}")
    deadline, told = time.monotonic() + START_LIMIT_S, ""
    while told != "idle " * len(hosts):
        if time.monotonic() > deadline:
            logs = "".join(_on(host, "tail -n 15 /run/slurm/*.log /run/munge/log") for host in hosts)
            raise NoNamespaces(f"Slurm's nodes are {told}:\n{logs}")
        time.sleep(0.5)
        try:
            told = slurm.run("sinfo", "--noheader", "--Node", "--partition=all", "--format=%T").replace("\n", " ")
        except RuntimeError as error:
            told = str(error)
    return slurm


def _on(host: Host, script: str) -> str:
    done = subprocess.run(host.command(["bash", "-c", script]), capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise NoNamespaces(f"{host.name}: {script.strip()[:100]}: {done.stderr.strip()}")
    return done.stdout
