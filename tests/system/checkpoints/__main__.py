"""Checkpoints of other programs, from → to: the largest difference of the continued losses and norms.

Every source is written here by the program itself, on two processes, at step 3 of 6. kit converts it, and kit's engines
or the Trainer make steps 4 to 6. Compared are losses and gradient norms with those of the program's own steps 4 to 6.
``--write`` keeps the table in docs/notes/checkpoints.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils.logging import disable_progress_bar

from kit.training.checkpoint.convert import convert
from tests.deepspeed import test_foreign as foreign
from tests.support.page import Section, row, table
from tests.support.program import run

SOURCES = {
    "trainer-zero-1": "Trainer, DeepSpeed ZeRO-1",
    "trainer-zero-2": "Trainer, DeepSpeed ZeRO-2",
    "trainer-zero-3": "Trainer, DeepSpeed ZeRO-3",
    "deepspeed-zero-2": "DeepSpeed alone, ZeRO-2",
    "deepspeed-zero-3": "DeepSpeed alone, ZeRO-3",
    "deepspeed-bf16-zero-2": "DeepSpeed alone, ZeRO-2, bf16",
    "deepspeed-fp16-zero-1": "DeepSpeed alone, ZeRO-1, fp16",
    "deepspeed-fp16-zero-3": "DeepSpeed alone, ZeRO-3, fp16",
    "deepspeed-offload-zero-2": "DeepSpeed alone, ZeRO-2, optimizer on the host",
    "accelerate-zero-2": "accelerate, DeepSpeed ZeRO-2",
    "accelerate-zero-3": "accelerate, DeepSpeed ZeRO-3",
    "accelerate-fsdp": "accelerate, FSDP2 (torch DCP)",
}
SIXTEEN_BITS = {"bf16", "fp16"}
TARGETS = ("torch on 1", "zero-1", "zero-2", "zero-3", "megatron TP2")
VIA = ("universal", "megatron", "dcp")
"""Formats into which a checkpoint is written, and out of which it is read again."""


def main(write: Annotated[bool, typer.Option(help="Keep the table in the page.")] = False) -> int:
    """Exit code 1 where a curve differs by more than the tests allow."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        written = foreign.write_all(root / "sources", tuple(SOURCES))
        rows, worst = [], 0.0
        for writer, title in SOURCES.items():
            cells = _errors(writer, *written[writer], root / writer)
            worst = max(worst, *(cells if not SIXTEEN_BITS & {*writer.split("-")} else [0.0]))
            shown = [f"{cell:.0e}" for cell in cells]
            rows.append([title, *shown, *["–"] * (len(TARGETS) + len(VIA) + 1 - len(shown))])
            print(row(rows[-1]), flush=True)
    heads = ["from", *(target.replace("zero-", "ZeRO-") for target in TARGETS), *(f"via {via}" for via in VIA)]
    matrix = table([*heads, "the Trainer on universal"], rows, right=True)
    print(f"{matrix}\n\nlargest difference in fp32 {worst:.1e}")
    if write:
        Section("docs/notes/checkpoints.md", "matrix", lambda: matrix).write()
    return int(worst > foreign.CLOSEST)


def _errors(writer: str, path: Path, expected: foreign.Curve, work: Path) -> list[float]:
    """One number per target, per format in between, and of the Trainer on the universal checkpoint."""
    work.mkdir()
    step = work / "step"
    convert(path, "step", step)
    curves = [foreign.continued(target, writer, step, work / target.replace(" ", "-")) for target in TARGETS]
    for via in VIA:
        convert(step, via, work / via, dtype="float32")
        convert(work / via, "step", work / f"of-{via}", model=str(path))
        curves.append(foreign.continued("torch on 1", writer, work / f"of-{via}", work / f"{via}-run"))
    if "trainer" in writer:
        convert(path, "universal", work / "checkpoint-3")
        curves.append(foreign.continued_by_trainer(writer, 2, work))
    return [foreign.error(curve, expected) for curve in curves]


if __name__ == "__main__":
    run(main)
