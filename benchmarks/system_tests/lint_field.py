"""Lint the configurations that public projects ship: the field test for false alarms.

    python -m benchmarks.system_tests.lint_field DIRECTORY…  directories with checkouts; every finding, then the counts

Takes every ``.json`` that looks like a DeepSpeed configuration, every YAML that looks like accelerate's, and every
script with a launch line.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterator
from pathlib import Path

from kit.diagnose.lint import SCRIPTS, Finding, lint
from kit.diagnose.lint.commands import commands
from kit.errors import KitError

DEEPSPEED_MARKS = ('"zero_optimization"', '"train_micro_batch_size_per_gpu"', '"train_batch_size"')


def configurations(root: Path) -> Iterator[Path]:
    """Files below a directory that either rule set is for."""
    for path in sorted(root.rglob("*")):
        if (
            path.suffix not in (".json", ".yaml", ".yml", *SCRIPTS)
            or not path.is_file()
            or path.stat().st_size > 1 << 20
        ):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix in SCRIPTS:
            if any(command.launcher != "python" for command in commands(text)):
                yield path
            continue
        marks = DEEPSPEED_MARKS if path.suffix == ".json" else ("distributed_type:",)
        if any(mark in text for mark in marks):
            yield path


def main() -> None:
    """Print every error and warning with its file, then how often each rule spoke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    spoken: collections.Counter[tuple[str, str]] = collections.Counter()
    files = clean = unreadable = 0
    for root in parser.parse_args().directories:
        for path in configurations(root):
            files += 1
            try:
                findings: tuple[Finding, ...] = lint(path)
            except KitError as error:
                unreadable += 1
                print(f"{path.relative_to(root)}: unreadable: {error}")
                continue
            clean += not any(finding.severity == "error" for finding in findings)
            spoken.update((finding.rule, finding.severity) for finding in findings)
            for finding in findings:
                if finding.severity != "note":
                    print(f"{path.relative_to(root)}: {finding}")
    print(f"\n{files} files, {clean} without an error, {unreadable} unreadable")
    for (rule, severity), number in spoken.most_common():
        print(f"{number:5d}  {severity:8s} {rule}")


if __name__ == "__main__":
    main()
