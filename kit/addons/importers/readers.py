"""Which other programs would read a Hugging Face directory, by the programs' own rules. No tensor is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging

from kit.addons.importers.stored import reader_errors
from kit.engines.io.sharded_safetensors import file_names
from kit.extras import install
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


_VLLM = "0.33.0"
_IN_VLLM = (
    "BloomForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM FalconForCausalLM GPT2LMHeadModel "
    "GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM Glm4MoeForCausalLM "
    "GptOssForCausalLM GraniteForCausalLM LlamaForCausalLM MiniMaxM2ForCausalLM Ministral3ForCausalLM "
    "MistralForCausalLM MixtralForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM "
    "Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM "
    "SeedOssForCausalLM SmolLM3ForCausalLM Starcoder2ForCausalLM"
)
"""The classes of kit's families that vLLM lists (its wheel, vllm/model_executor/models/registry.py, _VLLM_MODELS). The
wheel is for CUDA, so its loader was not run."""


def readers(directory: Path) -> list[str]:
    """One sentence about each program. Empty for a directory without safetensors. Raises CheckpointError if a file is
    damaged."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return []
    names = [name for path in files for name in file_names(path)]
    with reader_errors(directory / "config.json", "transformers"):
        config = parse_json(read_text(directory / "config.json"))
        layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
        architecture, model_type = str((config.get("architectures") or [""])[0]), str(config.get("model_type"))
    listed = "lists" if architecture in _IN_VLLM.split() else "was not found to list"
    vllm = f"vLLM {_VLLM} {listed} {architecture or 'no class'}; its loader was not run"
    return [_transformers(directory, architecture), _gguf(model_type, layers, names), vllm]


def _transformers(directory: Path, architecture: str) -> str:
    """By its loader, on the meta device: names and shapes of all tensors."""
    program = f"transformers {transformers.__version__}"
    found = getattr(transformers, architecture, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        return f"{program} has no class {architecture or '(config.json names none)'}"
    load: Any = found.from_pretrained
    try:
        with _silent():
            _, said = load(directory, local_files_only=True, device_map="meta", output_loading_info=True)
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
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
        return f"GGUF: not checked; {install('gguf')}"
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
