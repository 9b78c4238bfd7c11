"""Checks before any process starts: the files that a run names exist and fit the plan. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import kit.emit.megatron
from kit.cost.hardware import runs_rocm
from kit.cost.reliability import checkpoint_bytes
from kit.emit.copy_recipe import convert_data
from kit.emit.run_directory import RunDirectory
from kit.errors import KitError, SpecError
from kit.extras import install
from kit.object_storage import files_beside, is_address, open_filesystem
from kit.preflight.check_result import CheckResult, failure, judge, require
from kit.preflight.requirements import (
    PACKAGES,
    check_gpus,
    check_host_memory,
    check_libaio,
    check_nvme,
    check_optimizer,
    free_bytes,
    gpus_here,
)
from kit.preflight.versions import check_versions
from kit.specs.catalog import load_model
from kit.specs.job import TRL, Objective
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.run import DataSpec, data_paths
from kit.units import to_gib

_SHAPE = (
    "family",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tied_embeddings",
)
"""Fields in which the model to start from must equal the planned model."""


def preflight(rundir: RunDirectory, resume_from: Path | None = None) -> None:
    """Checks packages, model, data, machine and checkpoint of a run. Raises ``RunDirectoryError`` with every problem,
    one per line."""
    plan, run = rundir.plan, rundir.run
    require(_own_loop(plan.job.objective, run.data))  # the others would name what kit's own loop lacks
    require(
        *missing_packages(rundir),
        check_versions(),
        check_optimizer(plan),
        check_gpus(plan, gpus_here()),
        _model(rundir),
        *(_data(f"run.{key}", prefix, rundir) for key, prefix in data_paths(run.data).items()),
        _one_tokenizer(run.data),
        _disk(rundir),
        check_nvme(plan, run, rundir.path),
        check_libaio(plan),
        check_host_memory(plan),
        _asynchronous(rundir),
        _storage(rundir.run.checkpoint.remote),
        _checkpoint(resume_from),
    )


def _own_loop(objective: Objective, data: DataSpec) -> CheckResult:
    """Checks that kit's own loop trains the objective, and that there is training data. A run directory without is for
    a user's own script."""
    row = TRL.get(objective)
    return judge(
        "objective",
        f"kit's own loop trains job.objective={objective}",
        (
            row is not None,
            failure,
            f"job.objective={objective} is trained by TRL's {row.trainer if row else ''}, not by kit's own loop",
            "start it as README.md in the run directory says",
        ),
        (
            not data.named,
            failure,
            "run.data.train is missing, which kit's own loop trains on",
            "name it in the recipe and emit again; a script of your own starts as README.md in the run directory says",
        ),
    )


_AMDS_ENGINE = "build github.com/ROCm/TransformerEngine: PyPI's package is for NVIDIA's GPUs"


