"""Converts a checkpoint to a Hugging Face model directory or peft adapters, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from kit.engines.huggingface import adapters, experts
from kit.engines.huggingface.buffers import is_buffer
from kit.engines.huggingface.models import HfDirectory, build_skeleton, check_names, hf_config, tensor_shapes
from kit.engines.io.sharded_safetensors import split_into_files, write_tensors
from kit.engines.protocol import StateKind, TensorSource
from kit.errors import CheckpointError
from kit.specs.hub import id_of
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.training.checkpoint.files import new_directory, write_json
from kit.training.checkpoint.formats import Opened
from kit.training.checkpoint.progress import shown
from kit.units import GIB

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CHAT_TEMPLATE = "chat_template.jinja"
"""File of a model's or adapters' directory in which transformers looks for the chat template, before its config."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
)
"""Files to copy from ``extras_from``, if they exist."""
_GENERATION = "generation_config.json"
"""Copied for a whole model."""

_SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")


def opened_to_hf(
    opened: Opened,
    hf_dir: Path,
    dtype: str = "bfloat16",
    extras_from: Path | None = None,
    shard_bytes: int = 4 * GIB,
    merge_into: Path | None = None,
) -> None:
    """Write the weights of a checkpoint as a model that transformers' Auto classes load.

    ``extras_from``: the Hugging Face directory that the run started from; copies its tokenizer files, generation config
    and special token ids. If the checkpoint has adapters, writes a peft directory, with the tokenizer files and the
    base model's address; with ``merge_into`` (the directory of the frozen model) it writes the model with merged
    adapters. The chat template is the one that the run was trained with, whatever ``extras_from`` has. Downloads
    nothing; one tensor is in memory at a time. ``dtype``: a key of ``DTYPES``. Raises CheckpointError for a directory
    that is not empty, or a full disk.
    """
    source = opened.sources[StateKind.MASTER]
    if opened.lora is not None and merge_into is None:
        _write_peft(opened, opened.lora, Path(hf_dir), DTYPES[dtype], extras_from)
        return
    if merge_into is not None:
        if opened.lora is None:
            raise CheckpointError(f"it holds a whole model and no adapters; omit merge_into={merge_into}")
        source, extras_from = _Merged(opened.model, opened.lora, source, merge_into), extras_from or merge_into
    write_hf(opened.model, source, hf_dir, dtype, extras_from, shard_bytes, opened.chat_template)


def write_hf(
    model: ModelSpec,
    source: TensorSource,
    hf_dir: Path,
    dtype: str = "bfloat16",
    extras_from: Path | None = None,
    shard_bytes: int = 4 * GIB,
    chat_template: str | None = None,
) -> None:
    """Write the weights of ``source`` as a model that transformers' Auto classes load. ``chat_template``: in
    place of that of ``extras_from``. Other arguments and errors are those of ``opened_to_hf``."""
    shapes = tensor_shapes(model)
    check_names(shapes, source)
    if model.traits.interleaved_experts:
        shapes = {name: tuple(parameter.shape) for name, parameter in build_skeleton(model).named_parameters()}
        source = experts.FusedExpertsSource(model, source, list(shapes))
    extras = _extras(extras_from, (*TOKENIZER_FILES, _GENERATION))
    with new_directory(Path(hf_dir)) as directory:
        with shown({StateKind.MASTER: source}) as sources:
            _write_weights(sources[StateKind.MASTER], shapes, DTYPES[dtype], directory, shard_bytes)
        special_tokens = _special_tokens(extras_from)
        config = hf_config(model)
        config.update({"dtype": DTYPES[dtype], **special_tokens})
        if model.mtp_num_layers:
            config.num_nextn_predict_layers = model.mtp_num_layers  # as in DeepSeek-V3's config.json
        two_stacks = model.is_encoder_decoder
        classes = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if two_stacks else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        config.architectures = [classes[model.model_type]]
        config.save_pretrained(directory)
        _copy_extras(extras, directory, chat_template)
        if _GENERATION not in {path.name for path in extras}:
            write_json(directory / _GENERATION, special_tokens)


