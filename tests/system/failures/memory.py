"""Memory that runs out for real, in the phase that is asked for."""

from __future__ import annotations

import io
import resource
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 1 << 20
ROOM_BYTES = 600 * MIB


def leave_only(room_bytes: int) -> None:
    """From here on this process gets so much address space more, and the allocator fails beyond."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room_bytes, resource.RLIM_INFINITY))


def in_forward() -> None:
    """Runs out of memory in forward: this rank's batch is a thousand times as long as the others'."""
    layer, batch = torch.nn.Linear(16, 1024), torch.randn(4 * MIB // 16, 16)
    leave_only(ROOM_BYTES)
    layer(batch)


def in_backward() -> None:
    """What forward keeps fits, its gradients do not."""
    batch = torch.ones(ROOM_BYTES // 4 // 5 * 2, requires_grad=True)  # two fifths of the room, and its square as well
    leave_only(ROOM_BYTES)
    batch.square().sum().backward()


def in_optimizer() -> None:
    """Weights and gradients fit, the first of Adam's moments too, the second does not."""
    weight = torch.nn.Parameter(torch.ones(ROOM_BYTES // 4 * 2 // 3))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    weight.grad = torch.ones_like(weight)
    leave_only(ROOM_BYTES)
    optimizer.step()


def while_building() -> None:
    """The model does not fit: its second layer has no room."""
    leave_only(ROOM_BYTES)
    torch.nn.Sequential(*(torch.nn.Linear(MIB // 16, ROOM_BYTES // MIB) for _ in range(5)))


def while_saving() -> None:
    """The model fits, and a copy of it in memory, on its way to an object store, does not."""
    model = torch.nn.Linear(ROOM_BYTES // 4 // 16, 16)
    leave_only(ROOM_BYTES // 2)
    torch.save(model.state_dict(), io.BytesIO())


PHASES: dict[str, Callable[[], None]] = {
    "longer-batch": in_forward,
    "backward": in_backward,
    "optimizer": in_optimizer,
    "building": while_building,
    "saving": while_saving,
}
