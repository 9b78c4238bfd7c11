"""megatron-core without CUDA: one table of patches, for rehearsals and tests on CPU processes over gloo.

Only a worker's entry point calls ``install()``, and only if the plan's device is the CPU. Importing this module
changes nothing. The engine itself is written for CUDA and never checks its device.

Each row names the symbol to replace, the file of megatron-core that needs the patch, and the reason. After
``install()`` the process can no longer use a real GPU.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.router import TopKRouter
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_type = torch.Tensor.type
_split = HybridDeviceOptimizer._get_sub_optimizer_param_groups
_gather_equal, _reduce_scatter_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


@dataclass(frozen=True)
class Patch:
    """One symbol to replace."""

    symbol: str
    """Dotted path of module and attribute."""
    needed_by: str
    """Files that call the symbol, below ``megatron/core``."""
    reason: str
    replacement: Any


def install() -> None:
    """Replace every symbol of ``PATCHES`` and make ``"cuda"`` mean the CPU in every torch call of this thread."""
    for patch in PATCHES:
        owner_path, _, name = patch.symbol.rpartition(".")
        setattr(pkgutil.resolve_name(owner_path), name, patch.replacement)
    if not _device_mode:
        _device_mode.append(_CudaIsCpu())
        _device_mode[0].__enter__()  # type: ignore[no-untyped-call]


class _CudaIsCpu(TorchFunctionMode):
    """Replaces ``device="cuda"`` by the CPU in factories and ``Tensor.to``, and drops ``pin_memory``, which needs a
    driver.

    Needed by optimizer/optimizer.py, optimizer/clip_grads.py and pipeline_parallel/schedules.py, which name the
    device in a string.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.device and args and _on_cpu(args[0]) is _CPU:  # may have an index too
            return _CPU
        kwargs = {key: _on_cpu(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*(_on_cpu(value) for value in args), **kwargs)


_device_mode: list[_CudaIsCpu] = []


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return _CPU
    return value


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _itself(first: Any, *_: Any, **__: Any) -> Any:
    return first


def _type_as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    name = _type(tensor, *args, **kwargs)
    # Under a TorchFunctionMode the original function looks up "type" on torch.Tensor, so it calls this function again.
    if args or kwargs or name.startswith("torch.cuda."):
        return name
    return name.replace("torch.", "torch.cuda.", 1)


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


class _Stream:
    """A CUDA stream or event on the CPU, where nothing runs asynchronously."""

    wait = wait_stream = synchronize = _nothing
    record_event = _itself


_the_stream = _Stream()


class _ModelIsOnGpu(TorchFunctionMode):
    """Answers ``is_cuda`` as beside a GPU: no for tensors in page-locked memory and what is made of them, else yes."""

    def __init__(self) -> None:
        super().__init__()
        self._on_host: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined] # a descriptor
            return id(args[0]) not in self._on_host
        pins = func is torch.Tensor.pin_memory
        result = args[0] if pins else func(*args, **kwargs or {})
        if torch.is_tensor(result) and (pins or any(id(each) in self._on_host for each in args)):
            self._on_host[id(result)] = result
        return result


def _split_over_host_and_gpu(optimizer: Any, offload_fraction: float) -> Any:
    with _ModelIsOnGpu():
        return _split(optimizer, offload_fraction)


def _moved_from_gpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return what ``maybe_move_tensor_to_cpu`` returns for a tensor on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_first_dim(
    input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """all_gather of parts of unequal length. gloo requires equal parts, so pads them to the longest."""
    if output_split_sizes is None or group.size() == 1:
        return _gather_equal(input_, group, None, use_global_buffer)
    longest = max(1, *output_split_sizes)  # 1 if no rank has a token for these experts
    padded = input_.new_zeros(longest, *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    whole = _gather_equal(padded, group)
    return torch.cat([part[:size] for part, size in zip(whole.split(longest), output_split_sizes, strict=True)])


def _reduce_scatter_first_dim(
    input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """reduce_scatter into parts of unequal length, with padding as in ``_gather_first_dim``."""
    if input_split_sizes is None or group.size() == 1:
        return _reduce_scatter_equal(input_, group, None, use_global_buffer)
    longest = max(1, *input_split_sizes)
    padded = input_.new_zeros(group.size(), longest, *input_.shape[1:])
    for row, part in zip(padded, input_.split(input_split_sizes), strict=True):
        row[: part.shape[0]] = part
    return _reduce_scatter_equal(padded.flatten(0, 1), group)[: input_split_sizes[group.rank()]]


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.cuda.current_device",
        "tensor_parallel/layers.py",
        "parameters and buffers are created on the current device",
        lambda: _CPU,
    ),
    Patch("torch.cuda.synchronize", "pipeline_parallel/p2p_communication.py", "nothing runs asynchronously", _nothing),
    Patch("torch.cuda.manual_seed", "tensor_parallel/random.py", "seeds the tracked states", torch.manual_seed),
    Patch("torch.cuda.get_rng_state", "tensor_parallel/random.py", "the tracked state is the CPU's", _get_rng_state),
    Patch(
        "megatron.core.tensor_parallel.random._get_cuda_rng_state",
        "tensor_parallel/random.py",
        "full recompute saves the state before a layer",
        _get_rng_state,
    ),
    Patch(
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        "tensor_parallel/random.py",
        "full recompute restores it",
        lambda state, *_, **__: torch.set_rng_state(state),
    ),
    Patch("torch.cuda.Stream", "transformer/moe/token_dispatcher.py", "counts are copied on a side stream", _Stream),
    Patch("torch.cuda.current_stream", "transformer/moe/token_dispatcher.py", "and waited for", lambda *_: _the_stream),
    Patch("torch.cuda.stream", "transformer/moe/token_dispatcher.py", "entered as a context", lambda *_: nullcontext()),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "transformer/moe/token_dispatcher.py",
        "all_to_all takes its split sizes as numpy or lists; a tensor on the CPU is left as it is",
        _moved_from_gpu,
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
        "tensor_parallel/mappings.py",
        "experts with tensor parallelism (transformer/moe/token_dispatcher.py) gather unequal numbers of tokens",
        _gather_first_dim,
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
        "tensor_parallel/mappings.py",
        "and scatter them back",
        _reduce_scatter_first_dim,
    ),
    Patch(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        "optimizer/cpu_offloading/hybrid_optimizer.py",
        "chooses parameters on the GPU, whose state it moves to page-locked memory",
        _split_over_host_and_gpu,
    ),
    Patch(
        "megatron.core.transformer.moe.router.TopKRouter._apply_expert_bias",
        "transformer/moe/router.py",
        "a sum of counts, for which torch.compile would call a C++ compiler in every process",
        inspect.unwrap(TopKRouter._apply_expert_bias),
    ),
    Patch("torch.Tensor.cuda", "models/common/language_module/language_module.py", "tied weights are moved", _itself),
    Patch(
        "torch.Tensor.type",
        "optimizer/optimizer.py, optimizer/clip_grads.py, optimizer/distrib_optimizer.py",
        "type names are compared with torch.cuda.FloatTensor and torch.cuda.BFloat16Tensor",
        _type_as_on_cuda,
    ),
)
"""All symbols that ``install`` replaces, in addition to ``device="cuda"``."""