def missing_packages(rundir: RunDirectory) -> list[CheckResult]:
    """Checks that the engine's packages are installed; one failure for each problem."""
    plan, layout, job = rundir.plan, rundir.plan.layout, rundir.plan.job
    quantised = job.lora.quantised if job.lora else ""
    megatron, te = kit.emit.megatron.applies(plan), layout.implementation == "transformer_engine"
    engine = f"layout.engine={layout.engine}"
    install_engine = f"install torch for your GPU first, then: {install(layout.engine)}"
    needs = (
        (job.lora is not None, "job.lora", ("peft",), f"use: {install('lora')}"),
        (quantised != "", f"job.lora.{quantised}", ("bitsandbytes",), f"use: {install('lora')}"),
        (
            "bitsandbytes" in OPTIMIZERS[job.optimizer.name].implementations.get(layout.engine, ""),
            f"optimizer.name={job.optimizer.name}",
            ("bitsandbytes",),
            f"use: {install('eight-bit')}",
        ),
        (
            layout.engine == "torch" and job.precision == "fp8",
            "precision=fp8 on layout.engine=torch",
            ("torchao",),
            f"use: {install('torchao')}",
        ),
        (rundir.run.data.stream is not None, "run.data.stream", ("datasets",), f"use: {install('data')}"),
        (True, engine, PACKAGES[layout.engine], install_engine),
        (megatron, engine, ("megatron.core",), install_engine),
        (te, engine, ("transformer_engine",), _AMDS_ENGINE if runs_rocm(plan.cluster.gpu) else install_engine),
    )
    found = []
    for wanted, what, modules, fix in needs:
        if wanted and (missing := [name for name in modules if not _is_installed(name)]):
            said = f"{what} needs {', '.join(missing)}, not installed for {Path(sys.executable).name}"
            found.append(failure("packages", said, fix))
    return found


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def _model(rundir: RunDirectory) -> CheckResult | None:
    """Checks that the model to start from has the planned shape, and that its tokenizer has no more tokens."""
    if rundir.run.model_path is None:
        said = "job.lora without run.model_path: adapters belong to the weights of a model"
        return None if rundir.plan.job.lora is None else failure("model", said, "give its directory")
    path, planned = Path(rundir.run.model_path), rundir.plan.model
    if not (path / "config.json").is_file():
        fix = "give a Hugging Face model directory, or null for random weights"
        return failure("model", f"run.model_path={path}: no config.json there", fix)
    try:
        found = load_model(str(path))
        tokens = _tokenizer_size(path / "tokenizer.json")
    except KitError as error:
        return failure("model", str(error), "")
    except (OSError, ValueError) as error:
        return failure("model", f"{path}/tokenizer.json cannot be read as a tokenizer ({error})", "copy it again")
    other = [
        f"{field}={getattr(found, field)} where the plan has {getattr(planned, field)}"
        for field in _SHAPE
        if getattr(found, field) != getattr(planned, field)
    ]
    return judge(
        "model",
        f"{path} is the planned model",
        (
            bool(other),
            failure,
            f"run.model_path={path}: {', '.join(other)}",
            "plan that model (model: its directory) or give the planned one",
        ),
        (
            tokens > planned.vocab_size,
            failure,
            f"{path}/tokenizer.json has {tokens} tokens and the model's vocab_size is {planned.vocab_size}",
            "use the model's own tokenizer, or a model with a larger embedding",
        ),
    )


def _tokenizer_size(path: Path) -> int:
    """Largest token id plus one, with added tokens, from a ``tokenizer.json``; 0 if there is none."""
    if not path.is_file():
        return 0
    data = json.loads(path.read_text(encoding="utf-8"))
    vocab = data.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in data.get("added_tokens", [])]
    return max(ids, default=-1) + 1


def _one_tokenizer(data: DataSpec) -> CheckResult | None:
    """Checks that all pairs of several sets were tokenised alike, as far as their sidecars say."""
    first: tuple[str, Any] | None = None
    chats: tuple[str, str] | None = None
    for key, prefix in data_paths(data).items() if data.blend or data.validation_sets else ():
        try:
            facts = json.loads(_content(f"{prefix}.json") or b"")
            found = facts["tokenizer"], facts["vocab_size"]
        except (KitError, OSError, ValueError, LookupError, TypeError):
            continue  # without a sidecar; or damaged, which _data reports
        if first is not None and found != first[1]:
            said = (
                f"run.{key}={prefix}: was tokenised with {found[0]} ({found[1]} ids) and run.{first[0]} with "
                f"{first[1][0]} ({first[1][1]} ids); one model reads both"
            )
            return failure("data", said, f"tokenise both alike; if they are, write the same name into {prefix}.json")
        first = first or (key, found)
        if (template := facts.get("chat_template")) is not None:
            if chats is not None and template != chats[1]:
                said = f"run.{key}={prefix} and run.{chats[0]} were written with different chat templates"
                return failure("data", said, "convert both with the same --chat-template")
            chats = (key, template)
    return None


def _size(path: str) -> int | None:
    """Bytes of a file on a disk or at an address; None if there is none. Raises SpecError."""
    if not is_address(path):
        return os.path.getsize(path) if os.path.isfile(path) else None
    files, name = files_beside("the data", path, SpecError)
    return None if (found := files.find(name)) is None else found.num_bytes


def _content(path: str) -> bytes | None:
    """Content of a file on a disk or at an address; None if there is none. Raises SpecError and OSError."""
    if not is_address(path):
        return Path(path).read_bytes() if os.path.isfile(path) else None
    files, name = files_beside("the data", path, SpecError)
    return files.read(name)


