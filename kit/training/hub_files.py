"""Weights, tokenizers and data sets by their ids on the Hugging Face hub → files in the library's cache on this disk.

What the cache has complete is used as it is, so that a run resumes with the files that it began with. The rest is
fetched once a node: processes wait for one another at a lock. Nothing that could hold code is fetched: weights are
safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from kit.emit.run_directory import RunDirectory
from kit.errors import DataError, SpecError
from kit.files import locked
from kit.specs import hub
from kit.specs.run import with_paths

_WORDS = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configurations, tokenizers, chat templates."""
_WEIGHTS = "*.safetensors"
_NOT = ("*/*", "consolidated*")
"""Other formats of the same weights, which some repositories have beside them."""


def with_local_files(rundir: RunDirectory) -> RunDirectory:
    """The run directory with the paths of files on this disk in place of hub ids; ``run.yaml`` keeps the ids.

    Raises ``SpecError`` if they cannot be had."""
    stream = rundir.run.data.stream
    named = {"model_path": (rundir.run.model_path, True), "data.stream.tokenizer": (stream and stream.tokenizer, False)}
    found = {key: str(local(name, weights)) for key, (name, weights) in named.items() if name}
    return dataclasses.replace(rundir, run=with_paths(rundir.run, found)) if found else rundir


def local(name: str | Path, weights: bool = False) -> Path:
    """The directory of a model: that of its hub id in the cache, after it was fetched; or ``name`` if it is a path.

    ``weights``: whether the model's weights are needed, or its tokenizer alone. Raises ``SpecError``."""
    if not hub.is_elsewhere(str(name)):
        return Path(name)
    model = str(name)
    with hub.explained(model, "model"):
        if (found := _complete(model, weights)) is not None:
            return found
        hub.cache().mkdir(parents=True, exist_ok=True)
        with locked(hub.cache() / f".{model.replace('/', '--')}.kit.lock"):
            return _complete(model, weights) or _fetched(model, weights)


def _fetched(model: str, weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download

    what = "weights and tokenizer" if weights else "tokenizer"
    if not constants.HF_HUB_OFFLINE:
        print(f"{model}: fetching {what} from {constants.ENDPOINT} into {hub.cache()}", file=sys.stderr, flush=True)
    directory = Path(snapshot_download(model, allow_patterns=_patterns(weights), ignore_patterns=list(_NOT)))
    if not _is_whole(directory, weights):
        kind = "weights in safetensors, and kit reads no other files of the hub" if weights else "tokenizer"
        raise SpecError(f"{model} has no complete {kind} in {directory}; use another copy of the model")
    return directory


def _complete(model: str, weights: bool) -> Path | None:
    """The snapshot in the cache; None if files are missing. Asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns, left_out = _patterns(weights), list(_NOT)
    try:
        found = snapshot_download(model, local_files_only=True, allow_patterns=patterns, ignore_patterns=left_out)
    except LocalEntryNotFoundError:
        return None
    return Path(found) if _is_whole(Path(found), weights) else None


def _patterns(weights: bool) -> list[str]:
    return [*_WORDS, _WEIGHTS] if weights else list(_WORDS)


def _is_whole(directory: Path, weights: bool) -> bool:
    """Whether all files are there: a plan leaves a config.json alone, and transformers no tokenizer."""
    if not weights:
        return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    index = directory / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((directory / name).is_file() for name in ("config.json", *files))


def data_set_files(name: str) -> list[Path]:
    """The files of a data set of the hub, after they were fetched. ``name``: ORG/SET, ORG/SET:CONFIGURATION, or
    ORG/SET:CONFIGURATION:SPLIT; the split is train if it has no other name. No code of a data set is run.

    Raises ``SpecError`` if it cannot be had, ``DataError`` for an unknown configuration or split."""
    set_name, configuration, split = (*name.split(":"), "", "")[:3]
    split = split or "train"
    with hub.explained(set_name, "data set"):
        from datasets import load_dataset_builder  # type: ignore[import-untyped]
        from huggingface_hub import HfApi, constants, hf_hub_download

        revision = HfApi().dataset_info(set_name).sha
        try:
            files = load_dataset_builder(set_name, configuration or None, revision=revision).config.data_files or {}
        except ValueError as error:  # of an unknown configuration, or of several
            raise DataError(f"{name}: {' '.join(str(error).split())}; name one as {set_name}:CONFIGURATION") from None
        if split not in files:
            raise DataError(
                f"{name} has no split {split}; name one as {set_name}:{configuration}:SPLIT: {', '.join(files)}"
            )
        print(f"{name}: fetching {len(files[split])} files of {split} from {constants.ENDPOINT}", file=sys.stderr)
        start = f"hf://datasets/{set_name}@{revision}/"
        inside = [os.fspath(file).removeprefix(start) for file in files[split]]
        return [Path(hf_hub_download(set_name, file, repo_type="dataset", revision=revision)) for file in inside]


def is_data_set(name: str) -> bool:
    """Whether a source is a data set of the hub: see ``data_set_files``."""
    return hub.is_elsewhere(name.partition(":")[0])
