"""Converts Hugging Face models, exchange checkpoints and Megatron checkpoints to each other, without a GPU.

One parameter is in memory at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kit.cost.model.lora import named_layers
from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.engines.huggingface.models import HfDirectory, check_names, check_shape, tensor_shapes
from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES, plan_files, write_tensors
from kit.engines.protocol import StateKind, TensorSource
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.text import shown
from kit.training.checkpoint.counters import LARGEST, START, Counters
from kit.training.checkpoint.engine_checkpoint import MANIFEST, read_manifest
from kit.training.checkpoint.exchange import EXCHANGE_JSON, KINDS, ExchangeCheckpoint, exchange_json, is_exchange
from kit.training.checkpoint.files import FileRecord, new_directory, refuse_unlisted, verify, write_json
from kit.training.checkpoint.foreign.detect_format import TRACKER, recognise, torch_dist_directory
from kit.training.checkpoint.foreign.megatron_torch import open_torch_format, torch_format_state
from kit.training.checkpoint.foreign.source import ForeignState, described, plain_name
from kit.training.checkpoint.foreign.torch_dcp import adapter_config, verify_archives
from kit.training.checkpoint.foreign.torchtitan import as_hugging_face, is_torchtitan
from kit.training.checkpoint.progress import shown as shown_progress
from kit.training.checkpoint.to_huggingface import CHAT_TEMPLATE, DTYPES, TOKENIZER_FILES, exchange_to_hf, write_hf
from kit.training.checkpoint.to_universal import write_universal

_FORMATS = ("hf", "exchange", "megatron", "dcp", "universal")
_ADAPTERS = "adapter_config.json"
"""peft's configuration of adapters."""


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
    notes: tuple[str, ...] = ()


