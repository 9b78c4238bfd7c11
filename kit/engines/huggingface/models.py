"""Builds Hugging Face models from a ModelSpec without network access, and reads weights from a directory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from kit.engines.huggingface import encoder_decoder, fused_experts
from kit.engines.huggingface.buffers import SavedBuffers
from kit.engines.huggingface.experts import FusedExpertsSource, shapes_on_disk
from kit.engines.huggingface.fused_experts import ExpertSlice
from kit.engines.huggingface.text_part import of_text
from kit.engines.io.sharded_safetensors import SafetensorsSource, file_names, read_weight_map
from kit.engines.protocol import StateKind, TensorSource
from kit.errors import CheckpointError, EngineError, SpecError
from kit.specs.families import ENCODER_DECODER, FAMILIES, families_where
from kit.specs.hf_floats import decoded
from kit.specs.hf_keys import KEYS
from kit.specs.huggingface import config_from_model
from kit.specs.model import ModelSpec
from kit.specs.text import shown

_DROPOUT = re.compile(r"(dropout|drop|_prob|_pdrop)$")
"""Endings of the keys that are dropout rates, in any configuration."""
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


def hf_config(model: ModelSpec) -> PreTrainedConfig:
    """The configuration of the transformers class that computes ``model``.

    It has no special token ids, which belong to a tokenizer. Dropout is 0, because pretraining reads each token about
    once. Raises SpecError if the class does not accept the shape.
    """
    given = decoded(config_from_model(model))
    if model.approximate is not None:
        given |= {key: 0.0 for key, value in given.items() if _DROPOUT.search(key) and isinstance(value, float)}
    else:
        given |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True}
    try:
        config = AutoConfig.for_model(**given)
    except (ValueError, StrictDataclassError) as error:
        raise SpecError(f"transformers refuses the shape of {model.name}: {' '.join(str(error).split())}") from error
    if model.traits.ties_always:
        # The class derives the scale of its outputs from the argument, but then always sets tie_word_embeddings to
        # True. So set the value again.
        config.tie_word_embeddings = model.tied_embeddings
    return config


def auto_class(is_encoder_decoder: bool) -> Any:
    """transformers' class that finds the class of a model with an output head."""
    return AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM


def random_model(
    model: ModelSpec, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """A model of this shape with random weights from ``seed``, in ``dtype`` on ``device``, in train mode.

    Equal seed, dtype and kind of device give equal weights on every rank. The caller's random state does not change.
    Downloads nothing.
    """
    device = torch.device(device)
    cuda_devices = (
        [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    )
    with torch.random.fork_rng(devices=cuda_devices), torch.device(device):
        torch.manual_seed(seed)
        attention = "sdpa" if model.traits.fused_attention else "eager"
        config, options = hf_config(model), {"dtype": dtype, "attn_implementation": attention}
        if model.traits.ties_always and not model.tied_embeddings:
            built = encoder_decoder.UntiedT5._from_config(config, **options)  # type: ignore[no-untyped-call]
        else:
            built = auto_class(model.is_encoder_decoder).from_config(config, **options)
    if model.approximate is not None:
        _check_all_trained(model, built)
    built.train()
    return built


def _check_all_trained(model: ModelSpec, built: PreTrainedModel) -> None:
    frozen = [name for name, parameter in built.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise EngineError(
            f"model type {model.model_type} has parameters that are not trained, first {frozen[0]}: no checkpoint here "
            "holds them; use another model"
        )


def build_skeleton(model: ModelSpec, device: torch.device | str = "meta") -> PreTrainedModel:
    """The model with parameters on torch's meta device, which have names and shapes but no memory, and with its
    buffers, such as RoPE's frequencies, on ``device``. Unless that is meta too, the host must grant the addresses of
    the largest parameter for a moment, of which it gives no memory."""
    if device == "meta":
        return random_model(model, seed=0, device=device)
    with init_empty_weights(include_buffers=False):
        skeleton = random_model(model, seed=0)
    skeleton.tie_weights()  # each of the tied parameters went to meta by itself
    for buffer in skeleton.buffers():
        buffer.data = buffer.data.to(device)
    return skeleton


def tensor_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every tensor that transformers saves: parameters, a tied parameter once, and saved
    buffers (``kit/engines/huggingface/buffers.py``). Allocates no memory.

    Experts have their names on disk (``kit/engines/huggingface/experts.py``).
    """
    skeleton = build_skeleton(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in skeleton.named_parameters():
        shapes |= shapes_on_disk(model, name, tuple(parameter.shape))
    shapes |= SavedBuffers(skeleton, model).shapes
    return shapes | _shapes_of_prediction_heads(model, shapes)


def _shapes_of_prediction_heads(model: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Heads of multi-token prediction, which no class of transformers has: layers like the last one, and their own
    norms and projection. The embedding and the output layer of a head are the model's; their copies on disk are not
    read."""
    found: dict[str, tuple[int, ...]] = {}
    last, h = f"model.layers.{model.num_layers - 1}.", model.hidden_size
    for layer in range(model.num_layers, model.num_layers + model.mtp_num_layers):
        here = f"model.layers.{layer}."
        found |= {here + name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)}
        found |= {f"{here}{norm}.weight": (h,) for norm in ("enorm", "hnorm", "shared_head.norm")}
        found[f"{here}eh_proj.weight"] = (h, 2 * h)
    return found


def transformer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer layers in order; for an encoder-decoder the encoder's layers, then the decoder's."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def check_names(expected: Mapping[str, tuple[int, ...]], source: TensorSource) -> None:
    """Raises CheckpointError unless ``source`` has exactly the names of ``expected``."""
    present = set(source.names())
    if missing := sorted(expected.keys() - present):
        raise CheckpointError(
            f"{len(missing)} tensors of the model are missing from the checkpoint, first {missing[0]}; "
            f"use a checkpoint of the same model, complete"
        )
    if foreign := sorted(present - expected.keys()):
        raise CheckpointError(
            f"the checkpoint has {len(foreign)} tensors that the model has not, first {foreign[0]}; "
            f"use a checkpoint of the same model"
        )


def check_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    """Raises CheckpointError unless the shapes are equal."""
    if tuple(expected) != tuple(found):
        raise CheckpointError(
            f"tensor {name} has shape {list(found)} in the checkpoint and {list(expected)} in the model; "
            f"use a checkpoint of the same model"
        )


def check_tensors(expected: Mapping[str, tuple[int, ...]], source: TensorSource) -> None:
    """Raises CheckpointError unless ``source`` has exactly these tensors, of these shapes."""
    check_names(expected, source)
    for name, shape in expected.items():
        check_shape(name, shape, source.shape(name))


def source_for_model(
    model: ModelSpec,
    source: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    buffers: SavedBuffers,
    kind: StateKind,
) -> TensorSource:
    """``source`` with the names of transformers' parameters, the keys of ``shapes``. Also loads ``buffers`` from it.

    Raises CheckpointError unless ``source`` has exactly these parameters and buffers, of these shapes.
    """
    fused = FusedExpertsSource(model, source, list(shapes))
    check_tensors({**shapes, **buffers.shapes}, fused)
    buffers.load(kind, fused)
    return fused


_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


def _drop_later_predictions(directory: Path, config: Mapping[str, Any], names: dict[str, str], kept: int) -> None:
    """Remove the names of multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2) from ``names``,
    but those of the first ``kept`` layers: no class of transformers computes them (modeling_deepseek_v3.py,
    _keys_to_ignore_on_load_unexpected). Copies of embedding and output layer are removed from all."""
    last = config.get("num_hidden_layers")
    if not config.get("num_nextn_predict_layers") or not isinstance(last, int):
        return
    later = [name for name in names if (match := _LAYER.match(name)) and int(match[1]) >= last + kept]
    copies = [name for name in names if _LAYER.match(name) and name.endswith(_COPIES)]
    for name in {*later, *copies}:
        del names[name]
    if later:
        say_once(f"{len(later)} tensors of multi-token prediction in {directory} are left out: not trained")


def say_once(what: str) -> None:
    """Print, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(what, flush=True)


class HfDirectory(SafetensorsSource):
    """The weights of a Hugging Face model directory, sharded or not, under the names of current transformers.

    Old files are accepted: adds a missing base prefix (GPT-2 on the Hub has ``wte.weight``), and omits buffers that old
    versions saved (causal masks, inverse frequencies). Also omits the output projection of a model with tied
    embeddings, and, with a word, layers of multi-token prediction, and all but the text part of a model of text and
    images. Raises CheckpointError if config.json or the
    weights are missing.
    """

    def __init__(self, path: Path | str, prediction_heads: int = 0) -> None:
        """``prediction_heads``: heads of multi-token prediction that are kept."""
        directory = Path(path)
        whole = _read_config(directory)
        _check_not_quantised(directory, whole)
        files = weight_files(directory)
        config, own = of_text(whole, files)
        if others := len(files) - len(own):
            say_once(f"{others} tensors beside the text part of {directory} are left out: not trained")
        family = config.get("model_type")
        prefix = next((traits.prefix for name, traits in FAMILIES.items() if name == family), "model.")
        renames = {
            name if name.startswith((prefix, "lm_head.", "embed_out.")) else prefix + name: stored
            for name, stored in own.items()
            if not stored.endswith(_BUFFERS)
        }
        _drop_later_predictions(directory, config, renames, prediction_heads)
        two_stacks = family in ENCODER_DECODER
        if two_stacks:
            encoder_decoder.drop_copies(renames)
        # transformers writes only values that differ from a class's defaults. Encoder-decoders are tied by default. For
        # T5 it always writes "tied" (see hf_config).
        default = (
            KEYS[family].defaults.get("tied_embeddings", False) if family is not None and family in KEYS else two_stacks
        )
        tied = config.get("tie_word_embeddings", default)
        if tied and config.get("scale_decoder_outputs", True):
            renames.pop("lm_head.weight", None)
        self._parts: dict[str, ExpertSlice] = {}
        interleaved = family in families_where("interleaved_experts")
        if interleaved or any(name.endswith(".mlp.experts.gate_up_proj") for name in renames):
            if quantised := next((name for name in files if name.endswith("_blocks")), None):
                raise CheckpointError(
                    f"{quantised} in {directory} is quantised (mxfp4), which is not trained; save the model again "
                    "after from_pretrained(…, quantization_config=Mxfp4Config(dequantize=True))"
                )
            stored_shapes = SafetensorsSource({name: files[stored] for name, stored in renames.items()}, renames)
            experts = int(config.get("num_local_experts") or config["num_experts"])
            for name in list(renames):
                axis = {"gate_up_proj": 2, "down_proj": 1}.get(name.rpartition(".mlp.experts.")[2])
                inputs_first = axis is not None and stored_shapes.shape(name)[axis] != config["hidden_size"]
                parts = fused_experts.slices_on_disk(name, experts, interleaved, inputs_first and not interleaved)
                renames |= dict.fromkeys(parts, renames[name])
                self._parts |= parts
                if parts:
                    del renames[name]
        super().__init__({name: files[stored] for name, stored in renames.items()}, renames)
        if two_stacks:
            encoder_decoder.check_logits_bias(directory, files)

    def read(self, name: str) -> torch.Tensor:
        whole = super().read(name)
        return self._parts[name].of(whole) if name in self._parts else whole


_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Endings of the names of buffers that old versions of transformers saved."""


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory} has no readable config.json ({error}); give the directory of a downloaded model"
        ) from error