def _write_weights(
    source: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    directory: Path,
    shard_bytes: int,
) -> None:
    """Write shards ``model-0000k-of-0000n.safetensors`` and their index, or ``model.safetensors`` if one is enough."""
    # In the order of the source, which may read adjacent tensors only once.
    names = [name for name in source.names() if name in shapes]
    tensors = {name: (torch.float32 if is_buffer(name) else dtype, shapes[name]) for name in names}
    split = split_into_files(tensors, shard_bytes)
    for file, own in split.filename_to_tensors.items():
        write_tensors(directory / file, {name: tensors[name] for name in own}, source)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(directory / "model.safetensors.index.json", index)


def _extras(directory: Path | None, names: Sequence[str] = TOKENIZER_FILES) -> list[Path]:
    if directory is None:
        return []
    if not Path(directory).is_dir():
        raise CheckpointError(
            f"{directory} (whose tokenizer is to be copied) is not a directory; give a downloaded model's"
        )
    return [path for name in names if (path := Path(directory) / name).is_file()]


def _copy_extras(extras: Sequence[Path], directory: Path, chat_template: str | None) -> None:
    for path in extras:
        shutil.copyfile(path, directory / path.name)
    if chat_template is not None:
        (directory / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")


def _special_tokens(directory: Path | None) -> dict[str, Any]:
    path = None if directory is None else Path(directory) / "config.json"
    if path is None or not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    return {key: config[key] for key in _SPECIAL_TOKEN_KEYS if config.get(key) is not None}


def _write_peft(opened: Opened, lora: LoraSpec, directory: Path, dtype: torch.dtype, extras_from: Path | None) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which ``PeftModel.from_pretrained`` loads, and
    the tokenizer beside them, as peft's users do.

    ``extras_from``: directory of the adapters' model. Raises CheckpointError for a directory that is not empty and for
    a full disk.
    """
    extras = _extras(extras_from)
    is_model = extras_from is not None and (Path(extras_from) / "config.json").is_file()
    config = adapters.peft_config(lora, adapters.target_modules(build_skeleton(opened.model), lora))
    config.base_model_name_or_path = id_of(Path(extras_from)) if extras_from and is_model else None
    config.task_type = "SEQ_2_SEQ_LM" if opened.model.is_encoder_decoder else "CAUSAL_LM"
    config.inference_mode = True
    config.fan_in_fan_out = opened.model.traits.conv1d
    source = opened.sources[StateKind.MASTER]
    check_names(adapters.checkpoint_shapes(opened.model, lora), source)
    with new_directory(directory) as into:
        tensors = {name: source.read(name).to(dtype) for name in source.names()}
        save_file(tensors, into / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(into))
        _copy_extras(extras, into, opened.chat_template)


class _Merged(TensorSource):
    """A ``TensorSource`` of merged weights, W + scale·B·A, as in peft; with DoRA its rows then get their magnitudes."""

    def __init__(self, model: ModelSpec, lora: LoraSpec, trained: TensorSource, base: Path) -> None:
        """``base``: directory of the frozen model. Raises CheckpointError if its tensor names are not the model's."""
        self._base, self._adapters, self._lora = HfDirectory(base), trained, lora
        check_names(tensor_shapes(model), self._base)
        self._adapted = {name for name in trained.names() if ".lora_A." in name}
        self._transposed = model.traits.conv1d

    def names(self) -> list[str]:
        """Names of all weights of the model."""
        return list(self._base.names())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the weight."""
        return self._base.shape(name)

    def read(self, name: str) -> torch.Tensor:
        """The merged weight in fp32; without an adapter, the frozen weight in the dtype on disk."""
        weight = self._base.read(name)
        stem, _, last = name.rpartition(".")
        a = f"{adapters.PREFIX}{stem}.lora_A.weight"
        if last != "weight" or a not in self._adapted:
            return weight
        scale = self._lora.scale_of(stem.rpartition(".")[2])
        update = scale * self._adapters.read(a.replace("lora_A", "lora_B")) @ self._adapters.read(a)
        merged = weight.float() + (update.T if self._transposed else update)
        if not self._lora.use_dora:
            return merged
        magnitude, of_row = self._adapters.read(a.replace(".lora_A.weight", adapters.MAGNITUDE)), int(self._transposed)
        scaled: torch.Tensor = merged * (magnitude / merged.norm(dim=1 - of_row)).unsqueeze(1 - of_row)
        return scaled
