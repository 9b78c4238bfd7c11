"""Low-rank adapters through peft: a frozen model, adapters injected into its linear layers, their names on disk.

Adapters are named as in peft's files (``base_model.model.….lora_A.weight``) everywhere outside of an engine; they are
what is trained, saved and exported. The frozen weights come from ``run.model_path`` whenever an engine is built.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kit.engines import experts
from kit.engines.base import TensorSource
from kit.engines.hf import HfDirectory, build_skeleton, check_names, check_shape, parameter_shapes
from kit.errors import EngineError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory

PREFIX = "base_model.model."
"""What peft puts before a model's own names."""
_ADAPTER = "default"
"""peft's name of the adapter, which is part of parameters' names in memory and not on disk."""
_ATTENTION = ("attn", "attention", "Attention")
"""Parts of the names of transformers' attention modules."""


def freeze(model: PreTrainedModel, rundir: RunDirectory) -> None:
    """Weights of ``run.model_path`` into a freshly built model, frozen, in the computation's precision or nf4; and
    adapters. Raises EngineError without a path: adapters on random weights are of no use."""
    plan = rundir.plan
    assert plan.job.lora is not None
    if rundir.run.model_path is None:
        raise EngineError(
            "job.lora without run.model_path: adapters belong to the weights of a model; give its directory"
        )
    load_frozen(model, plan.model, HfDirectory(rundir.run.model_path))
    dtype = torch.bfloat16 if plan.job.precision == "bf16" else torch.float32
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)
    if plan.job.lora.four_bit:
        quantise(model, dtype)
    adapt(model, plan.job.lora)


def adapt(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Freeze ``model`` and inject adapters, in place: A random, B zero (see ``InitialAdapters``), both fp32."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config(lora, target_modules(model, lora)), model, _ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{_ADAPTER}." in name)
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.float()


def peft_config(lora: LoraSpec, targets: Sequence[str]) -> Any:
    """peft's configuration, for injection and for ``adapter_config.json``."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=sorted(targets), bias="none"
    )


def target_modules(model: PreTrainedModel, lora: LoraSpec) -> list[str]:
    """Last names of the linear layers that get adapters (``q_proj``, …), as ``adapter_config.json`` lists them.

    Experts are one tensor for all of them, not linear layers, and get none. Raises EngineError where nothing is left.
    """
    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
        and module is not head
        and (lora.targets == "all-linear" or any(part in name for part in _ATTENTION))
    }
    if not names:
        raise EngineError(
            f"lora.targets={lora.targets} finds no linear layer in {type(model).__name__}; use all-linear"
        )
    return sorted(names)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Adapters by their names on disk; without any, all parameters by their own."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name_on_disk(name): parameter for name, parameter in named.items()}


def name_on_disk(name: str) -> str:
    """A parameter's name in memory → in peft's files; those that are no adapter's keep theirs."""
    middle = f".{_ADAPTER}."
    return PREFIX + name.replace(middle, ".") if middle in name else name


def adapter_shapes(model: ModelSpec, lora: LoraSpec) -> dict[str, tuple[int, ...]]:
    """Name on disk → shape of every adapter. Allocates nothing."""
    skeleton = build_skeleton(model)
    adapt(skeleton, lora)
    return {name: tuple(parameter.shape) for name, parameter in trainable(skeleton).items()}


def checkpoint_shapes(model: ModelSpec, lora: LoraSpec | None) -> dict[str, tuple[int, ...]]:
    """Name → shape of what a checkpoint holds: all of the model, or its adapters. Allocates nothing."""
    return parameter_shapes(model) if lora is None else adapter_shapes(model, lora)


class InitialAdapters:
    """A ``TensorSource`` of adapters as they start: B zero, A as peft draws it (Kaiming with a = √5: uniform within
    1/√inputs), from a seed and the name alone, so that every layout starts from the same ones."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes, self._seed = shapes, seed

    def names(self) -> Sequence[str]:
        """All adapters."""
        return list(self._shapes)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, fp32, on the CPU."""
        shape = self._shapes[name]
        if ".lora_B." in name:
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(self._seed * 2**32 + zlib.crc32(name.encode()))
        return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._shapes[name]

    def read_flat(self, name: str, start: int, length: int) -> torch.Tensor:
        """Part of the flattened tensor."""
        return self.read(name).flatten()[start : start + length]


@torch.no_grad()
def load_frozen(model: PreTrainedModel, spec: ModelSpec, source: TensorSource) -> None:
    """Set all weights of a model that has no adapters yet. Under zero.Init each rank reads its own part.

    Raises CheckpointError where names or shapes are not the model's.
    """
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    fused = experts.Fused(spec, source, list(shapes))
    check_names(shapes, fused)
    for name, parameter in model.named_parameters():
        check_shape(name, shapes[name], fused.shape(name))
        if not hasattr(parameter, "ds_tensor"):
            parameter.copy_(fused.read(name))
            continue
        length = parameter.partition_numel()
        start = length * torch.distributed.get_rank(parameter.ds_process_group)
        part = fused.read_flat(name, start, length)
        parameter.ds_tensor.data[: part.numel()].copy_(part)


def quantise(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Linear layers but the head to nf4 with doubly quantised scales (QLoRA, arXiv 2305.14314), in place."""
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise EngineError("lora.four_bit needs bitsandbytes; install it with: pip install 'kit[lora]'") from error

    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or module is head:
            continue
        biased = module.bias is not None
        quantised = Linear4bit(
            module.in_features,
            module.out_features,
            bias=biased,
            compute_dtype=compute_dtype,
            quant_type="nf4",
            device="meta",
        )
        weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
        quantised.weight = weight.to(module.weight.device)  # it is this call that quantises
        quantised.weight.module = quantised
        quantised.quant_state = quantised.weight.quant_state
        if biased:
            quantised.bias = module.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, quantised)
