"""Lint: finds errors in configurations before they run on GPUs.

``lint(path)`` recognises a file by its content: a DeepSpeed configuration, accelerate's YAML, a recipe, a run
directory, a Kubernetes job, or a shell script with launch lines. It needs neither torch nor the engines: generated
tables have the keys that these read.

Its rooms, in the order in which data walks:

    command                       ``kit lint``
    finding, rule                 what a finding is, and what a rule
    json_text, shell_words, scripts, kubernetes_job
                                  files with the line of every key and word
    commands, job, accelerate_line
                                  launch lines, the job that runs them, what accelerate makes of them
    config, known_keys, described
                                  a configuration, the keys that its reader knows, its workload
    key_rules, batch_rules, precision_rules, zero_rules, consequence_rules
                                  of DeepSpeed's files
    accelerate_rules, fsdp_rules, parallelism_rules
                                  of accelerate's
    trainer_rules, megatron_rules
                                  of other trainers' arguments
    line_rules, command_rules, node_rules
                                  of launch lines
    fix                           the corrected copy
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from kit.addons.lint import (
    accelerate_rules,
    batch_rules,
    command_rules,
    consequence_rules,
    fsdp_rules,
    key_rules,
    line_rules,
    megatron_rules,
    node_rules,
    parallelism_rules,
    precision_rules,
    trainer_rules,
    zero_rules,
)
from kit.addons.lint.accelerate_line import with_line
from kit.addons.lint.command_rules import one_thread, processes, wrapped_classes
from kit.addons.lint.commands import Command
from kit.addons.lint.config import Config, Given, Reader
from kit.addons.lint.described import NEEDS_BOTH
from kit.addons.lint.finding import Finding, Severity
from kit.addons.lint.fix import fixed, write_fixed
from kit.addons.lint.json_text import parse_json
from kit.addons.lint.known_keys import known_keys
from kit.addons.lint.rule import CHECKS, Rule, check
from kit.addons.lint.scripts import kubernetes, launches, text_of
from kit.addons.lint.trainer_rules import contradicts_config, packs_split_rows
from kit.errors import KitError, SpecError
from kit.specs import strict_yaml
from kit.specs.cluster import ClusterSpec
from kit.specs.model import ModelSpec
from kit.specs.other_programs import program_of
from kit.specs.strict_yaml import Document
from kit.specs.text import shown

__all__ = [
    "READERS",
    "SCRIPTS",
    "Finding",
    "Reader",
    "Severity",
    "fixed",
    "lint",
    "lint_script",
    "read_values",
    "write_fixed",
]

FILES = (
    key_rules,
    batch_rules,
    precision_rules,
    zero_rules,
    consequence_rules,
    accelerate_rules,
    fsdp_rules,
    parallelism_rules,
    command_rules,
    line_rules,
    node_rules,
    megatron_rules,
    trainer_rules,
)
"""The files that register rules."""
_ENDINGS = (".json", ".yaml", ".yml")
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
OF_OPTIONS = {"fsdp2-key", "parallelism", "wrap-policy"}
"""Rules of accelerate's YAML for the options of ``accelerate launch`` too; the others have rules of their own there."""
READERS: tuple[Reader, ...] = get_args(Reader)


def lint(
    path: str | Path,
    *,
    reader: Reader | None = None,
    model: ModelSpec | None = None,
    cluster: ClusterSpec | None = None,
    seq_length: int | None = None,
    gradient_checkpointing: bool = False,
) -> tuple[Finding, ...]:
    """All findings of a file or a run directory, in the order of the file.

    ``reader``: the program that will read a DeepSpeed configuration. ``model`` and ``cluster``: needed to check memory
    and batch sizes. Raises ``SpecError`` for a file that cannot be read.
    """
    given = Given(reader, model, cluster, seq_length, gradient_checkpointing)
    try:
        findings = _findings(Path(path), given)
    except RecursionError:
        raise SpecError(f"{Path(path).name}: nested too deeply; a configuration has a few levels") from None
    findings = tuple(_first_of_each(findings))
    judged = {"prediction", "does-not-fit", "host-ram", "memory-not-judged", "not-read"}
    if (model or cluster) and judged.isdisjoint(finding.rule for finding in findings):
        why = "nothing here says how the model is split over GPUs" if model and cluster else NEEDS_BOTH
        fix = "name a DeepSpeed or accelerate configuration, a recipe or a run directory"
        findings += (Finding("memory-not-judged", "note", Path(path).name, None, "", why, fix),)
    return findings


def lint_script(text: str, name: str, reader: Reader) -> tuple[Finding, ...]:
    """Findings of a script's text alone: none of the files that it names is looked for."""
    named = partial(_named, find=lambda path, named: None)
    return tuple(_first_of_each(_ordered(launches(Path(name), text, Given(reader), named, follow=False))))


