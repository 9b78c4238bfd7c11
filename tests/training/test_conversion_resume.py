"""`kit convert data` on several processes, killed and resumed: the same files as one undisturbed process."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kit.errors import DataError
from kit.training.data import sources
from kit.training.data.indexed import IndexedTokens
from kit.training.data.indexed_writer import PairFormat, PairWriter
from kit.training.data.sources import Block, find_sources, json_rows
from kit.training.data.tokenise import tokenise
from kit.training.progress import progress_bar
from tests.training.disk import full_disk

ROOT = Path(__file__).parents[2]


def save_tokenizer(directory: Path, words: str = "abcde") -> Path:
    ids = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>").save_pretrained(directory)
    return directory


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 97)


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    rows = (json.dumps({"text": "a b c d e " * (k % 4) + "abcde"[k % 5]}) for k in range(first, first + count))
    path.write_text("\n".join(rows) + "\n")
    return path


def files(prefix: Path) -> dict[str, bytes]:
    """The contents of all files with this prefix, by suffix."""
    return {path.name.removeprefix(prefix.name): path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}.*")}


def interrupted(where: list[Path], tokenizer: Path, out: Path, after: int, **options: object) -> None:
    """Convert until so many blocks are written, and stop as Ctrl-C does."""
    append, calls = PairWriter.append, []

    def counted(self, block):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(block)
        append(self, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairWriter, "append", counted)
        with pytest.raises(KeyboardInterrupt):
            tokenise(where, tokenizer, out, **options)


class TestBlocks:
    TEXT = b'{"text": "\xc3\xa4"}\r\n\n  \n{"text": "a"}\n{"text": "bb bb bb bb bb bb"}\n{"text": "' + "ü".encode() * 40

    @pytest.mark.parametrize("end", [b'"}', b'"}\n', b'"}\n\n'])
    def test_any_size_of_block_reads_every_line_once(self, tmp_path, end):
        path = tmp_path / "x.jsonl"
        path.write_bytes(self.TEXT + end)
        whole = [
            (f"{path}:{n}", json.loads(line)) for n, line in enumerate(path.read_text().split("\n"), 1) if line.strip()
        ]
        size = path.stat().st_size
        for step in range(1, size + 1):
            bounds = [*range(0, size, step), size]
            found = [row for a, b in pairwise(bounds) for row in json_rows(Block(str(path), a, b))]
            assert [(str(where), row) for where, row in found] == whole

    @pytest.mark.parametrize("group", [3, 7, 100])
    def test_rows_of_parquet(self, tmp_path, group, monkeypatch):
        import pyarrow
        import pyarrow.parquet

        monkeypatch.setitem(sources._BLOCK_ROWS, ".parquet", 4)
        monkeypatch.setattr(sources, "_BATCH_ROWS", 3)
        texts = [f"{k}" for k in range(23)]
        path = tmp_path / "x.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=group)
        blocks = list(sources.blocks(find_sources(str(path))[0]))
        assert [text for block, _ in blocks for text in sources.texts(block, "text")] == texts
        assert sum(num_bytes for _, num_bytes in blocks) == path.stat().st_size
        rest = [block for block, _ in sources.blocks(find_sources(str(path))[0], blocks[1][0].stop)]
        assert rest == [block for block, _ in blocks[2:]]


@pytest.mark.nightly
def test_processes_write_what_one_writes(tokenizer, tmp_path):
    where = [write_rows(tmp_path / "1.jsonl", 40), write_rows(tmp_path / "2.jsonl", 25, first=7)]
    (tmp_path / "3.txt").write_text("e d c")
    where.append(tmp_path / "3.txt")
    for workers in (1, 2, 3):
        tokenise(where, tokenizer, tmp_path / f"{workers}" / "x", workers=workers)
    one = files(tmp_path / "1" / "x")
    assert sorted(one) == [".bin", ".idx", ".json"]
    assert one == files(tmp_path / "2" / "x") == files(tmp_path / "3" / "x")
    # transformers alone, without blocks
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    texts = [json.loads(line)["text"] for path in where[:2] for line in path.read_text().splitlines()] + ["e d c"]
    expected = [token for text in texts for token in [*loaded(text)["input_ids"], 1]]
    stream = IndexedTokens(tmp_path / "1" / "x")
    assert stream.read(0, len(stream)).tolist() == expected


@pytest.mark.nightly
def test_rows_for_fine_tuning_on_processes_and_resumed(tokenizer, tmp_path):
    rows, where = [{"prompt": "a b " * (k % 5), "completion": "c d"} for k in range(40)], tmp_path / "x.jsonl"
    where.write_text("\n".join(map(json.dumps, rows)))
    options = {"objective": "sft", "seq_length": 6}
    whole = tokenise([where], tokenizer, tmp_path / "1" / "x", workers=1, **options)
    assert whole.cut > 0 < whole.dropped
    interrupted([where], tokenizer, tmp_path / "2" / "x", 5, **options)
    resumed = tokenise([where], tokenizer, tmp_path / "2" / "x", workers=2, **options)
    assert files(tmp_path / "1" / "x") == files(tmp_path / "2" / "x")
    assert (resumed.sidecar, resumed.cut, resumed.dropped) == (whole.sidecar, whole.cut, whole.dropped)
    assert "went on after" in str(resumed)


@pytest.mark.nightly
def test_a_kill_before_any_operation_on_files(tokenizer, tmp_path):
    for k in range(2):
        write_rows(tmp_path / f"{k}.jsonl", 6, first=k)
    words = [sys.executable, "-m", "tests.training.killed_conversions", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert found["places"] > 30
    assert (found["files"], found["differ"]) == ([".bin", ".idx", ".json"], [])


_SLOW = """
import sys, time
from kit.training.data import sources
from kit.training.data.resume import ResumableWriter
from kit.training.data.tokenise import tokenise
sources.BLOCK_BYTES, append = 97, ResumableWriter.append
ResumableWriter.append = lambda *given: (time.sleep(0.05), append(*given))
tokenise(sys.argv[1:2], sys.argv[2], sys.argv[3], workers=2, commit_s=0)
"""


@pytest.mark.nightly
def test_kill_9_of_a_conversion_on_processes(tokenizer, tmp_path):
    """At three moments in turn; the processes that tokenise end too."""
    where, out = write_rows(tmp_path / "x.jsonl", 60), tmp_path / "out" / "x"
    tokenise([where], tokenizer, tmp_path / "whole" / "x", workers=1)
    state = Path(f"{out}.resume.partial")
    for position in (1, 1200):
        process = subprocess.Popen([sys.executable, "-c", _SLOW, where, tokenizer, out], cwd=ROOT)
        while not state.exists() or json.loads(state.read_text())["mark"]["position"] < position:
            assert process.poll() is None
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert not Path(f"{out}.bin").exists()
    resumed = tokenise([where], tokenizer, out)
    assert 0 < resumed.resumed_documents < resumed.sidecar.num_documents
    assert files(out) == files(tmp_path / "whole" / "x")


class TestRefusals:
    @pytest.fixture
    def half(self, tokenizer, tmp_path):
        """Two sources, of which the second is partly written."""
        where = [write_rows(tmp_path / "1.jsonl", 10), write_rows(tmp_path / "2.jsonl", 20)]
        interrupted(where, tokenizer, tmp_path / "out", 7)
        assert sorted(files(tmp_path / "out")) == [".bin.partial", ".lengths.partial", ".resume.partial"]
        return where

    def refused(self, match: str, where: list[Path], tokenizer: Path, out: Path, **options: object) -> None:
        before = files(out)
        with pytest.raises(DataError, match=match):
            tokenise(where, tokenizer, out, **options)
        assert files(out) == before

    def test_another_command(self, half, tokenizer, tmp_path):
        other, third = save_tokenizer(tmp_path / "other" / "tokenizer", "edcba"), write_rows(tmp_path / "3.jsonl", 3)
        for match, where, words, options in (
            (r"tokenizer=tokenizer \(\w+\) and this command has tokenizer \(", half, other, {}),
            ("made with text_key=text and this command has body", half, tokenizer, {"text_key": "body"}),
            ("made with objective=pretrain and this command has sft", half, tokenizer, {"objective": "sft"}),
            (r"source 2=.*2\.jsonl and this command has .*3\.jsonl", [half[0], third], tokenizer, {}),
            (r"source 3=None and this command has .*3\.jsonl", [*half, third], tokenizer, {}),
        ):
            self.refused(match, where, words, tmp_path / "out", **options)
        tokenise(half, tokenizer, tmp_path / "out")

    def test_damaged_files(self, half, tokenizer, tmp_path):
        out = tmp_path / "out"
        for suffix, damage, match in (
            (".bin.partial", lambda data: data[:-2], r"has \d+ bytes where \d+ were written"),
            (".bin.partial", lambda data: b"\x05" + data[1:], "has other tokens than were written"),
            (".resume.partial", lambda data: data[:-30], "is not the state of a conversion"),
        ):
            path = Path(f"{out}{suffix}")
            good = path.read_bytes()
            path.write_bytes(damage(good))
            self.refused(match, half, tokenizer, out)
            path.write_bytes(good)

    def test_another_process(self, half, tokenizer, tmp_path):
        writer = PairWriter(str(tmp_path / "new"), PairFormat(tokenizer="t", vocab_size=7))
        self.refused("is being written by another process", half, tokenizer, tmp_path / "new")
        writer.close(remove=True)


@pytest.mark.nightly
def test_a_bad_row_is_mended_and_its_source_read_again(tokenizer, tmp_path):
    where = [write_rows(tmp_path / "1.jsonl", 10), write_rows(tmp_path / "2.jsonl", 20)]
    tokenise(where, tokenizer, tmp_path / "whole" / "x")
    good = where[1].read_text().splitlines()
    where[1].write_text("\n".join([*good[:15], '{"text": 3}', *good[16:]]) + "\n")
    with pytest.raises(DataError, match=r"2\.jsonl:16 has no text in field 'text'; .*; \d+ documents are kept"):
        tokenise(where, tokenizer, tmp_path / "out" / "x", workers=2)
    where[1].write_text("\n".join(good) + "\n")
    assert tokenise(where, tokenizer, tmp_path / "out" / "x").resumed_documents == 10
    assert files(tmp_path / "out" / "x") == files(tmp_path / "whole" / "x")


def test_a_full_disk_is_freed_and_the_conversion_goes_on(tokenizer, tmp_path):
    where = [write_rows(tmp_path / "1.jsonl", 500)]
    tokenise(where, tokenizer, tmp_path / "whole" / "x")
    with full_disk(2000), pytest.raises(DataError, match=r"writing .* failed: .*File too large"):
        tokenise(where, tokenizer, tmp_path / "out" / "x", commit_s=0)
    assert tokenise(where, tokenizer, tmp_path / "out" / "x").resumed_documents > 0
    assert files(tmp_path / "out" / "x") == files(tmp_path / "whole" / "x")


def test_a_terminal_shows_how_much_is_done(tokenizer, tmp_path, monkeypatch):
    """And nothing else does."""
    terminal = mock.Mock(wraps=io.StringIO(), isatty=lambda: True, encoding="utf-8")
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), terminal):
        monkeypatch.setattr(sys, "stderr", stream)
        tokenise([write_rows(tmp_path / "x.jsonl", 60)], tokenizer, tmp_path / str(id(stream)))
        with progress_bar("parts", 200, done=50) as advance:
            advance(100)
        said = stream.getvalue()
        shown = [bool(re.search(what, said)) for what in (r"text.*100%", r"parts.* 75%")]
        assert (bool(said), *shown) == (stream is terminal,) * 3