def _data(key: str, prefix: str, rundir: RunDirectory) -> CheckResult | None:
    """Checks that the .bin/.idx pair exists, fits the objective, is long enough, and has no token id beyond the model's
    vocabulary."""
    job, name, vocab_size = rundir.plan.job, Path(prefix).name, rundir.plan.model.vocab_size
    try:
        sizes = {suffix: _size(prefix + suffix) for suffix in (".bin", ".idx")}
        if missing := [suffix for suffix, size in sizes.items() if size is None]:
            fix = "write the pair with: " + convert_data(
                job.objective, "TEXT", "DIRECTORY", prefix if is_address(prefix) else name
            )
            return failure("data", f"{key}={prefix}: {name}{missing[0]} is missing", fix)
        content = _content(f"{prefix}.json")
        if content is None:
            return None if sizes[".bin"] else failure("data", f"{key}={prefix}: holds no text", "leave it out")
        facts: dict[str, Any] = json.loads(content)
    except SpecError as error:
        return failure("data", f"{key}={prefix}: {error}", "")
    except (OSError, ValueError) as error:
        return failure("data", f"{key}={prefix}: {name}.json cannot be read ({error})", "tokenise again")
    written_for, longest = facts.get("objective", "pretrain"), facts.get("longest", 0)
    is_text = job.objective == "pretrain"
    about = f"{key}={prefix}"
    return judge(
        "data",
        f"{about}: {facts['num_tokens']} tokens",
        (
            facts["max_token_id"] >= vocab_size,
            failure,
            f"{about}: holds token {facts['max_token_id']} and the model's vocab_size is {vocab_size}",
            "tokenise the text with this model's tokenizer",
        ),
        (
            written_for != job.objective,
            failure,
            f"{about}: was written for objective={written_for} and the job has {job.objective}",
            f"write it with: kit convert data … --objective {job.objective}",
        ),
        (
            not is_text and longest > job.seq_length + (job.objective == "sft"),
            failure,
            f"{about}: its longest row has {longest} tokens and job.seq_length={job.seq_length}",
            "raise it, or cut rows with: kit convert data … --seq-length",
        ),
        (
            is_text and facts["num_tokens"] <= job.seq_length,
            failure,
            f"{about}: {facts['num_tokens']} tokens make no sample of job.seq_length={job.seq_length}",
            "give more text or shorter sequences",
        ),
    )


def _disk(rundir: RunDirectory) -> CheckResult | None:
    """Checks the space for one checkpoint, so that a run does not fail at its first save."""
    needed, name = checkpoint_bytes(rundir.plan.workload), rundir.path.name
    try:
        free = free_bytes(rundir.path)
    except OSError:
        said = f"{name} is not writable; checkpoints and metrics are written there"
        return failure("disk", said, "change its mode or its owner")
    if free >= needed:
        return None
    said = f"{name} is on a disk with {to_gib(free):.1f} GiB free and one checkpoint takes {to_gib(needed):.1f} GiB"
    return failure("disk", said, "make room or put the run directory elsewhere (--out)")


def _asynchronous(rundir: RunDirectory) -> CheckResult | None:
    if not (rundir.run.checkpoint.asynchronous and rundir.plan.layout.uses_nvme):
        return None
    said = "run.checkpoint.asynchronous=true with state on NVMe: a checkpoint is first copied to host memory, which "
    return failure("asynchronous", said + "state on NVMe does not fit into", "use false")


def _storage(remote: str | None) -> CheckResult | None:
    """Checks that the package of the protocol is installed. Opens no connection."""
    try:
        if remote is not None:
            open_filesystem("run.checkpoint.remote", remote)
    except SpecError as error:
        return failure("storage", str(error), "")
    return None


def _checkpoint(path: Path | None) -> CheckResult | None:
    """Checks that a checkpoint is there: it fits every layout."""
    if path is None or (path / "manifest.json").is_file() or (path / "checkpoints").is_dir():
        return None
    said = f"--resume {path}: not a checkpoint (no manifest.json)"
    return failure("checkpoint", said, "give auto, a step-… directory, or the directory of a run")
