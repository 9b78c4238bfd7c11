"""Put what kit says today into pages: ``python scripts/readme.py``.

The README's example plan, and the table of docs/fine-tune.md of what is usual for an objective.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kit.specs.job_defaults import JobDefaults, defaults_of

ROOT = Path(__file__).resolve().parents[1]
README, FINE_TUNE = ROOT / "README.md", ROOT / "docs" / "fine-tune.md"
EXAMPLE = re.compile(r"(?<=\$ kit plan )(?P<model>\S+) --gpus (?P<gpus>\S+)\n.*?(?=```)", re.DOTALL)
DEFAULTS = re.compile(r"(?<=<!-- defaults -->\n).*?\n(?=A batch has)", re.DOTALL)
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
    """The text with the output below ``$ kit plan MODEL --gpus GPUS`` as it is now."""
    return EXAMPLE.sub(lambda match: _output(match["model"], match["gpus"]), text, count=1)


def with_defaults(text: str) -> str:
    """The page with the table of ``kit.specs.job_defaults``."""
    head = "| objective | tokens | rows a step | learning rate | warm-up | epochs | as in |\n"
    head += "|---|--:|--:|--:|--:|--:|---|\n"
    rows = "".join(_row(name, defaults_of(*of)) for name, of in _ROWS.items())  # type: ignore[arg-type]
    return DEFAULTS.sub(lambda _: f"\n{head}{rows}\n", text, count=1)


def _row(name: str, row: JobDefaults) -> str:
    warmup = f"{row.warmup_steps:.0%}" if row.warmup_steps < 1 else f"{row.warmup_steps:,.0f} steps"
    cells = (name, f"{row.seq_length:,}", f"{row.global_batch_size}", f"{row.learning_rate:g}", warmup, f"{row.epochs}")
    return f"| {' | '.join((*cells, row.source))} |\n"


def _output(model: str, gpus: str) -> str:
    command = [sys.executable, "-m", "kit", "plan", model, "--gpus", gpus]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"{model} --gpus {gpus}\n{done.stdout}"


if __name__ == "__main__":
    for page, refresh in ((README, refreshed), (FINE_TUNE, with_defaults)):
        page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")
