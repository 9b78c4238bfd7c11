"""Hostile input, once for all: values, text, documents and files that no reader expects, and what an answer must be.

===============================  =====================================================================
``fuzz(examples)``               settings of hypothesis for a test of hostile input
``VALUES``, ``TEXTS``            any value of JSON or YAML; text of pieces that mean something to programs
``of(words)``                    text of a program's own words with such pieces in between
``filled(keys)``                 a mapping of keys that a reader knows, any value behind each
``mutated(tree)``                (place, tree): a good document with one value changed, added or gone
``damaged(tree, form)``          bytes of a file: a good document with other values, raw text or cut
``RAW``, ``WHOLE``, ``SPECIAL``  raw text by format; whole files; what is at a path and is no file
``answer(read, path)``           "answered" or "refused", in bounded time, memory and printable lines
===============================  =====================================================================
"""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kit.errors import KitError
from kit.specs import strict_yaml

SECONDS, HANGS_AFTER, GROWTH_KIB = 2.0, 60, 500 << 10
"""Of the processor; of the clock, which another program may use; of memory."""
LONGEST, MOST_LINES = 20_000, 60
HERE = "@@here@@"
"""Stands where raw text is put into a file."""
Place = tuple[str | int, ...]

NO_COUNT: list[Any] = [
    -1, -(2**63), 2**63, 10**30, 10**63, 10**400, 0.5, -0.5, 4.0, 1e-300, 5e-324, 1e30, 1e308, -1e308, float("inf"),
    float("-inf"), float("nan"), "0", "4", "1e999", "nan", "inf", "-inf", True, False, None, [], {}, [4],
]  # fmt: skip
"""Where a whole number of 64 bits is meant that is not negative."""
NO_TEXT: list[Any] = [None, True, 0, 4, 0.5, [], {}, [None], {"x": 1}]
"""Where text is meant."""
VALUES: st.SearchStrategy[Any] = st.sampled_from(NO_COUNT) | st.sampled_from(NO_TEXT) | st.sampled_from(
    [
        0, 1, 2, 3, 7, 2**31, 2**32,
        "", " ", "auto", "none", "x", "cpu", "nvme", "NO", "0,1", "8xH100", "9999999999xH100", "13B", "9" * 400 + "B",
        "../x", "~nobody/x", "~", "/", ".", "a\0b", "a\nb", "\ud800", "\u2028", "x" * 300, "x/" * 3000, "é" * 5000,
        [[]], [0, 1], [-1], ["full_attention", 1], ["sliding_attention"] * 2, {"": {}}, {"rope_type": []},
        {"rope_type": "linear", "factor": "x"}, {"name": "x"},
    ]
) | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=1)  # fmt: skip

CONTROLS = [*map(chr, range(32)), *map(chr, range(127, 160)), "\u2028", "\u2029"]
"""Characters that end a line or move a cursor: refused wherever text is read."""
CANARY = ("x\ntouch CANARY", "$(touch CANARY)", "`touch CANARY`", "'; touch CANARY; '", "--flag", "x\u2028y",
          "#SBATCH --x")  # fmt: skip
"""A file of this name is made by an injected command alone."""
PIECES = [
    "$(touch CANARY)", "`touch CANARY`", ";touch CANARY;", "';", '"; touch CANARY;"', "'; touch CANARY; '",
    "${X:-$(touch CANARY)}", "|touch CANARY", ">CANARY", "&&", "#SBATCH --x", "#", "%s", "%j", "\\", "\\n", '\\"',
    "'", '"', "--flag", "-", "=", ":", ",", "@", "!", "?", "*", "&", " ", "{", "}", "[", "]", "---", "...", "<b>",
    "[x](y)", "|", "**", "1e5", "1e-5", "0x1F", "null", "true", "on", "x", "7", "/a/b", "é", "模型", "😀", "\u00a0",
    "\ntouch CANARY\n", "\r#SBATCH --x\r", "\u2028", "\ufeff",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)

