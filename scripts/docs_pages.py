"""Pages of the docs site that are made of what exists: a hook of mkdocs (mkdocs.yml).

Commands from the parser, recipe keys from the schema, Python from the docstrings; the README, CONTRIBUTING and the
changelog as they are. A link to a file outside of docs/ becomes its name, because the site has none of those.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from recipe_schema import json_schema  # mkdocs puts the folder of its hooks on the path

from kit.cli import answers, app

ROOT = Path(__file__).resolve().parents[1]
COPIED = {
    "index.md": "README.md",
    "recipes.md": "recipes/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Page → the file that it is a copy of."""
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?!https?:|#|mailto:)(?P<to>[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/; what mkdocs.yml does not name is a note."""
    made = {"reference/commands.md": _commands(), "reference/recipe.md": _recipe(), "reference/python.md": _python()}
    made["reference/answers.schema.json"] = json.dumps(answers.json_schema(), indent=1)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    listed = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    config.nav[-1]["Evidence and notes"] += sorted(
        {file.src_uri for file in files.documentation_pages()} - listed - made.keys()
    )
    for name, source in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_relinked(text, posixpath.dirname(source), "")))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Resolve links that leave docs/. Search shows pages for users first, and of these the first job of most."""
    name = page.file.src_uri
    if boost := 8 if name == "fine-tune.md" else 3 if name in config.nav[0]["Use"] else 0:
        page.meta["search"] = {"boost": boost}
    if name in COPIED:
        return markdown
    return _relinked(markdown, posixpath.join("docs", posixpath.dirname(name)), posixpath.dirname(name))


def _relinked(text: str, folder: str, page_folder: str) -> str:
    """``folder``: that of the text in the repository; ``page_folder``: that of its page on the site."""
    pages = {source: name for name, source in COPIED.items()} | {"recipes": "recipes.md"}

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match["to"].partition("#")
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists() and not path.startswith("docs/reference/"):
            return match[0]  # mkdocs reports it
        page = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is None:
            return f"{match['text']} (`{path}`)"
        return f"[{match['text']}]({posixpath.relpath(page, page_folder or '.')}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, text)


def _commands() -> str:
    """Every command's own help, as the parser has it."""
    command: Any = typer.main.get_command(app)
    schema = "With `--json` a command answers as [this JSON schema](answers.schema.json) says."
    return "\n".join(["# Commands", "", schema, "", *_help(command, "kit", None)])


def _help(command: Any, name: str, parent: Any) -> list[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    path = context.command_path
    lines = [f"{'#' * (path.count(' ') + 2)} {path}", "", "```text", command.get_help(context), "```", ""]
    for inner in command.list_commands(context) if hasattr(command, "list_commands") else ():
        lines += _help(command.get_command(context, inner), inner, context)
    return lines


def _recipe() -> str:
    """A table for each section of a recipe."""
    schema = json_schema()
    lines = ["# Recipe keys", "", "From `recipes/recipe.schema.json`, which editors read too.", ""]
    for name, part in {"recipe": schema, **schema["$defs"]}.items():
        if "properties" in part:
            lines += [f"## {name}", "", part.get("description", ""), "", "| key | value | meaning |", "|---|---|---|"]
            lines += [
                f"| `{key}` | {_kind(value)} | {_cell(value.get('description', ''))} |"
                for key, value in part["properties"].items()
            ]
            lines.append("")
    return "\n".join(lines)


def _kind(value: dict[str, Any]) -> str:
    """Type, choices and default of a key."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    kinds = [_kind(each) for each in value.get("anyOf", ()) if each.get("type") != "null"]
    kinds = kinds or [" or ".join(f"`{each}`" for each in value.get("enum", ())) or str(value.get("type", "any"))]
    default = value.get("default")
    return " or ".join(kinds) + ("" if isinstance(default, dict | list | None) else f"; {_cell(repr(default))}")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("``", "`").split())


def _python() -> str:
    return "# Python\n\nEvery name is `kit.NAME`.\n\n::: kit.api\n"
