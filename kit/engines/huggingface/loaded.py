"""The weights of a Hugging Face directory: read tensor by tensor, or loaded by transformers where it renames and fuses
the tensors of a type that no family describes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kit.engines.huggingface.models import HfDirectory, hf_config, say_once, tensor_shapes
from kit.engines.protocol import TensorSource
from kit.errors import CheckpointError
from kit.specs.model import ModelSpec


def hf_weights(model: ModelSpec, path: Path | str) -> TensorSource:
    """The weights of the model in ``path``. Raises CheckpointError if config.json or weights are missing."""
    source = HfDirectory(path)
    if model.approximate is None or set(source.names()) == set(tensor_shapes(model)):
        return source
    return LoadedModel(model, Path(path))


class LoadedModel(TensorSource):
    """A model in host memory, whole, in the dtype on disk: transformers' own reading of its files
    (transformers/conversion_mapping.py has the renamed and fused tensors of each type)."""

    def __init__(self, model: ModelSpec, path: Path) -> None:
        """Raises CheckpointError if transformers cannot load the directory as this model, complete."""
        self._names = list(tensor_shapes(model))
        try:
            answer: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=hf_config(model),
                dtype="auto",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"transformers cannot load {path}: {' '.join(str(error).split())}") from error
        loaded, info = answer
        for what, keys in (("lacks", info["missing_keys"]), ("has other shapes of", info["mismatched_keys"])):
            if keys:
                raise CheckpointError(
                    f"{path} {what} {len(keys)} tensors of {model.name}, first {sorted(map(str, keys))[0]}; use a "
                    "checkpoint of the same model"
                )
        self._tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
        each_gb = sum(self._tensors[name].nbytes for name in self._names) / 1e9
        say_once(f"{path} is loaded whole by every process: {each_gb:.3g} GB of host memory each")

    def names(self) -> Sequence[str]:
        return self._names

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()
