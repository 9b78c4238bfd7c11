"""accelerate's configuration as a line of ``accelerate launch`` makes it: its options come before the YAML."""

from __future__ import annotations

from typing import Any

from kit.addons.lint.commands import Command, number, plain_name
from kit.addons.lint.known_keys import accelerate_keys
from kit.specs.strict_yaml import Document

_KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""commands/launch.py, launch_command: the first that is on decides."""


def with_line(command: Command, document: Document) -> Document:
    """The document with the options of the line, which come first; one that is only on the line has its number."""
    names = {plain_name(option): value for option, value in command.options}
    kind = next((kind for option, kind in _KINDS.items() if option in names), None)
    known, sections = accelerate_keys(), {"fsdp_config", "parallelism_config"}
    if kind is not None and "use_parallelism_config" not in names:
        sections.remove("parallelism_config")  # commands/launch.py, _validate_launch_command: not the file's either
    data = {key: value for key, value in document.data.items() if key != "parallelism_config" or key in sections}
    data |= {"distributed_type": kind} if kind is not None else {}
    for name, value in names.items():
        given: Any = True if value is None else value if number(value) is None else number(value)
        if name == "mixed_precision" and data.get("distributed_type") == "DEEPSPEED":
            continue  # beside a DeepSpeed file it is refused in the YAML alone
        if name in known.tree and not known.inside((name,)):
            data[name] = given
        for section in sections:
            if name in (known.inside((section,)) or {}):
                inner = data.get(section)
                data[section] = {**(inner if isinstance(inner, dict) else {}), name: given}
    return Document(document.name, data, document.lines or {(key,): command.line for key in data})
