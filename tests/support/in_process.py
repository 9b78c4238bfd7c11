"""The command line in this process: as ``kit WORDS``, in a fraction of the time."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import kit.cli


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def kit_main(*words: str) -> Said:
    """Runs ``kit WORDS``. No process may be started, and nothing but an exit code may come out of it."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch("sys.argv", ["kit", *words]), mock.patch.object(os, "execv", side_effect=AssertionError("started")),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        try:
            kit.cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    assert "Traceback" not in err.getvalue() + out.getvalue()
    return Said(code, out.getvalue(), err.getvalue())


def kit_refusal(words: Sequence[str]) -> str:
    """What ``kit WORDS`` writes to stderr; it ends with 2."""
    said = kit_main(*words)
    assert said.code == 2, said
    assert said.err.startswith("error: ")
    return said.err
