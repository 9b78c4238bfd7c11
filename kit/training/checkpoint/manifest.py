"""A manifest that carries its own hash, so that a changed number in it is noticed.

The hash is over the manifest's canonical JSON without the hash. It finds accidents: who can write the directory can
write a new one, so nothing that a manifest vouches for is trusted to run (``kit.engines.closed_list``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.errors import CheckpointError

_HASH = "sha256"
_LARGEST_BYTES = 1 << 28
"""A manifest of a million files is smaller."""


def sealed(contents: Mapping[str, Any]) -> dict[str, Any]:
    """The contents and their hash; an older hash among them is replaced."""
    bare = {key: value for key, value in contents.items() if key != _HASH}
    return {**bare, _HASH: _digest(bare)}


def read_sealed(path: Path, kind: str, version: int, unsealed: int | None = None) -> dict[str, Any]:
    """The contents of a manifest of format ``kind``. ``unsealed``: an older version, without a hash, that is read too.

    Raises OSError, ValueError where it is damaged or not what its hash says, and OtherVersionError.
    """
    if path.is_file() and path.stat().st_size > _LARGEST_BYTES:
        raise ValueError(f"it has {path.stat().st_size} bytes, more than any manifest of kit's")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(data, dict) or data.get("format") != kind:
        raise ValueError(f"format is not {kind!r}")
    found = data.get("version")
    if type(found) is not int or found not in (version, unsealed):
        raise OtherVersionError(f"{path} has version {str(found)[:20]}, this kit reads {version}")
    if _HASH in data or found == version:
        if data.get(_HASH) != sealed(data)[_HASH]:
            raise ValueError("its own hash (sha256) differs or is missing: it was changed after it was written")
        del data[_HASH]
    return data


class OtherVersionError(CheckpointError):
    """A manifest of kit's, of a version that this kit does not read."""


def _digest(bare: Mapping[str, Any]) -> str:
    canonical = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
