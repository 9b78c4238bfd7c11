"""LoRA and QLoRA through peft: a frozen model, with adapters injected into its linear layers.

Outside of an engine, adapters have the names of peft's files (``base_model.model.….lora_A.weight``). Engines train,
save and export the adapters only, and read the frozen weights from ``run.model_path``.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kit.emit.run_directory import RunDirectory
from kit.engines.huggingface.buffers import SavedBuffers
from kit.engines.huggingface.loaded import hf_weights
from kit.engines.huggingface.models import (
    build_skeleton,
    source_for_model,
    tensor_shapes,
)
from kit.engines.protocol import GeneratedSource, StateKind, TensorSource
from kit.errors import EngineError
from kit.extras import install
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.specs.text import nearest

PREFIX = "base_model.model."
"""peft's prefix to a model's own names."""
ADAPTER = "default"
"""peft's name of the adapter. It is part of parameter names in memory, but not on disk."""
MAGNITUDE = ".lora_magnitude_vector"
"""End of the names of DoRA's magnitudes."""
_WRAPPED = ".base_layer."
"""Part of the names of weights that have an adapter."""
_ATTENTION = ("attn", "attention", "Attention")
"""Strings that occur in the names of transformers' attention modules."""


def frozen_skeleton(rundir: RunDirectory, lora: LoraSpec, device: torch.device) -> PreTrainedModel:
    """The plan's model with adapters, all parameters on meta, buffers on ``device``. Raises EngineError where a package
    is missing that ``FrozenWeights`` will need."""
    if lora.quantised:
        _bitsandbytes()
    model = build_skeleton(rundir.plan.model, device)
    adapt(model, lora)
    return model


def build_frozen(rundir: RunDirectory, lora: LoraSpec, device: torch.device) -> PreTrainedModel:
    """The plan's model on ``device``, with frozen weights from ``run.model_path`` and adapters. Raises as
    ``FrozenWeights``."""
    model = frozen_skeleton(rundir, lora, device)
    FrozenWeights(model, rundir, device).load(model)
    return model


def adapt(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Freeze ``model`` and inject adapters, in place: A random, B zero (see ``InitialAdapters``), both fp32."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config(lora, target_modules(model, lora)), model, ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{ADAPTER}." in name)
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.float()


def peft_config(lora: LoraSpec, targets: Sequence[str]) -> Any:
    """peft's ``LoraConfig``, for injection and for ``adapter_config.json``."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        lora_dropout=lora.dropout,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        target_modules=sorted(targets),
        bias="none",
    )


def target_modules(model: PreTrainedModel, lora: LoraSpec) -> list[str]:
    """Last names of the linear layers that get adapters (``q_proj``, …), as ``adapter_config.json`` lists them.

    Experts get no adapters: transformers stores them in one fused tensor, not in linear layers. Where peft takes the
    names of other MLPs for theirs, these get none either. Raises EngineError if no layer gets an adapter.
    """
    head = model.get_output_embeddings()
    linears = {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    }
    if unknown := sorted(set(lora.target_modules) - set(linears.values())):
        raise EngineError(
            f"lora.target_modules has {unknown[0]}, which {type(model).__name__} has not; "
            f"{nearest(unknown[0], set(linears.values()))}"
        )
    everywhere = lora.targets == "all-linear"
    names = set(lora.target_modules) or {
        last for name, last in linears.items() if everywhere or any(part in name for part in _ATTENTION)
    }
    if not names:
        raise EngineError(
            f"lora.targets={lora.targets} finds no linear layer in {type(model).__name__}; use all-linear"
        )
    return sorted(_left_to_modules(model, names))


def _left_to_modules(model: PreTrainedModel, names: set[str]) -> set[str]:
    """``names`` without those that peft takes for routed experts, which are fused, and without which it adapts linear
    layers alone: of some model types those of all MLPs."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = peft_config(LoraSpec(), sorted(names))
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return set(config.target_modules)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name → parameter of all trained parameters. Adapters have their names in peft's files."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {PREFIX + _on_disk(n) if f".{ADAPTER}." in n else n: parameter for n, parameter in trained.items()}


def _on_disk(name: str) -> str:
    """peft's name of an adapter in its files (peft/utils/save_and_load.py)."""
    return name.replace(f".{ADAPTER}.", ".").replace(f"{MAGNITUDE}.weight", MAGNITUDE)


def adapter_shapes(model: ModelSpec, lora: LoraSpec) -> dict[str, tuple[int, ...]]:
    """Name on disk → shape of every adapter. Allocates no memory."""
    skeleton = build_skeleton(model)
    adapt(skeleton, lora)
    return {name: tuple(parameter.shape) for name, parameter in trainable(skeleton).items()}


