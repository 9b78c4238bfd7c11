"""What there is to say of a configuration: it fits or not, how fast it is, what is wrong with it, what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from kit.addons.configs.entries import Source, word
from kit.addons.configs.extra_memory import extra_gib, tower_parameters
from kit.addons.configs.known import unknown_keys
from kit.addons.configs.patch import edited, unified_diff
from kit.addons.configs.reading import Asked, asked_of, source_of
from kit.addons.configs.tables import Bound
from kit.addons.configs.variants import Variant, fastest, nearest, variant, variants
from kit.addons.configs.workload import Described
from kit.addons.lint import lint, lint_script
from kit.addons.lint.config_files import SCRIPTS, named_file
from kit.addons.lint.finding import Finding
from kit.cost.estimate import Prediction, predict
from kit.cost.memory.peak import peak_memory
from kit.cost.time.step import StepTimer
from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.planner.search import EQUALLY_FAST
from kit.specs import strict_yaml

Verdict = Literal["fits", "does not fit", "may fit", "may not fit"]
"""may fit: it needs at most kit's figure, which is too much. may not: at least one that fits."""


class ChangeJson(TypedDict):
    """Changed values of the file, and what it then needs."""

    keys: dict[str, Any]
    peak_gib: float
    step_time_s: float


class ConfigJson(TypedDict):
    """``kit plan FILE --json`` of another trainer's file."""

    file: str
    program: str
    verdict: Verdict
    bound: Bound | None
    """Whether the true peak is at most ``peak_gib``, or at least; null: it is about that."""
    worst_case: bool
    """Whether every row is counted as long as the longest."""
    plan: Plan
    gaps: list[str]
    findings: list[Finding]
    nearest: ChangeJson | None
    fastest: ChangeJson | None
    patch: str


@dataclass(frozen=True)
class Answer:
    """All that is known of a file on these GPUs."""

    path: Path
    asked: Asked
    now: Variant
    plan: Plan
    findings: tuple[Finding, ...]
    nearest: Variant | None
    """The fewest changed keys with which it fits; None where it fits, or nothing helps."""
    fastest: Variant | None
    """None where nothing is faster by more than the model can tell."""

    @property
    def bounds(self) -> set[Bound]:
        """On which sides of kit's figure the true one may be; empty where it is about that."""
        return {gap.bound for gap in self.now.described.gaps} | ({"most"} if self.worst_case else set())

    @property
    def bound(self) -> Bound | None:
        """On which side of kit's figure the true one is; None where it is about that, or on either."""
        return next(iter(self.bounds)) if len(self.bounds) == 1 else None

    @property
    def worst_case(self) -> bool:
        return self.asked.row_tokens is None and not self.now.described.packed

    @property
    def verdict(self) -> Verdict:
        if self.now.fits:
            return "may not fit" if "least" in self.bounds else "fits"
        if self.now.host_fits is False:
            return "does not fit"  # shorter rows leave a node's memory as full
        # pages leave the GPU before it runs out of memory
        paged = self.now.described.workload.job.optimizer.name.startswith("paged")
        return "may fit" if paged or "most" in self.bounds else "does not fit"

    @property
    def change(self) -> Variant | None:
        """What the patch does: to the nearest change where the file does not fit; else to the fastest."""
        return self.nearest if not self.now.fits else self.fastest

    @property
    def patch(self) -> str:
        """A diff of the file, which read again gives the promised layout; empty where nothing is to be changed."""
        if self.change is None or not reads_back(self.asked, self.change):
            return ""
        return unified_diff(self.asked.source, str(self.path), self.change.values)

    @property
    def exit_code(self) -> int:
        """0 if it fits, and nothing in it is an error."""
        return int(self.verdict != "fits" or any(finding.severity == "error" for finding in self.findings))

    def as_json(self) -> ConfigJson:
        """Plain values."""
        return {
            "file": str(self.path),
            "program": self.asked.table.program,
            "verdict": self.verdict,
            "bound": self.bound,
            "worst_case": self.worst_case,
            "plan": self.plan,
            "gaps": [f"{gap.key}: {gap.why}" for gap in self.now.described.gaps],
            "findings": [strict_yaml.to_plain(finding) for finding in self.findings],
            "nearest": _change(self.nearest) if self.nearest else None,
            "fastest": _change(self.fastest) if self.fastest else None,
            "patch": self.patch,
        }


def _change(found: Variant) -> ChangeJson:
    return {"keys": dict(found.values), "peak_gib": found.peak_gib, "step_time_s": found.step_s}


def reads_back(asked: Asked, change: Variant) -> bool:
    """Whether the edited text, read again, gives the layout and the job of the change."""
    try:
        text = edited(asked.source, change.values)
        if asked.source.form == "python":
            flags, _ = source_of(f"{asked.table.commands[1]} {text}", "flags.sh")
            again = asked.described({key: entry.value for key, entry in flags.entries.items()})
        else:
            source, table = source_of(text, asked.source.name)
            again = replace(asked, source=source, table=table).described({})
    except SpecError:
        return False
    return again.workload == change.described.workload


def answer(path: Path, gpus: str | None, row_tokens: int | None = None) -> Answer:
    """Raises ``SpecError`` where the file is not read, or kit has no figures for it."""
    return answer_of(path, asked_of(path, gpus, row_tokens))


def answer_of(path: Path, asked: Asked) -> Answer:
    """``path``: what the file is called. Raises ``SpecError``."""
    now = variant(asked, {}, StepTimer())
    others = tuple(variants(asked, now))
    best = fastest((now, *others))
    faster = best is not None and best.values and (not now.fits or best.step_s * EQUALLY_FAST < now.step_s)
    work = now.described.workload
    return Answer(
        path=path,
        asked=asked,
        now=now,
        plan=Plan(
            # its towers are counted: not the text part alone, as a plan of kit's own would say
            model=replace(work.model, source=path.name) if work.model.name in tower_parameters() else work.model,
            cluster=work.cluster,
            job=work.job,
            layout=work.layout,
            predicted=_predicted(now.described),
            decisions=(),
        ),
        findings=tuple(_findings(path, asked, now)),
        nearest=None if now.fits else nearest(others),
        fastest=best if faster else None,
    )


def _predicted(described: Described) -> Prediction:
    """``predict``'s, with what the program has on a GPU beside the workload: ``weights``, in every phase."""
    more = extra_gib(described.alone)
    stages = [
        replace(
            stage,
            components_gib={**stage.components_gib, "weights": stage.components_gib["weights"] + more},
            phases_gib={phase: gib + more for phase, gib in stage.phases_gib.items()},
        )
        for stage in peak_memory(described.alone)
    ]
    return replace(predict(described.workload), memory=tuple(stages))


def _findings(path: Path, asked: Asked, now: Variant) -> Iterator[Finding]:
    yield from unknown_keys(asked.table, asked.source)
    for note in now.described.notes:
        yield Finding("processes", "warning", path.name, None, "", note, "name as many GPUs as it starts processes")
    text = asked.source.text if asked.source.form == "shell" else ""
    linted = _linted(path, asked.source) if asked.is_here else lint_script(text, asked.source.name, "trainer")
    yield from (each for each in linted if each.rule not in ("not-read", "config-file-missing"))


def _linted(path: Path, source: Source) -> Iterator[Finding]:
    """Findings of a script and what it names, or of the DeepSpeed file that another form names."""
    named = source.entries.get("deepspeed")
    other = named_file(path, word(named.value)) if named is not None else None
    for file in [path] if path.suffix in SCRIPTS else [other] if other else []:
        yield from lint(file, reader="trainer")