RAW = {
    ".json": [
        "9" * 5000, "-" + "9" * 4000, "0." + "1" * 5000, "1e999", "NaN", "-Infinity", '{"a": 1, "a": 2}', '"\\ud800"',
        '"\\u0000"', "'x'", "", "{", "// x", "tru", "[" * 70 + "]" * 70, "[" * 900 + "1" + "]" * 900,
        '{"a":' * 950 + "1" + "}" * 950, "[" * 100_000, '{"a":' * 100_000, "[" + "[]," * 100_000 + "[]]",
        "{" + ",".join(f'"k{i}": {i}' for i in range(20_000)) + "}", '"' + "x" * 1_000_000 + '"', "1" * 1_000_000,
        '"' + "\\n" * 300_000 + '"', " " * 2_000_000 + "1", "\n" * 900_000 + "1",
    ],
    ".yaml": [
        "9" * 5000, "0x" + "f" * 5000, "1:" * 3000 + "1", ".inf", "-.inf", ".nan", "1e999", "2024-01-01",
        "2024-01-01 10:00:00", "!!set {a, b}", "!!binary aGVsbG8=", "!!omap [a: 1]", "!!int x", "!!bool x",
        "!!float x", "!!timestamp x", "!!null x", "!!python/object/apply:os.system [id]", "!x y", "{? [a] : 1}",
        "{? {a: 1} : 1}", "{? !!binary aGk= : 1}", "{1: x, null: y, 1.5: z}", "{true: x}", "=", "<<", "{<<: {a: 1}}",
        "{<<: 1}", "{<<: [1]}", "*nothing", "&a [*a, *a]", "&a {x: *a}", '"a\\0b"', "'", '"', "%", "@", "`", "\t",
        "- ", "? ", ": ", "|", ">", "--- 1", "...", "[" * 100_000, "{a: " * 50_000, "- " * 20_000, "? " * 20_000,
        "[" * 70 + "1" + "]" * 70, "{a: " * 900 + "1" + "}" * 900, "[" + "[]," * 200_000 + "]",
        "{" + ", ".join(f"k{i}: {i}" for i in range(40_000)) + "}", "x" * 1_000_000, "[" + "1," * 300_000 + "]",
        "[&a0 [x,x], " + ", ".join(f"&a{i} [" + f"*a{i - 1}," * 9 + "]" for i in range(1, 12)) + "]",
        "{a0: &a0 {x: 1}, " + ", ".join(f"a{i}: &a{i} {{<<: [" + f"*a{i - 1}," * 9 + "]}" for i in range(1, 9)) + "}",
    ],
    "": [
        "9" * 5000, "\\", "'", '"', "$((", "`", "\t" * 1000, "\\\n" * 2000, "x" * 1_000_000, "\n" * 200_000,
        "--a=" * 5000,
        "torchrun --nproc_per_node " + "9" * 5000 + " t.py", "#SBATCH --ntasks=" + "9" * 5000,
        "accelerate launch --num_processes -1 --config_file /dev/zero t.py",
        "deepspeed --num_gpus 1e999 t.py --deepspeed .",
        '{"step": ' + "[" * 5000, '{"step": 1e999}', '{"step": "1", "loss": {}}', '{"step": 1}',
        '{"step": -1, "loss": null}',
        '{"step": 1, "loss": "x", "grad_norm": []}', "[1]", "null", '{"step": true, "loss": 1, "grad_norm": 1}',
        "Traceback (most recent call last):\n" * 300, '  File "' + "x" * 5000, "[rank9999999]: RuntimeError: ",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate " + "9" * 400 + " GiB",
    ],
}  # fmt: skip
"""By suffix (``""``: lines of text): what PyYAML, ``json`` or a program has a tag, a limit or a repetition for."""
WHOLE: list[bytes] = [
    b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf{}", b"null", b"[]", b"{}", b"1", b"\x80" * 100, b"a", b"{}\n{}",
    b"--- a\n--- b",
    b"PK\x03\x04", b"\x1f\x8b\x08" + b"\0" * 100, b"\x80\x04\x95cos\nsystem\n", b"x" * 1_000_000, b"\0" * 1_000_000,
    b"\n" * 1_000_000, "".join(f"k{i}: {i}\n" for i in range(60_000)).encode(),
    ("{" + ",".join(f'"k{i}":{i}' for i in range(60_000)) + "}").encode(),
]  # fmt: skip


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 33)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "directory": Path.mkdir,
    "8 GiB of nothing": _sparse,
    "link to itself": lambda path: path.symlink_to(path),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "missing": lambda path: None,
}


