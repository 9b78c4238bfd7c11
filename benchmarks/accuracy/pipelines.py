"""Pipeline splits of rows: Megatron's layout strings, descriptions in words, and nanotron's own balance."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.accuracy.programs.published import chunks_with_ends, even_chunks, runs_of

Row = dict[str, Any]


class NotPredictedError(ValueError):
    """A row that the cost model cannot predict; the message is the reason."""


def stage_layers_of(row: Row, pp: int, vp: int) -> tuple[tuple[int, ...], ...]:
    """Layers of every chunk if the split is uneven; empty if it is even."""
    return _checked(_split(row, pp, vp), pp * vp, row["model"]["num_layers"])


def _split(row: Row, pp: int, vp: int) -> tuple[tuple[int, ...], ...]:
    layers, layout = row["model"]["num_layers"], row["job"].get("pipeline_layout") or ""
    if "embedding and loss counted as one layer each" in layout:
        return chunks_with_ends(layers, pp * vp)
    first_last = re.search(r"first stage (\d+) layers, last stage (\d+) layers", layout)
    if first_last:
        first, last = int(first_last.group(1)), int(first_last.group(2))
        middle = even_chunks(layers - first - last, pp - 2) if pp > 2 else ()
        return runs_of([first, *(len(part) for part in middle), last])
    if "|" in layout:
        return _megatron_layout(layout)
    if row["job"]["engine"] == "nanotron":
        return _nanotron_split(row["model"], pp)
    return ()


def _checked(split: tuple[tuple[int, ...], ...], chunks: int, layers: int) -> tuple[tuple[int, ...], ...]:
    if split and (len(split) != chunks or sum(len(part) for part in split) != layers):
        raise NotPredictedError(f"the stated pipeline layout has {len(split)} parts, not {chunks} for {layers} layers")
    return split


def _nanotron_split(model: Row, pp: int) -> tuple[tuple[int, ...], ...]:
    """nanotron balances GEMM FLOPs, including the head's: a stage ends once it exceeds its share (models/base.py,
    build_model)."""
    layers, h = model["num_layers"], model["hidden_size"]
    layer = 4 * h * h + 3 * model["ffn_hidden_size"] * h
    total = layers * layer + model["vocab_size"] * h
    stages: list[list[int]] = [[] for _ in range(pp)]
    stage = 0
    for number in range(layers):
        stages[stage].append(number)
        if (number + 1) * layer > total * (stage + 1) / pp:
            stage += 1
    return tuple(tuple(part) for part in stages)


def _megatron_layout(text: str) -> tuple[tuple[int, ...], ...]:
    """``Et*2|(tt|)*5t|tmL`` (megatron-core, transformer/pipeline_parallel_layer_layout.py): t is a decoder layer."""
    expanded = re.sub(r"\(([^)]*)\)\*(\d+)", lambda found: found.group(1) * int(found.group(2)), text)
    expanded = re.sub(r"(\w)\*(\d+)", lambda found: found.group(1) * int(found.group(2)), expanded)
    return runs_of([part.count("t") for part in expanded.split("|")])
