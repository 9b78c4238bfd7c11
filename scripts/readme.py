"""Put today's output of the README's example plan into the README: ``python scripts/readme.py``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLE = re.compile(r"(?<=\$ kit plan )(?P<model>\S+) --gpus (?P<gpus>\S+)\n.*?(?=```)", re.DOTALL)


def refreshed(text: str) -> str:
    """The text with the output below ``$ kit plan MODEL --gpus GPUS`` as it is now."""
    return EXAMPLE.sub(lambda match: _output(match["model"], match["gpus"]), text, count=1)


def _output(model: str, gpus: str) -> str:
    command = [sys.executable, "-m", "kit", "plan", model, "--gpus", gpus]
    done = subprocess.run(command, cwd=README.parent, capture_output=True, text=True, check=True)
    return f"{model} --gpus {gpus}\n{done.stdout}"


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text(encoding="utf-8")), encoding="utf-8")
