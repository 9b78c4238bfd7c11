"""``kit generate``: a look at what a checkpoint has learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kit.cli.options import AsJson, answer, count
from kit.errors import SpecError


def generate(
    path: Annotated[Path, typer.Argument(help="Hugging Face model, or a checkpoint that kit convert model reads.")],
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to continue; repeatable.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Hugging Face directory with the tokenizer, if the checkpoint has none.")
    ] = None,
    merge_into: Annotated[Path | None, typer.Option(help="For adapters: the base model.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a completion.", parser=count)] = 64,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of draws with a temperature.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue prompts by a checkpoint or model, with transformers' generation in one process.

    A checkpoint is first converted into a temporary directory ($TMPDIR), as large as its weights in bf16.
    """
    if not prompt:
        raise SpecError("--prompt is missing; give a text to continue")
    from kit.training.generate import generate as completions

    found = completions(
        path,
        prompt,
        tokenizer=tokenizer,
        merge_into=merge_into,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    answer(found, "\n".join(each.prompt + each.completion for each in found), as_json)
