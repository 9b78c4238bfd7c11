"""Layer inputs on the host: the order of copies, on a device whose copy stream runs as late as its waits allow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kit.engines.huggingface import models
from kit.engines.kernels import offloaded_inputs
from kit.engines.kernels.offloaded_inputs import OffloadedInputs, offload_inputs
from kit.errors import EngineError
from tests.support import tiny
from tests.support.refusals import refusal

LAYERS = 3
IDS = torch.arange(16).reshape(2, 8)


class LateCopies(TorchDispatchMode):
    """Stands for torch.cuda: its one side stream copies only what the compute stream waits for. Tensors are on the CPU.

    ``log`` has copies ("out", layer), ("back", layer), waits for them, and the MLPs that begin; ``faults`` what a GPU
    would do wrong without a word; ``most_back`` how many inputs that came back were on the device at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []
        self.faults: list[str] = []
        self.most_back = 0
        self.sources: list[StorageWeakRef] = []
        self._queue: list[Callable[[], None]] = []
        self._copied: list[tuple[str, int]] = []
        self._hosts: list[int] = []
        self._backs: list[StorageWeakRef] = []
        self._on_side = self._in_step = False

    # It is both streams: each of their methods that kit calls belongs to one of them.
    def Stream(self, _: torch.device) -> LateCopies:
        return self

    def current_stream(self) -> LateCopies:
        return self

    @contextmanager
    def stream(self, _: object) -> Iterator[None]:
        self._on_side = True
        yield
        self._on_side = False

    def wait_stream(self, _: object) -> None:  # of the side stream
        self._in_step = True

    def record_event(self) -> int:  # of the side stream
        return len(self._copied)

    def wait_event(self, event: int) -> None:  # of the compute stream
        while len(self._copied) - len(self._queue) < event:
            self._queue.pop(0)()
        self.log.append(("wait " + self._copied[event - 1][0], self._copied[event - 1][1]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is not torch.ops.aten.copy_.default or not self._on_side:
            self._in_step = self._in_step and func.is_view
            self.most_back = max(self.most_back, sum(not each.expired() for each in self._backs))
            return func(*args, **kwargs)
        self._enqueue(*args[:2])
        return args[0]

    def _enqueue(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self._in_step:
            self.faults.append("a copy that does not wait for its source")
        back = source.data_ptr() in self._hosts
        if back:
            self._copied.append(("back", self._hosts.index(source.data_ptr())))
            self._backs.append(StorageWeakRef(target.untyped_storage()))
        else:
            self._copied.append(("out", len(self._hosts)))
            self._hosts.append(target.data_ptr())
            self.sources.append(StorageWeakRef(source.untyped_storage()))
        self.log.append(self._copied[-1])
        held, to, value = StorageWeakRef(source.untyped_storage()), weakref.ref(target), source.clone()
        written = source if back else None  # torch's allocator does not free pinned memory under a copy
        target.fill_(torch.nan)

        def run() -> None:
            if to() is None or held.expired():
                self.faults.append("memory freed under a copy")
            else:
                to().copy_(value if written is None else written)

        self._queue.append(run)


def build(offload: bool = True, device: LateCopies | None = None) -> Any:
    model = models.random_model(tiny.model(num_layers=LAYERS), 0, torch.float32)
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    if offload:
        offload_inputs(model)
    for layer, module in enumerate(model.model.layers):
        if device is not None:
            module.mlp.register_forward_pre_hook(lambda *_, layer=layer: device.log.append(("mlp", layer)))
    return model


def loss(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    total: torch.Tensor = model(input_ids=ids, use_cache=False).logits.square().mean()
    return total


def gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def expected(*batches: torch.Tensor) -> list[torch.Tensor]:
    model = build(offload=False)
    for ids in batches or (IDS,):
        loss(model, ids).backward()
    return gradients(model)


def equal(found: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, others))


ORDER = [
    *[(what, layer) for layer in range(LAYERS) for what in ("out", "mlp", "wait out")],
    ("back", 2), ("wait back", 2), ("back", 1), ("mlp", 2),
    ("wait back", 1), ("back", 0), ("mlp", 1),
    ("wait back", 0), ("mlp", 0),
]  # fmt: skip


def test_a_copy_back_starts_before_the_recompute_of_the_layer_after_it(monkeypatch):
    device = LateCopies()
    monkeypatch.setattr(offloaded_inputs, "device_module", lambda _: device)
    model = build(device=device)
    with device:
        total = loss(model)
        assert all(source.expired() for source in device.sources), "an input is still on the device after forward"
        total.backward()
    assert (device.log, device.faults) == (ORDER, [])
    assert device.most_back == 2  # one in use, one on its way
    assert equal(gradients(model), expected())


def test_a_failed_step_leaves_nothing_to_the_next(monkeypatch):
    device = LateCopies()
    monkeypatch.setattr(offloaded_inputs, "device_module", lambda _: device)
    model = build(device=device)
    with device:
        failed = loss(model)  # no backward, and its graph lives on
        before = len(device.log)
        loss(model).backward()
        assert [layer - LAYERS for what, layer in device.log[before:] if what == "back"] == [2, 1, 0]
        assert equal(gradients(model), expected())

        model.zero_grad()
        hook = model.model.layers[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
        refusal(ZeroDivisionError, lambda: loss(model).backward())
        hook.remove()
        model.zero_grad()
        loss(model).backward()
    assert device.faults == []
    assert equal(gradients(model), expected())
    del failed


def test_micro_batches_evaluation_and_second_backward():
    model, other = build(), IDS.flip(1)
    loss(model).backward()
    with torch.no_grad():
        first = loss(model)  # in training mode, without a graph
    one, two = loss(model, other), loss(model)
    one.backward()  # not in the order of a stack
    model.eval()
    assert torch.equal(loss(model), first)
    two.backward(retain_graph=True)
    two.backward()
    assert equal(gradients(model), expected(IDS, other, IDS, IDS))


def test_only_the_input_goes_to_the_host():
    """Not a mask, nor what the layer saves; views, twice the same tensor, and leaves with gradients are right."""
    lane, copied = OffloadedInputs(), []
    original = lane.copy
    lane.copy = lambda target, source: copied.append(source.nbytes) or original(target, source)  # type: ignore[method-assign]
    leaf, mask = torch.randn(6, 4, requires_grad=True), torch.randn(4, 3)

    def layer(x: torch.Tensor, again: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (x * again).sigmoid() @ other.T @ other

    for view in (leaf, leaf.t().contiguous().t(), leaf[::2], leaf[:1].expand(3, 4)):
        copied.clear()
        weight = mask.T.clone().requires_grad_()
        wanted = torch.autograd.grad(layer(view, view, weight).sum(), (leaf, weight))
        assert equal(list(torch.autograd.grad(lane(layer, view, view, weight).sum(), (leaf, weight))), list(wanted))
        assert set(copied) == {view.nbytes}
        assert len(copied) == 3  # out once, back for both arguments


def test_a_layer_that_writes_to_its_input_is_refused():
    hidden = torch.ones(3, requires_grad=True) * 2
    assert "wrote to its input" in refusal(EngineError, lambda: OffloadedInputs()(lambda x: x.mul_(2), hidden))
