"""What other packages add to kit, and kit's own add-ons, by the entry points that they register."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kit.errors import KitError


def registered(group: str) -> dict[str, EntryPoint]:
    """Name → entry point of a group, such as ``kit.commands``. Nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load(entry: EntryPoint) -> Any:
    """What an entry point names. Raises KitError for one that cannot be imported."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        package = entry.dist.name if entry.dist else "a package"
        raise KitError(
            f"{entry.name} of {package}: {entry.value} cannot be imported ({error}); install {package} again, or "
            "uninstall it"
        ) from error
