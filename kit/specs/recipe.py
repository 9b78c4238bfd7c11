"""A recipe: the YAML file that a person copies and edits.

    model:   llama-3.1-8b            # a catalog name, a Hugging Face directory, or a mapping of ModelSpec
    cluster: 8xH100                  # GPUs, `aws:p5.48xlarge:4`, or a mapping of ClusterSpec
    job:     {seq_length: 8192}      # JobSpec
    run:     {data: {train: …}}      # RunSpec; needed to run, not to plan
    layout:  {tp: 8}                 # Pins: what the planner must not choose
    extra:   {deepspeed: {…}}        # Extra: keys for the engine's own file, which are not in the prediction
    extends: other.yaml              # optional: take another recipe and change these keys of it

Relative paths in a recipe are relative to the recipe's directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog import cluster_called, load_model, model_called, parse_cluster
from kit.specs.catalog.clusters import described_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.extra import Extra, merged
from kit.specs.job import LENGTHS_OF_JOB, JobSpec
from kit.specs.job_defaults import with_defaults
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec
from kit.specs.other_programs import refuse_other_programs
from kit.specs.run import RunSpec, absolute_paths
from kit.specs.text import check_line, first_ten, nearest, shown
from kit.specs.validation import Text, spec

_SECTIONS = ("model", "cluster", "job", "run", "layout", "extra", "extends")


@spec
class Recipe:
    """A recipe with its names looked up and its paths made absolute; every value validated."""

    name: Text
    """The file's name without its suffix."""
    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    run: RunSpec | None
    layout: Pins
    extra: Extra = Extra()


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override by ``dotted.key=value`` words, look up, validate. Raises ``SpecError`` with all problems."""
    path = Path(path)
    check_line("recipe", str(path))
    document = strict_yaml.read(path)
    refuse_other_programs(document, path)
    return _validated(_extended(document, path), overrides, path.stem, path.parent)


def recipe_of_document(document: strict_yaml.Document, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from text instead of a file. Its names must be in the catalog, and its run is ignored: no file is read.

    Raises ``SpecError``, also for ``extends``.
    """
    return _validated(document, overrides, document.name, None)


def _validated(document: strict_yaml.Document, overrides: Sequence[str], name: str, base: Path | None) -> Recipe:
    _check_one_length(reduce(partial(_override, merge=merged), overrides, strict_yaml.Document(document.name, {}, {})))
    document = reduce(_override, overrides, document)
    _check_one_length(document)
    if base is None and "extends" in document.data:
        raise SpecError(f"{document.where(('extends',))}: extends names a file; write the whole recipe here")
    unknown = [key for key in document.data if key not in _SECTIONS]
    problems = first_ten(
        document.name,
        unknown,
        lambda key: f"{document.where((key,))}: {shown(key, str)}: unknown key; {nearest(str(key), _SECTIONS)}",
    )
    problems += [
        f"{document.name}: {key}: is required and missing"
        for key in ("model", "cluster")
        if document.data.get(key) is None
    ]
    values: dict[str, Any] = {}
    for key in ("model", "cluster", "run", "layout", "extra", "job"):
        try:
            if key == "job" and values.get("model") and values.get("cluster"):
                document = _with_usual_job(document, values["model"], values["cluster"])
            values[key] = None if key == "run" and base is None else _section(key, document, base)
        except SpecError as error:
            problems += str(error).splitlines()
    if problems:
        raise SpecError("\n".join(problems))
    return Recipe(name=name, **values)


def _with_usual_job(document: strict_yaml.Document, model: ModelSpec, cluster: ClusterSpec) -> strict_yaml.Document:
    """The recipe with what is usual for its job."""
    job = document.data.get("job") or {}
    if not isinstance(job, dict):
        return document  # its parser says what is wrong
    job = with_defaults(job, model, cluster.num_gpus)
    return strict_yaml.Document(name=document.name, data={**document.data, "job": job}, lines=document.lines)


_LENGTHS = (*(("job", key) for key in LENGTHS_OF_JOB), ("run", "steps"))
"""Keys of which a recipe has one: in an extending recipe or an argument it takes the place of the base's."""


