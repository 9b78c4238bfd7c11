"""Every reader answers whatever stands in its file: with a value, or with clear lines, in bounded time and memory.

python -m tests.test_readers runs 250 inputs a reader instead of 15 (make prove NAME=readers).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import kit
from kit.addons.doctor.logs import diagnose
from kit.addons.lint import lint
from kit.emit.run_directory import RunDirectory, write
from kit.engines.protocol import StateKind
from kit.planner import calibration
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.recipe import load_recipe
from kit.specs.run import DataSpec, RunSpec
from kit.training.checkpoint.files import FileRecord, with_checksum
from kit.training.checkpoint.manifest import Checkpoint, Manifest, manifest_json
from kit.training.counters import Counters
from kit.training.logging.metrics import MetricsLog, logged_steps
from tests.emit.plans import CONFIG
from tests.support import hostile
from tests.support.files import file_with
from tests.support.hostile import HERE, spelt

EXAMPLES = int(os.environ.get("READERS_EXAMPLES", "15"))


@dataclass(frozen=True)
class Reader:
    """A file that kit reads, and what reads it."""

    name: str
    """The file's, below a directory that ``make`` fills."""
    read: Callable[[Path], object]
    """Of the file's path."""
    good: Callable[[Path], Any]
    """Values of a file that is read without an error, of its path; text for a file that is no tree."""
    make: Callable[[Path], None] = lambda directory: None
    reseal: bool = False
    """Whether its own hash is put right after the damage, as by who means harm."""

    @property
    def form(self) -> str:
        """Kind of text."""
        return Path(self.name).suffix if self.name.endswith((".json", ".yaml")) else ""

    def open(self, directory: Path) -> Path:
        """The file as it is before any damage, in a new directory."""
        directory.mkdir()
        self.make(directory)
        path = directory / self.name
        return file_with(path, spelt(self.good(path), self.form))


@cache
def planned() -> Plan:
    job = kit.JobSpec(seq_length=32, global_batch_size=8, total_tokens=10_000, precision="fp32")
    return kit.plan(MODEL, parse_cluster("2xcpu"), job, kit.Pins(engine="deepspeed", zero_stage=2))


MODEL = dataclasses.replace(load_model("llama-3.2-1b"), num_layers=2, hidden_size=64, head_dim=2, ffn_hidden_size=64)
CLUSTER = parse_cluster("2xH100")
RECIPE = {
    "model": {
        "name": "own", "family": "llama", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "cluster": "2xcpu",
    "job": {"seq_length": 32, "global_batch_size": 8, "learning_rate": 1e-3,
            "optimizer": {"name": "adamw", "eps": 1e-8}, "lora": None, "grad_clip": 1.0},
    "run": {"data": {"train": "x", "seed": 1}, "seed": 1, "steps": 3, "nvme_path": "y", "limits": {"hang_seconds": 9.0},
            "schedule": {"warmup_steps": 2}, "logging": {"gradients_at_steps": [1]}},
    "layout": {"engine": "deepspeed", "zero_stage": 2, "micro_batch_size": 1, "recompute": "none", "tp": 1},
}  # fmt: skip
OWN_CLUSTER = {
    "num_nodes": 2,
    "gpus_per_node": 2,
    "intra_node_gbytes_per_s": 9.0,
    "inter_node_gbytes_per_s": 9.0,
    "gpu": "H100",
    "host_ram_gib": 64,
}
DS_CONFIG = {
    "train_batch_size": 16, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "initial_scale_power": 16}, "gradient_clipping": 1.0, "wall_clock_breakdown": False,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "sub_group_size": 1e9, "overlap_comm": True,
                          "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_count": 4},
                          "offload_param": {"device": "cpu", "buffer_size": 1e8}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "activation_checkpointing": {"number_checkpoints": 2}, "aio": {"block_size": 1048576},
}  # fmt: skip
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1,
    "mixed_precision": "bf16", "machine_rank": 0, "main_process_port": 29500, "gpu_ids": "all", "downcast_bf16": "no",
    "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 1, "offload_optimizer_device": "cpu"},
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}  # fmt: skip
STEP = '{"step": 1, "loss": 2.0, "grad_norm": 1.0, "samples_seen": 8}\n'
HASH = {"bytes": 3, "xxh3_128": "0" * 32}


def _run_directory(path: Path) -> None:
    path.rmdir()
    write(planned(), RunSpec(data=DataSpec(train=str(path / "train"))), path)


def _opened(path: Path) -> None:
    run = RunDirectory.open(path.parent)
    run.memory_after_edits()
    "\n".join(map(str, run.edits))