_MOST_OF_A_RULE = 50


def _first_of_each(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Shortens the findings of a rule that has very many in a file: the first ones, and the number of the others."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        same = alike.setdefault((finding.file, finding.rule), [])
        same.append(finding)
        if len(same) <= _MOST_OF_A_RULE:
            yield finding
    for (*_, last), more in ((same[:_MOST_OF_A_RULE], len(same) - _MOST_OF_A_RULE) for same in alike.values()):
        if more > 0:
            yield replace(last, key="", line=None, changes=(), why=f"{more} more of the same", fix="see the first")


@check(
    None,
    Rule("not-read", "ds, accelerate, script", "files and launches of other programs", "nothing in it was judged"),
)
def _findings(path: Path, given: Given) -> tuple[Finding, ...]:
    if path.is_dir():
        return _run_directory(path)
    if path.suffix in SCRIPTS:
        return _ordered(launches(path, text_of(path), given, _named))
    if path.suffix not in _ENDINGS:
        raise SpecError(f"{path.name}: lint reads .json, .yaml, .sh, .sbatch and run directories; is it one of these?")
    if path.suffix != ".json" and re.search(r"(?m)^apiVersion:", text_of(path)):
        return _ordered(kubernetes(path, given, _named))
    config = _read(path, given)
    if (kind := _kind(config.document.data, path.suffix)) is not None:
        return _OF_KIND[kind](path, config)
    program = program_of(config.document.data)
    looks = (
        f"it looks like {program}'s" if program else "its keys are neither DeepSpeed's nor accelerate's nor a recipe's"
    )
    why = f"not a file that kit lint reads: {looks}"
    return (Finding("not-read", "warning", path.name, None, "", why, "name the configuration itself"),)


_TELLING = {
    "accelerate": {"distributed_type", "compute_environment"},
    "recipe": {"cluster", "extends"},
    "deepspeed": {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"},
}
"""Keys that alone identify the kind of a file."""


def _kind(data: Mapping[str, Any], suffix: str) -> str | None:
    """The kind of a file, by its keys (misspelt keys count too); None if most keys are unknown."""
    accelerate = {"accelerate": {*known_keys("accelerate").tree}}
    if suffix == ".json":
        known = {
            "deepspeed": {*known_keys("DeepSpeed").tree, *known_keys("DeepSpeed").removed, "bfloat16"},
            **accelerate,
        }
    else:
        known = {**accelerate, "recipe": {"model", "cluster", "job", "run", "layout", "extends"}}
    names = [str(key) for key in data][:200]
    shares = {
        kind: sum(bool(difflib.get_close_matches(name, words, 1, 0.8)) for name in names) / max(1, len(names))
        for kind, words in known.items()
    }
    telling = [kind for kind in known if _TELLING[kind] & set(names)]
    best = max(telling or known, key=lambda kind: shares[kind])
    return best if telling or not names or shares[best] > 0.5 else None


def read_values(path: str | Path) -> dict[str, Any]:
    """The plain values of a file, for a corrected copy."""
    return _read(Path(path)).document.data


def _read(path: Path, given: Given | None = None) -> Config:
    """A file beside what is known of its use."""
    text, is_json = text_of(path), path.suffix == ".json"
    document, irregular = parse_json(text, path.name) if is_json else (strict_yaml.parse_text(text, path.name), ())
    return replace((given or Given()).of(document), irregularities=irregular)


def _deepspeed(config: Config) -> tuple[Finding, ...]:
    return _ordered(finding for each in CHECKS["deepspeed"] for finding in each(config))


@check(
    None,
    Rule(
        "config-file-missing",
        "accelerate, script",
        "a configuration file that is missing",
        "fails at start",
    ),
)
def _accelerate(path: Path, config: Config) -> tuple[Finding, ...]:
    """``config``: the file, or what a launch line makes of it."""
    if (started := config.number("num_processes")) is not None:
        config = replace(config, processes=int(started))
    findings = [finding for each in CHECKS["accelerate"] for finding in each(config)]
    key = "deepspeed_config.deepspeed_config_file"
    if isinstance(named := config.get(key), str) and config.get("distributed_type") == "DEEPSPEED":
        if (other := named_file(path, named)) is None:
            why = f"{named} is neither here nor above this file"
            fix = "its path is relative to where accelerate launch is started: start it there"
            findings.append(config.finding("config-file-missing", "warning", key, why, fix))
        else:
            ranks = config.processes and config.processes // _model_parallel(other.with_name("megatron.yaml"))
            findings += _deepspeed(replace(_read(other, replace(config, reader="accelerate")), processes=ranks))
    return _ordered(findings)


def named_file(path: Path, named: str) -> Path | None:
    """Finds a file named in another file: relative to the working directory, to that file, or to a parent directory."""
    places = [folder / named for folder in (path.parent, Path(), *path.absolute().parents[1:5])]
    return next((place for place in places if place.is_file()), None)


def _named(
    path: Path, command: Command, given: Given, find: Callable[[Path, str], Path | None] = named_file
) -> list[Finding]:
    """Findings of the configuration files that a launch line names, and contradictions between file and line."""
    of_accelerate, document = command.launcher == "accelerate launch", Document(path.name, {}, {})
    launch = Config(document=with_line(command, document) if of_accelerate else document)
    found, files = list(wrapped_classes(command, given.model)), list[Config]()
    readers: tuple[tuple[str | None, Reader | None], ...] = (
        (command.argument("deepspeed"), "trainer"),
        (command.argument("deepspeed_config"), "deepspeed"),
        (command.value("deepspeed_config_file"), "accelerate"),
        (command.value("config_file") if of_accelerate else None, None),
    )
    literal = [(name, reader) for name, reader in readers if name and "$" not in name and name.endswith(_ENDINGS)]
    for named, reader in literal:
        if (other := find(path, named)) is None:
            why, fix = f"{named} is neither here nor above this script", "start it where the path is right"
            found.append(command.finding("config-file-missing", "warning", "", why, fix))
        elif reader is not None and other.suffix == ".json":
            files.append(replace(_read(other, replace(given, reader=reader)), processes=processes(command)))
            found += [*_deepspeed(files[-1]), *contradicts_config(command, files[-1])]
        else:
            launch = _read(other, given)
            launch = replace(launch, document=with_line(command, launch.document))
            found += _accelerate(other, launch)
            inside = find(other, str(launch.get("deepspeed_config.deepspeed_config_file")))
            files += [_read(inside)] if inside else []
    if of_accelerate and command.value("config_file") is None and launch.has("distributed_type"):
        found += [each for check in CHECKS["accelerate"] for each in check(launch) if each.rule in OF_OPTIONS]
    return [*found, *one_thread(command, launch, files), *packs_split_rows(command, launch)]


def _model_parallel(megatron: Path) -> int:
    """Model-parallel ranks (tp · pp) under ZeRO with Megatron's layers. DeepSpeed gets this number from the program's
    mpu object, not from its configuration; kit writes it to Megatron's file in the same directory."""
    if not megatron.is_file():
        return 1
    sizes = strict_yaml.read(megatron).data.get("parallel_state", {})
    return int(sizes.get("tensor_model_parallel_size", 1)) * int(sizes.get("pipeline_model_parallel_size", 1))


@check(None, Rule("recipe", "recipe", "errors that `kit plan` reports", "no plan"))
def _recipe(path: Path, _: Config) -> tuple[Finding, ...]:
    """Errors of a recipe and of its plan."""
    from kit.planner.make_plan import make_plan
    from kit.specs.recipe import load_recipe

    try:
        recipe = load_recipe(path)
        make_plan(recipe.model, recipe.cluster, recipe.job, recipe.layout)
    except KitError as error:
        return _of_lines("recipe", path, error, "change the recipe")
    return ()


def _of_lines(rule: str, path: Path, error: KitError, fix: str) -> tuple[Finding, ...]:
    """One finding per line of the message."""
    return tuple(Finding(rule, "error", path.name, None, "", line, fix) for line in str(error).splitlines())


@check(
    None,
    Rule("run-directory", "run", "files that do not belong to their plan", "kit refuses to train"),
    Rule("edited", "run", "edits that are honoured", "reported again at start"),
)
def _run_directory(path: Path) -> tuple[Finding, ...]:
    """Compares the plan of a run directory with its derived files, and lints its DeepSpeed and accelerate files."""
    from kit.emit.run_directory import RunDirectory

    try:
        rundir = RunDirectory.open(path)
    except KitError as error:
        return _of_lines("run-directory", path, error, "emit again from the recipe")
    why = "{} was planned, the file has {}"
    findings = [
        Finding("edited", "note", each.file, None, each.key, why.format(shown(each.planned), shown(each.found)), "kept")
        for each in rundir.edits
    ]
    config, launched = path / "ds_config.json", path / "accelerate.yaml"
    if launched.is_file():
        findings += _accelerate(launched, _read(launched, Given(model=rundir.plan.model)))
    elif config.is_file():
        findings += _deepspeed(_read(config, Given("deepspeed", rundir.plan.model)))
    # The planner has already checked memory.
    return tuple(finding for finding in findings if finding.rule != "memory-not-judged")


_OF_KIND: dict[str, Callable[[Path, Config], tuple[Finding, ...]]] = {
    "recipe": _recipe,
    "deepspeed": lambda path, config: _deepspeed(config),
    "accelerate": _accelerate,
}
"""Kind of a file → its findings."""


def _ordered(findings: Any) -> tuple[Finding, ...]:
    rank = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(findings, key=lambda f: (f.file, f.line or 0, rank[f.severity])))
