"""Reads Megatron-LM's old ``torch`` format, one file per tensor- and pipeline-parallel rank, in one process.

Megatron-LM (megatron/training/checkpointing.py, ``get_checkpoint_name`` and ``generate_state_dict``) writes
``mp_rank_TT[_PPP]/model_optim_rng.pt``: ``model``, or ``model0``, ``model1``, … of an interleaved pipeline, under the
names of megatron-core's modules, which count layers from 0 in each chunk; ``optimizer``; ``args`` and ``iteration``.
Files are mapped into memory; one Hugging Face tensor is joined at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.addons.importers.megatron.source import megatron_source, shard_shape
from kit.addons.importers.opaque import Opaque, unknown_names
from kit.addons.importers.stored import reader_errors
from kit.addons.importers.tensors import MOMENTS, hyperparameters, one_step, steps_of
from kit.engines.huggingface.models import tensor_shapes
from kit.engines.megatron.model.transformer_engine import plain_name
from kit.engines.megatron.weights import ParamMapping, mapped_params, weight_map
from kit.engines.megatron.weights.sharding import Shape, VocabParallel
from kit.engines.protocol import StateKind, TensorSource
from kit.engines.safe_unpickle import load_safely
from kit.errors import CheckpointError
from kit.specs.model import ModelSpec
from kit.specs.text import first, refuse
from kit.training.counters import START

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "_extra_state")
"""Last parts of the names of what is no parameter, so that no optimizer has it."""


class Arguments(Opaque):
    """Stands for ``argparse.Namespace``: Megatron-LM's arguments as a dictionary."""

    values: Mapping[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.values = dict(state)


_INERT = ("_io.BytesIO", "collections.defaultdict", "signal.Signals")
"""Classes outside of Megatron and numpy that a file may name: fp8's extra state, reruns, ``--exit-signal``."""
_INERT_PACKAGES = ("megatron.", "numpy.")
"""Whatever a file names of these packages (enums of its arguments, states of random numbers) is ``Opaque``."""


@dataclass(frozen=True)
class _RankFile:
    """One file, its tensors not read yet."""

    path: Path
    iteration: int
    arguments: Mapping[str, Any]
    chunks: list[Mapping[str, torch.Tensor]]
    """Model chunks of this pipeline stage, in the order in which data passes them."""
    state: Mapping[StateKind, Mapping[tuple[int, str], torch.Tensor]]
    """Kind of the optimizer's state → (chunk, name) → tensor of the parameter's shape; empty if it is not here."""
    steps: frozenset[int]
    hyperparameters: list[dict[str, Any]]
    note: str
    """Why Adam's state is left out; otherwise empty."""


class TorchFormat:
    """A checkpoint on disk; all but the elements of tensors is read. Raises CheckpointError for a missing rank, files
    of different iterations, expert parallelism, an unknown class, unexpected content and damaged files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with reader_errors(directory, "Megatron-LM"):
            paths = rank_files(directory)
            first = _read(next(iter(paths.values())))
            said = [first.arguments.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")]
            self.tp, self.pp = (
                size if type(size) is int and size > 0 else 1 + max(rank[place] for rank in paths)
                for place, size in enumerate(said[:2])
            )
            wanted = [(tp, pp) for tp in range(self.tp) for pp in range(self.pp)]
            missing = [f"mp_rank_{tp:02d}" + f"_{pp:03d}" * (self.pp > 1) for tp, pp in wanted if (tp, pp) not in paths]
            reasons = {
                f"{directory} was written with expert parallelism, of which kit does not read this format; load it "
                f"with Megatron-LM and save it with --ckpt-format torch_dist, which kit reads": (
                    (said[2] or 1) != 1 or any(len(rank) > 2 for rank in paths)
                ),
                f"{directory} was written with TP={self.tp} PP={self.pp} and {''.join(missing[:1])}/{FILE} is missing; "
                f"copy the checkpoint again, from every node": missing,
                f"{directory} has files of {len(paths)} ranks and was written with TP={self.tp} PP={self.pp}: two "
                f"checkpoints are mixed; take another one": len(paths) > len(wanted),
            }
            refuse(reasons, CheckpointError)
            self._files = {rank: first if at == 0 else _read(paths[rank]) for at, rank in enumerate(wanted)}
            self.arguments = first.arguments
            self._require_one_iteration(first)
            self.notes = tuple(sorted({file.note for file in self._files.values() if file.note}))
            steps = one_step(directory, frozenset().union(*(file.steps for file in self._files.values())))
            if steps is None and not self.notes:
                self.notes = ("Adam's step is missing: weights only",)
            samples = int(self.arguments.get("consumed_train_samples") or 0) if first.iteration else 0
            adam = 0 if self.notes else steps or 0
            self.counters = replace(START, step=first.iteration, samples_seen=samples, optimizer_steps=adam)
            self.hyperparameters = first.hyperparameters if not self.notes else []
            self._places = self._by_name()

    def sources(self, model: ModelSpec) -> dict[StateKind, TensorSource]:
        """The weights (fp32 master weights where the optimizer has them), and both moments or none, under Hugging Face
        names. Raises CheckpointError if the arguments or the names are of another model; reading, for a shard of
        another shape."""
        self._require_model(model)
        params, shapes = list(mapped_params(weight_map(model), model)), tensor_shapes(model)
        kinds = (StateKind.MASTER,) if self.notes else (StateKind.MASTER, *MOMENTS)
        return {
            kind: megatron_source(model, params, shapes, kind, partial(self._shards, model, kind)) for kind in kinds
        }

    def _shards(
        self, model: ModelSpec, kind: StateKind, mapped: ParamMapping, shapes: list[Shape]
    ) -> list[torch.Tensor]:
        """A parameter's part of each tensor-parallel rank; the vocabulary, padded at its end, is joined to one."""
        if mapped.megatron not in self._places:
            raise CheckpointError(
                f"{self.directory} has no {mapped.megatron}; give the model of the checkpoint by --model. Names of "
                f"Megatron-LM's older layers (language_model…) are not read"
            )
        stage, chunk, own = self._places[mapped.megatron]
        files = [self._files[tp, stage] for tp in range(self.tp)]
        shards = [file.state.get(kind, {}).get((chunk, own), file.chunks[chunk][own]) for file in files]
        if isinstance(mapped.sharding, VocabParallel):  # Megatron-LM pads to make_vocab_size_divisible_by, too
            shards = [torch.cat(shards)[: shapes[0][0]]]
        for rank, shard in enumerate(shards):
            expected = shard_shape(mapped.sharding, shapes, model, len(shards), rank)
            if shard.shape != expected:
                raise CheckpointError(
                    f"{self.directory}: {mapped.megatron} has shape {list(shard.shape)} and {model.name} has "
                    f"{list(expected)} at TP={self.tp}; give the model of the checkpoint by --model"
                )
        return shards

    def _require_one_iteration(self, first: _RankFile) -> None:
        folder = re.fullmatch(r"iter_(\d+)", self.directory.name)
        expected, named = (int(folder[1]), "its name") if folder else (first.iteration, first.path)
        others = {
            f"{file.path} is of iteration {file.iteration} and {named} says {expected}: two checkpoints are mixed; "
            f"take another one": file.iteration != expected
            for file in self._files.values()
        }
        refuse(others, CheckpointError)

    def _require_model(self, model: ModelSpec) -> None:
        expected = {
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
        }
        if self.arguments.get("group_query_attention") is True:
            expected["num_query_groups"] = model.num_key_value_heads
        said = {name: self.arguments.get(name, size) for name, size in expected.items()}
        layers = {int(match[1]) for name in self._places if (match := _LAYER.match(name))}
        sizes = {
            f"{self.directory} is of a model with {name} {said[name]} and {model.name} has {size}; give the model of "
            f"the checkpoint by --model": type(said[name]) is int and said[name] != size
            for name, size in expected.items()
        }
        stages = {
            f"{self.directory} has {len(layers)} layers and {model.name} has {model.num_layers}; give the model of the "
            f"checkpoint by --model, and the files of every pipeline stage": len(layers) != model.num_layers
        }
        refuse(sizes | stages, CheckpointError)

    def _by_name(self) -> dict[str, tuple[int, int, str]]:
        """Name that counts layers over the whole model → (stage, chunk, name in the chunk)."""
        found: dict[str, tuple[int, int, str]] = {}
        before = 0
        for chunk in range(len(self._files[0, 0].chunks)):
            for stage in range(self.pp):
                names = [set(self._files[tp, stage].chunks[chunk]) for tp in range(self.tp)]
                if odd := set().union(*(each ^ names[0] for each in names)):
                    raise CheckpointError(
                        f"{self.directory}: not every tensor-parallel rank has {min(odd)}; two checkpoints are mixed, "
                        f"take another one"
                    )
                layers = 0
                for name in self._files[0, stage].chunks[chunk]:
                    whole = plain_name(name)
                    if match := _LAYER.match(name):
                        layers = max(layers, int(match[1]) + 1)
                        whole = whole.replace(match[0], f"decoder.layers.{before + int(match[1])}.", 1)
                    found.setdefault(whole, (stage, chunk, name))
                before += layers
        return found


def rank_files(directory: Path) -> dict[tuple[int, ...], Path]:
    """(TP rank, PP rank), with a third number of expert parallelism, → file; empty if this is another format."""
    found: dict[tuple[int, ...], Path] = {}
    for path in sorted(directory.glob("mp_rank_*")):
        if (match := _RANK.fullmatch(path.name)) and (path / FILE).is_file():
            found[int(match[1]), int(match[2] or 0), *([int(match[3])] if match[3] else [])] = path / FILE
    return found


def _read(path: Path) -> _RankFile:
    inert = [name for name in unknown_names(path) if name.startswith(_INERT_PACKAGES) or name in _INERT]
    allowed = [(Arguments, "argparse.Namespace"), *((Opaque, name) for name in inert)]
    loaded = load_safely(path, allowed, mapped=True)
    arguments = loaded.get("args")
    chunks = [loaded["model"]] if "model" in loaded else []
    while f"model{len(chunks)}" in loaded:
        chunks.append(loaded[f"model{len(chunks)}"])
    tensors = [{name: value for name, value in chunk.items() if isinstance(value, torch.Tensor)} for chunk in chunks]
    version = loaded.get("checkpoint_version", 0)
    reasons = {
        f"{path} has no weights; give the files of {FILE} that Megatron-LM wrote": not any(tensors),
        f"{path} says checkpoint_version {version}, in which queries, keys and values have another order; load it with "
        f"Megatron-LM and save it again": version < 2,
    }
    refuse(reasons, CheckpointError)
    values = arguments.values if isinstance(arguments, Arguments) else {}
    adam = _optimizer(loaded.get("optimizer"), tensors)
    return _RankFile(path, int(loaded.get("iteration") or 0), values, list(tensors), *adam)


_State = dict[StateKind, dict[tuple[int, str], torch.Tensor]]
_LEFT_OUT = "{}: weights only"


def _optimizer(
    saved: Any, chunks: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[_State, frozenset[int], list[dict[str, Any]], str]:
    """(state, steps, hyperparameters, note) of one rank's optimizer. A note says why the state is left out."""
    inner = saved.get("optimizer", saved) if isinstance(saved, dict) else {}
    reasons = {
        "no state of an optimizer": saved is None,
        "several optimizers (of experts), whose state kit does not read": not isinstance(saved, dict),
        "the distributed optimizer's state (distrib_optim.pt), which kit does not read": not inner.get("state"),
    }
    if unread := first(reasons, _LEFT_OUT):
        return {}, frozenset(), [], unread
    names = _numbered(inner["param_groups"], chunks)
    found = {kind: {name: inner["state"].get(n, {}).get(kind.value) for n, name in names.items()} for kind in MOMENTS}
    numbers = [number for group in inner["param_groups"] for number in group["params"]]
    masters = [tensor for group in saved.get("fp32_from_fp16_params") or () for tensor in group]
    odd = [
        f"{kind.value} of {name} is missing or of another shape"
        for chunk, name in names.values()
        for kind in MOMENTS
        if found[kind][chunk, name] is None or found[kind][chunk, name].shape != chunks[chunk][name].shape
    ]
    lacking = {
        "".join(odd[:1]): odd,
        "parameter groups in an order that is not megatron-core's": not names,
        "fp32 master weights of some parameters only": masters and len(masters) != len(numbers),
    }
    if unread := first(lacking, _LEFT_OUT):
        return {}, frozenset(), [], unread
    if masters:
        found[StateKind.MASTER] = {names[n]: tensor.detach() for n, tensor in zip(numbers, masters, strict=True)}
    return found, frozenset(steps_of(inner)), hyperparameters(inner["param_groups"]), ""


def _numbered(
    groups: Sequence[Mapping[str, Any]], chunks: Sequence[Mapping[str, torch.Tensor]]
) -> dict[int, tuple[int, str]]:
    """Number of a parameter in the optimizer → (chunk, name): the parameters of a group in the order of the model's,
    biases and vectors in the group without weight decay (megatron-core, optimizer/__init__.py, ``_get_param_groups``).
    Empty if the groups have other numbers of parameters."""
    decayed = {
        (chunk, name): tensor.ndim > 1 and not name.endswith(".bias")
        for chunk, tensors in enumerate(chunks)
        for name, tensor in tensors.items()
        if not name.endswith(_BUFFERS)
    }
    found: dict[int, tuple[int, str]] = {}
    for group in groups:
        decays = group.get("wd_mult", 1.0) != 0
        expected = [each for each, does in decayed.items() if does == decays]
        if group["params"] and len(group["params"]) != len(expected):
            return {}
        found |= dict(zip(group["params"], expected, strict=False))
    return found if len(found) == len(decayed) else {}
