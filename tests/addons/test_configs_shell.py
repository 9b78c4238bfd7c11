"""The words of scripts, and the flags of the command that trains."""

from __future__ import annotations

import pytest

from kit.addons.configs.entries import UNRESOLVED
from kit.addons.configs.reading import source_of
from kit.addons.lint.shell_words import shell_lines

WORDS = {
    "run 'b c' \"d $X\" e\\ f": ["run", "b c", "d 1", "e f"],
    "run --x=$X ${Y:-7} ${Z:=q} ${X:-9} $UNSET": ["run", "--x=1", "7", "q", "1", None],
    'run "" ${Z:-a b;} "${Z:-a $X}"': ["run", "", "a", "b;", "a 1"],
    "run $((X + 15)) $(expr 16 / $X) $(nproc) `date`": ["run", "16", "16", None, None],
    'A=(--a 1\n --b "2 3" # why\n)\nrun "${A[@]}" ${A[*]} end': [
        "run",
        "--a",
        "1",
        "--b",
        "2 3",
        "--a",
        "1",
        "--b",
        "2",
        "3",
        "end",
    ],
    'A=(1); A+=(2)\nrun "${A[@]}"': ["run", "1", "2"],
    'A=(1)\nif $Q; then A+=(--a 2); else A+=(--a 3); fi\nA+=(--b)\nrun "${A[@]}"': ["run", "1", "--a", "2", "--b"],
    'O="--a 1 --b"\nrun $O "$O"': ["run", "--a", "1", "--b", "--a 1 --b"],
    "run `date` b `date +%s`/c d": ["run", None, "b", None, "d"],
    "run a > log.txt 2>&1": ["run", "a"],
    "run a 2>&1 b > c d >& e f": ["run", "a", "b", "d", "f"],
    "run a \\\n  b # c \\\n": ["run", "a", "b"],
    'if [ -z "$Q" ]; then Q=2; fi\nrun $Q': ["run", "2"],
    "Q=1\nif true; then Q=2; fi\nrun $Q": ["run", None],
    "for Q in 1 2; do\nrun $Q\ndone": ["run", None],
    "cat <<EOF\nrun wrong\nEOF\nrun right": ["run", "right"],
    "Q=3 run $Q": ["run", None],
    "Q=1 && Q=1\nX=1 || Q=2\nrun $Q": ["run", None],
    "run '$X' \"\\$X\"": ["run", "$X", "$X"],
    "read -r -d '' V <<EOF\na \\\n  b\nEOF\nrun $V": ["run", "a", "b"],
    'run "$@" a': ["run", "$@", "a"],
    "export Q=5\nrun x$Q": ["run", "x5"],
}


@pytest.mark.parametrize("script", WORDS)
def test_words_of_a_shell(script: str) -> None:
    (found,) = [line for line in shell_lines(f"X=1\n{script}\n") if line.words and line.words[0].value == "run"]
    assert [word.value for word in found.words] == WORDS[script]


def test_flags_of_a_command() -> None:
    text = "X=1\nswift sft --model $M --a 1 2 --flag --b=3 --four-bit true --c '' --system 'x=y' +e.f=6 ++g=7\n"
    source, _ = source_of(text, "s.sh")
    assert {key: entry.value for key, entry in source.entries.items() if not key.startswith("env.")} == {
        "model": UNRESOLVED, "a": ["1", "2"], "flag": True, "b": "3", "four_bit": "true", "c": "", "system": "x=y",
        "e.f": "6", "g": "7",
    }  # fmt: skip
    b = source.entries["b"]
    assert (text[b.start : b.end], b.line, source.entries["env.X"].value) == ("3", 2, "1")
