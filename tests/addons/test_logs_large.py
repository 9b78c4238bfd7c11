"""The doctor reads logs of any size: in time that grows with the size, in memory that does not, and sees the same."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.addons.doctor.logs import Cause, diagnose
from kit.addons.doctor.logs.curves import LOSS, Curves
from kit.addons.doctor.logs.log_lines import LINE_BYTES, Line, Piece
from kit.addons.doctor.logs.patterns import PATTERNS, Pattern
from kit.addons.doctor.logs.scan import _WORDS, Scan
from tests.planning.shapes import by_hand
from tests.support.files import file_with

LOGS = sorted((Path(__file__).parent / "logs").glob("*.log"))
MB = 1_000_000
ORDINARY = (
    "step {i}/9000000  loss 3.{i} norm 1.2  tokens/s 12,000  step_time 0.31 s  peak 3.1 GiB\n",
    "[rank{r}]: 2026-11-22 20:15:00 INFO train.py:300 step {i} loss 3.{i} memory 71.2 GiB\n",
    "2026-11-22 20:15:00,123 [INFO] [logging.py:96:log_dist] [Rank 0] samples seen {i}, tokens {i}\n",
)


def write(path: Path, size: int, line: str, end: str = "") -> Path:
    """A log of about this size that ends in these words."""
    block = "".join(line.format(i=i, r=i % 8) for i in range(1000, 3000)).encode()
    with path.open("wb") as stream:
        for _ in range(size // len(block)):
            stream.write(block)
        stream.write(end.encode())
    return path


def seconds(path: Path) -> float:
    """Of the processor: other programs on this machine do not count."""
    begin = time.process_time()
    diagnose([path])
    return time.process_time() - begin


PIECE = Piece(b"one\rtwo\rthree\nfour", 0, 18, 1, "all.log", None)
LONG = replace(PIECE, text=b"x" * (3 * LINE_BYTES))
AFTER_MUCH = replace(PIECE, text=b"[rank5]: old\n[rank3]: " + b"x" * 200 + b" step 4 loss 2.0, norm 1\n")
test_value = by_hand([
    ("a line of a bar", lambda: PIECE.span(5), (4, 7)),
    ("a line behind a bar", lambda: PIECE.span(9), (8, 13)),
    ("the last line", lambda: PIECE.span(16), (14, 18)),
    ("what is around", lambda: [each.text for each in PIECE.before(16, 2)], ["three", "two"]),
    ("no more than is around", lambda: len(
        replace(PIECE, text=b"first\n" + LONG.text + b"\nend").before(len(LONG.text) + 8, 2)), 1),
    ("around a match", lambda: AFTER_MUCH.line_at(next(LOSS.finditer(AFTER_MUCH.text)), 7),
     Line("x" * 99 + " step 4 loss 2.0", 3, "all.log", 7)),
    ("a long line is cut", lambda: LONG.span(LINE_BYTES + 9), (9, 2 * LINE_BYTES + 9)),
])  # fmt: skip


@pytest.mark.slow
@pytest.mark.everyday("kit")
@pytest.mark.parametrize("line", ORDINARY, ids=["kit", "ranks", "deepspeed"])
def test_time_grows_with_the_size(line: str, tmp_path: Path) -> None:
    """Ten times the log takes about ten times as long; the slowest of machines reads several MB a second."""
    small, large = (seconds(write(tmp_path / f"{size}.log", size * MB, line)) for size in (2, 20))
    assert large < 15 * small
    assert large < 20 / 4


def test_of_a_large_log_losses_are_read_in_a_part_of_every_piece(tmp_path: Path) -> None:
    """At most 4 MiB of it, evenly spread: half of each piece of 5 MiB."""
    line = "step {i}  loss 0.0 and nothing else of any interest here\n"
    scan = Scan()
    scan.read(write(tmp_path / "all.log", 5 << 20, line))
    assert 2 << 20 < scan.curves.losses[None].zeros * len(line.format(i=1000)) < 3 << 20


def test_of_very_many_steps_every_other_is_kept() -> None:
    """4,096 of them: times by their order, losses that no later one went below by theirs."""
    curves, line = Curves(), Line("", 0, "all.log", 1)
    for step in range(1, 4099):
        curves.add_time(step, step, line)
        curves.add_loss(step, step, line)
    assert curves.times[0] == [*range(2, 4097, 2), 4098]
    assert [loss for loss, *_ in curves.losses[0].above] == [*range(1, 4098, 2)]


MEMORY = """
import resource, sys
from pathlib import Path
from kit.addons.doctor.logs import Cause, diagnose
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print([cause.cause for cause in diagnose([Path(sys.argv[1])])])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.everyday("ranks")
@pytest.mark.parametrize(
    "line", [ORDINARY[1], "x" * 1000, "\rEpoch 1: {i}it [00:10, loss=0.53]"], ids=["ranks", "endless", "returns"]
)
def test_memory_stays_flat(line: str, tmp_path: Path) -> None:
    """Also for one endless line; what went wrong stands at the end."""
    path = write(tmp_path / "all.log", 20 * MB, line, "OSError: [Errno 28] No space left on device\n")
    causes, grown_mib = subprocess.check_output([sys.executable, "-c", MEMORY, str(path)], text=True).splitlines()
    assert causes == "['disk-full']"
    assert float(grown_mib) < 40


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.cause)
def test_no_line_that_a_pattern_matches_is_passed_over(pattern: Pattern) -> None:
    """The words that a log is searched for are in every line that the pattern matches, whatever it is."""

    @settings(max_examples=8, deadline=None, database=None)
    @given(st.from_regex(pattern.regex, alphabet=st.characters(codec="ascii", exclude_characters="\r\n")))
    def shown(text: str) -> None:
        if pattern.regex.search(text):
            assert pattern.shows(text), text
            raw = text.encode()
            assert any(words.search(raw) for words in _WORDS), text

    shown()


