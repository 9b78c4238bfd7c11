"""Raw rows that a recipe names → the tokenised pair that a run reads: made once, and kept beside the runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.errors import DataError, SpecError
from kit.object_storage import is_address, open_filesystem
from kit.specs.job import TRL, JobSpec, Objective
from kit.specs.run import DataSpec, RunSpec
from kit.specs.text import listed
from kit.training.data.sources import DATA_SETS, SUFFIXES, TEXT_SUFFIXES, Source, find_sources, rows
from kit.training.hub_files import local

_FOLDER = "tokenised"
"""Directory beside the run directories that keeps the pairs."""
_OBJECTIVES: dict[tuple[str, ...], Objective] = {
    ("messages",): "sft",
    ("conversations",): "sft",
    ("instruction", "output"): "sft",
    ("prompt", "completion"): "sft",
    ("source", "target"): "seq2seq",
    ("text",): "pretrain",
}
"""Fields of a row → what it is for. The first that all stand in a row count."""
_MEANT = {
    **dict.fromkeys(("question", "query", "input", "problem"), "prompt"),
    **dict.fromkeys(("answer", "response", "output", "solution"), "completion"),
    **dict.fromkeys(("content", "document"), "text"),
    **dict.fromkeys(("conversation", "dialog", "dialogue", "chat"), "messages"),
}
"""Other names of fields → those that are read; what they hold kit does not guess."""
_OF_TOKENIZERS = (".json", ".jinja", ".model", ".txt")


def is_raw(path: str) -> bool:
    """Whether a path of ``run.data`` names rows or text, and no tokenised pair."""
    if path.startswith(DATA_SETS):
        return True
    if not is_address(path) and (Path(f"{path}.idx").exists() or Path(path).is_dir()):
        return Path(path).is_dir()
    return Path(path).suffix in SUFFIXES


def objective_of(path: str) -> Objective:
    """What the first row of a source is for. Raises DataError for fields that no objective of kit's own loop has."""
    source = find_sources(path)[0]
    if source.suffix in TEXT_SUFFIXES:
        return "pretrain"
    where, row = next(rows(source, lambda _: None), ("", None))
    if not where:
        raise DataError(f"{path} has no rows; give a file with one row or more")
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; a row is an object with fields, such as messages")
    if "chosen" in row or {"prompt", "completion", "label"} <= row.keys():
        raise DataError(
            f"{path} has preferences ({', '.join(row)}), on which TRL's trainers train; kit recipes lists trl-dpo, "
            "trl-kto and trl-reward, whose files start them. --objective sft learns every completion"
        )
    for keys, objective in _OBJECTIVES.items():
        if row.keys() >= set(keys):
            return objective
    known = " or ".join("{" + ", ".join(keys) + "}" for keys in _OBJECTIVES)
    meant = {name: _MEANT[name] for name in row if name in _MEANT}
    fix = f"rename {', '.join(f'{name} to {new}' for name, new in meant.items())}; kit reads" if meant else "give"
    raise DataError(f"{where} has the fields {listed(map(str, row)) or 'of nothing'}; {fix} {known}")


def prepared(run: RunSpec, job: JobSpec, beside: Path, say: Callable[[str], None]) -> RunSpec:
    """The run with tokenised pairs in place of raw rows. ``beside``: parent of the run directory. ``say`` gets a line
    about each set. Raises DataError as ``tokenise`` does, and SpecError where no tokenizer is named."""
    raw = {key: path for key in ("train", "validation") if (path := getattr(run.data, key)) and is_raw(path)}
    if not raw:
        return run
    if job.objective in TRL:
        raise SpecError(
            f"objective={job.objective}: TRL's trainer trains it, from its own script and data; kit recipes copy "
            f"llama-3.1-8b-trl-{job.objective}-… has the files that start it. Without run.data kit emit writes them"
        )
    if run.model_path is None:
        raise SpecError(
            f"run.data.{next(iter(raw))}={next(iter(raw.values()))} are raw rows, and run.model_path is missing, whose "
            "tokenizer they need; name the model's directory there, or tokenise them with kit convert data"
        )
    pairs: dict[str, Any] = {key: _pair(path, run, job, beside / _FOLDER, say) for key, path in raw.items()}
    return replace(run, data=replace(run.data, **pairs))


def samples_of(data: DataSpec, job: JobSpec) -> int:
    """Samples of an epoch of ``data.train``, a pair on this disk: rows, or sequences of text."""
    said = json.loads(Path(f"{data.train}.json").read_text(encoding="utf-8"))
    return int(said["num_tokens"] // job.seq_length if job.objective == "pretrain" else said["num_documents"])


def _pair(path: str, run: RunSpec, job: JobSpec, folder: Path, say: Callable[[str], None]) -> str:
    """Prefix of the pair of one source, which is written unless it is there."""
    from kit.training.data.chat_template import read_chat_template
    from kit.training.data.tokenise import tokenise

    seq_length = None if job.objective == "pretrain" else job.seq_length
    template = run.data.chat_template
    decides = [job.objective, seq_length, template and read_chat_template(template)]
    digest = hashlib.sha256(json.dumps(decides).encode())
    tokenizer = local(str(run.model_path))
    files = sorted(file for file in tokenizer.glob("*") if file.suffix in _OF_TOKENIZERS)
    for part in (*map(_hash, files), *(each for source in find_sources(path) for each in _hashes(source))):
        digest.update(part.encode())
    prefix = folder / f"{Path(path).stem.replace(':', '-')}-{digest.hexdigest()[:12]}"
    if prefix.with_name(f"{prefix.name}.json").exists():
        say(f"{path}: tokenised before, {prefix}")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        done = tokenise(
            [path], tokenizer, prefix, objective=job.objective, seq_length=seq_length, chat_template=template
        )
        say(f"{path} → {done}")
    return str(prefix)


def _hashes(source: Source) -> Iterator[str]:
    """What changes if the content of a source does: of an object, what its storage says of its version."""
    if is_address(source.name):
        filesystem, inside = open_filesystem("source", source.name)
        yield str(filesystem.ukey(inside))
    else:
        path = Path(source.name)
        yield from map(_hash, sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path])


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}"
