"""Damaged copies of checkpoints: what a copy over a network, a full disk or a mix of two runs leaves behind."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kit.errors import CheckpointError
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.exchange import ExchangeCheckpoint

OUTCOMES = ("refused", "noted", "harmless", "unnoticed", "traceback")
"""Refused: a CheckpointError, and nothing written. Noted: converted, and the answer says what does not fit. Harmless:
the same tensors and counters as of the whole checkpoint. Unnoticed: others. Traceback: another error, or files left
behind."""


class _Unknown:
    """A class that no closed list has."""


def _state_files(root: Path) -> list[Path]:
    found = [path for path in sorted(root.rglob("*")) if path.suffix in (".pt", ".distcp") or path.name == ".metadata"]
    return [path for path in found if path.name != "scheduler.pt"]


def _rewritten(
    change: Callable[[bytearray, random.Random], bytes | bytearray],
) -> Callable[[Path, random.Random], None]:
    """The bytes of one file are others."""

    def harm(root: Path, chance: random.Random) -> None:
        path = chance.choice(_state_files(root))
        path.write_bytes(change(bytearray(path.read_bytes()), chance))

    return harm


def _flipped(content: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 1, 8))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content


def _edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path, random.Random], None]:
    """What one pickle holds is something else."""

    def harm(root: Path, chance: random.Random) -> None:
        path = chance.choice([path for path in _state_files(root) if path.suffix == ".pt"])
        loaded = torch.load(path, weights_only=False)  # written by this program a moment ago
        edit(loaded if isinstance(loaded, dict) else {})
        torch.save(loaded, path)

    return harm


def _another_step(loaded: dict[str, Any]) -> None:
    if "global_steps" in loaded:
        loaded["global_steps"] += 1
    for part in (loaded.get("optimizer_state_dict") or {}).values():
        for state in part.get("state", {}).values() if isinstance(part, dict) else ():
            state["step"] = state["step"] + 1


def _another_model(root: Path, chance: random.Random) -> None:
    path = root / "config.json"
    key, value = chance.choice((("hidden_size", 64), ("intermediate_size", 48), ("num_hidden_layers", 3)))
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {key: value}), encoding="utf-8")


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "a file is missing": lambda root, chance: chance.choice(_state_files(root)).unlink(),
    "a file is truncated": _rewritten(lambda content, chance: content[: chance.randrange(len(content))]),
    "one or eight bits are flipped": _rewritten(_flipped),
    "a pickle names an unknown class": _edited(lambda loaded: loaded.update(extra=_Unknown())),
    "a rank's file is of another step": _edited(_another_step),
    "config.json is another model's": _another_model,
}
_PICKLES = ("a pickle names an unknown class", "a rank's file is of another step")


def outcomes(sources: Mapping[str, Path], work: Path, cases: int, seed: int = 1) -> dict[str, Counter[str]]:
    """Damage → how often each of ``OUTCOMES``; ``cases`` of each source and damage. Prints those that are not fine."""
    chance = random.Random(seed)
    found: dict[str, Counter[str]] = {damage: Counter() for damage in DAMAGES}
    for name, source in sources.items():
        convert(source, "exchange", work / f"whole-{name}")
        whole = ExchangeCheckpoint(work / f"whole-{name}")
        pickles = any(path.suffix == ".pt" for path in _state_files(source))
        for damage, harm in DAMAGES.items():
            for number in range(cases if pickles or damage not in _PICKLES else 0):
                copy, out = work / "copy", work / "out"
                shutil.copytree(source, copy)
                harm(copy, chance)
                outcome, _, words = _outcome(copy, out, whole).partition(":")
                found[damage][outcome] += 1
                if outcome in ("unnoticed", "traceback"):
                    print(f"{name}, {damage}, case {number}: {outcome}{words}")
                shutil.rmtree(copy)
                shutil.rmtree(out, ignore_errors=True)
    return found


def _outcome(copy: Path, out: Path, whole: ExchangeCheckpoint) -> str:
    try:
        said = convert(copy, "exchange", out)
    except CheckpointError as error:
        if out.exists() or list(out.parent.glob(f".{out.name}*")):
            return "traceback: files are left behind"
        return "refused" if len(str(error)) > 20 else "traceback: no words"
    except Exception as error:
        return f"traceback: {type(error).__name__} {error}"
    found = ExchangeCheckpoint(out)
    if "check that all files are of one checkpoint" in said:
        return "noted"
    if (found.counters, found.kinds) != (whole.counters, whole.kinds):
        return f"unnoticed: {found.counters} {found.kinds}"
    pairs = [(found.source(kind), whole.source(kind)) for kind in whole.kinds]
    same = all(torch.equal(one.read(name), other.read(name)) for one, other in pairs for name in other.names())
    return "harmless" if same else "unnoticed: other tensors"
