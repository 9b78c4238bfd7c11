"""What several commands take: options, recipes with changes, jobs, pinned choices."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.entry_points import load, registered
from kit.errors import SpecError
from kit.planner.calibration import Calibration
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.job_defaults import with_defaults
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec
from kit.specs.other_programs import program_of, refuse_other_programs
from kit.specs.validation import trusted

if TYPE_CHECKING:
    from kit.specs.recipe import Recipe


def count(text: str | int) -> int:
    """The parser of an option that takes a count. ``text``: or the option's default."""
    from kit.specs.count import as_count

    try:
        number = as_count(str(text))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}") from None
    if number < 1:
        raise typer.BadParameter(f"{text!r} should be at least 1")
    return number


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="layout.tp=8 pins a choice; job.key=value and cluster.key=value change what is asked; of a recipe any key."
    ),
]
Gpus = Annotated[
    str | None, typer.Option(help="Cluster for a model: 8xH100, aws:p4d.24xlarge:8, cluster.yaml, local …")
]
Engine = Annotated[str, typer.Option(help="auto, torch, deepspeed or megatron.")]
SeqLength = Annotated[int | None, typer.Option(help="Tokens in a sequence.", parser=count)]
GlobalBatchSize = Annotated[int | None, typer.Option(help="Sequences in an optimizer step.", parser=count)]
TotalTokens = Annotated[
    int | None, typer.Option(help="Token budget, for days and cost; for example 20B or 1e12.", parser=count)
]
Epochs = Annotated[float | None, typer.Option(help="Passes over the training data, instead of --total-tokens.")]
Precision = Annotated[str | None, typer.Option(help="bf16, fp32, fp16 or fp8.")]
Objective = Annotated[str | None, typer.Option(help="pretrain, sft, seq2seq, or TRL's dpo, kto, reward, grpo.")]
Lora = Annotated[bool, typer.Option("--lora", help="Train low-rank adapters instead of the weights.")]
Qlora = Annotated[bool, typer.Option("--qlora", help="Train low-rank adapters on frozen weights in 4 bits.")]
Optimizer = Annotated[str | None, typer.Option(help="adamw, adamw-8bit, sgd, lion, lion-8bit, adafactor or muon.")]
Attention = Annotated[str | None, typer.Option(help="cudnn, flash3, flash4 or default: layout.attention_kernel.")]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", help="Correct predictions by the runs that this file records.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; python -m kit.cli.answers prints its schema.")]
OutDir = Annotated[
    Path, typer.Option("--out", "-o", help="New directory to write; an existing one is never overwritten.")
]


def echo_json(value: Any) -> None:
    """Print a value, or any nesting of them, as JSON."""
    typer.echo(json.dumps(strict_yaml.to_plain(value), indent=1))


def answer(value: Any, text: str, as_json: bool) -> None:
    """Print the value as JSON, or the text that says it."""
    if as_json:
        echo_json(value)
    else:
        typer.echo(text)


@contextlib.contextmanager
def searching(what: str) -> Iterator[None]:
    """On a terminal, after a second: say what is compared, until it is done."""
    if not sys.stderr.isatty():
        yield
        return
    line = f"comparing the layouts of {what} …"
    timer = threading.Timer(1.0, typer.echo, (line,), {"nl": False, "err": True})
    timer.start()
    try:
        yield
    finally:
        said = not timer.is_alive()
        timer.cancel()
        if said:
            typer.echo("\r\x1b[K", nl=False, err=True)


def terminal() -> tuple[int, Callable[[str], str]]:
    """The width to wrap at and a function that styles a label. On a terminal: its width, and colour if it has
    colours."""
    from kit.report.view import WIDTH

    if not sys.stdout.isatty():
        return WIDTH, str
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    width = max(40, min(WIDTH, shutil.get_terminal_size().columns))
    return width, str if plain else functools.partial(typer.style, fg="cyan")


def is_recipe(target: str) -> bool:
    """Whether it is a YAML file, or a plan as ``--json`` prints it."""
    with contextlib.suppress(SpecError):
        return target.endswith((".yaml", ".yml")) or (target.endswith(".json") and is_plan(Path(target)))
    return False


CONFIGS = "kit.configs"
"""Group of entry points: a function that answers of another trainer's file (docs/how-to/your-config.md)."""
_FORMS = (".yaml", ".yml", ".json", ".toml", ".py", ".sh", ".bash", ".sbatch", ".slurm")


def reader_of(target: str) -> Callable[..., None] | None:
    """What reads a file of another trainer, or one's function; None for everything else, and where no add-on does."""
    path = Path(target.partition("::")[0])
    if path.suffix not in _FORMS or path.name == "config.json" or not path.is_file():
        return None
    if is_recipe(target):
        try:
            if not program_of(strict_yaml.read(path).data):
                return None
        except SpecError:  # told where a recipe is read
            return None
    return next((load(entry) for entry in registered(CONFIGS).values()), None)


def is_plan(path: Path) -> bool:
    """Whether the file is a saved plan. Otherwise it is a recipe."""
    return "schema_version" in strict_yaml.read(path).data


def plan_recipe(
    path: Path, overrides: list[str] | None, calibration: Path | None = None, tight: bool = False
) -> tuple[Plan, Recipe]:
    """The plan of a recipe with its changes, or a saved plan. Of a saved plan only ``run`` can be changed."""
    from kit.api import plan  # a plan of catalog names imports no recipe
    from kit.specs.recipe import load_recipe

    _one_value_each(changes := overrides or [])
    if not is_plan(path):
        recipe = load_recipe(path, changes)
        return plan(recipe, calibration=calibration, tight=tight), recipe
    return _saved_plan(path, changes)