def checkpoint_shapes(model: ModelSpec, lora: LoraSpec | None) -> dict[str, tuple[int, ...]]:
    """Name → shape of the tensors in a checkpoint: the whole model without ``lora``, otherwise its adapters. Allocates
    no memory."""
    return tensor_shapes(model) if lora is None else adapter_shapes(model, lora)


class InitialAdapters(GeneratedSource):
    """Initial adapters: B is zero, A is uniform within ±1/√inputs, as in peft (Kaiming with a = √5). DoRA's magnitudes
    are the lengths of the frozen weight's rows, so that the model at first computes what it did."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, frozen: Callable[[str], torch.Tensor] | None = None
    ) -> None:
        """``frozen``: name of a frozen weight → (outputs, inputs) as the layer computes with it; only DoRA asks."""
        super().__init__(shapes, seed)
        self._weight_of = frozen

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, fp32, on the CPU."""
        shape = self._shapes[name]
        if name.endswith(MAGNITUDE):
            assert self._weight_of is not None
            return self._weight_of(name.removeprefix(PREFIX).replace(MAGNITUDE, ".weight")).float().norm(dim=1)
        if ".lora_B." in name:
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(self._seed * 2**32 + zlib.crc32(name.encode()))
        return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


class FrozenWeights:
    """Loads the frozen weights of a model on meta, module by module, from ``run.model_path``.

    Reads one tensor at a time, and keeps it in the precision of the computation, in nf4 or in int8. The experts of a
    layer are one tensor, which bitsandbytes dequantises when it is read, and keeps while the layer's experts compute.
    """

    def __init__(self, model: PreTrainedModel, rundir: RunDirectory, device: torch.device) -> None:
        """``model``: from ``frozen_skeleton``. Raises EngineError without ``run.model_path``, because adapters on
        random weights are useless. Raises CheckpointError if names differ from the model's."""
        lora = rundir.plan.job.lora
        self._device = device
        self._dtype = torch.bfloat16 if rundir.plan.job.precision == "bf16" else torch.float32
        self._frozen = {
            name.replace(_WRAPPED, "."): parameter
            for name, parameter in model.named_parameters()
            if f".{ADAPTER}." not in name
        }
        self._eight_bit = lora is not None and lora.eight_bit
        self._quantised = _to_quantise(model) if lora is not None and lora.quantised else set()
        self._experts = _experts(model) if lora is not None and lora.quantize_moe_experts else set()
        self._source = _frozen_source(model, rundir, {name: tuple(each.shape) for name, each in self._frozen.items()})

    @torch.no_grad()
    def load(self, module: torch.nn.Module) -> None:
        """Load what is still on meta below ``module``, and allocate its adapters, in place. ``module``: the model or a
        part of it that has all owners of a tied weight."""
        owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for owner in list(module.modules()):
            for key, parameter in list(owner.named_parameters(recurse=False)):
                if not parameter.is_meta:
                    continue
                if parameter.requires_grad:  # an adapter, whose values are imported after all weights
                    setattr(owner, key, torch.nn.Parameter(torch.empty_like(parameter, device=self._device)))
                else:
                    owners.setdefault(id(parameter), []).append((owner, key))
        names = [name for name, parameter in self._frozen.items() if id(parameter) in owners]
        # Quantised weights last: their layer takes the bias from the layer that it replaces.
        for name in sorted(names, key=self._quantised.__contains__):
            self._load(name, module, owners[id(self._frozen[name])])

    def _load(self, name: str, module: torch.nn.Module, owners: list[tuple[torch.nn.Module, str]]) -> None:
        # ``read`` may return a view of the file.
        value = self._source.read(name).to(device=self._device, dtype=self._dtype, copy=True)
        if name not in self._quantised:
            frozen = torch.nn.Parameter(value, requires_grad=False)
            for owner, key in owners:
                setattr(owner, key, frozen)
                if name in self._experts:
                    _bitsandbytes("parametrize").replace_parameter_4bit(owner, key, compress_statistics=True)
            return
        ((linear, _),) = owners
        for parent in list(module.modules()):
            for child, each in list(parent.named_children()):
                if each is linear:
                    setattr(parent, child, _quantised_layer(linear, value, self._dtype, self._eight_bit))


@torch.no_grad()
def freeze_partitioned(model: PreTrainedModel, rundir: RunDirectory, lora: LoraSpec) -> None:
    """Load frozen weights and inject adapters into a model that zero.Init has partitioned. Each rank reads its part of
    every weight."""
    parameters: dict[str, Any] = dict(model.named_parameters())  # Any: zero.Init adds attributes
    shapes = {name: tuple(parameter.ds_shape) for name, parameter in parameters.items()}
    source = _frozen_source(model, rundir, shapes)
    for name, parameter in parameters.items():
        length = parameter.partition_numel()
        part = source.read_flat(name, length * torch.distributed.get_rank(parameter.ds_process_group), length)
        parameter.ds_tensor.data[: part.numel()].copy_(part)
    adapt(model, lora)


