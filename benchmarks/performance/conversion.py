"""Time and memory of ``kit convert model``: 8B of weights, and 1B with Adam's state.

    python -m benchmarks.performance.conversion [DIRECTORY] [--write]

Makes both checkpoints of random numbers in DIRECTORY, which needs 50 GB, and converts each in a process of its own.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from kit.engines.base import GeneratedSource, StateKind, TensorSource
from kit.engines.huggingface.models import tensor_shapes
from kit.specs.catalog import load_model
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.exchange import KINDS
from kit.training.checkpoint.finished_files import resumable_directory
from kit.training.checkpoint.to_huggingface import write_hf
from kit.training.checkpoint.to_universal import write_universal
from tests.support.page import Section, table
from tests.support.program import run

PAGE = "docs/checkpoints.md"


class Noise(GeneratedSource):
    """Every tensor repeats one block of positive random numbers: what they are costs a conversion nothing."""

    block = torch.rand(1 << 20)

    def read(self, name: str) -> torch.Tensor:
        size = math.prod(self.shape(name))
        return self.block.repeat(-(-size // len(self.block)))[:size].reshape(self.shape(name))


@dataclass(frozen=True)
class Conversion:
    """One conversion and what it took."""

    what: str
    read_gb: float
    written_gb: float
    seconds: float
    peak_gib: float


def measured(what: str, source: Path, to: str, out: Path, model: Path) -> Conversion:
    """``kit convert model`` in a process of its own; it says its time and peak memory."""
    words = [sys.executable, "-m", "kit", "convert", "model", str(source), "--to", to, "--out", str(out)]
    words += ["--model", str(model)] if to == "exchange" else []
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    seconds, peak = map(float, re.findall(r"\(([\d.]+) s, at most ([\d.]+) GiB of memory\)", done.stdout)[-1])
    return Conversion(what, _gigabytes(source), _gigabytes(out), seconds, peak)


def _gigabytes(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e9


def of_weights(root: Path, name: str) -> list[Conversion]:
    """A Hugging Face model in bf16 to and fro."""
    model, found = load_model(name), []
    write_hf(model, Noise(tensor_shapes(model), seed=0), root / "hf")
    for title, source, to, out in (
        ("Hugging Face → exchange", "hf", "exchange", "exchange"),
        ("exchange → Hugging Face", "exchange", "hf", "again"),
        ("exchange → megatron", "exchange", "megatron", "megatron"),
    ):
        found.append(measured(f"{name}, weights: {title}", root / source, to, root / out, root / "hf"))
        for weights in root.glob("hf/*.safetensors") if out == "exchange" else ():
            weights.unlink()  # the configuration stays
        if out != "exchange":
            shutil.rmtree(root / out)
    shutil.rmtree(root / "exchange")
    shutil.rmtree(root / "hf")
    return found


def with_adam(root: Path, name: str) -> list[Conversion]:
    """A universal checkpoint with moments to other formats."""
    model, found = load_model(name), []
    sources: dict[StateKind, TensorSource] = dict.fromkeys(KINDS, Noise(tensor_shapes(model), seed=0))
    write_hf(model, sources[StateKind.MASTER], root / "hf")
    with resumable_directory(root / "universal") as finished:
        write_universal(model, sources, Counters(100, 0, 0, 100, 0), finished, root / "hf")
    shutil.copy(root / "hf" / "config.json", root / "universal")
    for title, source, to in (
        ("universal → exchange", "universal", "exchange"),
        ("exchange → universal", "exchange", "universal-again"),
        ("exchange → dcp", "exchange", "dcp"),
        ("exchange → megatron", "exchange", "megatron"),
    ):
        out = root / to
        kind = to.partition("-")[0]
        found.append(measured(f"{name}, with Adam's state: {title}", root / source, kind, out, root / "hf"))
        shutil.rmtree(out) if to != "exchange" else shutil.rmtree(root / "universal")
    return found


def main(
    directory: Annotated[Path | None, typer.Argument(help="Where the checkpoints are made; a temporary one.")] = None,
    write: Annotated[bool, typer.Option(help="Keep the table in the page.")] = False,
    large: str = "llama-3.1-8b",
    small: str = "llama-3.2-1b",
) -> int:
    """Prints a row for each conversion."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        (Path(place) / "adam").mkdir()
        rows = [*of_weights(Path(place), large), *with_adam(Path(place) / "adam", small)]
    cells = [[r.what, f"{r.read_gb:.1f}", f"{r.written_gb:.1f}", f"{r.seconds:.0f}", f"{r.peak_gib:.1f}"] for r in rows]
    shown = table(["conversion", "GB read", "GB written", "seconds", "peak GiB"], cells, right=True)
    print(f"{shown}\n{os.cpu_count()} cores")
    if write:
        Section(PAGE, "conversion", lambda: shown).write()
    return 0


if __name__ == "__main__":
    run(main)
