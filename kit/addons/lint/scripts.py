"""Findings of a script and of a Kubernetes manifest: of every launch line, and of the configurations that it names."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

from kit.addons.lint import line_rules
from kit.addons.lint.commands import commands, unread
from kit.addons.lint.config import Given
from kit.addons.lint.config_files import named_file, text_of
from kit.addons.lint.finding import Finding
from kit.addons.lint.job import Job
from kit.addons.lint.kubernetes_job import pod_scripts
from kit.addons.lint.named_file_rules import Find, of_line
from kit.addons.lint.rule import findings
from kit.specs import strict_yaml

_STARTS = re.compile(r"(?<![\w./-])[\w./-]{1,200}\.(?:sh|bash)\b")


def launches(
    path: Path, text: str, given: Given, find: Find = named_file, job: Job | None = None, follow: bool = True
) -> list[Finding]:
    """Findings of every launch line in a script's text, and of the configurations that it names; of the scripts beside
    it that it starts (``follow``), if it has no launch of its own. ``find`` finds them. ``job``: what runs the script,
    where it does not say so."""
    job = job or Job.of_batch(text)
    found = list(commands(text, path.name, job))
    started = dict.fromkeys(path.parent / name for name in _STARTS.findall(text)) if follow and not found else ()
    if others := [other for other in started if other.is_file() and other.name != path.name]:
        return [
            finding for other in others[:20] for finding in launches(other, text_of(other), given, find, follow=False)
        ]
    of_lines = ([*findings("launch", command), *of_line(path, command, given, find)] for command in found)
    said = itertools.chain(
        unread(text, path.name, len(found)),
        line_rules.broken_line(text, found),
        line_rules.unset_variables(text, found, job.variables),
        *of_lines,
    )
    return list({str(finding): finding for finding in said}.values())


def kubernetes(path: Path, given: Given) -> list[Finding]:
    """Findings of the launch lines in a manifest, at the line of the file that has the same text."""
    text = text_of(path)
    numbers = {line.strip(): number for number, line in reversed([*enumerate(text.splitlines(), start=1)])}
    pods = [
        pod
        for part in re.split(r"(?m)^---.*$", text)
        if part.strip()
        for pod in pod_scripts(strict_yaml.parse_text(part, path.name).data)
    ]
    of_each = [(script.splitlines(), launches(path, script, given, job=job)) for script, job in pods]
    read = [(lines, found) for lines, found in of_each if not any(map(_is_silence, found))]
    if not read:
        why = "no container of it starts torchrun, deepspeed, accelerate launch or a Python script: nothing was read"
        return [Finding("not-read", "warning", path.name, None, "", why, "name the script that it starts")]
    return [
        replace(finding, line=numbers.get(lines[finding.line - 1].strip()))
        if finding.file == path.name and finding.line
        else finding
        for lines, found in read
        for finding in found
    ]


def _is_silence(finding: Finding) -> bool:
    """Whether nothing in a script was read."""
    return (finding.rule, finding.severity) == ("not-read", "warning")
