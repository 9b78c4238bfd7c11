"""Commands that answer before anything runs: ``plan``, ``explain``, ``memory``."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.cli.options import (
    AsJson,
    Attention,
    CalibrationFile,
    Engine,
    Epochs,
    GlobalBatchSize,
    Gpus,
    Lora,
    Objective,
    Optimizer,
    Overrides,
    Precision,
    Qlora,
    SeqLength,
    TotalTokens,
    answer,
    asked,
    count,
    echo_json,
    is_plan,
    is_recipe,
    job_for,
    of_file_alone,
    pins_of,
    plan_recipe,
    reader_of,
    recipe_changes,
    request_of,
    searching,
    terminal,
    with_changes,
)
from kit.errors import SpecError
from kit.files import write_text
from kit.planner.calibration import Calibration, learn
from kit.planner.calibration import load as load_calibration
from kit.planner.calibration import save as save_calibration
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.catalog.models import weights_of
from kit.specs.cluster import ClusterSpec
from kit.specs.job import TRL, JobSpec
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec
from kit.specs.text import refuse
from kit.units import human_count

if TYPE_CHECKING:
    from kit.report.memory_report import FitReport


def plan(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Recipe file, another trainer's file, catalog name, or Hugging Face directory.")
    ],
    overrides: Overrides = None,
    gpus: Gpus = None,
    clusters: Annotated[
        str | None, typer.Option(help="Compare these clusters with days and money: 8xH100,aws:p5.48xlarge:4,own.yaml …")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(help="USD for a node and hour, as 38.5, or of one of --clusters, as 8xH100=38.5; repeatable."),
    ] = None,
    engine: Engine = "auto",
    seq_length: SeqLength = None,
    global_batch_size: GlobalBatchSize = None,
    total_tokens: TotalTokens = None,
    epochs: Epochs = None,
    precision: Precision = None,
    objective: Objective = None,
    lora: Lora = False,
    qlora: Qlora = False,
    optimizer: Optimizer = None,
    attention: Attention = None,
    tight: Annotated[
        bool, typer.Option("--tight", help="Let the layout fill the GPU, without room for the prediction's error.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this YAML file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a self-contained page to this new file.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Also choose a cluster that trains the token budget in this many days.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Also choose a cluster that trains the token budget for this many USD.")
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option(help="Also choose a cluster, with at most this many GPUs.", parser=count)
    ] = None,
    by: Annotated[str | None, typer.Option(help="Choose the cluster by gpus (the default), money or time.")] = None,
    calibration: CalibrationFile = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="summary.json of a run: record it in the file of --calibration, then plan.")
    ] = None,
    patch: Annotated[
        bool, typer.Option("--patch", help="Of another trainer's file: print the diff that makes it fit, or faster.")
    ] = False,
    row_tokens: Annotated[
        int | None,
        typer.Option(help="Of another trainer's file: usual tokens of a row, if it does not pack.", parser=count),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose a layout; print whether it fits, how fast it is and what it costs. kit explain says why.

    With --deadline, --budget, --max-gpus or --by the cluster is chosen too: of all node types, or of the one in --gpus.
    """
    from kit.report.summary import LABEL_WIDTH, summary
    from kit.report.view import view_of

    if (reader := reader_of(model)) is not None:
        reader(Path(model), gpus, row_tokens, patch, as_json)
        return
    chooses, recipe = any(wish is not None for wish in (deadline, budget, max_gpus, by)), is_recipe(model)
    reasons = {
        "--patch and --row-tokens are of another trainer's file, such as axolotl.yaml or train.sh": (
            patch or row_tokens is not None
        ),
        "--calibrate records a run; name the file to record it in: --calibration calibration.yaml": (
            calibrate is not None and calibration is None
        ),
        "--clusters prints a table of clusters and no plan; leave out --gpus, --save, --html, --calibrate, --deadline, "
        "--budget, --max-gpus and --by": clusters is not None and (gpus or chooses or save or html or calibrate),
        "--price is of clusters that --gpus or --clusters name": clusters is None and price and (chooses or recipe),
        "--deadline, --budget, --max-gpus and --by choose a cluster, and a recipe names its own; use the model's name "
        "instead of the recipe": chooses and recipe,
        "--gpus is missing, for example --gpus 8xH100; or --deadline DAYS to have it chosen": (
            not (recipe or chooses or clusters or gpus)
        ),
    }
    refuse(reasons)
    changes, given = recipe_changes(overrides, engine, attention), asked(context)
    known = None if calibration is None or (calibrate is not None and not calibration.exists()) else calibration
    if clusters is not None:
        _compare_clusters(model, clusters, price or [], changes, given, known, as_json)
        return
    if recipe:
        of_file_alone(context, Path(model))
        with searching(model):
            result, _ = plan_recipe(Path(model), changes, known, tight)
        again = [model, *changes]
    else:
        spec = load_model(model)
        if chooses:
            pins, job = pins_of(model, changes), job_for(spec, 1, **given)
            gpus = _chosen_cluster(spec, job, pins, gpus, by or "gpus", deadline, budget, max_gpus, known, as_json)
        assert gpus is not None, "it was named, or chosen"
        with searching(f"{spec.name} on {gpus}"):
            cluster = _priced(gpus, price) if price else parse_cluster(gpus)
            cluster, job, pins = with_changes(model, spec, cluster, given, changes)
            result = make_plan(spec, cluster, job, pins, load_calibration(known), tight)
        again = [model, "--gpus", gpus, *changes]
        for name, value in given.items():
            again += [f"--{name.replace('_', '-')}"]
            again += [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]
    if calibrate is not None and calibration is not None:
        result = _calibrated(result, calibrate, calibration)
    if save is not None:
        result.save(save)
    if html is not None:
        _write_page(result, html)
    if as_json:
        echo_json(result)
        return
    width, style = terminal()
    then = _next(result, again, ["--calibration", str(calibration)] if calibration else [], width - LABEL_WIDTH)
    typer.echo(summary(view_of(result), then, width, style))


