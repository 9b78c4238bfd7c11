"""Coined words, fragments and long sentences, for ``make lint``: exit code 1 if there is one."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    r"[Hh]ub_?[Cc]heckpoint|HUB_JSON|[Ee]xchange_?[Cc]heckpoint": "Checkpoint",
    r"^(Teller|Unsteady|Outbox|Peers|ById)$": "RunLogger, AnomalyHandler, P2PSender, StatusAllReduce",
    r"^[Tt]win(_|$)": "scaled_down",
    r"^StateBlock$|^held_bytes$|^load_restricted$": "TensorShard, memory_bytes, load_safely",
    r"^(kept|kept_names|[Bb]ookmark|StreamPlace)$": "retained_steps, retained, StreamCursor, StreamState",
    r"^(PairWriter|pair_files|StoredBlock)$": "IndexedWriter, files_of, TensorShard",
    r"^((read_)?sealed|closed_list|Inert|run_collectively)$": "with_checksum, safe_unpickle, Opaque, on_all_ranks",
    r"^(LastResort|TooSlow|Binding|first_screen)$|last_resort": "Fallback, LowerBound, Bottleneck, summary",
}
"""Coined public name → the name to use."""
WORDS = {
    r"[Hh]ub checkpoint|hub-step|native checkpoint|[Ee]xchange checkpoint": "checkpoint",
    r"torch-native|huggingface-sdpa": "local, huggingface",
    r"operators as they come": "eager mode",
    r"matrix products?": "GEMM",
    r"\bmasters\b": "master weights",
    r"belongs? into": "belongs in",
    r"copied along|lose their end": "copy, truncate",
    r"\btravels?\b": "is sent",
    r"\b(lies|lie) (on|in|beside|where|fused|transposed)\b": "is stored",
    r"\btwin\b": "scaled-down copy",
    r"\bweighs? one\b|\bweighing one\b": "has the same weight",
    r"[Rr]ates? of products": "GEMM rate",
    r"stands? (there )?twice": "is there twice",
    r"(\}|path|directory) is no (checkpoint|goal|limit|measurement|multiple|folder|batch size)": "is not a …",
    r"told again|put in view|at its fullest|as they come and go": "reported again, peak",
    r"(drops?|ignored?) .{0,30}without a word": "silently",
}
"""Coined word in a docstring, a message or a page → the field's word."""
FRAGMENT = re.compile(r"(Of|The same|Those|That|As (the|by|above|below)|See) ")
"""Begins a docstring whose subject the reader must guess."""
LONGEST = 35
"""Words in a sentence of a page. A colon or a semicolon ends one too."""
TABLE = re.compile(r"^(\||#|    |- `).*$", re.MULTILINE)
CODE = re.compile(r"```.*?```|<!-- (?:generated|figures: begin).*?<!-- .*?-->", re.DOTALL)


def of_code(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield from ((node.lineno, f"{node.name}: {use}") for old, use in NAMES.items() if re.search(old, node.name))
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if m := FRAGMENT.match(text):
                yield node.lineno, f"a docstring begins with {m[0]!r}: say what it describes"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from (
                (node.lineno, f"{m[0]!r}: {use}") for old, use in WORDS.items() if (m := re.search(old, node.value))
            )


def of_page(path: Path) -> Iterator[tuple[int, str]]:
    if re.match(r"# .*\n\n(Generated|Written) by", whole := path.read_text(encoding="utf-8")):
        return  # a report that a program writes
    text = CODE.sub(lambda m: "\n" * m[0].count("\n"), whole)
    for old, use in WORDS.items():
        yield from ((text.count("\n", 0, m.start()) + 1, f"{m[0]!r}: {use}") for m in re.finditer(old, text))
    for sentence in re.split(r"(?<=[.!?:;])[*)]*\s|\n\s*\n|\n *(?:[-*]|\d+\.) ", TABLE.sub("\n", text)):
        if len(sentence.split()) > LONGEST:
            at = text.count("\n", 0, text.find(sentence[:40])) + 1
            yield at, f"{len(sentence.split())} words: {' '.join(sentence.split())[:70]}…"


if __name__ == "__main__":
    files = [*sorted((ROOT / "kit").rglob("*.py")), ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [(file, *hit) for file in files for hit in (of_code if file.suffix == ".py" else of_page)(file)]
    print("\n".join(f"{file.relative_to(ROOT)}:{line}: {said}" for file, line, said in found))
    sys.exit(bool(found))