def _frozen_source(model: PreTrainedModel, rundir: RunDirectory, shapes: Mapping[str, tuple[int, ...]]) -> TensorSource:
    buffers = SavedBuffers(model, rundir.plan.model)
    return source_for_model(rundir.plan.model, frozen_weights(rundir), shapes, buffers, StateKind.MASTER)


def initial_adapters(rundir: RunDirectory, shapes: Mapping[str, tuple[int, ...]]) -> InitialAdapters:
    """``InitialAdapters`` of a run, with the weights that DoRA's magnitudes are taken of."""
    lora, plan = rundir.plan.job.lora, rundir.plan
    if lora is None or not lora.use_dora:
        return InitialAdapters(shapes, rundir.run.seed)
    source, dtype = frozen_weights(rundir), torch.bfloat16 if plan.job.precision == "bf16" else torch.float32

    def weight(name: str) -> torch.Tensor:
        whole = source.read(name).to(dtype)
        return whole.t() if plan.model.traits.conv1d else whole

    return InitialAdapters(shapes, rundir.run.seed, weight)


def frozen_weights(rundir: RunDirectory) -> TensorSource:
    """The weights that adapters belong to. Raises EngineError without ``run.model_path``."""
    if rundir.run.model_path is None:
        raise EngineError(
            "job.lora without run.model_path: adapters belong to the weights of a model; give its directory"
        )
    return hf_weights(rundir.plan.model, rundir.run.model_path)


def scale_bytes(model: torch.nn.Module) -> int:
    """Bytes of the quantisation scales, which are not parameters."""
    states: list[Any] = [getattr(each, "quant_state", None) or getattr(each, "state", None) for each in model.modules()]
    nested = [getattr(state, "state2", None) for state in states]
    scales = [getattr(each, name, None) for each in (*states, *nested) for name in ("absmax", "SCB")]
    return sum(each.nbytes for each in scales if each is not None)


def _to_quantise(model: PreTrainedModel) -> set[str]:
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    frozen = {name for name, module in linear.items() if module is not model.get_output_embeddings()}
    return {f"{name}.weight".replace(_WRAPPED, ".") for name in frozen if ".lora_" not in name}


def _experts(model: PreTrainedModel) -> set[str]:
    """Names of the matrices of routed experts, each of which is one tensor of three dimensions for a layer."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim == 3 and ".experts." in name}


def _bitsandbytes(room: str = "modules") -> Any:
    """Its module of quantised layers, or another of ``bitsandbytes.nn``."""
    try:
        return importlib.import_module(f"bitsandbytes.nn.{room}")
    except ImportError as error:
        raise EngineError(f"quantised weights need bitsandbytes; install it with: {install('lora')}") from error


def _quantised_layer(
    linear: torch.nn.Module, value: torch.Tensor, compute_dtype: torch.dtype, eight_bit: bool
) -> torch.nn.Module:
    """The linear layer with ``value`` as its weight: in nf4 with doubly quantised scales (QLoRA, arXiv 2305.14314), or
    in int8 with a scale a row, as transformers makes it of ``BitsAndBytesConfig(load_in_8bit=True)``
    (quantizers/quantizer_bnb_8bit.py), where inputs from 6 on are multiplied in their own precision."""
    layers = _bitsandbytes()
    assert isinstance(linear, torch.nn.Linear)
    widths, own = (linear.in_features, linear.out_features), {"bias": linear.bias is not None, "device": "meta"}
    quantised: Any
    if eight_bit:
        quantised = layers.Linear8bitLt(*widths, has_fp16_weights=False, threshold=6.0, **own)
        # It is this call that quantises, and only what comes from the CPU.
        weight = layers.Int8Params(value.to("cpu"), requires_grad=False, has_fp16_weights=False).to(value.device)
        quantised.weight = weight
        quantised.init_8bit_state()  # which the first forward would do: so the scales have one place
    else:
        quantised = layers.Linear4bit(*widths, compute_dtype=compute_dtype, quant_type="nf4", **own)
        # Otherwise evaluation on some CPUs repacks the weights permanently, with scales in bf16.
        quantised.support_avx512bf16_for_cpu = False
        weight = layers.Params4bit(value, requires_grad=False, quant_type="nf4", compress_statistics=True)
        quantised.weight = weight.to(value.device)  # it is this call that quantises
        quantised.weight.module = quantised
        quantised.quant_state = quantised.weight.quant_state
    quantised.bias = linear.bias
    return quantised
