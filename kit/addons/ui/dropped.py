"""A trainer's file that a visitor drops, and what ``kit plan FILE`` says of it. Its text reaches no file of this
machine: its name is a label, and nothing that it names is looked up here."""

from __future__ import annotations

import re
from pathlib import Path

from kit.addons.configs.answer import Answer, answer_of
from kit.addons.configs.reading import asked_of_text
from kit.errors import SpecError
from kit.specs.cluster import ClusterSpec
from kit.specs.text_files import MOST_BYTES, reason


def label_of(name: str) -> str:
    """What a file is called here: the last part of the name that the browser gives, on one line."""
    return re.sub(r"[^\w .@+-]", "_", re.split(r"[/\\]", name)[-1])[-100:] or "file"


def judged(label: str, data: bytes, cluster: ClusterSpec) -> Answer:
    """The answer for the bytes of a file. Raises ``SpecError``."""
    if len(data) > MOST_BYTES:
        raise SpecError(f"{label}: it has more than {MOST_BYTES:,} bytes, the most for a file of this kind")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"{label}: {reason(error)}") from None
    return answer_of(Path(label), asked_of_text(text, label, cluster))
