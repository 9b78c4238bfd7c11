"""The README prints what the program prints, and names only what exists."""

import re
from pathlib import Path

from scripts.readme import EXAMPLE, README, refreshed

TEXT = README.read_text(encoding="utf-8")
ROOT = README.parent


def test_the_example_plan_is_todays() -> None:
    assert EXAMPLE.search(TEXT)
    assert refreshed(TEXT) == TEXT, "run: python scripts/readme.py"


def test_every_link_leads_somewhere() -> None:
    for page in (README, *sorted((ROOT / "docs").glob("*.md"))):
        targets = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8"))
        assert [t for t in targets if not (page.parent / t).exists()] == [], page.name


def test_every_make_target_exists() -> None:
    makefile = Path(ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
