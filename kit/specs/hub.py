"""A model's config.json by its id on the Hugging Face hub: from the library's cache on this disk, or fetched.

huggingface_hub does the work: HF_ENDPOINT, HF_HUB_OFFLINE, tokens and proxies are as that library has them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.errors import KitError, SpecError
from kit.extras import install
from kit.specs.text import escaped, shown

_ID = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_]([\w.-]*[\w])?", re.ASCII)
"""ORG/NAME (huggingface_hub/utils/_validators.py, validate_repo_id)."""
_MOST_CHARACTERS = 96
_PAGES = ("data", "datasets", "models", "spaces")
"""Paths of the hub's own pages, and folders of most recipes: no organisation has these names."""


def is_id(name: str) -> bool:
    """Whether a name has the form of a hub id, ORG/NAME."""
    return len(name) <= _MOST_CHARACTERS and _ID.fullmatch(name) is not None and name.split("/")[0] not in _PAGES


def is_elsewhere(name: str, base: Path = Path()) -> bool:
    """Whether a name is a hub id, and not a path: neither it nor its first folder is there, relative to ``base``."""
    return is_id(name) and not os.path.lexists(base / name.split("/")[0])


def config_file(name: str, most_bytes: int) -> Path:
    """The config.json of hub id ``name``. Says on stderr that it is fetched, where it is not in the cache.

    Raises ``SpecError`` if it cannot be had, or is longer than ``most_bytes``.
    """
    known = _cached(name)
    if known is not None:
        return known
    with explained(name, "model"):
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

        url = hf_hub_url(name, "config.json", endpoint=constants.ENDPOINT)
        if not constants.HF_HUB_OFFLINE:
            print(f"{name}: fetching config.json from {constants.ENDPOINT}", file=sys.stderr)
        size = get_hf_file_metadata(url, token=None).size or 0
        if size > most_bytes:
            raise SpecError(f"config.json of {name} has {size:,} bytes, and no model's has {most_bytes:,}; it is none")
        return Path(hf_hub_download(name, "config.json"))


def _cached(name: str) -> Path | None:
    """config.json in the cache: of the revision that main was last, else of the newest snapshot that has it.

    Layout: huggingface.co/docs/huggingface_hub/guides/manage-cache. Needs no huggingface_hub.
    """
    model = cache() / f"models--{name.replace('/', '--')}"
    snapshots = sorted(model.glob("snapshots/*/config.json"), key=os.path.getmtime, reverse=True)
    try:
        main = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        main = ""
    return next((file for file in snapshots if file.parent.name == main), next(iter(snapshots), None))


def cache() -> Path:
    """The library's cache directory (huggingface_hub/constants.py)."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{home}/huggingface"
    found = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(found)).expanduser()


def id_of(directory: Path) -> str:
    """The hub id of a snapshot in the cache; of another directory its path."""
    model = directory.parent.parent.name
    of_cache = directory.parent.name == "snapshots" and model.startswith("models--")
    return model.removeprefix("models--").replace("--", "/") if of_cache else str(directory)


@contextmanager
def explained(name: str, kind: str) -> Iterator[None]:
    """Turns what the library raises for hub id ``name`` into ``SpecError``. ``kind``: model or data set."""
    try:
        from huggingface_hub import constants, errors
    except ModuleNotFoundError:
        raise SpecError(
            f"{kind} {name} is not on this disk, and kit asks the hub by huggingface_hub, which is not installed: "
            f"{install('hub')}"
        ) from None
    where = constants.ENDPOINT
    page = f"{where}/{'' if kind == 'model' else 'datasets/'}{name}"
    log_in = "run hf auth login, or set HF_TOKEN"
    try:
        yield
    except (KitError, ModuleNotFoundError):
        raise
    except errors.GatedRepoError:
        raise SpecError(f"{kind} {name} is gated: accept its licence at {page}; then {log_in}") from None
    except errors.RepositoryNotFoundError:
        raise SpecError(f"{where} has no {kind} {name}, or it is private; correct the name, or {log_in}") from None
    except errors.LocalEntryNotFoundError as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{where} cannot be reached"
        raise SpecError(_elsewhere(kind, name, offline)) from error
    except errors.EntryNotFoundError:
        raise SpecError(f"{page} has no config.json, so it is no model for transformers; use another") from None
    except errors.OfflineModeIsEnabled:
        raise SpecError(_elsewhere(kind, name, "HF_HUB_OFFLINE is set")) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        fix = f"the token may not read it: see {page}, then {log_in}" if status in (401, 403) else "try again later"
        raise SpecError(f"{where} answered {status} for {kind} {name}; {fix}") from None
    except Exception as error:  # of the HTTP client, whose classes differ between versions
        why = shown(" ".join(str(error).split()), escaped) or type(error).__name__
        raise SpecError(_elsewhere(kind, name, f"{where} gave no whole answer ({why})")) from error


def _elsewhere(kind: str, name: str, why: str) -> str:
    """What to do without the hub."""
    download = f"hf download {name}" if kind == "model" else f"hf download --repo-type dataset {name}"
    return (
        f"{kind} {name} is not complete in {cache()}, and {why}: run {download} where there is a network, and copy "
        "that directory here, or name the files"
    )
