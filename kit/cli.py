"""The command line: parse, call, print. Everything it does is a function that a library user can call."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kit.api import plan as make_plan
from kit.errors import KitError, SpecError
from kit.planner.plan import Plan
from kit.specs import yaml
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.recipe import Recipe, load_recipe

app = typer.Typer(
    name="kit",
    help="From a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
convert_app = typer.Typer(
    help="Between formats, offline: text to tokens, checkpoints and models to one another.", no_args_is_help=True
)
recipes_app = typer.Typer(help="The recipes that come with kit: list them, copy one.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")
app.add_typer(recipes_app, name="recipes")

Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, as section.key=value.")]
OutDir = Annotated[
    Path, typer.Option("--out", "-o", help="New directory to write; an existing one is never overwritten.")
]


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Recipe file, catalog name, or Hugging Face directory.")],
    overrides: Overrides = None,
    gpus: Annotated[
        str | None, typer.Option(help="8xH100, 64xA100-80, aws:p4d.24xlarge:8 …; not with a recipe.")
    ] = None,
    engine: Annotated[str, typer.Option(help="auto, torch, deepspeed or megatron.")] = "auto",
    fix: Annotated[list[str] | None, typer.Option(help="Pin a choice: --fix tp=8. Repeatable.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences in an optimizer step.")] = None,
    total_tokens: Annotated[float | None, typer.Option(help="Token budget, for days and cost; 1e12 is fine.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this YAML file.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Days for the token budget: choose the cluster too.")] = None,
    budget: Annotated[float | None, typer.Option(help="USD for the token budget: choose the cluster too.")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="Most GPUs of a cluster to choose.", min=1)] = None,
    by: Annotated[str, typer.Option(help="Choose the cluster by gpus, money or time.")] = "gpus",
    calibrate: Annotated[
        Path | None, typer.Option(help="A run's summary.json: correct this and later plans on the cluster by it.")
    ] = None,
) -> None:
    """What to run, whether it fits, how fast, what it costs, and why.

    With --deadline, --budget or --max-gpus the cluster is chosen too: of all node types, or of the one in --gpus.
    """
    from kit.planner.render import render

    if _is_recipe(model):
        if gpus or seq_length or global_batch_size or total_tokens:
            raise SpecError(
                "a recipe names its own cluster and job; change them as words: cluster=8xH100 job.seq_length=8192"
            )
        words = [*(overrides or []), *[f"layout.{word}" for word in fix or []]]
        result = make_plan(load_recipe(model, [*words, f"layout.engine={engine}"] if engine != "auto" else words))
    else:
        if overrides:
            raise SpecError(
                f"{overrides[0]!r}: section.key=value changes a recipe; {model!r} is not a recipe file: use the options"
            )
        job = _job(seq_length=seq_length, global_batch_size=global_batch_size, total_tokens=total_tokens)
        if deadline is not None or budget is not None or max_gpus is not None:
            gpus = _chosen_cluster(model, job, _pins(engine, fix or []), gpus, by, deadline, budget, max_gpus)
        if gpus is None:
            raise SpecError("--gpus is missing, for example --gpus 8xH100; or --deadline DAYS to have it chosen")
        result = make_plan(model, gpus, job, _pins(engine, fix or []))
    if calibrate is not None:
        result = _calibrated(result, calibrate)
    if save is not None:
        result.save(save)
    typer.echo(render(result))


@app.command()
def explain(
    target: Annotated[str, typer.Argument(help="Plan file, recipe file, catalog name, or Hugging Face directory.")],
    overrides: Overrides = None,
    gpus: Annotated[str | None, typer.Option(help="Cluster, for a model that is no file.")] = None,
    engine: Annotated[str, typer.Option(help="auto, torch, deepspeed or megatron.")] = "auto",
    fix: Annotated[list[str] | None, typer.Option(help="Pin a choice: --fix tp=8. Repeatable.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences in an optimizer step.")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", help="gpus=16xH200, seq_length=131072, tp=4 …; repeatable.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the step and the schedule to this file.")] = None,
) -> None:
    """Every decision of a plan, what binds, where the time goes, and what would change."""
    from kit.planner.explain import explain as explained
    from kit.planner.explain_png import draw

    pins = Pins()
    if _is_recipe(target):
        result, pins = _plan_or_recipe(Path(target), overrides, engine, fix)
    else:
        if gpus is None:
            raise SpecError("--gpus is missing, for example --gpus 8xH100")
        pins = _pins(engine, fix or [])
        job = _job(seq_length=seq_length, global_batch_size=global_batch_size)
        result = make_plan(target, gpus, job, pins)
    typer.echo(explained(result, pins, tuple(what_if or ())))
    if png is not None:
        draw(result, png)
        typer.echo(f"\n{png}: the step and the schedule")


@app.command()
def memory(
    model: Annotated[
        str, typer.Argument(help="Catalog name, Hugging Face directory, a size such as 13B; with --probe a plan.yaml.")
    ],
    gpus: Annotated[str | None, typer.Option(help="8xH100, aws:p4d.24xlarge:8, cluster.yaml, local …")] = None,
    engine: Annotated[str, typer.Option(help="auto, torch, deepspeed or megatron.")] = "auto",
    zero: Annotated[int | None, typer.Option(help="ZeRO stage.")] = None,
    offload: Annotated[str | None, typer.Option(help="Where optimizer state lies: none, cpu or nvme.")] = None,
    offload_param: Annotated[str | None, typer.Option(help="Where weights lie: none, cpu or nvme.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallelism.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    vp: Annotated[int | None, typer.Option(help="Virtual stages a pipeline rank.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context parallelism.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert parallelism.")] = None,
    sp: Annotated[bool | None, typer.Option(help="Sequence parallelism.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences at once on a rank.")] = None,
    fix: Annotated[list[str] | None, typer.Option(help="Pin any other choice: --fix etp=2. Repeatable.")] = None,
    seq_length: Annotated[int | None, typer.Option("--seq", "--seq-length", help="Tokens in a sequence.")] = None,
    global_batch_size: Annotated[
        int | None, typer.Option("--global-batch", "--global-batch-size", help="Sequences in an optimizer step.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, fp16 or fp8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw a stacked bar into this file.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure a plan: run its real model code on fake tensors, without a GPU.")
    ] = False,
    stage: Annotated[int | None, typer.Option(help="With --probe: one pipeline stage.")] = None,
) -> None:
    """Whether it fits: peak memory of a GPU by component and pipeline stage, fitting or not."""
    import json

    if probe:
        # Another process: the probe patches torch for good.
        words = [sys.executable, "-m", "kit.diagnose.probe", model, *(["--json"] if as_json else [])]
        os.execv(sys.executable, words + (["--stage", str(stage)] if stage is not None else []))
    if gpus is None:
        raise SpecError("--gpus is missing, for example --gpus 8xH100")

    from rich.console import Console

    from kit.planner.memory_picture import picture, save_png
    from kit.planner.memory_report import memory_report
    from kit.specs.catalog import load_model, parse_cluster

    sizes = {"tp": tp, "pp": pp, "vp": vp, "cp": cp, "ep": ep, "sp": sp, "zero_stage": zero}
    sizes |= {"micro_batch_size": micro_batch, "recompute": recompute}
    sizes |= {"offload_optimizer": offload, "offload_param": offload_param}
    given = [f"{name}={str(value).lower()}" for name, value in sizes.items() if value is not None]
    job = _job(seq_length=seq_length, global_batch_size=global_batch_size, precision=precision)
    report = memory_report(load_model(model), parse_cluster(gpus), job, _pins(engine, [*given, *(fix or [])]))
    if png is not None:
        save_png(report, png)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        Console(highlight=False, soft_wrap=True).print(picture(report))


@app.command()
def emit(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe file.")] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New run directory; an existing one is never overwritten.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Compare ds_configs/ and launch/ of this checkout with its recipes.")
    ] = False,
    write_shipped: Annotated[bool, typer.Option(help="Write ds_configs/ and launch/ again.")] = False,
) -> None:
    """Plan a recipe and write its run directory."""
    if check or write_shipped:
        _shipped(write=write_shipped)
        return
    if recipe is None or out is None:
        raise SpecError("kit emit needs a recipe and --out NEW_DIRECTORY")
    result, loaded = _plan_recipe(recipe, overrides)
    rundir = _emit(loaded, result, out)
    typer.echo(f"{out}: {', '.join(sorted(p.name for p in rundir.path.iterdir()))}")
    typer.echo(f"start it: kit train {out}    or: {out}/launch.sh")


@app.command()
def train(
    target: Annotated[Path, typer.Argument(help="Run directory, or a recipe (then with --out).")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run directory to write for a recipe.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: the newest good checkpoint; or the path of a hub checkpoint.")
    ] = None,
    stop_at_step: Annotated[int | None, typer.Option(help="Stop after this step, with a checkpoint.", min=1)] = None,
) -> None:
    """Start this node's processes of a run and wait for them."""
    from kit.emit.preflight import preflight
    from kit.emit.run_directory import RunDirectory

    if _is_recipe(str(target)):
        if out is None:
            raise SpecError("--out is missing: a recipe is trained from a run directory, which is written there")
        result, loaded = _plan_recipe(target, overrides)
        rundir = _emit(loaded, result, out)
    elif overrides:
        raise SpecError(f"{overrides[0]!r}: a run directory is changed by changing its recipe and emitting again")
    else:
        rundir = RunDirectory.open(target)
    preflight(rundir, None if resume in (None, "auto") else Path(resume))
    words = ["--resume", resume if resume == "auto" else str(Path(resume).resolve())] if resume else []
    words += ["--stop-at-step", str(stop_at_step)] if stop_at_step else []
    sys.stdout.flush()
    os.environ.setdefault("PYTHON", sys.executable)
    os.execv(str(rundir.path / "launch.sh"), [str(rundir.path / "launch.sh"), *words])


