"""Put today's output of the README's example plan into the README: ``python scripts/readme.py``."""

from __future__ import annotations

import re
from pathlib import Path

import kit
from kit.report.plan_text import render

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLE = re.compile(r"(?<=\$ kit plan )(?P<model>\S+) --gpus (?P<gpus>\S+)\n.*?(?=```)", re.DOTALL)


def refreshed(text: str) -> str:
    """The text with the output below ``$ kit plan MODEL --gpus GPUS`` as it is now."""
    return EXAMPLE.sub(lambda match: _output(match["model"], match["gpus"]), text, count=1)


def _output(model: str, gpus: str) -> str:
    return f"{model} --gpus {gpus}\n{render(kit.plan(model, gpus))}\n"


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text(encoding="utf-8")), encoding="utf-8")
