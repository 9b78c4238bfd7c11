"""accelerate's configuration as a line of ``accelerate launch`` makes it: its options come before the YAML."""

from __future__ import annotations

from typing import Any

from kit.addons.lint.commands import Command, number, plain_name
from kit.addons.lint.fix import changed
from kit.addons.lint.known_keys import known_keys
from kit.specs.strict_yaml import Document

_KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""commands/launch.py, launch_command: the first that is on decides."""


def with_line(command: Command, document: Document) -> Document:
    """The document with the options of the line, which come first; one that is only on the line has its number."""
    given = {plain_name(option): value for option, value in command.options}
    kind = next((kind for option, kind in _KINDS.items() if option in given), None)
    # commands/launch.py, _validate_launch_command: without the option not the file's either
    splits = kind is None or "use_parallelism_config" in given
    sections = ["fsdp_config", *["parallelism_config"] * splits]
    data = {key: value for key, value in document.data.items() if key != "parallelism_config" or splits}
    data |= {"distributed_type": kind} if kind is not None else {}
    known = known_keys("accelerate")
    places: dict[str, tuple[str, ...]] = {name: (name,) for name in known.tree if known.inside((name,)) is None}
    places |= {name: (section, name) for section in sections for name in known.inside((section,)) or ()}
    if data.get("distributed_type") == "DEEPSPEED":
        del places["mixed_precision"]  # beside a DeepSpeed file it is refused in the YAML alone
    data = changed(data, [(places[name], _plain(value)) for name, value in given.items() if name in places])
    return Document(document.name, data, document.lines or {(key,): command.line for key in data})


def _plain(value: str | None) -> Any:
    """A switch is true, a whole number a number."""
    return True if value is None else value if number(value) is None else number(value)
