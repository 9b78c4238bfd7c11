"""Write ``kit/addons/lint/launcher_options.yaml``: the options of each launcher, and how many words each takes.

    python scripts/launcher_options.py > kit/addons/lint/launcher_options.yaml

Taken from the launchers' own parsers, caught as they begin to parse.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Callable

import yaml

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed writes a line of its own

from accelerate.commands.launch import launch_command_parser
from deepspeed.launcher import runner
from torch.distributed.run import get_args_parser


class _Caught(Exception):
    pass


def caught(parse: Callable[[], object]) -> argparse.ArgumentParser:
    """The parser that a function makes for itself."""
    made: list[argparse.ArgumentParser] = []
    former = argparse.ArgumentParser.parse_args

    def catch(self: argparse.ArgumentParser, *_: object, **__: object) -> object:
        made.append(self)
        raise _Caught

    argparse.ArgumentParser.parse_args = catch  # type: ignore[method-assign, assignment]
    try:
        parse()
    except _Caught:
        return made[0]
    finally:
        argparse.ArgumentParser.parse_args = former  # type: ignore[method-assign]
    raise SystemExit("the launcher made no parser")


def options(parser: argparse.ArgumentParser) -> dict[str, int]:
    """Option → words that follow it."""
    found = {}
    for action in parser._actions:
        words = 0 if action.nargs == 0 else 1
        found |= dict.fromkeys(action.option_strings, words)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    table = {
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "accelerate")},
        "torchrun": options(get_args_parser()),
        "deepspeed": options(caught(runner.parse_args)),
        "accelerate launch": options(launch_command_parser()),
    }
    table["versions"]["torch"] = str(table["versions"]["torch"]).split("+")[0]
    print("# Written by scripts/launcher_options.py from the installed launchers; 1: a word follows the option.")
    print(yaml.safe_dump(table, sort_keys=False), end="")
