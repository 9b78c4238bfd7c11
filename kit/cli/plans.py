"""Commands that answer before anything runs: ``plan``, ``explain``, ``memory``."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kit.api import plan as make_plan
from kit.cli.options import Overrides, is_recipe, job_for, pins_of
from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.recipe import load_recipe


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
    total_tokens: Annotated[
        float | None, typer.Option(help="Token budget, for days and cost; for example 1e12.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, fp16 or fp8.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this YAML file.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Also choose a cluster that trains the token budget in this many days.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Also choose a cluster that trains the token budget for this many USD.")
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option(help="Also choose a cluster, with at most this many GPUs.", min=1)
    ] = None,
    by: Annotated[str | None, typer.Option(help="Choose the cluster by gpus (the default), money or time.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="summary.json of a run: correct this and later plans on its cluster.")
    ] = None,
) -> None:
    """Choose a layout; print whether it fits, how fast it is, what it costs, and why.

    With --deadline, --budget, --max-gpus or --by the cluster is chosen too: of all node types, or of the one in --gpus.
    """
    from kit.report.plan_text import render
    from kit.specs.catalog import load_model

    chooses = any(wish is not None for wish in (deadline, budget, max_gpus, by))
    if is_recipe(model):
        if chooses:
            raise SpecError(
                "--deadline, --budget, --max-gpus and --by choose a cluster, and a recipe names its own; "
                "use the model's name instead of the recipe"
            )
        if gpus or seq_length or global_batch_size or total_tokens or precision:
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
        asked = {"seq_length": seq_length, "global_batch_size": global_batch_size, "total_tokens": total_tokens}
        job = job_for(load_model(model), **asked, precision=precision)
        if chooses:
            goal = by or "gpus"
            gpus = _chosen_cluster(model, job, pins_of(engine, fix or []), gpus, goal, deadline, budget, max_gpus)
        if gpus is None:
            raise SpecError("--gpus is missing, for example --gpus 8xH100; or --deadline DAYS to have it chosen")
        result = make_plan(model, gpus, job, pins_of(engine, fix or []))
    if calibrate is not None:
        result = _calibrated(result, calibrate)
    if save is not None:
        result.save(save)
    typer.echo(render(result))


def explain(
    target: Annotated[str, typer.Argument(help="Plan file, recipe file, catalog name, or Hugging Face directory.")],
    overrides: Overrides = None,
    gpus: Annotated[str | None, typer.Option(help="Cluster, if the target is a model.")] = None,
    engine: Annotated[str, typer.Option(help="auto, torch, deepspeed or megatron.")] = "auto",
    fix: Annotated[list[str] | None, typer.Option(help="Pin a choice: --fix tp=8. Repeatable.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences in an optimizer step.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, fp16 or fp8.")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", help="gpus=16xH200, seq_length=131072, tp=4 …; repeatable.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the step and the schedule into this file.")] = None,
) -> None:
    """Explain every decision of a plan, what limits it, where its time goes, and what a change would do."""
    from kit.planner import calibration
    from kit.report.charts import draw
    from kit.report.what_if import explain as explained
    from kit.specs.catalog import load_model

    pins = Pins()
    if is_recipe(target):
        result, pins = _plan_or_recipe(Path(target), overrides, engine, fix)
    else:
        if gpus is None:
            raise SpecError("--gpus is missing, for example --gpus 8xH100")
        pins = pins_of(engine, fix or [])
        asked = {"seq_length": seq_length, "global_batch_size": global_batch_size, "precision": precision}
        result = make_plan(target, gpus, job_for(load_model(target), **asked), pins)
    typer.echo(explained(result, pins, tuple(what_if or ()), calibration.load()))
    if png is not None:
        draw(result, png)
        typer.echo(f"\n{png}: the step and the schedule")


def memory(
    model: Annotated[
        str, typer.Argument(help="Catalog name, Hugging Face directory, a size such as 13B; with --probe a plan.yaml.")
    ],
    gpus: Annotated[str | None, typer.Option(help="8xH100, aws:p4d.24xlarge:8, cluster.yaml, local …")] = None,
    engine: Annotated[str, typer.Option(help="auto, torch, deepspeed or megatron.")] = "auto",
    zero: Annotated[int | None, typer.Option(help="ZeRO stage.")] = None,
    offload: Annotated[str | None, typer.Option(help="Offload the optimizer state: none, cpu or nvme.")] = None,
    offload_param: Annotated[str | None, typer.Option(help="Offload the weights: none, cpu or nvme.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    vp: Annotated[int | None, typer.Option(help="Virtual stages per pipeline rank.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context parallel size.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert parallel size.")] = None,
    sp: Annotated[bool | None, typer.Option(help="Sequence parallelism.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per rank and forward pass.")] = None,
    fix: Annotated[list[str] | None, typer.Option(help="Pin any other choice: --fix etp=2. Repeatable.")] = None,
    seq_length: Annotated[int | None, typer.Option("--seq", "--seq-length", help="Tokens in a sequence.")] = None,
    global_batch_size: Annotated[
        int | None, typer.Option("--global-batch", "--global-batch-size", help="Sequences in an optimizer step.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, fp16 or fp8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw a stacked bar into this file.")] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Measure a plan's memory: run the model code on fake tensors, without a GPU."),
    ] = False,
    stage: Annotated[int | None, typer.Option(help="With --probe: the pipeline stage to measure.")] = None,
) -> None:
    """Print peak memory per GPU by component and pipeline stage, and whether it fits."""
    import json

    if probe:
        # Another process: the probe patches torch for good.
        words = [sys.executable, "-m", "kit.diagnose.probe", model, *(["--json"] if as_json else [])]
        os.execv(sys.executable, words + (["--stage", str(stage)] if stage is not None else []))
    if gpus is None:
        raise SpecError("--gpus is missing, for example --gpus 8xH100")

    from kit.planner.request import Request
    from kit.report.memory_report import memory_report
    from kit.specs.catalog import load_model, parse_cluster

    sizes: dict[str, int | str | None] = {
        "tp": tp,
        "pp": pp,
        "vp": vp,
        "cp": cp,
        "ep": ep,
        "sp": sp,
        "zero_stage": zero,
    }
    sizes |= {"micro_batch_size": micro_batch, "recompute": recompute}
    sizes |= {"offload_optimizer": offload, "offload_param": offload_param}
    given = [f"{name}={str(value).lower()}" for name, value in sizes.items() if value is not None]
    spec = load_model(model)
    job = job_for(spec, seq_length=seq_length, global_batch_size=global_batch_size, precision=precision)
    report = memory_report(
        Request(model=spec, cluster=parse_cluster(gpus), job=job, pins=pins_of(engine, [*given, *(fix or [])]))
    )
    if png is not None:
        from kit.report.memory_text import save_png

        save_png(report, png)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        from rich.console import Console

        from kit.report.memory_text import picture

        Console(highlight=False, soft_wrap=True).print(picture(report))


def _calibrated(result: Plan, measurements: Path) -> Plan:
    """Learn from a run (of the plan beside the file, or else of this one), keep it, and plan again."""
    from kit.cost import predict
    from kit.planner import calibration
    from kit.planner.make_plan import make_plan as plan_again
    from kit.report.what_if import pinned

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
    from kit.planner import calibration
    from kit.planner.cluster_selection import Constraints, cluster_options, node_type, render_options
    from kit.specs.catalog import load_model

    if by not in ("gpus", "money", "time"):
        raise SpecError(f"--by {by!r} is no goal; use gpus, money or time")
    constraints = Constraints(goal=by, deadline_days=deadline, budget_usd=budget, max_gpus=max_gpus)  # type: ignore[arg-type]
    only = None if node is None else node_type(node)
    found = cluster_options(load_model(model), job, pins, constraints, only, calibration.load())
    typer.echo(render_options(found) + "\n")
    return f"{found[0].cluster.name}:{found[0].cluster.num_nodes}"


def _plan_or_recipe(path: Path, overrides: list[str] | None, engine: str, fix: list[str] | None) -> tuple[Plan, Pins]:
    """A saved plan as it is, or a recipe's, planned now; with the choices that were pinned."""
    from kit.report.what_if import pinned

    words = [*(overrides or []), *[f"layout.{word}" for word in fix or []]]
    words += [f"layout.engine={engine}"] if engine != "auto" else []
    if "schema_version" in strict_yaml.read(path).data:
        if words:
            raise SpecError(f"{words[0]!r}: a plan has every choice made; ask with --what-if, or explain its recipe")
        saved = Plan.load(path)
        return saved, pinned(saved)
    recipe = load_recipe(path, words)
    return make_plan(recipe), recipe.layout