def _lengths(data: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """The lengths that a recipe's text gives."""
    sections = {key: data.get(key) for key in ("job", "run")}
    found = {path: (sections[path[0]] or {}).get(path[1]) for path in _LENGTHS if isinstance(sections[path[0]], dict)}
    return {path: value for path, value in found.items() if value is not None}


def _check_one_length(document: strict_yaml.Document) -> None:
    given = _lengths(document.data)
    if len(given) > 1:
        said = " and ".join(f"{'.'.join(path)}={shown(value, str)}" for path, value in given.items())
        raise SpecError(
            f"{document.where(next(iter(given)))}: {said}: the length of a run is one of job.epochs, run.steps and "
            "job.total_tokens; leave out the others"
        )


def run_of(overrides: Sequence[str], base: Path) -> RunSpec | None:
    """The run that ``run.key=value`` arguments describe without a recipe; None without any. Raises ``SpecError``."""
    document = reduce(_override, overrides, strict_yaml.Document(name="run", data={}, lines={}))
    run: RunSpec | None = _section("run", document, base)
    return run


def job_and_cluster(
    model: ModelSpec, cluster: ClusterSpec, job: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[JobSpec, ClusterSpec]:
    """What the keys of a job and a cluster come to with ``job.key=value`` and ``cluster.key=value`` arguments, as in a
    recipe. Raises ``SpecError``."""
    data = {"job": dict(job), "cluster": strict_yaml.to_plain(cluster)}
    document = reduce(_override, overrides, strict_yaml.Document(name="arguments", data=data, lines={}))
    cluster = _section("cluster", document, Path())
    return _section("job", _with_usual_job(document, model, cluster), Path()), cluster


def recipe_of_data(
    data: dict[str, Any], overrides: Sequence[str], name: str, base: Path
) -> tuple[Recipe, dict[str, Any]]:
    """(recipe, its keys with the overrides) of keys that no file has. ``base``: paths are relative to it. Raises
    ``SpecError``."""
    document = reduce(_override, overrides, strict_yaml.Document(name="options", data=data, lines={}))
    return _validated(document, (), name, base), document.data


def merged_text(path: str | Path) -> str:
    """A recipe as YAML text, merged with the recipe that it extends. Raises ``SpecError``."""
    path = Path(path)
    data = dict(_extended(strict_yaml.read(path), path).data)
    data.pop("extends", None)
    ordered = {key: data[key] for key in _SECTIONS if key in data}
    return strict_yaml.dump({key: _without_nulls(value) for key, value in ordered.items()})


def _without_nulls(value: Any) -> Any:
    """Removes null values, with which a variant removes keys of its base; the merged recipe does not need them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


def _section(key: str, document: strict_yaml.Document, base: Path | None) -> Any:
    """One section of a recipe → its spec. An absent section takes its defaults. ``base``: paths are relative to it;
    None: names are of the catalog alone."""
    raw = document.data.get(key)
    if key in ("model", "cluster") and isinstance(raw, str):
        with document.at((key,)):
            if base is None:
                return model_called(raw) if key == "model" else cluster_called(raw)
            local = base / raw
            if key == "model":
                return load_model(str(local) if os.path.isfile(local / "config.json") else raw)
            return parse_cluster(str(local) if os.path.isfile(local) else raw)
    if raw is None:
        return {"job": JobSpec(), "layout": Pins(), "extra": Extra()}.get(key)
    if key == "cluster":
        return described_cluster(document, (key,), cluster_called if base is None else parse_cluster)
    kinds: dict[str, Any] = {"model": ModelSpec, "job": JobSpec, "run": RunSpec, "layout": Pins, "extra": Extra}
    value = strict_yaml.parse(kinds[key], _without_nulls(raw) if key == "extra" else raw, document, (key,))
    return absolute_paths(value, base) if isinstance(value, RunSpec) and base else value


def _extended(document: strict_yaml.Document, path: Path) -> strict_yaml.Document:
    """Merges a recipe with the recipe that it extends."""
    base_name = document.data.get("extends")
    if base_name is None:
        return document
    where = f"{document.where(('extends',))}: extends={shown(base_name)}"
    if not isinstance(base_name, str):
        raise SpecError(f"{where}: should be the path of a recipe")
    base_path = path.parent / base_name
    if not os.path.isfile(base_path):
        raise SpecError(f"{where}: no such recipe beside {path.name}")
    base = strict_yaml.read(base_path)
    if "extends" in base.data:
        raise SpecError(
            f"{where}: it extends another recipe itself; one level is the limit, so that a recipe stays readable"
        )
    return strict_yaml.Document(name=document.name, data=_merged(base.data, document.data), lines=document.lines)


_Merge = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """The recipe with the values of ``over``. A length replaces whichever length the base has."""
    if _lengths(over):
        for section, key in _lengths(base):
            base = base | {section: {name: value for name, value in base[section].items() if name != key}}
    return merged(base, over)


def _override(document: strict_yaml.Document, word: str, merge: _Merge = _merged) -> strict_yaml.Document:
    """Apply one ``job.learning_rate=1e-5``; the value is read as YAML."""
    key, equals, text = word.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise SpecError(f"override {shown(word)} is not of the form section.key=value")
    value = strict_yaml.parse_text(f"value: {text}", f"override {shown(word)}").data["value"]
    nested: Any = value
    for part in reversed(parts):
        nested = {part: nested}
    if isinstance(named := document.data.get("cluster"), str) and isinstance(nested.get("cluster"), dict):
        nested = {"cluster": {"node": named, **nested["cluster"]}}
    return strict_yaml.Document(name=document.name, data=merge(document.data, nested), lines=document.lines)