_OF_16_BITS = "train the 16-bit model that it was made from; QLoRA (--qlora) makes its own 4-bit weights of that"
_INSTEAD = {
    "fp8": "save the model again after from_pretrained(…, quantization_config=FineGrainedFP8Config(dequantize=True))"
}
"""``quant_method`` whose weights can be restored → what the user can do."""


def _check_not_quantised(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for quantised weights, except gpt-oss's mxfp4, which is refused by its tensor names."""
    given = config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method not in (None, "mxfp4"):
        raise CheckpointError(
            f"weights in {directory} are quantised ({shown(method, str)}), which is not trained; "
            f"{_INSTEAD.get(str(method), _OF_16_BITS)}"
        )


def weight_files(directory: Path, *stems: str) -> dict[str, Path]:
    """Name of each stored tensor → its file, of a directory that ``save_pretrained`` wrote: in one file or in shards
    with an index, ``model.safetensors`` or the older ``pytorch_model.bin``, or of other ``stems``.

    Raises CheckpointError if there are none, or if the index names another directory.
    """
    for name in stems or ("model.safetensors", "pytorch_model.bin"):
        single, index = directory / name, directory / f"{name}.index.json"
        if index.exists():
            files = read_weight_map(index)
            if outside := next((file for file in files.values() if Path(file).name != file), None):
                raise CheckpointError(f"{index} names {outside}, which is not beside it; copy the model again")
            return {name: directory / file for name, file in files.items()}
        if single.exists():
            return dict.fromkeys(file_names(single), single)
    raise CheckpointError(
        f"{directory} has neither {' nor '.join(stems or ('model.safetensors', 'pytorch_model.bin'))} nor an index; "
        f"give the directory of a model, complete"
    )
