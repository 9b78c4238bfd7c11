"""Converts Hugging Face models, exchange checkpoints and Megatron checkpoints to each other, without a GPU.

One parameter is in memory at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kit.engines.base import StateKind, TensorSource
from kit.engines.huggingface.models import HfDirectory, check_names, tensor_shapes
from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES, plan_files, write_tensors
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.training.checkpoint.counters import LARGEST, START, Counters
from kit.training.checkpoint.engine_checkpoint import MANIFEST, STATE, read_manifest
from kit.training.checkpoint.exchange import EXCHANGE_JSON, KINDS, ExchangeCheckpoint, exchange_json, is_exchange
from kit.training.checkpoint.files import FileRecord, new_directory, refuse_unlisted, verify, write_json
from kit.training.checkpoint.to_huggingface import DTYPES, exchange_to_hf, write_hf

_FORMATS = ("hf", "exchange", "megatron")
_TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron-LM looks for the newest checkpoint of a directory (megatron/training/checkpointing.py)."""


@dataclass(frozen=True)
class _Opened:
    """A checkpoint to convert."""

    format: str
    model: ModelSpec
    counters: Counters
    sources: Mapping[StateKind, TensorSource]
    """The weights; and both moments, or no moments."""
    lora: LoraSpec | None = None
    """Set if the weights are adapters."""


def convert(
    source: Path,
    to: str,
    out: Path,
    *,
    dtype: str = "bfloat16",
    model: str | None = None,
    extras_from: Path | None = None,
    merge_into: Path | None = None,
) -> str:
    """Write ``source`` in another format to the new directory ``out``; returns a description of ``out``.

    ``dtype``: of the weights in Hugging Face and Megatron checkpoints; all other tensors are fp32. ``model``: the model
    of a Megatron checkpoint that is not in a run directory of kit (a Hugging Face directory, a run directory, or a
    catalog name). Raises KitError if a file is missing, damaged, or of another model.
    """
    to = "exchange" if to == "hub" else to  # the name in earlier versions
    if to not in _FORMATS:
        raise CheckpointError(f"--to {to} is unknown; use one of {', '.join(_FORMATS)}")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if to == "hf" and is_exchange(Path(source)):
        exchange_to_hf(source, out, dtype, extras_from, merge_into=merge_into)
        adapters = ExchangeCheckpoint(source).lora is not None and merge_into is None
        return f"{'peft adapters' if adapters else 'a Hugging Face model'} in {dtype}"
    if merge_into is not None:
        raise CheckpointError(
            f"--merge-into {merge_into} is for adapters (an exchange checkpoint) and --to hf; omit it"
        )
    opened = open_checkpoint(Path(source), model)
    if opened.lora is not None:
        raise CheckpointError(f"{source} holds adapters, which --to {to} has no place for; use --to hf")
    if opened.format == to:
        raise CheckpointError(f"{source} is of format {to} already; copy it, or choose another --to")
    if to == "hf":
        write_hf(opened.model, opened.sources[StateKind.MASTER], out, dtype, extras_from)
        return f"a Hugging Face model in {dtype}"
    if to == "exchange":
        _write_exchange(opened, out)
    else:
        _write_megatron(opened, out, DTYPES[dtype])
    state = "with Adam's state" if len(opened.sources) > 1 else "weights only"
    return f"a {to} checkpoint of {opened.model.name}, {state}"


def open_checkpoint(path: Path, model: str | None = None) -> _Opened:
    """Detect the format of a directory and open it. Raises KitError if the format is unknown or the data damaged."""
    if is_exchange(path):
        exchange = ExchangeCheckpoint(path)
        exchange.verify()
        sources: dict[StateKind, TensorSource] = {kind: exchange.source(kind) for kind in exchange.kinds}
        return _Opened("exchange", exchange.model, exchange.counters, sources, exchange.lora)
    if (directory := _torch_dist_directory(path)) is not None:
        return _open_megatron(path, directory, model)
    if (path / "config.json").is_file():
        from kit.specs.catalog import load_model

        spec = load_model(str(path))
        return _Opened("hf", spec, START, {StateKind.MASTER: HfDirectory(path)})
    raise CheckpointError(
        f"{path} is not a checkpoint: neither {EXCHANGE_JSON} nor config.json (Hugging Face) nor .metadata or "
        f"{_TRACKER} (Megatron) is in it"
    )


