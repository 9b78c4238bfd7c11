"""What can be known before any process starts: files that a run names exist and fit the plan. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit.emit.megatron
from kit.cost.reliability import checkpoint_bytes
from kit.emit.copy_recipe import convert_data
from kit.emit.run_directory import RunDirectory
from kit.errors import CheckpointError, DataError, EngineError, KitError, RunDirectoryError
from kit.preflight.check_result import require
from kit.preflight.facts import free_bytes
from kit.preflight.requirements import (
    PACKAGES,
    check_gpus,
    check_host_memory,
    check_libaio,
    check_nvme,
    gpus_here,
)
from kit.specs.catalog import load_model
from kit.units import to_gib


def preflight(rundir: RunDirectory, resume_from: Path | None = None) -> None:
    """Check model, data, checkpoint and disk of a run. Raises ``KitError`` with every problem, one a line."""
    plan, run = rundir.plan, rundir.run
    checks: tuple[Callable[[], None], ...] = (
        lambda: _packages(rundir),
        lambda: require(check_gpus(plan, gpus_here())),
        lambda: _model(rundir),
        lambda: _data("run.data.train", run.data.train, rundir),
        lambda: _data("run.data.validation", run.data.validation, rundir),
        lambda: _disk(rundir),
        lambda: require(check_nvme(plan, run, rundir.path)),
        lambda: require(check_libaio(plan)),
        lambda: require(check_host_memory(plan)),
        lambda: _asynchronous(rundir),
    )
    problems = []
    for check in checks:
        try:
            check()
        except KitError as error:
            problems.append(str(error))
    if resume_from is not None:
        _checkpoint(rundir, resume_from)
    if problems:
        raise RunDirectoryError("\n".join(problems))


def _checkpoint(rundir: RunDirectory, path: Path) -> None:
    """An exchange checkpoint fits every layout; engines' own files fit as many ranks as wrote them, Megatron's any."""
    if any((path / name).is_file() for name in ("exchange.json", "hub.json")):  # the second as earlier kits wrote it
        return
    manifest = path / "manifest.json"
    if not manifest.is_file():
        raise CheckpointError(
            f"--resume {path}: not a checkpoint (no exchange.json, no manifest.json); give auto, or an "
            f"exchange-step-… or step-… directory"
        )
    try:
        writers = int(json.loads(manifest.read_text(encoding="utf-8"))["world_size"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"--resume {path}: manifest.json is damaged ({error}); give another, or auto") from None
    layout = rundir.plan.layout
    if layout.engine != "megatron" and writers != layout.world_size:
        raise CheckpointError(
            f"--resume {path}: written by {writers} ranks where the plan has {layout.world_size}, and "
            f"layout.engine={layout.engine} reads its own files on as many as wrote them; resume from an "
            f"exchange checkpoint (exchange-step-…) of that run"
        )


def _packages(rundir: RunDirectory) -> None:
    """The planned engine is installed here; planning alone needs none."""
    engine = rundir.plan.layout.engine
    lora = rundir.plan.job.lora
    adapters = () if lora is None else ("peft", "bitsandbytes") if lora.four_bit else ("peft",)
    if absent := [name for name in adapters if not _is_installed(name)]:
        raise EngineError(f"job.lora needs {', '.join(absent)}, not installed; use: pip install 'kit[lora]'")
    if rundir.plan.job.optimizer.name == "adamw-8bit" and not _is_installed("bitsandbytes"):
        raise EngineError(
            "optimizer.name=adamw-8bit needs bitsandbytes, not installed; use: pip install 'kit[eight-bit]'"
        )
    if engine == "torch" and rundir.plan.job.precision == "fp8" and not _is_installed("torchao"):
        raise EngineError(
            "precision=fp8 on layout.engine=torch needs torchao, not installed; use: pip install 'kit[torchao]'"
        )
    if rundir.plan.layout.loss_kernel == "liger" and not _is_installed("liger_kernel"):
        raise EngineError(
            "layout.loss_kernel=liger needs liger-kernel, not installed; use: pip install liger-kernel, or leave it out"
        )
    needed = PACKAGES[engine]
    if kit.emit.megatron.applies(rundir.plan):
        needed += ("megatron.core",)
    if rundir.plan.layout.implementation == "transformer_engine":
        needed += ("transformer_engine",)
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        raise EngineError(
            f"layout.engine={engine} needs {', '.join(missing)}, not installed for {Path(sys.executable).name}; "
            f"install torch for your GPU first, then: pip install 'kit[{engine}]'"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def _model(rundir: RunDirectory) -> None:
    """The model to start from has the planned shape, and its tokenizer no more tokens than the model."""
    if rundir.run.model_path is None:
        if rundir.plan.job.lora is not None:
            raise RunDirectoryError(
                "job.lora without run.model_path: adapters belong to the weights of a model; give its directory"
            )
        return
    path = Path(rundir.run.model_path)
    if not (path / "config.json").is_file():
        raise RunDirectoryError(
            f"run.model_path={path}: no config.json there; give a Hugging Face model directory, "
            "or null for random weights"
        )
    found, planned = load_model(str(path)), rundir.plan.model
    for field in (
        "family",
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "tied_embeddings",
    ):
        if getattr(found, field) != getattr(planned, field):
            raise RunDirectoryError(
                f"run.model_path={path}: {field}={getattr(found, field)} where the plan has {getattr(planned, field)}; "
                "plan that model (model: its directory) or give the planned one"
            )
    tokenizer = path / "tokenizer.json"
    if tokenizer.is_file():
        tokens = _tokenizer_size(tokenizer)
        if tokens > planned.vocab_size:
            raise DataError(
                f"{tokenizer} has {tokens} tokens and the model's vocab_size is {planned.vocab_size}; "
                "use the model's own tokenizer, or a model with a larger embedding"
            )


def _tokenizer_size(path: Path) -> int:
    """Largest token id plus one, added tokens included, from a ``tokenizer.json``."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tokenizer: {error}") from None
    vocab = data.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in data.get("added_tokens", [])]
    return max(ids, default=-1) + 1


