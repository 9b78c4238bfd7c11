"""``kit generate``: a look at what a checkpoint has learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kit.cli.options import AsJson, answer, count
from kit.errors import SpecError


def generate(
    path: Annotated[Path, typer.Argument(help="Run directory, checkpoint, or Hugging Face model.")],
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to answer or continue; repeatable.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Hugging Face directory with the tokenizer; else that of the run.")
    ] = None,
    merge_into: Annotated[Path | None, typer.Option(help="For adapters: the base model; else that of the run.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a completion.", parser=count)] = 64,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of draws with a temperature.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer prompts by a checkpoint or model, with transformers' generation in one process.

    A model with a chat template gets each prompt as a user's turn.

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
        raw=raw,
    )
    answer(
        found,
        "\n".join(
            f"{each.prompt}\n{each.completion}" if each.chat else each.prompt + each.completion for each in found
        ),
        as_json,
    )