def convert(
    source: Path,
    to: str,
    out: Path,
    *,
    dtype: str | None = None,
    model: str | None = None,
    extras_from: Path | None = None,
    merge_into: Path | None = None,
) -> str:
    """Write ``source`` in another format to the new directory ``out``; returns a description of ``out``.

    ``dtype``: of the weights in Hugging Face and Megatron checkpoints, bfloat16 if None; all other tensors are fp32.
    ``model``: the model of a checkpoint that does not say it and is not in a run directory of kit (a Hugging Face
    directory, a run directory, or a catalog name). ``extras_from``: see ``exchange_to_hf``. Raises KitError if a file
    is missing, damaged, or of another model, and for an argument that this conversion would not use.
    """
    if to not in _FORMATS:
        raise CheckpointError(f"--to {to} is unknown; use one of {', '.join(_FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if dtype not in (None, "float32") and to not in ("hf", "megatron"):
        raise CheckpointError(f"--dtype {dtype} with --to {to}, which holds fp32 always; omit it")
    dtype = dtype or "bfloat16"
    if extras_from is not None and to != "hf":
        raise CheckpointError(f"--extras-from {extras_from} with --to {to}, which holds no tokenizer; omit it")
    if extras_from is not None and not any((extras_from / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(f"--extras-from {extras_from} has no tokenizer; give the directory of a downloaded model")
    if model is not None and is_exchange(Path(source)):
        raise CheckpointError(f"--model {model}: {source} is an exchange checkpoint, which says its model; omit it")
    if to == "hf" and is_exchange(Path(source)):
        exchange_to_hf(source, out, dtype, extras_from, merge_into=merge_into)
        exchange = ExchangeCheckpoint(source)
        what = "peft adapters" if exchange.lora is not None and merge_into is None else "a Hugging Face model"
        template = "" if exchange.chat_template is None else f", {CHAT_TEMPLATE} is the one it was trained with"
        return f"{what} in {dtype}{template}"
    if merge_into is not None:
        raise CheckpointError(
            f"--merge-into {merge_into} is for adapters (an exchange checkpoint) and --to hf; omit it"
        )
    opened = open_checkpoint(Path(source), model)
    if opened.lora is not None and to != "exchange":
        use = "hf" if opened.format == "exchange" else "exchange, and of that --to hf"
        raise CheckpointError(f"{source} holds adapters, which --to {to} has no place for; use --to {use}")
    if opened.format == to:
        raise CheckpointError(f"{source} is of format {to} already; copy it, or choose another --to")
    if to == "hf":
        write_hf(opened.model, opened.sources[StateKind.MASTER], out, dtype, extras_from)
        return f"a Hugging Face model in {dtype}"
    with shown_progress(opened.sources) as sources, new_directory(Path(out)) as directory:
        opened = replace(opened, sources=sources)
        if to == "exchange":
            _write_exchange(opened, directory)
        elif to == "dcp":
            _write_distributed(opened, directory)
        elif to == "universal":
            write_universal(opened.model, opened.sources, opened.counters, directory, Path(source))
        else:
            _write_megatron(opened, directory, DTYPES[dtype])
    state = "with Adam's state" if len(opened.sources) > 1 else "weights only"
    return "; ".join([f"a {to} checkpoint of {opened.model.name}, {state}", *opened.notes])


def open_checkpoint(path: Path, model: str | None = None) -> _Opened:
    """Detect the format of a directory and open it. Raises KitError if the format is unknown or the data damaged."""
    if is_exchange(path):
        exchange = ExchangeCheckpoint(path)
        exchange.verify()
        # Megatron's files have places for Adam's state.
        adam = OPTIMIZERS[exchange.optimizer].state_of == "adamw"
        kinds = exchange.kinds if adam else (StateKind.MASTER,)
        sources: dict[StateKind, TensorSource] = {kind: exchange.source(kind) for kind in kinds}
        return _Opened("exchange", exchange.model, exchange.counters, sources, exchange.lora)
    found = recognise(path)
    if found.format in ("megatron", "native") and (directory := torch_dist_directory(path)) is not None:
        return _open_megatron(path, directory, model)
    if found.format == "hf":
        from kit.specs.catalog import load_model

        if model is not None:
            raise CheckpointError(f"--model {model}: {path} has a config.json, which says its model; omit it")
        return _Opened("hf", load_model(str(path)), START, {StateKind.MASTER: HfDirectory(path)})
    if found.format == "megatron-old":
        verify_archives(found.directory)
        spec, old = _model_of(path, model), open_torch_format(found.directory)
        said = torch_format_state(old)
        return _Opened(found.format, spec, said.counters, old.sources(spec), notes=said.notes)
    if found.format not in ("deepspeed", "universal", "dcp", "peft") or found.open is None:
        raise CheckpointError(f"{path} ({found.program}) is not converted: {'; '.join(found.notes) or 'see inspect'}")
    verify_archives(found.directory)
    spec, state = _model_of(path, model), found.open()
    if is_torchtitan(state):
        state = as_hugging_face(state, spec)
    lora = _lora(path, spec, state) if (path / _ADAPTERS).is_file() else None
    sources = state.sources(spec, adapters=lora is not None)
    return _Opened(found.format, spec, state.counters, sources, lora, state.notes)


def _lora(path: Path, model: ModelSpec, state: ForeignState) -> LoraSpec:
    """The adapters' rank, scale and layers by peft's configuration. Raises CheckpointError for what kit does not train:
    other kinds of adapters, or adapters on other layers."""
    config = adapter_config(path)
    with described(path / _ADAPTERS, "peft"):
        other = "modules_to_save" if config.get("modules_to_save") else ""
        if config.get("peft_type") != "LORA" or other:
            raise CheckpointError(
                f"{path} has adapters of type {config.get('peft_type')} {other}, which kit does not train"
            )
        rank, alpha, dropout = int(config["r"]), float(config["lora_alpha"]), float(config.get("lora_dropout") or 0)
        kinds: dict[str, Any] = {key: config.get(key) is True for key in ("use_rslora", "use_dora")}
        patterns: dict[str, Any] = {key: dict(config.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")}
        listed = sorted(map(str, config.get("target_modules") or []))
        lora = LoraSpec(rank=rank, alpha=alpha, dropout=dropout, **kinds, **patterns)
    if unknown := sorted(set().union(*patterns.values()) - named_layers(model).keys()):
        raise CheckpointError(f"{path} has a rank or alpha of {unknown[0]} alone, which kit does not train")
    names = {plain_name(name) for name in state.weights}
    choices: list[dict[str, Any]] = [{"targets": "attention"}, {"targets": "all-linear"}]
    if listed and set(listed) <= named_layers(model).keys():
        choices.append({"target_modules": tuple(listed)})
    for choice in choices:
        chosen = replace(lora, **choice)
        if names == checkpoint_shapes(model, chosen).keys():
            return chosen
    raise CheckpointError(
        f"{path} has adapters on {shown(config.get('target_modules'))}; kit's are on all layers of attention, on all "
        f"linear layers, or on a list of layers whose names it knows: merge these with peft's merge_and_unload"
    )


def _write_exchange(opened: _Opened, directory: Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Write an exchange checkpoint, in fp32. Raises CheckpointError."""
    shapes = checkpoint_shapes(opened.model, opened.lora)
    for source in opened.sources.values():
        check_names(shapes, source)
        for name, shape in shapes.items():
            check_shape(name, shape, source.shape(name))
    weight_map: dict[StateKind, dict[str, str]] = {}
    records: dict[str, FileRecord] = {}
    for kind, source in opened.sources.items():
        weight_map[kind] = {}
        files = plan_files([name for name in source.names() if name in shapes], shapes, 4, shard_bytes)
        for number, names in enumerate(files, start=1):
            file = f"{kind.value}-{number:05d}.safetensors"
            tensors = {name: (torch.float32, shapes[name]) for name in names}
            records[file] = FileRecord(*write_tensors(directory / file, tensors, source))
            weight_map[kind] |= dict.fromkeys(names, file)
    write_json(
        directory / EXCHANGE_JSON, exchange_json(opened.counters, opened.model, weight_map, records, opened.lora)
    )


def _write_distributed(opened: _Opened, directory: Path) -> None:
    """Write a checkpoint of torch.distributed.checkpoint in fp32, with the keys of ``{"model": …, "optimizer": …}`` as
    torch's ``get_state_dict`` returns them, without ``param_groups``. Raises CheckpointError."""
    from kit.engines.megatron.checkpoint.torch_dist import WriteBlock, write_blocks

    shapes = tensor_shapes(opened.model)
    blocks = []
    for kind, source in opened.sources.items():
        check_names(shapes, source)
        for name, shape in shapes.items():
            check_shape(name, shape, source.shape(name))
            state = f"optimizer.state.{name}"
            key = f"model.{name}" if kind is StateKind.MASTER else f"{state}.{kind.value}"
            read = functools.partial(_in_fp32, source, name)
            blocks.append(WriteBlock(key, shape, (0,) * len(shape), shape, torch.float32, read))
            if kind is StateKind.EXP_AVG:
                steps = functools.partial(torch.tensor, float(opened.counters.optimizer_steps))
                blocks.append(WriteBlock(f"{state}.step", (), (), (), torch.float32, steps))
    write_blocks(directory, blocks=blocks, common=None)


def _in_fp32(source: TensorSource, name: str) -> torch.Tensor:
    return source.read(name).float()


def _write_megatron(opened: _Opened, directory: Path, dtype: torch.dtype) -> None:
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
    (directory / name).mkdir(exist_ok=True)

    offline.write_checkpoint(directory / name, opened.model, opened.sources, dtype, common)
    (directory / TRACKER).write_text(newest, encoding="utf-8")


def _open_megatron(path: Path, directory: Path, model: str | None) -> _Opened:
    from kit.engines.megatron.checkpoint import offline, torch_dist

    counters = None
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        verify(path, manifest.files)
        refuse_unlisted(path, {*manifest.files, MANIFEST})
        counters = manifest.counters
    spec, lora = _model_of(path, model), _adapters_of_run(path, model)
    checkpoint = torch_dist.Checkpoint(directory)
    if counters is None:
        checkpoint.verify()
    adam = offline.has_moments(checkpoint, spec, lora) and checkpoint.optimizer() == "adamw"
    kinds = KINDS if adam else (StateKind.MASTER,)
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
    sources = {kind: offline.MegatronSource(checkpoint, kind, spec, lora) for kind in kinds}
    return _Opened("megatron", spec, counters, sources, lora)


def _adapters_of_run(path: Path, model: str | None) -> LoraSpec | None:
    """The adapters that the run directory trains, which contains the checkpoint or is named by ``model``."""
    from kit.planner.plan import Plan

    plan = (path.resolve().parent.parent if model is None else Path(model)) / "plan.yaml"
    return Plan.load(plan).job.lora if plan.is_file() else None


def _model_of(path: Path, model: str | None) -> ModelSpec:
    """The model named by ``model``, otherwise that of a ``config.json`` in the checkpoint or beside it, that of the
    adapters' base, or of the run directory that contains the checkpoint."""
    from kit.planner.plan import Plan
    from kit.specs.catalog import load_model

    if model is None:
        for directory in (path, path.parent):
            if (directory / "config.json").is_file():
                return load_model(str(directory))
        if (path / _ADAPTERS).is_file():
            config = adapter_config(path)
            with described(path / _ADAPTERS, "peft"):
                base = Path(str(config["base_model_name_or_path"]))
                if (base / "config.json").is_file():
                    return load_model(str(base))
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
