"""``sky.yaml``: the run as a SkyPilot task, for ``sky jobs launch sky.yaml`` in the run directory. SkyPilot restarts a
preempted job elsewhere, and the job resumes from the newest checkpoint in its bucket."""

from __future__ import annotations

import re

from kit.addons.targets.kubernetes import MOUNTED_AT, dns_name
from kit.emit.derived_file import DerivedFile
from kit.extras import DISTRIBUTION
from kit.planner.plan import Plan
from kit.specs import strict_yaml

_TARGET = "sky"
_HEADER = """\
# Set the bucket's name, which has to be your own, and where kit is installed from. Then: sky jobs launch sky.yaml
# The bucket gets this run directory, and its checkpoints later. use_spot: false rents nodes that are not taken away.
"""
_NAMES = {"A100-40": "A100", "V100-16": "V100"}
"""GPUs whose smaller size SkyPilot calls by the bare name."""


def accelerator(gpu: str) -> str:
    """SkyPilot's name of a catalog GPU: ``A100-80`` → ``A100-80GB``."""
    return _NAMES.get(gpu, re.sub(r"^([A-Z]+\d+)-(\d+)$", r"\1-\2GB", gpu))


def task(plan: Plan) -> str:
    """The task's YAML: SkyPilot starts ``run`` once on every node."""
    cluster = plan.cluster
    ranks = 'NODE_RANK="$SKYPILOT_NODE_RANK" MASTER_ADDR="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"'
    return _HEADER + strict_yaml.dump(
        {
            "name": dns_name(plan),
            "num_nodes": cluster.num_nodes,
            "resources": {
                "accelerators": {accelerator(cluster.gpu.name): cluster.gpus_per_node},
                "use_spot": True,
                "job_recovery": {"max_restarts_on_errors": 3},
                **({"network_tier": "best"} if cluster.num_nodes > 1 else {}),
            },
            # A cached mount, because kit renames complete checkpoints, which plain bucket mounts do not support.
            "file_mounts": {MOUNTED_AT: {"name": "REPLACE-ME", "source": ".", "mode": "MOUNT_CACHED"}},
            "setup": f"pip install '{DISTRIBUTION}[{plan.layout.engine}] @ git+REPLACE-ME'",
            "run": f"cd {MOUNTED_AT}\n{ranks} exec bash launch.sh --resume auto\n",
        }
    )


FILES = (DerivedFile("sky.yaml", task, lambda plan: plan.cluster.gpu.device == "cuda", target=_TARGET, own_loop=True),)
