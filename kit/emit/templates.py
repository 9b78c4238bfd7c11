"""Plain DeepSpeed configurations for the Hugging Face Trainer, one a way to shard: what people copy and adapt.

Each is a plan's own ``ds_config.trainer.json``, for the case that the template is for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kit.emit.deepspeed import ds_config
from kit.emit.trainer import for_trainer, trainer_config
from kit.planner.search import make_plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Pins

NVME_PATH = "/mnt/nvme"
"""Stands for a folder on every node's own disk."""


@dataclass(frozen=True)
class Template:
    """A way to shard, and the plan that stands for it."""

    name: str
    when: str
    cluster: str
    pins: dict[str, Any]
    model: str = "llama-3.1-8b"
    seq_length: int = 4096

    def text(self) -> str:
        """JSON, for the Trainer where it can run it, with numbers otherwise."""
        job = JobSpec(seq_length=self.seq_length, global_batch_size=128, total_tokens=10**9)
        # The Trainer's model: left to itself the planner may split a faster one, of Megatron's layers.
        model: dict[str, Any] = {"implementation": "huggingface", "tp": 1}
        pins = Pins(engine="deepspeed", **model, **self.pins)
        plan = make_plan(load_model(self.model), parse_cluster(self.cluster), job, pins)
        config = trainer_config(plan) if for_trainer(plan) else ds_config(plan)
        return json.dumps(with_nvme_path(config, NVME_PATH), indent=2) + "\n"


def with_nvme_path(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The same configuration with the disk named where it is used. A plan does not know it: ``run.nvme_path`` does."""
    named = {
        name: section | {"nvme_path": path}
        for name, section in config["zero_optimization"].items()
        if isinstance(section, dict) and section.get("device") == "nvme"
    }
    return config | {"zero_optimization": config["zero_optimization"] | named}


TEMPLATES = (
    Template(
        "zero1",
        "everything fits but the optimizer's state; the least communication",
        "8xH100",
        {"zero_stage": 1},
        model="llama-3.2-1b",
    ),
    Template("zero2", "weights fit whole on a GPU, gradients and optimizer state do not", "8xH100", {"zero_stage": 2}),
    Template(
        "zero2-offload",
        "weights fit whole, and host memory is larger than the GPUs'",
        "8xA100-40",
        {"zero_stage": 2, "offload_optimizer": "cpu"},
    ),
    Template("zero3", "weights do not fit whole: each layer is gathered when needed", "8xA100-80", {"zero_stage": 3}),
    Template(
        "zero3-offload",
        "state of all GPUs together does not fit, host memory does",
        "8xA100-40",
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        model="llama-2-13b",
    ),
    Template(
        "zero-infinity-nvme",
        "host memory does not hold it either: optimizer state and weights on the node's own disks",
        "dgx-h100",
        {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
        model="llama-3-70b",
    ),
    Template(
        "zero++",
        "ZeRO-3 over slow links: weights gathered inside a node and in int8, gradients reduced in int4",
        "16xA100-80",
        {"zero_stage": 3, "zero_hpz": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    ),
    Template(
        "ulysses",
        "sequences longer than a GPU holds, by exchanging heads; for deepspeed.initialize, not for the Trainer",
        "8xH100",
        {"zero_stage": 3, "cp": 8, "cp_comm_type": "a2a"},
        seq_length=131072,
    ),
)
"""From the simplest to the slowest, then what several nodes and long sequences need."""
