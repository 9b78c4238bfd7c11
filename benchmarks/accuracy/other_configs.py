"""How many example files of another trainer ``kit plan FILE`` answers, by folder, and which gaps stand alone:
``python -m benchmarks.accuracy.other_configs CHECKOUT [LIST [GPUS]]``.

CHECKOUT is a clone of the trainer, LIST a file with paths in it, of Python with functions, as FILE::FUNCTION; without,
every file of such a form below ``examples``. The GPUs are a node's eight, or as many nodes as the file's sizes take;
with GPUS, such as 2xRTX-4090, it also says how many files a change helps there, and how many of the patches read back
as promised. Text models are counted for themselves: not the files whose model sees or hears, nor what kit refuses on
purpose (docs/how-to/your-config.md).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from kit.addons.configs.answer import Answer, answer
from kit.addons.configs.reading import asked_of
from kit.errors import KitError

_ON_PURPOSE = re.compile(
    r"tower|distill|diffusion|quantisation-aware|partly frozen|device_map|Megatron-FSDP|NPU|does not set|draft model"
)
_SEES_OR_HEARS = re.compile(
    r"(?i)(^|[^a-z])(v-?l|vlm|vit|vision|visual|omni|audio|asr|tts|ocr|image|video|multimodal|mm|flux|wan2|diffusion|"
    r"keye|minicpm-?v|smolvlm|internvl|pixtral|llava|emu3|voxtral)([^a-z]|$)|4\.6v"
)
_FILES = (".yaml", ".yml", ".json", ".toml", ".sh")


class Read(NamedTuple):
    """What is said of one file."""

    path: str
    said: Literal["answered", "with gaps", "refused"]
    why: tuple[str, ...]
    of_text: bool


def read(root: Path, path: str) -> Read:
    """With the fewest nodes that the file's sizes divide."""
    said = ""
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        try:
            found = asked_of(root / path, f"{nodes}x8xH100").described({})
        except KitError as error:
            said = str(error)
            if "divide" not in said and "multiple" not in said:
                break
        else:
            gaps = tuple(sorted({f"{gap.key}: {gap.why}" for gap in found.gaps}))
            text = not found.workload.model.is_text_part and not _SEES_OR_HEARS.search(path)
            return Read(path, "with gaps" if gaps else "answered", gaps, text)
    on_purpose = _ON_PURPOSE.search(said) or _SEES_OR_HEARS.search(path) or _SEES_OR_HEARS.search(said[:80])
    return Read(path, "refused", (said.splitlines()[0],), not on_purpose)


def table(reads: Iterable[Read]) -> list[str]:
    """Lines: files, answered, without a gap; by folder, and in all."""
    rows: dict[str, list[Read]] = {}
    for each in reads:
        for name in ("/".join(each.path.split("/")[:2]), "in all"):
            rows.setdefault(name, []).append(each)
    lines = [f"{'folder':36} {'files':>6} answered no gap | {'text':>5} answered no gap"]
    for name in sorted(rows, key=lambda name: (name == "in all", name)):
        text = [each for each in rows[name] if each.of_text]
        lines.append(f"{name:36} {_shares(rows[name])} | {_shares(text)}")
    return lines


def _shares(reads: list[Read]) -> str:
    said, number = Counter(each.said for each in reads), max(1, len(reads))
    return f"{len(reads):6} {1 - said['refused'] / number:8.0%} {said['answered'] / number:6.0%}"


def patches(root: Path, paths: Iterable[str], gpus: str) -> str:
    """What changes do for the files on these GPUs."""
    found = list[Answer]()
    for path in paths:
        with suppress(KitError):
            found += [answer(root / path, gpus)]
    helped = [each for each in found if each.change is not None]
    return f"on {gpus} a change helps {len(helped)}; {sum(bool(each.patch) for each in helped)} patches read back"


def main(root: Path, names: Path | None, gpus: str = "") -> None:
    """Print the table, the gaps that stand alone, and why files are refused."""
    paths = names.read_text().split() if names else []
    found = paths or [str(path.relative_to(root)) for path in sorted((root / "examples").rglob("*")) if path.is_file()]
    reads = [read(root, path) for path in found if path.endswith(_FILES) or "::" in path]
    alone = Counter(each.why[0] for each in reads if each.said == "with gaps" and len(each.why) == 1)
    refused = Counter(each.why[0].split(": ", 1)[-1][:90] for each in reads if each.said == "refused" and each.of_text)
    print(*table(reads), "", *(f"{number:4} gap alone: {why}" for why, number in alone.most_common(20)), sep="\n")
    print("", *(f"{number:4} refused: {why}" for why, number in refused.most_common(20)), sep="\n")
    if gpus:
        print(patches(root, (each.path for each in reads if each.said != "refused"), gpus))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None, *sys.argv[3:])