@app.command()
def lint(
    paths: Annotated[list[Path], typer.Argument(help="ds_config.json, accelerate YAML, recipe, or run directory.")],
    model: Annotated[str | None, typer.Option(help="What it trains: lets memory be judged.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Where it runs: lets batch sizes and memory be judged.")] = None,
    reader: Annotated[
        str | None, typer.Option(help="Who reads a DeepSpeed file: deepspeed, accelerate or trainer.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    fix: Annotated[Path | None, typer.Option(help="Write a corrected copy of the one file here.")] = None,
) -> None:
    """What is wrong with a configuration, before a GPU is paid for. Exit code 1 where a finding is an error."""
    import json

    from kit.diagnose.lint import READERS, lint, read_values, write_fixed
    from kit.specs.catalog import load_model, parse_cluster

    if reader is not None and reader not in READERS:
        raise SpecError(f"--reader {reader!r}: {yaml.nearest(reader, list(READERS))}")
    if fix is not None and (len(paths) > 1 or paths[0].is_dir()):
        raise SpecError("--fix writes a copy of one file; name one .json or .yaml file")
    known = load_model(model) if model else None, parse_cluster(gpus) if gpus else None
    findings = [finding for path in paths for finding in lint(path, reader=reader, model=known[0], cluster=known[1])]
    if fix is not None:
        own = [finding for finding in findings if finding.file == paths[0].name]
        write_fixed(read_values(paths[0]), own, fix)
    if as_json:
        typer.echo(json.dumps([finding.as_json() for finding in findings], indent=1))
    else:
        for finding in findings:
            typer.echo(str(finding))
        counts = [f"{sum(f.severity == s for f in findings)} {s}s" for s in ("error", "warning", "note")]
        typer.echo(", ".join(counts) + (f"; corrected copy: {fix}" if fix else ""))
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


@app.command()
def doctor(
    logs: Annotated[list[Path], typer.Argument(help="Logs of all ranks: files, or directories of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What went wrong in a run: the cause, the rank that had it first, what to do. Exit code 1 where one is found."""
    import json

    from kit.diagnose.logs import diagnose

    causes = diagnose(logs)
    if as_json:
        typer.echo(json.dumps([cause.as_json() for cause in causes], indent=1))
    else:
        typer.echo("\n".join(str(cause) for cause in causes) if causes else "no known sign of a failure")
    if causes:
        raise typer.Exit(1)


@app.command()
def rehearse(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or the name of one that comes with kit.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Keep everything in this new directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a recipe in small, on CPU processes: train, be killed, resume, export. Exit code 1 where it differs."""
    import json
    import tempfile

    from kit.rehearsal import rehearse
    from kit.rehearsal.report import render
    from kit.specs.shipped import recipe_path

    path = Path(recipe) if _is_recipe(recipe) else recipe_path(recipe)
    loaded = load_recipe(path, overrides or [])
    if out is not None and out.exists():
        raise SpecError(f"{out} exists already and is not overwritten; choose another --out")
    with tempfile.TemporaryDirectory(prefix="kit-rehearsal-") as scratch:
        result = rehearse(path.stem, make_plan(loaded), loaded.run, out or Path(scratch) / path.stem)
    typer.echo(json.dumps(result.as_json(), indent=1) if as_json else render(result))
    if not result.passed:
        raise typer.Exit(1)


@recipes_app.command("list")
def list_recipes() -> None:
    """Every recipe, with what it is for."""
    from kit.specs.shipped import headline, recipe_names, recipe_path

    for name in recipe_names():
        typer.echo(f"{name}\n    {headline(recipe_path(name))}")


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Recipe, as kit recipes list shows it.")],
    directory: Annotated[Path, typer.Argument(help="New directory; an existing one is never overwritten.")],
) -> None:
    """A directory to run from: the recipe in one file, its run directory, and a README with the commands."""
    from kit.emit.copied import copy_recipe

    made = copy_recipe(name, directory)
    typer.echo(f"{made}: {', '.join(sorted(path.name for path in made.iterdir()))}; read README.md")


@convert_app.command("data")
def convert_data(
    sources: Annotated[list[Path], typer.Argument(help="Text files, .jsonl files, or a saved Hugging Face data set.")],
    tokenizer: Annotated[Path, typer.Option(help="Hugging Face directory with the tokenizer.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Prefix of the .bin/.idx pair.")],
    text_key: Annotated[str, typer.Option(help="Field of jsonl rows and data sets that holds the text.")] = "text",
    objective: Annotated[
        str,
        typer.Option(help="pretrain: text. sft: jsonl of messages, or prompt and completion. seq2seq: source, target."),
    ] = "pretrain",
    seq_length: Annotated[int | None, typer.Option(help="sft, seq2seq: longer rows lose their end.", min=1)] = None,
) -> None:
    """Tokenise text, chats or pairs into the .bin/.idx pair that the engines read."""
    if objective in ("sft", "seq2seq"):
        from kit.training.data.tokenise_rows import tokenise_rows

        rows = tokenise_rows(sources, tokenizer, out, objective=objective, seq_length=seq_length)  # type: ignore[arg-type]
        typer.echo(str(rows))
        return
    if objective != "pretrain" or seq_length is not None:
        raise SpecError(
            f"--objective {objective}, --seq-length {seq_length}: use pretrain, sft or seq2seq; text is never cut"
        )
    from kit.training.data.tokenise import tokenise

    typer.echo(str(tokenise(sources, tokenizer, out, text_key=text_key)))


@convert_app.command("model")
def convert_model(
    source: Annotated[
        Path, typer.Argument(help="Hub checkpoint (RUN/checkpoints/hub-step-…), Hugging Face model, or Megatron's.")
    ],
    out: OutDir,
    to: Annotated[str, typer.Option(help="hf, hub or megatron.")] = "hf",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    extras_from: Annotated[
        Path | None, typer.Option(help="Hugging Face directory whose tokenizer is copied along.")
    ] = None,
    merge_into: Annotated[
        Path | None, typer.Option(help="Adapters: the model that was frozen; writes it with them merged in.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="What a Megatron checkpoint is of: Hugging Face or run directory, catalog name.")
    ] = None,
) -> None:
    """Between Hugging Face models, hub checkpoints and Megatron's, offline and a parameter at a time.

    A hub checkpoint of adapters becomes a peft directory, or with --merge-into a whole model.
    """
    from kit.training.checkpoint.convert import convert

    what = convert(source, to, out, dtype=dtype, model=model, extras_from=extras_from, merge_into=merge_into)
    typer.echo(f"{out}: {what}")


def main() -> None:
    """Entry point: an error of the user's is one message and exit code 2, never a traceback."""
    try:
        app(standalone_mode=True)
    except KitError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise SystemExit(2) from None


def _calibrated(result: Plan, measurements: Path) -> Plan:
    """Learn from a run (of the plan beside the file, or else of this one), keep it, and plan again."""
    from kit.cost import predict
    from kit.planner import calibration
    from kit.planner.explain import pinned
    from kit.planner.search import make_plan as plan_again

    beside = measurements.parent / "plan.yaml"
    ran = Plan.load(beside) if beside.exists() else result
    ran = dataclasses.replace(ran, predicted=predict(ran.model, ran.cluster, ran.job, ran.layout))
    known = calibration.learn(ran, measurements, calibration.load())
    typer.echo(f"{calibration.save(known)}: what {measurements} says of runs like it\n")
    return plan_again(result.model, result.cluster, result.job, pinned(result), known)


def _chosen_cluster(
    model: str,
    job: JobSpec,
    pins: Pins,
    node: str | None,
    by: str,
    deadline: float | None,
    budget: float | None,
    max_gpus: int | None,
) -> str:
    """Print what the node types offer, and return the first."""
    from kit.planner.purchase import Wish, offers, render_offers
    from kit.specs.catalog import load_model

    if by not in ("gpus", "money", "time"):
        raise SpecError(f"--by {by!r} is no goal; use gpus, money or time")
    wish = Wish(goal=by, deadline_days=deadline, budget_usd=budget, max_gpus=max_gpus)  # type: ignore[arg-type]
    found = offers(load_model(model), job, pins, wish, None if node is None else node.rpartition(":")[2] or node)
    typer.echo(render_offers(found) + "\n")
    return f"{found[0].cluster.name}:{found[0].cluster.num_nodes}"


def _shipped(write: bool) -> None:
    """``ds_configs/`` and ``launch/`` of the checkout that the recipes come from."""
    from kit.emit import shipped
    from kit.specs.shipped import recipes_directory

    root = recipes_directory().parent
    lines = shipped.write(root) if write else shipped.check(root)
    for line in lines:
        typer.echo(line)
    typer.echo(f"{len(lines)} files {'written or removed' if write else 'differ'}")
    if lines and not write:
        raise typer.Exit(1)


def _is_recipe(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _plan_or_recipe(path: Path, overrides: list[str] | None, engine: str, fix: list[str] | None) -> tuple[Plan, Pins]:
    """A saved plan as it is, or a recipe's, planned now; with the choices that were pinned."""
    from kit.planner.explain import pinned

    words = [*(overrides or []), *[f"layout.{word}" for word in fix or []]]
    words += [f"layout.engine={engine}"] if engine != "auto" else []
    if "schema_version" in yaml.read(path).data:
        if words:
            raise SpecError(f"{words[0]!r}: a plan has every choice made; ask with --what-if, or explain its recipe")
        saved = Plan.load(path)
        return saved, pinned(saved)
    recipe = load_recipe(path, words)
    return make_plan(recipe), recipe.layout


def _plan_recipe(path: Path, overrides: list[str] | None) -> tuple[Plan, Recipe]:
    recipe = load_recipe(path, overrides or [])
    return make_plan(recipe), recipe


def _emit(recipe: Recipe, result: Plan, out: Path) -> Any:
    from kit.emit.run_directory import write

    if recipe.run is None:
        raise SpecError(f"{recipe.name}: run is required and missing; a run needs at least run.data.train")
    return write(result, recipe.run, out)


def _job(**values: float | str | None) -> JobSpec:
    """Options that were given, over the defaults."""
    given = {
        key: int(value) if isinstance(value, float) else value for key, value in values.items() if value is not None
    }
    return yaml.parse(JobSpec, given, yaml.Document(name="options", data={}, lines={}))


def _pins(engine: str, words: list[str]) -> Pins:
    """``tp=8`` words → pins, validated like the layout section of a recipe."""
    data: dict[str, Any] = {} if engine == "auto" else {"engine": engine}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise SpecError(
                f"--fix {word!r} is not of the form key=value; "
                f"keys are {', '.join(field.name for field in dataclasses.fields(Pins))}"
            )
        data[key] = yaml.parse_text(f"value: {text}", f"--fix {word}").data["value"]
    return yaml.parse(Pins, data, yaml.Document(name="--fix", data={}, lines={}))