def _write_exchange(opened: _Opened, out: Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Write an exchange checkpoint, in fp32. Raises CheckpointError."""
    shapes = tensor_shapes(opened.model)
    weight_map: dict[StateKind, dict[str, str]] = {}
    records: dict[str, FileRecord] = {}
    with new_directory(Path(out)) as partial:
        for kind, source in opened.sources.items():
            check_names(shapes, source)
            weight_map[kind] = {}
            files = plan_files([name for name in source.names() if name in shapes], shapes, 4, shard_bytes)
            for number, names in enumerate(files, start=1):
                file = f"{kind.value}-{number:05d}.safetensors"
                tensors = {name: (torch.float32, shapes[name]) for name in names}
                records[file] = FileRecord(*write_tensors(partial / file, tensors, source))
                weight_map[kind] |= dict.fromkeys(names, file)
        write_json(partial / EXCHANGE_JSON, exchange_json(opened.counters, opened.model, weight_map, records))


def _write_megatron(opened: _Opened, out: Path, dtype: torch.dtype) -> None:
    """Write a directory that Megatron-LM loads: ``release`` for weights only, ``iter_…`` with optimizer state.

    Raises CheckpointError.
    """
    from kit.engines.megatron.checkpoint import offline

    counters = opened.counters
    common: dict[str, object] = {"checkpoint_version": 3.0, "iteration": counters.step}
    name, newest = "release", "release"
    if len(opened.sources) > 1:
        name, newest = f"iter_{counters.step:07d}", str(counters.step)
        common["optimizer"] = {
            "optimizer": {"param_groups": [{"step": counters.optimizer_steps}]},
            "param_state_sharding_type": "fully_reshardable",
        }
    with new_directory(Path(out)) as partial:
        (partial / name).mkdir()
        offline.write_checkpoint(partial / name, opened.model, opened.sources, dtype, common)
        (partial / _TRACKER).write_text(newest, encoding="utf-8")


def _torch_dist_directory(path: Path) -> Path | None:
    """The directory with the torch_dist files: ``path``, ``path/state`` of a native checkpoint, or Megatron-LM's newest
    checkpoint in ``path``; None if there is none."""
    tracker = path / _TRACKER
    candidates = [path, path / STATE]
    if tracker.is_file():
        newest = tracker.read_text(encoding="utf-8").strip()
        candidates.append(
            path / (newest if newest == "release" else f"iter_{int(newest):07d}" if newest.isdigit() else newest)
        )
    return next((each for each in candidates if (each / ".metadata").is_file()), None)


def _open_megatron(path: Path, directory: Path, model: str | None) -> _Opened:
    from kit.engines.megatron.checkpoint import offline, torch_dist

    counters = None
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        verify(path, manifest.files)
        refuse_unlisted(path, {*manifest.files, MANIFEST})
        counters = manifest.counters
    spec = _model_of(path, model)
    checkpoint = torch_dist.Checkpoint(directory)
    kinds = KINDS if offline.has_moments(checkpoint, spec) else (StateKind.MASTER,)
    if counters is None:
        iteration, steps = checkpoint.common().get("iteration", 0), checkpoint.optimizer_steps()
        if steps is None:
            kinds = (StateKind.MASTER,)  # moments of unknown age: Adam would correct their bias as if they were new
        if type(iteration) is not int or not 0 <= iteration <= LARGEST or not 0 <= (steps or 0) <= LARGEST:
            raise CheckpointError(
                f"{path} says iteration={str(iteration)[:40]} and {str(steps)[:40]} steps of its optimizer, which must "
                f"be whole numbers, 0 or more; give another checkpoint"
            )
        step = max(iteration, steps or 0)  # a missing iteration counts as 0
        counters = dataclasses.replace(START, step=step, optimizer_steps=steps or 0)
    sources = {kind: offline.MegatronSource(checkpoint, kind, spec) for kind in kinds}
    return _Opened("megatron", spec, counters, sources)


def _model_of(path: Path, model: str | None) -> ModelSpec:
    """The model named by ``model``, otherwise the model of the run directory that contains the checkpoint."""
    from kit.planner.plan import Plan
    from kit.specs.catalog import load_model

    if model is None:
        plan = path.resolve().parent.parent / "plan.yaml"
        if not plan.is_file():
            raise CheckpointError(
                f"{path} does not say what model it is of; add --model with its Hugging Face directory, the run "
                f"directory, or a catalog name"
            )
        return Plan.load(plan).model
    if (Path(model) / "plan.yaml").is_file():
        return Plan.load(Path(model) / "plan.yaml").model
    return load_model(model)
