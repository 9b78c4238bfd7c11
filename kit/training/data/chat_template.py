"""Chat templates, Jinja as transformers reads it: of a file, or one that comes with kit, ``templates/NAME.jinja``. None
of kit's is used unless its name is given."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kit.errors import DataError
from kit.specs.run import DataSpec
from kit.training.data.indexed import IndexedTokens

_SHIPPED = {
    path.name.removesuffix(".jinja"): path for path in files("kit.training.data").joinpath("templates").iterdir()
}


def read_chat_template(name: str) -> str:
    """Text of the template of kit, or of the file, of this name. Raises DataError."""
    try:
        return (_SHIPPED.get(name) or Path(name)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"--chat-template {name} is no file of text; give a Jinja file, such as a chat_template.jinja, or "
            f"{' or '.join(_SHIPPED)}, which comes with kit"
        ) from error


def chat_template_of(data: DataSpec) -> str | None:
    """Text of the template by which the training data were written; None if they name none, or several."""
    sidecars = [IndexedTokens(path).sidecar for path in data.training_paths]
    found = {None if sidecar is None else sidecar.chat_template for sidecar in sidecars}
    return found.pop() if len(found) == 1 else None
