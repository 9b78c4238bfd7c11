"""Put what kit says and measured into pages: ``python scripts/readme.py``.

The output below a command, where a page shows one; the table of what is usual for an objective; figures of evidence,
which stand once, in a generated page, and are quoted by ``<!-- PAGE: ROW: COLUMN -->…<!-- -->``: the cell of a table of
docs/PAGE.md, of several figures in it the first. No line begins with the mark: it would begin a block of HTML.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from kit.specs.job_defaults import JobDefaults, defaults_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTPUT = re.compile(r"(?<=^\$ )(?P<command>kit [^\n]+)\n.*?(?=^```)", re.DOTALL | re.MULTILINE)
DEFAULTS = re.compile(r"(?<=<!-- defaults -->\n).*?\n(?=A batch has)", re.DOTALL)
FIGURE = re.compile(r"(?<=<!-- )(?P<page>[\w/-]+): (?P<row>[^:>]+): (?P<column>[^:>]+) -->[^<]*(?=<!-- -->)")
_ROWS = {
    "pretraining": ("pretrain", False),
    "SFT": ("sft", False),
    "SFT with LoRA or QLoRA": ("sft", True),
    "sequence to sequence": ("seq2seq", False),
    "DPO, KTO": ("dpo", False),
    "reward model": ("reward", False),
    "GRPO": ("grpo", False),
}


def refreshed(text: str) -> str:
    """The page as it is now. Raises LookupError for a figure that its page has not."""
    text = OUTPUT.sub(lambda match: f"{match['command']}\n{_output(match['command'])}", text)
    text = DEFAULTS.sub(lambda _: _defaults(), text, count=1)
    return FIGURE.sub(
        lambda match: f"{match['page']}: {match['row']}: {match['column']} -->{_cell(**match.groupdict())}", text
    )


def pages() -> list[Path]:
    """Those that may hold such parts."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def _defaults() -> str:
    head = "| objective | tokens | rows a step | learning rate | warm-up | epochs | as in |\n"
    head += "|---|--:|--:|--:|--:|--:|---|\n"
    rows = "".join(_row(name, defaults_of(*of)) for name, of in _ROWS.items())  # type: ignore[arg-type]
    return f"\n{head}{rows}\n"


def _cell(page: str, row: str, column: str) -> str:
    """Of the page's first table with such a column and row."""
    heads: list[str] = []
    for line in (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        heads = cells and (heads or cells)
        if cells and column in heads and cells[0] == row:
            return cells[heads.index(column)].split(",")[0]
    raise LookupError(f"docs/{page}.md has no table with a column {column!r} and a row {row!r}")


def _row(name: str, row: JobDefaults) -> str:
    warmup = f"{row.warmup_steps:.0%}" if row.warmup_steps < 1 else f"{row.warmup_steps:,.0f} steps"
    cells = (name, f"{row.seq_length:,}", f"{row.global_batch_size}", f"{row.learning_rate:g}", warmup, f"{row.epochs}")
    return f"| {' | '.join((*cells, row.source))} |\n"


def _output(command: str) -> str:
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.stderr:  # an exit code of 1 may say that something does not fit
        raise ValueError(done.stderr)
    return done.stdout


if __name__ == "__main__":
    for page in pages():
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