def _priced(gpus: str, price: list[str]) -> ClusterSpec:
    from kit.report.clusters import clusters_named  # a plan without a price need not load the table

    return clusters_named([gpus], price)[gpus]


def _next(plan: Plan, words: list[str], known: list[str], width: int) -> tuple[str, ...]:
    """Commands that follow on ``kit plan WORDS``, each complete; the last ones end in a run."""
    asked_for = shlex.join([*words, *known])
    memory, page = f"kit memory {asked_for}", shlex.join(["kit", "ui", *(words[:1] if Path(words[0]).exists() else [])])
    second = f"{memory}   {page}"
    then = [f"kit explain {asked_for}", second if len(second) <= width else memory]
    own_loop, several = plan.job.objective not in TRL, plan.cluster.num_nodes > 1
    if is_recipe(words[0]):
        start = " && kit train runs/a" if own_loop and not several else ""
        return (*then, f"kit emit {shlex.join(words)} --out runs/a{start}")
    if own_loop and weights_of(words[0]):
        rows = {"sft": "chats.jsonl", "seq2seq": "pairs.jsonl"}.get(plan.job.objective, "text.jsonl")
        train = shlex.join(["kit", "train", words[0], "--data", rows, *words[1:], "--out", "runs/a"])
        return (*then, f"{train} --dry-run" if several else train)
    return (*then, f"kit plan {asked_for} --save plan.yaml && kit emit plan.yaml --out runs/a")


def explain(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Plan file, recipe file, catalog name, or Hugging Face directory.")],
    overrides: Overrides = None,
    gpus: Gpus = None,
    engine: Engine = "auto",
    seq_length: SeqLength = None,
    global_batch_size: GlobalBatchSize = None,
    total_tokens: TotalTokens = None,
    epochs: Epochs = None,
    precision: Precision = None,
    objective: Objective = None,
    lora: Lora = False,
    qlora: Qlora = False,
    optimizer: Optimizer = None,
    attention: Attention = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="Show what a change would do: cluster=16xH200, job.seq_length=131072, layout.tp=4 …; repeatable.",
        ),
    ] = None,
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
) -> None:
    """Explain every decision of a plan, what limits it, where its time goes, and what a change would do."""
    from kit.report.what_if import explain as explained

    changes, known = recipe_changes(overrides, engine, attention), load_calibration(calibration)
    if is_recipe(target):
        of_file_alone(context, Path(target))
        with searching(target):
            result, recipe = plan_recipe(Path(target), changes, calibration)
        pins = recipe.layout
    else:
        request = request_of(context, target, changes, known)
        with searching(f"{request.model.name} on {gpus}"):
            result = make_plan(request.model, request.cluster, request.job, request.pins, known)
        pins = request.pins
    with searching("what each change would do"):
        explanation = explained(result, pins, tuple(what_if or ()), known)
    answer(explanation, str(explanation), as_json)


def memory(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Recipe or plan file, catalog name, Hugging Face directory, or a size such as 13B."),
    ] = None,
    overrides: Overrides = None,
    gpus: Gpus = None,
    engine: Engine = "auto",
    seq_length: SeqLength = None,
    global_batch_size: GlobalBatchSize = None,
    total_tokens: TotalTokens = None,
    epochs: Epochs = None,
    precision: Precision = None,
    objective: Objective = None,
    lora: Lora = False,
    qlora: Qlora = False,
    optimizer: Optimizer = None,
    attention: Attention = None,
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
    largest: Annotated[
        bool, typer.Option("--largest", help="Without a model: the largest that fits on --gpus, full, LoRA and QLoRA.")
    ] = False,
) -> None:
    """Print peak memory per GPU by component and pipeline stage, and whether it fits. Exit code 1 if it does not."""
    from kit.report.memory_report import memory_report

    changes = recipe_changes(overrides, engine, attention)
    reasons = {
        "--largest finds a model for GPUs: leave the model out, and name them, as in --gpus 8xH100": (
            largest and (model is not None or gpus is None)
        ),
        "a model, a recipe or a plan is missing; or --largest, to see which model fits": not largest and model is None,
    }
    refuse(reasons)
    if model is None:
        _largest(gpus or "", pins_of("--largest", changes), asked(context), as_json)
        return
    known = load_calibration(calibration)
    if is_recipe(model):
        of_file_alone(context, Path(model))
        report = _memory_of_file(Path(model), changes, known)
    else:
        request = request_of(context, model, changes, known)
        with searching(f"{request.model.name} on {gpus}"):
            report = memory_report(request)
    if as_json:
        echo_json(report.as_json())
    else:
        from rich.console import Console

        from kit.report.memory_text import picture

        Console(highlight=False, soft_wrap=True).print(picture(report))
    if report.verdict == "does not fit":
        raise typer.Exit(1)


