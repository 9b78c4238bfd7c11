"""The sdist and its wheel in empty environments, planner alone: ``python -m tests.system.wheel``.

Builds the sdist, and the wheel out of the sdist. Installs the wheel alone into a fresh environment of every
interpreter, and compares what ``kit`` answers there with what it answers in the checkout. ``--python`` names the
interpreters; those that do not start are named and left out, and at least one must start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.support import ROOT, program

PYTHONS = ["python3.11", "python3.12", "python3.13"]
ANSWERS = [
    ["plan", "llama-3.1-8b", "--gpus", "8xH100"],
    ["memory", "llama-3-70b", "--gpus", "64xH100", "layout.tp=8"],
    ["recipes", "list"],
]


def main(python: Annotated[list[str], typer.Option(help="an interpreter; repeatable")] = PYTHONS) -> int:
    """0 where every interpreter that is there answers as the checkout does."""
    pythons = [name for name in python if _starts(name)]
    print("not here:", ", ".join(name for name in python if name not in pythons) or "none")
    if not pythons:
        print("error: no interpreter starts; name one with --python", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kit-wheel-") as scratch:
        place = Path(scratch)
        builder = _environment(sys.executable, place / "builder")
        _run(builder, "-m", "pip", "install", "--quiet", "build")
        _run(builder, "-m", "build", "--outdir", str(place / "dist"), str(ROOT))
        (wheel,) = (place / "dist").glob("*.whl")
        expected = [json.loads(_run(sys.executable, "-m", "kit", *words, "--json", cwd=ROOT)) for words in ANSWERS]
        for number, name in enumerate(pythons):
            there = _environment(name, place / f"environment{number}")
            _run(there, "-m", "pip", "install", "--quiet", str(wheel))
            assert _run(there, "-c", "import importlib.util as u; print(u.find_spec('torch'))") == "None\n"
            found = [json.loads(_run(there, "-m", "kit", *words, "--json", cwd=place)) for words in ANSWERS]
            assert found == expected, f"{name}: the wheel answers otherwise than the checkout"
            run = place / f"run{number}"
            _run(there, "-m", "kit", "recipes", "copy", "llama-1b-pretrain-amp-1xh100", str(run), cwd=place)
            assert (run / "run" / "launch.sh").is_file()
            packages, version = _run(there, "-m", "pip", "freeze").splitlines(), _run(there, "-m", "kit", "--version")
            told = f"{version.strip()}, {wheel.stat().st_size / 1e6:.1f} MB, {len(packages)} packages"
            print(f"{name}: {told}; {len(ANSWERS)} answers as the checkout's")
    return 0


def _starts(name: str) -> bool:
    try:
        return subprocess.run([name, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _environment(python: str, place: Path) -> str:
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    return str(place / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def _run(python: str, *words: str, cwd: Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONUTF8": "1"}
    done = subprocess.run(
        [python, *words], cwd=cwd, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\n{' '.join(words)}: exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    program.run(main)