def fuzz(examples: int) -> settings:
    """``examples`` inputs: the same ones each day, others each night (the profiles of tests/conftest.py)."""
    return settings(
        max_examples=examples, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def of(words: Iterable[str], most: int = 12, between: str = "") -> st.SearchStrategy[str]:
    """Text of a program's own words, with pieces that mean something to others."""
    return st.lists(st.sampled_from([*words]) | TEXTS, max_size=most).map(between.join)


def filled(keys: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the keys that a reader knows, with anything behind them; keys below a key are a mapping of their own."""

    def below(inner: Any) -> st.SearchStrategy[Any]:
        return VALUES | filled(inner) if isinstance(inner, Mapping) and inner else VALUES

    chosen = st.lists(st.sampled_from(sorted(keys)), min_size=1, max_size=6, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: below(keys[name]) for name in names}))


def places(tree: Any, place: Place = ()) -> list[Place]:
    """Every value of a document, by its keys."""
    inner = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    return [place] * bool(place) + [found for key, value in inner for found in places(value, (*place, key))]


def changed(tree: Any, place: Place, value: Any) -> Any:
    """A copy with another value at a place, or a new one; ``...`` takes it away."""
    whole = inner = copy.deepcopy(tree)
    for step in place[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return whole


def spoil(file: Path, place: Place, value: Any, seal: Callable[[Any], Any] = dict) -> None:
    """A JSON file with another value at a place; ``seal`` gives it the hash that its author would write."""
    file.write_text(json.dumps(seal(changed(json.loads(file.read_text()), place, value))))


@st.composite
def mutated(draw: st.DrawFn, tree: Any, values: st.SearchStrategy[Any] = VALUES) -> tuple[Place, Any]:
    """A good document with one value changed, added or taken away, and where."""
    place = draw(st.sampled_from([each for each in places(tree) if isinstance(each[-1], str)]))
    more = draw(st.sampled_from(["", "", "", "x"]))
    place = (*place[:-1], f"{place[-1]}{more}")
    return place, changed(tree, place, draw(values if more else values | st.just(...)))


def spelt(tree: Any, form: str) -> bytes:
    """A document as the file's bytes; ``form`` is ``.json``, ``.yaml`` or ``""`` for text."""
    text = json.dumps(tree) if form == ".json" else strict_yaml.dump(tree) if form == ".yaml" else str(tree)
    return text.encode(errors="surrogatepass")


@st.composite
def damaged(draw: st.DrawFn, good: Any, form: str, seal: Callable[[Any], Any] = lambda tree: tree) -> bytes:
    """A file's bytes: a good document with other values or raw text in some places (of a text: at ``HERE``), or cut, or
    something else altogether. ``seal`` puts a hash in the file right, as who means harm would; half of the time."""
    kind = draw(st.sampled_from(["values", "values", "values", "raw", "whole", "bytes", "cut"]))
    if kind in ("whole", "bytes"):
        return draw(st.sampled_from(WHOLE) if kind == "whole" else st.binary(max_size=200))
    raw = draw(st.sampled_from(RAW[form])).encode()
    if form:
        good = json.loads(json.dumps(good))
        for _ in range(draw(st.integers(1, 3))):
            _, after = draw(mutated(good, st.just(HERE) if kind == "raw" else VALUES))
            good = after or good
        good = seal(good) if kind == "values" and draw(st.booleans()) else good
    encoded = spelt(good, form)
    if kind == "raw" or not form:
        for quoted in (f'"{HERE}"', f"'{HERE}'", HERE):
            encoded = encoded.replace(quoted.encode(), raw)
    return encoded[: draw(st.integers(0, len(encoded)))] if kind == "cut" else encoded


class Hang(BaseException):
    """A reader that did not answer; no ``except Exception`` catches it."""


def _hangs(signal_number: int, frame: FrameType | None) -> None:
    raise Hang


def answer(read: Callable[[Path], object], path: Path, seconds: float = SECONDS) -> str:
    """``answered`` or ``refused``; AssertionError where the reader took too long, too much, or raised anything else."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGS_AFTER)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 30), limits[1]))  # a MemoryError, and not the end of all
    started, said = time.process_time(), ""
    try:
        read(path)
    except KitError as error:
        said = str(error)
        assert said, "refused without a word"
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    took = time.process_time() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert took < seconds, f"{took:.1f} s"
    assert grown < GROWTH_KIB, f"{grown >> 10} MB"
    assert len(said) < LONGEST, said[:3000]
    assert len(said.splitlines()) < MOST_LINES, said[:3000]
    assert all(line.isprintable() for line in said.splitlines()), ascii(said[:3000])
    return "refused" if said else "answered"
