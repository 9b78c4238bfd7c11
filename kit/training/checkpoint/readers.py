"""Which other programs would read a Hugging Face directory, by the programs' own rules. No tensor is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import transformers
from transformers.utils import logging

from kit.engines.io.sharded_safetensors import file_names
from kit.specs.text_files import parse_json, read_text

_GGUF_NAMES = {
    "mistral": "llama",
    "mixtral": "llama",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
}
"""model_type → architecture, where llama.cpp's convert_hf_to_gguf.py gives a type that of another one. Other types have
the name of their architecture, but for ``-`` and ``_``."""


def readers(directory: Path) -> list[str]:
    """One sentence about each program. Empty for a directory without safetensors. Raises CheckpointError if a file is
    damaged."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return []
    config = parse_json(read_text(directory / "config.json"))
    names = [name for path in files for name in file_names(path)]
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    return [_transformers(directory, config.get("architectures") or []), _gguf(config["model_type"], layers, names)]


def _transformers(directory: Path, architectures: list[str]) -> str:
    """By its loader, on the meta device: names and shapes of all tensors."""
    program = f"transformers {transformers.__version__}"
    found = getattr(transformers, architectures[0], None) if architectures else None
    if found is None:
        return f"{program} has no class {architectures[0] if architectures else '(config.json names none)'}"
    try:
        with _silent():
            _, said = found.from_pretrained(
                directory, local_files_only=True, device_map="meta", output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        return f"{program} does not load it: {' '.join(str(error).split())[:200]}"
    wrong = [
        f"{len(said[key])} {words}, as {min(map(str, said[key]))}"
        for key, words in (
            ("missing_keys", "missing"),
            ("unexpected_keys", "unknown"),
            ("mismatched_keys", "misshapen"),
        )
        if said[key]
    ]
    return f"{program} finds tensors {'; '.join(wrong)}" if wrong else f"{program} loads every tensor"


def _gguf(model_type: str, layers: int, names: Iterable[str]) -> str:
    """By the names that llama.cpp's converter knows."""
    try:
        program = f"GGUF: gguf {version('gguf')}"
    except PackageNotFoundError:
        return "GGUF: not checked; pip install gguf"
    import gguf

    wanted = _GGUF_NAMES.get(model_type, model_type)
    known = {re.sub("[-_]", "", name): (number, name) for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if (architecture := known.get(re.sub("[-_]", "", wanted))) is None:
        return f"{program} has no architecture for model_type {model_type}"
    places = gguf.get_tensor_name_map(architecture[0], layers)
    # As convert_hf_to_gguf.py does: experts are stacked, and a router's correction is called a bias.
    plain = {
        re.sub(r"\.experts\.\d+\.", ".experts.", name).replace("correction_bias", "correction.bias") for name in names
    }
    lost = sorted(name for name in plain if places.get_name(name, try_suffixes=(".weight", ".bias")) is None)
    if lost:
        return f"{program} has no name for {len(lost)} tensors of architecture {architecture[1]}, as {lost[0]}"
    return f"{program} has a name for every tensor, of architecture {architecture[1]}"


@contextmanager
def _silent() -> Iterator[None]:
    """transformers prints a bar and a report."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