def _data(key: str, prefix: str | None, rundir: RunDirectory) -> None:
    """The pair exists, is long enough for one sample, and holds no token that the model lacks."""
    if prefix is None:
        return
    name = Path(prefix).name
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise DataError(
                f"{key}={prefix}: {name}{suffix} is missing; write the pair with: "
                + convert_data(rundir.plan.job.objective, "TEXT", "DIRECTORY", name)
            )
    sidecar = Path(prefix + ".json")
    if not sidecar.is_file():
        return
    facts: dict[str, Any] = json.loads(sidecar.read_text(encoding="utf-8"))
    if facts["max_token_id"] >= rundir.plan.model.vocab_size:
        raise DataError(
            f"{key}={prefix}: holds token {facts['max_token_id']} and the model's vocab_size is "
            f"{rundir.plan.model.vocab_size}; "
            "tokenise the text with this model's tokenizer"
        )
    written_for, wanted = facts.get("objective", "pretrain"), rundir.plan.job.objective
    if written_for != wanted:
        raise DataError(
            f"{key}={prefix}: was written for objective={written_for} and the job has {wanted}; "
            f"write it with: kit convert data … --objective {wanted}"
        )
    if wanted != "pretrain" and facts["longest"] > rundir.plan.job.seq_length + (wanted == "sft"):
        raise DataError(
            f"{key}={prefix}: its longest row has {facts['longest']} tokens and "
            f"job.seq_length={rundir.plan.job.seq_length}; raise it, or cut rows with: kit convert data … --seq-length"
        )
    if wanted == "pretrain" and facts["num_tokens"] <= rundir.plan.job.seq_length:
        raise DataError(
            f"{key}={prefix}: {facts['num_tokens']} tokens make no sample of "
            f"job.seq_length={rundir.plan.job.seq_length}; "
            "give more text or shorter sequences"
        )


def _asynchronous(rundir: RunDirectory) -> None:
    if rundir.run.checkpoint.asynchronous and rundir.plan.layout.uses_nvme:
        raise EngineError(
            "run.checkpoint.asynchronous=true with state on NVMe: a checkpoint is first copied to host memory, which "
            "state on NVMe does not fit into; use false"
        )


def _disk(rundir: RunDirectory) -> None:
    """Room for one checkpoint; without it the run would train for hours and lose everything."""
    needed, name = checkpoint_bytes(rundir.plan.workload), rundir.path.name
    try:
        free = free_bytes(rundir.path)
    except OSError:
        raise CheckpointError(
            f"{name} is not writable; checkpoints and metrics are written there: change its mode or its owner"
        ) from None
    if free < needed:
        raise CheckpointError(
            f"{name} is on a disk with {to_gib(free):.1f} GiB free and one checkpoint takes {to_gib(needed):.1f} GiB; "
            "make room or put the run directory elsewhere (--out)"
        )
