"""One mutant: a single change of the source, what a user would have met, and the tests that are to notice it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent


class MutantError(Exception):
    """A row that cannot be planted."""


@dataclass(frozen=True)
class Mutant:
    """A row of ``hand.yaml`` or ``tool.yaml``; the file's name says who thought of it."""

    name: str
    file: str
    """Path in the repository."""
    old: str
    """Text that the file has once."""
    new: str
    met: str
    """What a user would have met."""
    tests: str
    """Arguments of pytest: the cheapest tests that run the line."""
    origin: str
    """``hand`` or ``tool``."""
    equivalent: str = ""
    """Why nothing changes for anyone; such a row is not run, and another stands in its place."""

    @property
    def package(self) -> str:
        """``kit/engines``, ``kit/cost``, …: rows of the table."""
        return "/".join(self.file.split("/")[:2])

    def plant(self, tree: Path) -> None:
        """Change the file in ``tree``. Raises MutantError where the old text does not occur exactly once."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (found := text.count(self.old)) != 1 or self.old == self.new:
            raise MutantError(
                f"{self.origin} mutant {self.name}: its old text occurs {found} times in {self.file} and must occur "
                f"once, and differ from the new one; write it for today's source:\n{self.old}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutants() -> Iterator[Mutant]:
    """All rows, in the order of the files. Raises MutantError for a name that stands twice."""
    seen: set[str] = set()
    for path in sorted(HERE.glob("*.yaml")):
        for row in yaml.safe_load(path.read_text(encoding="utf-8")) or ():
            mutant = Mutant(**row, origin=path.stem)
            if mutant.name in seen:
                raise MutantError(f"two mutants are called {mutant.name}; rename one in {path.name}")
            seen.add(mutant.name)
            yield mutant
