"""``kit convert``: text to tokens, checkpoints and models to one another."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

import typer

from kit.cli.app import PLAIN, WithAddons
from kit.cli.options import AsJson, OutDir, answer, count
from kit.specs.text import refuse

CONVERSIONS = "kit.conversions"
"""Group of entry points: command of ``kit convert`` → a function, or an app of commands, as of ``kit.commands``."""


class _Conversions(WithAddons):
    group = CONVERSIONS


convert = typer.Typer(
    cls=_Conversions,
    help="Convert offline: text to tokens; checkpoints and models between formats.",
    no_args_is_help=True,
    **PLAIN,
)


@convert.command("data")
def convert_data(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Text, .jsonl or .parquet files, also as s3://bucket/part-*.jsonl; or a saved Hugging Face data set."
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(help="Hugging Face directory with the tokenizer.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Prefix of the .bin/.idx pair.")],
    text_key: Annotated[
        str | None, typer.Option(help="pretrain: field of a jsonl row or data set with the text; text if not given.")
    ] = None,
    objective: Annotated[
        str,
        typer.Option(help="pretrain: text. sft: jsonl of messages, or prompt and completion. seq2seq: source, target."),
    ] = "pretrain",
    seq_length: Annotated[int | None, typer.Option(help="sft, seq2seq: truncate longer rows.", parser=count)] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="sft: for messages, a Jinja file, or plain, which fits any tokenizer; else the tokenizer's."),
    ] = None,
    workers: Annotated[str | None, typer.Option(hidden=True)] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise text, chats or pairs into the .bin/.idx pair that the engines read, on all cores.

    The files are complete or absent: after an interruption the same command starts again.
    """
    reasons = {
        f"--workers {workers}: the tokenizer's threads use all cores; RAYON_NUM_THREADS limits them": (
            workers is not None
        ),
        f"--objective {objective}, --seq-length {seq_length}: use pretrain, sft or seq2seq; text is never cut": (
            objective not in ("pretrain", "sft", "seq2seq") or (objective == "pretrain" and seq_length is not None)
        ),
        f"--chat-template {chat_template} with --objective {objective}: only sft has chats; omit it": (
            chat_template is not None and objective != "sft"
        ),
        f"--text-key {text_key} with --objective {objective}, whose rows have fields of their own": (
            text_key is not None and objective != "pretrain"
        ),
    }
    refuse(reasons)
    from kit.training.data.tokenise import tokenise

    done = tokenise(
        sources,
        tokenizer,
        out,
        objective=objective,  # type: ignore[arg-type]
        text_key=text_key or "text",
        seq_length=seq_length,
        chat_template=chat_template,
    )
    answer({"path": out, "what": str(done)}, str(done), as_json)


@convert.command("model")
def convert_model(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run directory (its newest checkpoint), a checkpoint of kit, DeepSpeed, Megatron, FSDP or DCP, or a "
            "Hugging Face model."
        ),
    ],
    out: OutDir,
    to: Annotated[
        str, typer.Option(help="hf, step (kit's own), megatron, dcp (torch's) or universal (DeepSpeed's).")
    ] = "hf",
    dtype: Annotated[
        str | None, typer.Option(help="hf, megatron: float32, bfloat16 (if not given) or float16.")
    ] = None,
    extras_from: Annotated[
        Path | None,
        typer.Option(help="hf: copy tokenizer files from this Hugging Face directory; else that of the run."),
    ] = None,
    merge_into: Annotated[
        Path | None, typer.Option(help="For adapters: the base model; writes the merged model.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model, if no config.json is beside it: its directory, a run directory, a catalog name."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert between Hugging Face models, kit's checkpoints and others': offline, one parameter at a time.

    A checkpoint of adapters becomes a peft directory, or with --merge-into a whole model.
    """
    from kit.training.checkpoint.convert import convert as converted
    from kit.training.checkpoint.of_run import newest_step, started_from

    started = time.monotonic()
    source = newest_step(source)
    if to == "hf" and extras_from is None and (base := started_from(source)) and any(base.glob("tokenizer*.json")):
        extras_from = base
    what = converted(source, to, out, dtype=dtype, model=model, extras_from=extras_from, merge_into=merge_into)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of kB
    what += f" ({time.monotonic() - started:.1f} s, at most {peak_gib:.1f} GiB of memory)"
    answer({"path": str(out), "what": f"{out}: {what}"}, f"{out}: {what}", as_json)