def _metrics(path: Path) -> None:
    logged_steps(path, 3, 100)
    MetricsLog(path, 3).close()


def _checkpoint() -> Any:
    counters = Counters(step=1, samples_seen=8, tokens_seen=64, optimizer_steps=1, samples_skipped=0)
    return manifest_json(
        Manifest(
            counters=counters,
            model=MODEL,
            files={"model/f": FileRecord(**HASH)},  # type: ignore[arg-type]
            weight_map={"w": "f"},
            kinds=(StateKind.MASTER,),
        )
    )


def _linted(path: Path) -> None:
    assert [
        finding for finding in lint(path, model=MODEL, cluster=CLUSTER) if len(str(finding)) >= hostile.LONGEST
    ] == []


def _as_emitted(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else strict_yaml.parse_text(text, path.name).data


READERS = {
    "recipe": Reader("recipe.yaml", load_recipe, lambda _: RECIPE),
    "planned recipe": Reader("recipe.yaml", lambda path: kit.plan(load_recipe(path)), lambda _: RECIPE),
    "cluster": Reader("cluster.yaml", lambda path: parse_cluster(str(path)), lambda _: OWN_CLUSTER),
    "model": Reader("config.json", lambda path: load_model(path.parent), lambda _: CONFIG),
    "plan": Reader("plan.yaml", lambda path: Plan.load(path).digest, _as_emitted, _run_directory),
    "manifest": Reader("manifest.json", _opened, _as_emitted, _run_directory),
    "run": Reader("run.yaml", _opened, _as_emitted, _run_directory),
    "edited ds_config": Reader("ds_config.json", _opened, _as_emitted, _run_directory),
    "checkpoint": Reader("manifest.json", lambda path: Checkpoint(path.parent), lambda _: _checkpoint(), reseal=True),
    "calibration": Reader(
        "rows.yaml", calibration.load, lambda _: {"x": {"step_time_factor": 1.0, "extra_gib": 0.0, "runs": 1}}
    ),
    "metrics": Reader("metrics.jsonl", _metrics, lambda _: STEP + HERE + "\n" + STEP),
    "log": Reader(
        "rank0.log", lambda path: diagnose([path]), lambda _: f"[rank0]: step 1\n{HERE}\n[rank1]: Error: x\n"
    ),
    "ds_config": Reader("ds.json", _linted, lambda _: DS_CONFIG),
    "accelerate": Reader("accelerate.yaml", _linted, lambda _: ACCELERATE),
    "script": Reader(
        "run.sh", _linted, lambda _: f"#!/bin/bash\n#SBATCH --nodes=2\ntorchrun {HERE} --nnodes 2 t.py {HERE}\n"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Good files are read; imports and tables once, before any clock runs."""
    for reader in READERS.values():
        reader.read(reader.open(tmp_path_factory.mktemp("warm") / "x"))


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_answered_or_refused_in_words(name: str, tmp_path: Path) -> None:
    reader, counts = READERS[name], Counter[str]()
    path = reader.open(tmp_path / "x")
    whole, good = path.read_bytes(), reader.good(path)

    @hostile.fuzz(EXAMPLES)
    @given(content=hostile.damaged(good, reader.form, with_checksum if reader.reseal else lambda tree: tree))
    def read(content: bytes) -> None:
        path.write_bytes(whole)  # which the reader may have changed
        path.write_bytes(content)
        counts[hostile.answer(reader.read, path)] += 1

    read()
    print(f"\n{name}: {counts.total()} inputs, {dict(counts)}, 0 tracebacks, 0 hangs")


@pytest.mark.parametrize("kind", hostile.SPECIAL)
@pytest.mark.parametrize("name", [name for name in READERS if name != "planned recipe"])
def test_what_is_no_file_is_refused_in_words(name: str, kind: str, tmp_path: Path) -> None:
    if name in ("log", "metrics") and kind == "8 GiB of nothing":
        return  # both may be as long: read in pieces, in time that grows with them (test_logs_large)
    path = READERS[name].open(tmp_path / "x")
    path.unlink()
    hostile.SPECIAL[kind](path)
    # to begin with; a run directory
    fine = {("metrics", "missing"), *((each, "directory") for each in ("ds_config", "accelerate", "script"))}
    assert hostile.answer(READERS[name].read, path) == ("answered" if (name, kind) in fine else "refused")


if __name__ == "__main__":
    os.environ.setdefault("READERS_EXAMPLES", "250")  # read when pytest imports this file again
    sys.exit(pytest.main(["-q", "-s", "-m", "not nightly", __file__, *sys.argv[1:]]))  # CI asks the same every day
