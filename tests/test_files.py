"""What gets its name last, and the one lock."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from kit.files import complete_directory, complete_file, locked, publish, write_text
from tests.support.calls import before
from tests.support.files import file_with
from tests.support.refusals import refusal


def test_everything_is_durable_before_it_gets_its_name(tmp_path, monkeypatch):
    """Files of a directory and the directories, then the name; a file beside it."""
    partial, directory, single = tmp_path / ".x.partial", tmp_path / "x", tmp_path / "y.json"
    file_with(partial / "deep" / "file", "text")
    synced = []
    before(
        monkeypatch,
        os,
        "fsync",
        lambda file: synced.append((os.readlink(f"/proc/self/fd/{file}"), directory.exists(), single.exists())),
    )
    publish(partial, directory)
    with complete_file(single) as file:
        file.write(b"whole")
    inside = {(str(path), False, False) for path in (partial, partial / "deep", partial / "deep" / "file")}
    assert set(synced[:3]) == inside
    temporary = str(tmp_path / ".y.json.partial")
    assert synced[3:] == [(str(tmp_path), True, False), (temporary, True, False), (str(tmp_path), True, True)]
    assert single.read_bytes() == b"whole"


def test_a_small_file_is_whole_and_is_overwritten_where_it_may_be(tmp_path, monkeypatch):
    """As is one that was written under a name of the caller's own."""
    synced, target, own = [], tmp_path / "file", file_with(tmp_path / "own", "é")
    before(monkeypatch, os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    for text in ("old", "é\n"):
        write_text(target, text)
    said = refusal(FileExistsError, write_text, target, "new", overwrite=False)
    assert (target.read_bytes(), said.endswith(f"File exists: '{target}'")) == ("é\n".encode(), True)
    assert synced == [str(tmp_path / ".file.partial"), str(tmp_path)] * 2
    publish(own, target)
    assert (target.read_bytes(), synced[4:], own.exists()) == ("é".encode(), [str(own), str(tmp_path)], False)


def _half_a_file(directory: Path) -> None:
    with complete_file(directory / "file") as file:
        file.write(b"new")
        raise EOFError


def _half_a_directory(directory: Path) -> None:
    with complete_directory(directory / "new" / "directory") as partial:
        (partial / "half").touch()
        raise EOFError


@pytest.mark.parametrize(("write", "left"), [(_half_a_file, ["file"]), (_half_a_directory, ["file", "new"])])
def test_an_error_leaves_the_old_content_and_nothing_beside_it(tmp_path, write, left):
    (tmp_path / "file").write_text("old")
    refusal(EOFError, write, tmp_path)
    assert (sorted(path.name for path in tmp_path.rglob("*")), (tmp_path / "file").read_text()) == (left, "old")


def test_a_directory_has_one_writer_and_nothing_of_a_killed_one(tmp_path):
    directory, left = tmp_path / "directory", tmp_path / ".directory.partial"
    file_with(left / "of a killed one", "")
    with complete_directory(directory) as partial:
        (partial / "file").touch()
        with pytest.raises(BlockingIOError), complete_directory(directory):
            pass
        assert not directory.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]
    assert [path.name for path in directory.iterdir()] == ["file"]
    with pytest.raises(OSError, match="not empty"), complete_directory(directory):
        pass


@pytest.mark.parametrize("end", [Path.unlink, lambda path: path.rename(path.with_name("done"))])
def test_a_lock_that_ends_while_the_next_one_opens_it_is_a_new_one(tmp_path, monkeypatch, end):
    """Who ends removes or renames the file that the next one has open: a third one must not come in beside it."""
    path, ends = tmp_path / "lock", iter([end])
    before(monkeypatch, fcntl, "flock", lambda *_: next(ends, lambda _: None)(path))
    with locked(path, wait=False), pytest.raises(BlockingIOError), locked(path, wait=False):
        pass
