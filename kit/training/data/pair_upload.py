"""Uploads a finished pair: ``.bin`` and ``.idx``, then the sidecar, which says that the set is complete."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from kit.errors import DataError
from kit.object_storage import files_beside
from kit.training.checkpoint.files import write_json

_SUFFIXES = (".bin", ".idx", ".json")


class PairUpload:
    """A pair that is written to a directory of this machine and belongs to an address.

    PREFIX.uploaded.partial marks an upload that has begun, and says which files are there in which version.
    """

    def __init__(self, address: str, work: str | Path | None) -> None:
        self._files, self._name = files_beside("--out", address, DataError)
        self._address, self._work = address, Path(f"{self._name}.upload") if work is None else Path(work)
        self.prefix = str(self._work / self._name)
        """Prefix of the local files."""
        self._state = Path(f"{self.prefix}.uploaded.partial")

    def check(self) -> None:
        """Raises DataError if files are at the address that no interrupted upload of here has left, or if nothing can
        be written there."""
        for suffix in () if self._state.is_file() else _SUFFIXES:
            if self._files.find(self._name + suffix) is not None:
                raise DataError(f"{self._address}{suffix} exists; choose another prefix or remove it yourself")
        self._files.check_writable()

    def run(self) -> None:
        """Copy what is missing; compares the size of every copy. Raises DataError."""
        try:
            self._copy()
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"uploading {self.prefix} failed: {error}; check the free space and the files") from error

    def _copy(self) -> None:
        paths = {suffix: Path(self.prefix + suffix) for suffix in _SUFFIXES}
        sidecar = paths[".json"].read_text(encoding="utf-8")
        state = json.loads(self._state.read_text(encoding="utf-8")) if self._state.is_file() else {}
        done = state["done"] if state.get("sidecar") == sidecar else {}
        if self._files.read(f"{self._name}.json") not in (None, sidecar.encode()):
            raise DataError(
                f"{self._address}.json is of another set, which was written meanwhile; choose another --out"
            )
        write_json(self._state, {"sidecar": sidecar, "done": done})
        for suffix, path in paths.items():
            name = self._name + suffix
            copy = self._files.find(name)
            if copy is None or done.get(suffix) != [copy.num_bytes, copy.version]:
                copy = self._files.put(path, name, path.stat().st_size)
                done[suffix] = [copy.num_bytes, copy.version]
                write_json(self._state, {"sidecar": sidecar, "done": done})

    def remove_local(self) -> None:
        """Remove the local files, and their directory if nothing else is in it."""
        for suffix in (*_SUFFIXES, ".uploaded.partial"):
            Path(self.prefix + suffix).unlink(missing_ok=True)
        with suppress(OSError):
            self._work.rmdir()