def _memory_of_file(path: Path, changes: list[str], known: Calibration) -> FitReport:
    """The memory of a plan file as it is; or of a recipe's plan, or of the layout that comes closest to fitting."""
    from kit.report.memory_report import memory_report, report_of
    from kit.specs.recipe import load_recipe

    if is_plan(path):
        return report_of(plan_recipe(path, changes)[0].workload)
    recipe = load_recipe(path, changes)
    return memory_report(
        Request(model=recipe.model, cluster=recipe.cluster, job=recipe.job, pins=recipe.layout, calibration=known)
    )


def _largest(gpus: str, pins: Pins, given: dict[str, Any], as_json: bool) -> None:
    from kit.report import largest_model

    cluster = parse_cluster(gpus)
    job = job_for(load_model(largest_model.SIZES[0]), cluster.num_gpus, **given)
    found = largest_model.largest_models(cluster, job, pins)
    answer(found, largest_model.table(cluster, job, found), as_json)


def _write_page(plan: Plan, path: Path) -> None:
    from kit.report.html import page
    from kit.report.view import view_of

    try:
        write_text(path, page(view_of(plan)), overwrite=False)
    except OSError as error:
        raise SpecError(f"--html {path} cannot be written: {error.strerror}; name a new file") from None


def _calibrated(result: Plan, measurements: Path, file: Path) -> Plan:
    """Record a run in the calibration file, and plan again. The run is one of the plan beside its summary; without such
    a file, of this plan."""
    from kit.cost.estimate import predict
    from kit.emit.extra import with_extra
    from kit.report.what_if import pinned

    beside = measurements.parent / "plan.yaml"
    ran = Plan.load(beside) if beside.exists() else result
    ran = dataclasses.replace(ran, predicted=predict(ran.workload))
    known = load_calibration(file if file.exists() else None)
    save_calibration(learn(ran, measurements, known), file)
    typer.echo(f"{file}: what {measurements} says of runs like it\n")
    again = make_plan(result.model, result.cluster, result.job, pinned(result), load_calibration(file))
    return dataclasses.replace(
        with_extra(again, result.extra),
        predicted=again.predicted.for_steps(result.predicted.num_steps, again.cluster),
    )


def _compare_clusters(
    model: str,
    clusters: str,
    prices: list[str],
    changes: list[str],
    given: dict[str, Any],
    calibration: Path | None,
    as_json: bool,
) -> None:
    """Print the table of ``--clusters``."""
    from kit.api import compare_clusters
    from kit.report.clusters import cluster_table, clusters_named

    named = clusters_named([name.strip() for name in clusters.split(",")], prices)
    with searching(f"{model} on {len(named)} clusters"):
        if is_recipe(model):
            if given:
                raise SpecError("a recipe names its own job; change it as arguments: job.seq_length=8192")
            from kit.specs.recipe import load_recipe

            answers = compare_clusters(load_recipe(Path(model), changes), named, calibration=calibration)
        else:
            spec = load_model(model)
            job = job_for(spec, max(cluster.num_gpus for cluster in named.values()), **given)
            answers = compare_clusters(spec, named, job, pins_of(model, changes), calibration)
    answer(list(answers), cluster_table(answers), as_json)


def _chosen_cluster(
    model: ModelSpec,
    job: JobSpec,
    pins: Pins,
    node: str | None,
    by: str,
    deadline: float | None,
    budget: float | None,
    max_gpus: int | None,
    calibration: Path | None,
    as_json: bool,
) -> str:
    """Print what the node types offer, and return the best. With --json the table goes to stderr."""
    from kit.planner.cluster_selection import GOALS, Constraints, cluster_options, node_type, render_options
    from kit.report.view import of_a_billion

    goal = next((goal for goal in GOALS if goal == by), None)
    if goal is None:
        raise SpecError(f"--by {by!r} is not a goal; use gpus, money or time")
    if deadline is None and budget is None:
        job = of_a_billion(job)
    constraints = Constraints(goal=goal, deadline_days=deadline, budget_usd=budget, max_gpus=max_gpus)
    only = None if node is None else node_type(node)
    with searching(f"{model.name} on {node or 'every node type'}"):
        found = cluster_options(model, job, pins, constraints, only, load_calibration(calibration))
    typer.echo(f"{render_options(found)}\nof {human_count(job.total_tokens or 0)} tokens\n", err=as_json)
    return f"{found[0].cluster.name}:{found[0].cluster.num_nodes}"
