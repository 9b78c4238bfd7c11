"""Plans of exactly the layout that a test names, which no search chose; what their files say, as dotted keys; and
stand-ins for programs that a script starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kit.cost.estimate import predict
from kit.cost.workload import Workload
from kit.emit.run_directory import files_of
from kit.planner.plan import Plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.extra import flat
from kit.specs.job import JobSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from tests.support.files import file_with

HF = {"implementation": "huggingface"}
TORCH, ZERO = HF | {"engine": "torch"}, HF | {"engine": "deepspeed"}
MEGATRON = {"engine": "megatron", "implementation": "transformer_engine"}
ADAM = OptimizerSpec(beta1=0.8, beta2=0.97, eps=1e-7, weight_decay=0.03)
ADAPTED = LoraSpec(rank=8, alpha=24, dropout=0.1, target_modules=("q_proj", "v_proj"))
QLORA, IN_8_BITS = LoraSpec(rank=8, alpha=24, four_bit=True, use_rslora=True, use_dora=True), LoraSpec(eight_bit=True)
SFT = {"objective": "sft", "seq_length": 2048, "learning_rate": 2e-5, "grad_clip": 0.7, "optimizer": ADAM}
ZERO2 = ZERO | {"dp": 8, "zero_stage": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 3, "recompute": "full"}
ZERO3 = ZERO2 | {"zero_stage": 3}
FSDP2 = TORCH | {"dp": 8, "zero_stage": 3, "micro_batch_size": 2, "gradient_accumulation_steps": 3}
DENSE = MEGATRON | {"dp": 2, "tp": 4, "cp": 1, "pp": 2, "sp": True, "zero_stage": 1, "micro_batch_size": 3}
ON_CPU = {"cluster": "2xcpu", "dp": 2}
Case = tuple[str, str, dict[str, Any], dict[str, Any]]
"""Name of a file, the target that writes it, the plan, and key → value: ``...`` is a key that the file must not have,
``"only"`` says that it has no others."""
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
"""config.json of the smallest model."""
ECHO = '#!/bin/sh\nprintf "%s\\n" "$@"\n'
"""A program that prints its arguments."""


def plan_of(
    model: str | ModelSpec = "llama-3.1-8b",
    cluster: str | ClusterSpec = "8xH100",
    job: Mapping[str, Any] | None = None,
    **layout: Any,
) -> Plan:
    """The batch of the job is the layout's."""
    model = load_model(model) if isinstance(model, str) else model
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    chosen = Layout(**layout)
    spec = JobSpec(**({"global_batch_size": chosen.global_batch_size} | dict(job or {})))
    workload = Workload(model=model, cluster=cluster, job=spec, layout=chosen)
    return Plan(model=model, cluster=cluster, job=spec, layout=chosen, predicted=predict(workload), decisions=())


def stand_in(directory: Path, **programs: str) -> dict[str, str]:
    """An environment whose PATH begins with these programs: name → script."""
    for name, text in programs.items():
        file_with(directory / name, text).chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def words(script: str, directory: Path, *arguments: str, **given: str) -> list[str]:
    """What the program that a script of ``bash`` ends with is told."""
    environment = stand_in(directory, python=ECHO, torchrun=ECHO) | given
    done = subprocess.run(
        ["bash", "-c", script, "script", *arguments], cwd=directory, env=environment, text=True, capture_output=True,
        check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def commands(page: str) -> list[str]:
    """Those of a README that start a script."""
    return re.findall(r"^(?:accelerate|deepspeed) .*", page, re.MULTILINE)


def settings(plan: Plan, name: str, target: str, directory: Path) -> dict[str, Any]:
    """Dotted key → value of a file; of a script, flag or override → its words, True without any."""
    text = files_of(plan, [target] if target else [])[name]
    if not name.endswith(".sh"):
        return flat(json.loads(text) if name.endswith(".json") else yaml.safe_load(text))
    found: dict[str, Any] = {}
    told = words(text, directory, MEGATRON_LM="/M", NODE_RANK="1", MASTER_ADDR="127.0.0.1")
    for word in told[told.index("-m") + 1 if "-m" in told else 0 :]:
        key, _, value = word.partition("=")
        if word.startswith("--"):
            found[flag := word.removeprefix("--")] = True
        elif value:
            found[key] = value
        elif found:
            found[flag] = word if found[flag] is True else f"{found[flag]} {word}"
    return found


def check_settings(case: Case, directory: Path) -> None:
    """Fails where a file says something else of the plan."""
    name, target, plan, expected = case
    found = settings(plan_of(**plan), name, target, directory)
    wanted = {key: value for key, value in expected.items() if key != "only"}
    assert {key: found.get(key, ...) for key in wanted} == wanted
    assert not expected.get("only") or found.keys() == wanted.keys()