def _saved_plan(path: Path, changes: list[str]) -> tuple[Plan, Recipe]:
    from kit.report.what_if import pinned
    from kit.specs.recipe import Recipe, run_of

    saved = Plan.load(path)
    if others := [change for change in changes if not change.startswith("run.")]:
        raise SpecError(
            f"{others[0]!r}: a plan has every choice made; change its recipe, or ask kit explain with --what-if"
        )
    run = run_of(changes, path.parent)
    return saved, Recipe(
        name=path.stem,
        model=saved.model,
        cluster=saved.cluster,
        job=saved.job,
        run=run,
        layout=pinned(saved),
    )


def _one_value_each(changes: list[str]) -> None:
    """Raises ``SpecError`` if one key has two values: kit does not guess which one counts."""
    given: dict[str, str] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if given.setdefault(key, value) != value:
            raise SpecError(f"{key}={given[key]} and {key}={value}: one choice has two values; leave one of them out")


def recipe_changes(overrides: list[str] | None, engine: str, attention: str | None = None) -> list[str]:
    """All changes of a recipe that arguments and options make, as ``section.key=value``."""
    named = {"engine": None if engine == "auto" else engine, "attention_kernel": attention}
    changes = [*(overrides or []), *(f"layout.{key}={value}" for key, value in named.items() if value is not None)]
    _one_value_each(changes)
    return changes


def of_file_alone(context: typer.Context, path: Path) -> None:
    """Raises ``SpecError`` for options of a cluster or a job beside a file that has its own, with the arguments that do
    the same to a recipe."""
    gpus, given = context.params["gpus"], asked(context)
    if not gpus and not given:
        return
    refuse_other_programs(strict_yaml.read(path), path)
    keys = {"lora": "lora.four_bit=false", "qlora": "lora.four_bit=true", "optimizer": "optimizer.name={}"}
    words = [f"cluster={gpus}"] if gpus else []
    words += [f"job.{keys.get(name, f'{name}={{}}').format(value)}" for name, value in given.items()]
    raise SpecError(
        f"a recipe or a plan names its own cluster and job; options do not change them, a recipe's arguments do: "
        f"{shlex.join(words)}"
    )


def request_of(context: typer.Context, name: str, changes: list[str], calibration: Calibration) -> Request:
    """What the options ask of a model by its name. Raises ``SpecError``."""
    if context.params["gpus"] is None:
        raise SpecError("--gpus is missing, for example --gpus 8xH100")
    model, cluster = load_model(name), parse_cluster(context.params["gpus"])
    cluster, job, pins = with_changes(name, model, cluster, asked(context), changes)
    return Request(model=model, cluster=cluster, job=job, pins=pins, calibration=calibration)


_JOB = (
    "seq_length",
    "global_batch_size",
    "total_tokens",
    "epochs",
    "precision",
    "objective",
    "lora",
    "qlora",
    "optimizer",
)


def asked(context: typer.Context) -> dict[str, Any]:
    """The given options that describe the job."""
    return {key: value for key in _JOB if (value := context.params.get(key)) is not None and value is not False}


def keys_of_job(
    *, lora: bool = False, qlora: bool = False, optimizer: str | None = None, **values: Any
) -> dict[str, Any]:
    """The keys of a recipe's job that the given options stand for."""
    data: dict[str, Any] = {"lora": {"four_bit": qlora}} if lora or qlora else {}
    return data | ({} if optimizer is None else {"optimizer": {"name": optimizer}}) | values


def job_for(model: ModelSpec, num_gpus: int, **given: Any) -> JobSpec:
    """The job of the given options, with what is usual where they are silent."""
    keys = with_defaults(keys_of_job(**given), model, num_gpus)
    if not given:
        return trusted(JobSpec, keys)  # kit's own values, without the time that the parser takes to load
    return strict_yaml.parse(JobSpec, keys, strict_yaml.Document(name="options", data={}, lines={}))


def with_changes(
    name: str, model: ModelSpec, cluster: ClusterSpec, given: dict[str, Any], changes: list[str]
) -> tuple[ClusterSpec, JobSpec, Pins]:
    """The cluster and the job that options describe, with ``cluster.key=value`` and ``job.key=value`` applied to them
    as to those of a recipe; and what is pinned."""
    asks = [word for word in changes if re.match(r"(cluster|job)[.=]", word)]
    if asks:
        from kit.specs.recipe import job_and_cluster  # a plan of catalog names imports no recipe

        job, cluster = job_and_cluster(model, cluster, keys_of_job(**given), asks)
    else:
        job = job_for(model, cluster.num_gpus, **given)
    return cluster, job, pins_of(name, [word for word in changes if word not in asks])


def pins_of(model: str, changes: list[str]) -> Pins:
    """``layout.tp=8`` → pins, validated like the layout section of a recipe."""
    data: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.startswith("layout."):
            raise SpecError(
                f"{change!r} is not of the form layout.key=value, which pins a choice; {model!r} is not a recipe file: "
                "use the options for its cluster and job"
            )
        data[key.removeprefix("layout.")] = strict_yaml.parse_text(f"value: {text}", change).data["value"]
    return strict_yaml.parse(Pins, data, strict_yaml.Document(name="layout", data={}, lines={})) if data else Pins()
