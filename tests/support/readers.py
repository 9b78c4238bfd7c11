"""Other programs' own parsers, in virtual environments of their own: their pins clash with kit's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path


def environment(place: Path, alone: Sequence[str] = (), whole: Sequence[str] = (), borrows: bool = True) -> Path:
    """Python of the environment ``place``, made the first time and kept. ``alone``: packages without what they need;
    ``whole``: with it. ``borrows``: packages of this environment are seen too."""
    python, done = (place / "bin" / "python").absolute(), place / "complete"
    if not done.exists():
        print(f"  installing {', '.join([*alone, *whole][:2])} … into {place}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        (site,) = place.glob("lib/python3*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n" if borrows else "", encoding="utf-8")
        for words in filter(None, (alone and ["--no-deps", *alone], whole)):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *words], check=True)
        done.touch()
    return python


def judged(python: Path, reader: str, paths: Sequence[Path], plant: bool, **variables: str) -> int:
    """Have ``reader``, a program that prints path → problem in JSON, read the files; print what it says of each, and
    how many of each name are accepted. 0 where all are, or with ``plant``, each file having a fault, none."""
    words = [str(python), "-W", "ignore", "-c", reader, *map(str, paths)]
    place = paths[0].parents[1]  # not the checkout, whose folders have names of packages
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=place, env=os.environ | variables)
    problems: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    for path, problem in problems.items():
        print(f"{Path(path).parent.name}/{Path(path).name}: {problem}")
    for name in sorted({path.name for path in paths}):
        named = [path for path in paths if path.name == name]
        print(f"{name}: {sum(str(path) not in problems for path in named)} of {len(named)} accepted")
    return int(len(problems) != (len(paths) if plant else 0))
