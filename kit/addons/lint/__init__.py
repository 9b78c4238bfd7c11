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
    config, config_files, known_keys, described
                                  a configuration and its file, the keys that its reader knows, its workload
    key_rules, batch_rules, precision_rules, zero_rules, consequence_rules
                                  of DeepSpeed's files
    accelerate_rules, fsdp_rules, parallelism_rules
                                  of accelerate's
    trainer_rules, megatron_rules
                                  of other trainers' arguments
    line_rules, command_rules, node_rules
                                  of launch lines
    named_file_rules              of the configurations that another file names
    fix                           the corrected copy
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
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
from kit.addons.lint.config import Config, Given, Reader
from kit.addons.lint.config_files import ENDINGS, SCRIPTS, read, read_values, text_of
from kit.addons.lint.described import NEEDS_BOTH
from kit.addons.lint.finding import Finding, Severity
from kit.addons.lint.fix import fixed, write_fixed
from kit.addons.lint.known_keys import known_keys
from kit.addons.lint.named_file_rules import of_accelerate
from kit.addons.lint.rule import Rule, check
from kit.addons.lint.rule import findings as findings_of
from kit.addons.lint.scripts import kubernetes, launches
from kit.errors import KitError, SpecError
from kit.specs.cluster import ClusterSpec
from kit.specs.model import ModelSpec
from kit.specs.other_programs import program_of
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
    path, given = Path(path), Given(reader, model, cluster, seq_length, gradient_checkpointing)
    try:
        found = _run_directory(path) if path.is_dir() else _ordered(_findings(path, given))
    except RecursionError:
        raise SpecError(f"{path.name}: nested too deeply; a configuration has a few levels") from None
    findings = tuple(_first_of_each(found))
    judged = {"prediction", "does-not-fit", "host-ram", "memory-not-judged", "not-read"}
    if (model or cluster) and judged.isdisjoint(finding.rule for finding in findings):
        why = "nothing here says how the model is split over GPUs" if model and cluster else NEEDS_BOTH
        fix = "name a DeepSpeed or accelerate configuration, a recipe or a run directory"
        findings += (Finding("memory-not-judged", "note", path.name, None, "", why, fix),)
    return findings


def lint_script(text: str, name: str, reader: Reader) -> tuple[Finding, ...]:
    """Findings of a script's text alone: none of the files that it names is looked for."""
    found = launches(Path(name), text, Given(reader), lambda path, named: None, follow=False)
    return tuple(_first_of_each(_ordered(found)))


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
def _findings(path: Path, given: Given) -> Iterable[Finding]:
    if path.suffix in SCRIPTS:
        return launches(path, text_of(path), given)
    if path.suffix not in ENDINGS:
        raise SpecError(f"{path.name}: lint reads .json, .yaml, .sh, .sbatch and run directories; is it one of these?")
    if path.suffix != ".json" and re.search(r"(?m)^apiVersion:", text_of(path)):
        return kubernetes(path, given)
    config = read(path, given)
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
        findings += _ordered(of_accelerate(launched, read(launched, Given(model=rundir.plan.model))))
    elif config.is_file():
        findings += _ordered(findings_of("deepspeed", read(config, Given("deepspeed", rundir.plan.model))))
    # The planner has already checked memory.
    return tuple(finding for finding in findings if finding.rule != "memory-not-judged")


_OF_KIND: dict[str, Callable[[Path, Config], Iterable[Finding]]] = {
    "recipe": _recipe,
    "deepspeed": lambda path, config: findings_of("deepspeed", config),
    "accelerate": of_accelerate,
}
"""Kind of a file → its findings."""


def _ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    rank = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(findings, key=lambda f: (f.file, f.line or 0, rank[f.severity])))
