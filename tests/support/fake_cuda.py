"""One CUDA device that holds shapes and no values, on a machine without CUDA: torch's fake tensors, and a watch over
where every tensor is made.

A CPU build of torch has no guard and no streams for CUDA, which autograd asks for. So C++ is told that these tensors
are on the meta device, Python that they are on ``cuda:0``, and what C++ then makes on meta is made on ``cuda:0``.

Importing it changes nothing. ``fake_cuda`` patches torch: use it in a process of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

CUDA, META = torch.device("cuda:0"), torch.device("meta")
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")


class OneDevice(TorchDispatchMode):
    """Places in kit and its libraries (``file:line operator``) where a tensor is made on the host that comes from none
    of the host's (``strays``), where operands are on both (``mixed``), and where the host waits (``waits``)."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Begin to count."""
        self.strays: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return _device_for_cpp(args)
        args, kwargs = _on_cuda((args, kwargs or {}))
        name = func._schema.name
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        given = {each.device.type for each in tensors}
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if given == {"cuda"}:
                self.waits[_place(name)] += 1
            return 1.0 if args[0].dtype.is_floating_point else 1
        on_host = tensors and not any(isinstance(each, FakeTensor) for each in tensors) and kwargs.get("device") != CUDA
        with unset_fake_temporarily() if on_host else nullcontext():  # what the host computes of data is real
            result = func(*args, **kwargs)
        made = {each.device.type for each in tree_iter(result) if isinstance(each, torch.Tensor)}
        if name in COPIES:
            if given == {"cuda"} and made == {"cpu"}:
                self.waits[_place(name)] += 1
        elif len(given) > 1:
            self.mixed[_place(name)] += 1
        elif "cpu" in made and given != {"cpu"}:
            self.strays[_place(name)] += 1
        return result


def _autocast(original):
    """The casts of autocast, which C++ makes of tensors on CUDA alone."""

    def call(*args, **kwargs):
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            args = tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, args)
        return original(*args, **kwargs)

    return call


class _FakeMode(FakeTensorMode):
    """Its own decompositions and autograd's C++ meet the same two answers."""

    avoid_device_init = True  # whatever torch.cuda.is_available says

    def dispatch(self, func, types, args=(), kwargs=None):
        return super().dispatch(func, types, *_on_cuda((args, kwargs or {})))


def _device_for_cpp(args):
    device = args[0].fake_device
    return META if device.type == "cuda" or args[0].fake_mode.in_kernel_invocation else device


def _on_cuda(given):
    return tree_map_only(torch.device, lambda each: CUDA if each == META else each, given)


def _place(operator: str) -> str:
    """The nearest caller that is neither torch nor this file."""
    frame = sys._getframe(2)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(("torch.", f"{__name__}.")):
        frame = frame.f_back
    where = "backward" if frame is None else f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
    return f"{where} {operator}"


@contextmanager
def fake_cuda() -> Iterator[OneDevice]:
    """torch sees one GPU, whatever is made on it is fake, and this process is the only rank of a world."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_: True,
        "get_rng_state": lambda *_: None,
        "set_rng_state": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    fake_tensor._DISPATCH_META_HANDLERS[torch.ops.prim.device.default] = _device_for_cpp
    original = FakeTensor.__torch_dispatch__.__func__

    def dispatch(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return _device_for_cpp(args)
        return original(cls, func, types, args, kwargs or {})

    FakeTensor.__torch_dispatch__ = classmethod(dispatch)
    for owner, name in ((F, "linear"), (F, "scaled_dot_product_attention"), (torch, "matmul"), (torch, "bmm")):
        setattr(owner, name, _autocast(getattr(owner, name)))
    F.grouped_mm = lambda tokens, weights, offs: tokens @ weights[0]  # that of fake tensors takes bf16 alone
    with _FakeMode(allow_non_fake_inputs=True), OneDevice() as watch:
        yield watch
