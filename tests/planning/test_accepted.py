"""2,000 random cases, and the committed files: each is complete, and accepted by the program that will read it.
``python -m tests.planning.test_accepted`` draws 20,000."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from kit.planner.plan import Plan
from kit.specs import strict_yaml
from tests.support import ROOT
from tests.support.workers import pool
from tests.system.accepted.cases import emitted, problems, random_plan
from tests.system.accepted.parsers import (
    refused_by_accelerate,
    refused_by_deepspeed,
    refused_by_fsdp_plugin,
    refused_by_megatron,
)

pytestmark = pytest.mark.xdist_group("accepted")
"""One process of two: its plans are drawn once."""
CASES = int(os.environ.get("ACCEPTED_CASES", "2000"))
LIMIT_S = 300 if CASES <= 2000 else 1500


@cache
def plans() -> tuple[Plan, ...]:
    return tuple(plan for seed in range(CASES) if (plan := random_plan(seed)) is not None)


def distinct(name: str) -> dict[str, tuple[Plan, dict[str, Any]]]:
    """Files of that name, each text once."""
    files = ((plan, emitted(plan).get(name)) for plan in plans())
    return {
        f"{each.layout.dp} {json.dumps(config, sort_keys=True)}": (each, config) for each, config in files if config
    }


@pytest.mark.slow
def test_batches_memory_and_keys_hold_in_every_case() -> None:
    assert {index: wrong for index, plan in enumerate(plans()) if (wrong := problems(plan))} == {}
    assert {plan.layout.engine for plan in plans()} == {"torch", "deepspeed", "megatron"}
    assert len(plans()) > CASES / 8  # the rest has no legal layout that fits


@pytest.mark.parametrize(
    ("engine", "name", "refused", "as_read", "least"),
    [
        ("deepspeed", "ds_config.json", refused_by_deepspeed, lambda plan, config: (config, plan.layout.dp), 50),
        ("deepspeed", "accelerate.yaml", refused_by_accelerate, lambda _, config: strict_yaml.dump(config), 20),
        ("megatron", "megatron.yaml", refused_by_megatron, lambda _, config: config, 50),
    ],
    ids=["DeepSpeed, at its world size", "accelerate", "megatron-core"],
)
def test_the_program_that_reads_a_file_takes_every_one(
    engine: str, name: str, refused: Any, as_read: Callable[..., Any], least: int
) -> None:
    given = [as_read(*each) for each in distinct(name).values()]
    assert len(given) > least
    assert pool(engine, 2).run(refused, given, timeout_s=LIMIT_S)[0] == []


def test_accelerates_plugin_takes_every_fsdp_config_and_means_the_same() -> None:
    configs = [config for _, config in distinct("accelerate.yaml").values() if "fsdp_config" in config]
    texts = [strict_yaml.dump(config) for config in configs]
    assert len(texts) > 5
    misspelt = {**configs[0], "fsdp_config": {**configs[0]["fsdp_config"], "fsdp_reshard_after_forwards": True}}
    misspelt["fsdp_config"].pop("fsdp_reshard_after_forward")
    found = pool("deepspeed", 2).run(refused_by_fsdp_plugin, [*texts, strict_yaml.dump(misspelt)], timeout_s=LIMIT_S)[0]
    assert len(found) == 1, found
    assert "fsdp_reshard_after_forwards" in found[0]


def test_committed_files_are_taken_by_their_readers() -> None:
    """``ds_configs/`` and ``launch/``. A template's "auto" stands for what the Trainer would give."""
    configs = []
    for path in [
        *sorted((ROOT / "ds_configs").glob("*.json")),
        *sorted((ROOT / "launch").glob("*/run/ds_config.json")),
    ]:
        config = json.loads(path.read_text())
        if config["train_batch_size"] == "auto":
            config = filled(config)
        rows = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        configs.append((config, config["train_batch_size"] // rows))
    assert len(configs) >= 10
    misspelt = copy.deepcopy(configs[0])
    misspelt[0]["zero_optimization"]["overlap_com"] = True
    refused = pool("deepspeed", 2).run(refused_by_deepspeed, [*configs, misspelt], timeout_s=LIMIT_S)[0]
    assert len(refused) == 1, refused
    assert "overlap_com" in refused[0]
    texts = [path.read_text() for path in (ROOT / "launch").glob("*/run/accelerate*.yaml")]
    assert len(texts) >= 3
    assert pool("deepspeed", 2).run(refused_by_accelerate, texts, timeout_s=LIMIT_S)[0] == []
    settings = [strict_yaml.read(path).data for path in (ROOT / "launch").glob("*/run/megatron.yaml")]
    assert len(settings) == 1
    assert pool("megatron", 2).run(refused_by_megatron, settings, timeout_s=LIMIT_S)[0] == []


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """A template with numbers, 8 ranks of one sequence each (tests/deepspeed/test_trainer.py has the Trainer's own)."""
    optimizer = config["optimizer"]["params"] | {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    zero = {key: 10**5 if value == "auto" else value for key, value in config["zero_optimization"].items()}
    return (
        config
        | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        | {
            "gradient_clipping": 1.0,
            "optimizer": config["optimizer"] | {"params": optimizer},
            "bf16": config["bf16"] | {"enabled": True},
            "zero_optimization": zero,
        }
    )


if __name__ == "__main__":
    os.environ.setdefault("ACCEPTED_CASES", "20000")  # read when pytest imports this file again
    raise SystemExit(pytest.main(["-q", "-s", __file__]))
