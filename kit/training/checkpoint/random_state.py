"""Saves and restores all random generators of a process as JSON, so that a resumed run draws the same numbers.

Some engines' checkpoints contain torch's generator; none contains Python's, numpy's or megatron-core's tracked
generators. The file is not a pickle: it has numbers and base64 only.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.errors import CheckpointError
from kit.specs.text import shown

RandomState = dict[str, Any]


def capture() -> RandomState:
    """The state of all generators of this process."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: RandomState = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    if tracker := _megatron_tracker():
        state["megatron"] = {name: _text(value) for name, value in tracker.get_states().items()}
    return state


def _restore(state: RandomState) -> None:
    """Set all generators. Raises KeyError, TypeError or ValueError for a state that ``capture`` did not return."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    if (tracker := _megatron_tracker()) and "megatron" in state:
        tracker.set_states({name: _tensor(value) for name, value in state["megatron"].items()})


def write(state: RandomState, directory: Path, rank: int) -> None:
    """Write ``state`` into an existing directory. Raises OSError."""
    (directory / file_name(rank)).write_text(json.dumps(state), encoding="utf-8")


def read(directory: Path, rank: int) -> None:
    """Restore the generators from the file of ``write``. Raises CheckpointError if it is missing or damaged."""
    path = directory / file_name(rank)
    try:
        _restore(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not what kit writes of random generators ({shown(error)})") from error


def file_name(rank: int) -> str:
    """File name of one rank's generators."""
    return f"rank-{rank:05d}.json"


def _megatron_tracker() -> Any:
    """megatron-core's RNG tracker (tensor_parallel/random.py); None if the run does not use it."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    if module is None:
        return None
    tracker = module.get_cuda_rng_tracker()
    return tracker if tracker.is_initialized() else None


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
