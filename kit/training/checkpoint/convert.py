"""Converts checkpoints and Hugging Face models to each other, without a GPU. One parameter is in memory at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.engines.huggingface.models import check_tensors
from kit.errors import CheckpointError
from kit.specs.text import refuse
from kit.training.checkpoint.files import new_directory
from kit.training.checkpoint.formats import Opened, formats, recognise
from kit.training.checkpoint.progress import shown
from kit.training.checkpoint.to_huggingface import CHAT_TEMPLATE, DTYPES, TOKENIZER_FILES, opened_to_hf
from kit.training.hub_files import local


def convert(
    source: Path,
    to: str,
    out: Path,
    *,
    dtype: str | None = None,
    model: str | None = None,
    extras_from: Path | None = None,
    merge_into: Path | None = None,
) -> str:
    """Write ``source`` in another format to the new directory ``out``; returns a description of ``out``.

    ``dtype``: of the weights where the format has a choice, bfloat16 if None; all other tensors are fp32. ``model``:
    the model of a checkpoint that does not say it and is not in a run directory of kit (a Hugging Face directory, a run
    directory, or a catalog name). ``extras_from``: see ``opened_to_hf``. Raises KitError if a file is missing,
    damaged, or of another model, and for an argument that this conversion would not use.
    """
    writers = {name: each for name, each in formats().items() if each.write is not None}
    if to != "hf" and to not in writers:
        moved = "; it is step now" if to == "exchange" else ""
        raise CheckpointError(f"--to {to} is unknown{moved}; use one of {', '.join(['hf', *writers])}")
    reasons = {
        f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}": dtype not in (None, *DTYPES),
        f"--dtype {dtype} with --to {to}, which holds fp32 always; omit it": (
            dtype not in (None, "float32") and to in writers and not writers[to].takes_dtype
        ),
        f"--extras-from {extras_from} with --to {to}, which holds no tokenizer; omit it": extras_from and to != "hf",
    }
    refuse(reasons, CheckpointError)
    dtype = dtype or "bfloat16"
    source, extras_from = local(source, weights=True), extras_from and local(extras_from)
    merge_into = merge_into and local(merge_into, weights=True)
    if extras_from is not None and not any((extras_from / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(f"--extras-from {extras_from} has no tokenizer; give the directory of a downloaded model")
    name, opened = open_checkpoint(Path(source), model)
    if name == to:
        raise CheckpointError(f"{source} is of format {to} already; copy it, or choose another --to")
    reasons = {
        f"--merge-into {merge_into} is for adapters and --to hf; omit it": merge_into is not None and to != "hf",
        f"{source} holds adapters, which --to {to} has no place for; use --to hf": (
            opened.lora is not None and to not in ("hf", "step")
        ),
    }
    refuse(reasons, CheckpointError)
    shapes = checkpoint_shapes(opened.model, opened.lora)
    for of_kind in opened.sources.values():
        check_tensors(shapes, of_kind)
    if to == "hf":
        opened_to_hf(opened, out, dtype, extras_from, merge_into=merge_into)
        what = "peft adapters" if opened.lora is not None and merge_into is None else "a Hugging Face model"
        template = "" if opened.chat_template is None else f", {CHAT_TEMPLATE} is the one it was trained with"
        return f"{what} in {dtype}{template}"
    write = writers[to].write
    assert write is not None
    with shown(opened.sources) as sources, new_directory(Path(out)) as directory:
        write(replace(opened, sources=sources), directory, DTYPES[dtype], Path(source))
    state = "with Adam's state" if len(opened.sources) > 1 else "weights only"
    return "; ".join([f"a {to} checkpoint of {opened.model.name}, {state}", *opened.notes])


def open_checkpoint(path: Path, model: str | None = None) -> tuple[str, Opened]:
    """(format, checkpoint). Raises KitError if the format is unknown, or the data damaged."""
    known, found = recognise(path)
    if known.open is None:
        raise CheckpointError(f"{path} ({found.program}) is not converted; give the directory of a checkpoint")
    return known.name, known.open(path, found, model)
