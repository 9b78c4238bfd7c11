"""An exchange checkpoint of adapters → a peft directory, or a model with the adapters merged in; offline."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kit.engines.base import StateKind, TensorSource
from kit.engines.huggingface import adapters
from kit.engines.huggingface.models import HfDirectory, build_skeleton, check_names, tensor_shapes
from kit.errors import CheckpointError
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.checkpoint.files import new_directory


def exchange_to_peft(
    exchange: ExchangeCheckpoint, directory: Path, dtype: torch.dtype, base: Path | None = None
) -> None:
    """``adapter_config.json`` and ``adapter_model.safetensors``, as ``PeftModel.from_pretrained`` takes them.

    ``base``: the model that the adapters belong to, to be named in the configuration. Raises CheckpointError for a
    directory that is not empty and for a full disk.
    """
    assert exchange.lora is not None
    skeleton = build_skeleton(exchange.model)
    config = adapters.peft_config(exchange.lora, adapters.target_modules(skeleton, exchange.lora))
    config.base_model_name_or_path = None if base is None else str(base)
    config.task_type = "SEQ_2_SEQ_LM" if exchange.model.is_encoder_decoder else "CAUSAL_LM"
    config.inference_mode = True
    config.fan_in_fan_out = exchange.model.traits.conv1d
    source = exchange.source(StateKind.MASTER)
    check_names(adapters.checkpoint_shapes(exchange.model, exchange.lora), source)
    try:
        with new_directory(directory) as partial:
            tensors = {name: source.read(name).to(dtype) for name in source.names()}
            save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(str(partial))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"writing {directory} failed: {error}; check the free space there") from error


class Merged(TensorSource):
    """A ``TensorSource`` of W + (alpha/rank)·B·A over a frozen model's weights, as peft merges them."""

    def __init__(self, exchange: ExchangeCheckpoint, base: Path) -> None:
        """Raises CheckpointError where ``base`` is not the model that was frozen."""
        assert exchange.lora is not None
        self._base, self._adapters = HfDirectory(base), exchange.source(StateKind.MASTER)
        check_names(tensor_shapes(exchange.model), self._base)
        self._scale = exchange.lora.alpha / exchange.lora.rank
        self._adapted = {name for name in self._adapters.names() if ".lora_A." in name}
        self._transposed = exchange.model.traits.conv1d

    def names(self) -> list[str]:
        """All weights of the model."""
        return list(self._base.names())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the weight."""
        return self._base.shape(name)

    def read(self, name: str) -> torch.Tensor:
        """The merged weight, fp32 where there is an adapter."""
        weight = self._base.read(name)
        stem, _, last = name.rpartition(".")
        a = f"{adapters.PREFIX}{stem}.lora_A.weight"
        if last != "weight" or a not in self._adapted:
            return weight
        update = self._scale * self._adapters.read(a.replace("lora_A", "lora_B")) @ self._adapters.read(a)
        return weight.float() + (update.T if self._transposed else update)