@pytest.mark.everyday("mismatched", "saving", "kit-run", "diverges", "threads")
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_behind_much_ordinary_output_says_the_same(path: Path, tmp_path: Path) -> None:
    """Pieces end somewhere in the middle of what matters: tracebacks, tables, phases."""
    text = path.read_bytes()
    alone = diagnose([path])
    for before in (1 << 20, (1 << 20) + (1 << 17) - 700):
        assert told(
            diagnose([file_with(tmp_path / path.name, b"nothing to see here\n" * (before // 20) + text)])
        ) == told(alone)


def told(causes: tuple[Cause, ...]) -> list[tuple[object, ...]]:
    """What is said of a log, without the numbers of its lines."""
    return [
        (c.cause, c.ranks, re.sub(r"\.log:\d+", "", c.meaning), c.fix, c.phase, c.step, c.frames, c.evidence)
        for c in causes
    ]


WORDS = (
    "Traceback (most recent call last)", ":", "\n", "\r", " ", '  File "a.py", line 3, in f', "KeyError: 'x'",
    "[rank3]: ", "Root Cause (first observed failure):\n", "  rank      : 9 (local_rank: 9)\n", "CUDA out of memory",
    "exitcode: -9", "step 99999999999999999999 loss 1e999", "step 1 loss 0.1", "During handling of the above exception",
    "\x00", "é", "Tried to allocate 1.0 GiB and 9.0 GiB is reserved by PyTorch but unallocated", "[rank99999999]",
    "loss nan",
)  # fmt: skip


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(WORDS), max_size=30), st.binary(max_size=40))
def test_whatever_stands_in_a_log_gets_an_answer(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], rest: bytes
) -> None:
    path = file_with(tmp_path_factory.mktemp("fuzz") / "rank_1.log", "".join(words).encode() + rest)
    assert all(map(str, diagnose([path])))
