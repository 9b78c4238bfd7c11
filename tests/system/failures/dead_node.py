"""A host that goes in the middle of a job, network and all: ``python -m tests.system.failures.dead_node
DIRECTORY``.

Two hosts of namespaces, torchrun on each; at a step the second host's process 1 is killed, and with it all that it ran
and its network. Writes ``job.log``; exit code 3 without namespaces.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.support import ROOT, namespaces
from tests.system.failures.worker import FAULT_AT

LIMIT_S = 90


def main() -> int:
    """Run, and kill, inside of namespaces."""
    log = Path(sys.argv[1]) / "job.log"
    with namespaces.hosts(["node-0", "node-1"], trap=False) as (first, second), log.open("ab") as stream:
        processes = []
        for rank in range(2):
            job = f"--nproc-per-node 1 --nnodes 2 --node-rank {rank} --master-addr {first.address} --master-port 29500"
            worker = f"-m tests.system.failures.worker dead-node {log.parent}"
            script = f"cd {ROOT} && {sys.executable} -m torch.distributed.run {job} {worker}"
            environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            words = namespaces.remote(f"node-{rank}", script, environment)
            words[1:1] = ["-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2"]
            processes.append(subprocess.Popen(words, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL))
        deadline = time.monotonic() + LIMIT_S
        while f"step {FAULT_AT} " not in log.read_text(encoding="utf-8", errors="replace"):
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.05)
        subprocess.run(["kill", "-9", str(second.pid)], check=True)
        for process in processes:
            process.wait(timeout=LIMIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(namespaces.main("tests.system.failures.dead_node", main))
