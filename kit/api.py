"""The public names: one function for each command, and the types that these functions take and return.

``plan`` does what ``kit plan`` does, ``explain`` what ``kit explain`` does, and so on. ``kit emit`` is ``emit_run``,
because ``kit.emit`` is the package that writes files. A function raises ``KitError`` for an error that its caller can
correct.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import EngineError, KitError
from kit.planner.calibration import load as load_calibration
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.cluster import ClusterSpec, GpuSpec
from kit.specs.job import JobSpec, OptimizerSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec
from kit.specs.recipe import Recipe, load_recipe
from kit.specs.run import RunSpec

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory
    from kit.planner.compare import Comparison
    from kit.rehearsal.rehearse import Rehearsal
    from kit.report.clusters import ClusterAnswer
    from kit.report.memory_report import FitReport
    from kit.report.what_if import Explanation


def plan(
    model: str | Path | ModelSpec | Recipe,
    cluster: str | ClusterSpec | None = None,
    job: JobSpec | None = None,
    pins: Pins | None = None,
    calibration: str | Path | None = None,
    tight: bool = False,
) -> Plan:
    """The fastest plan that fits.

    ``model``: a catalog name, a Hugging Face directory, a ``ModelSpec``, or a recipe. With a recipe, give no cluster,
    job or pins. ``cluster``: ``"8xH100"``, ``"aws:p5.48xlarge:4"`` or a ``ClusterSpec``. ``pins``: choices already
    made. ``calibration``: a file that ``kit plan --calibrate`` wrote. Its runs correct the predictions for their
    cluster. ``tight``: whether the layout may leave no room for the error of its predicted peak.

    Raises ``SpecError`` for unknown names and impossible values, ``PlanError`` where nothing is legal or fits.
    """
    known, asked = load_calibration(calibration), _request(model, cluster, job, pins)
    if isinstance(model, Recipe):
        from kit.emit.of_recipe import plan_of_recipe

        return plan_of_recipe(model, known, tight)
    return make_plan(asked.model, asked.cluster, asked.job, asked.pins, known, tight)


def compare(
    model: str | Path | ModelSpec | Recipe,
    cluster: str | ClusterSpec | None = None,
    job: JobSpec | None = None,
    pins: Pins | None = None,
) -> Comparison:
    """Every legal layout with its memory and step time, the plan chosen from them, or why there is none.

    Takes what ``plan`` takes. Raises ``SpecError``.
    """
    from kit.planner.compare import compare

    return compare(_request(model, cluster, job, pins))


def compare_clusters(
    model: str | Path | ModelSpec | Recipe,
    clusters: Mapping[str, ClusterSpec],
    job: JobSpec | None = None,
    pins: Pins | None = None,
    calibration: str | Path | None = None,
) -> tuple[ClusterAnswer, ...]:
    """The best plan on each cluster with its days and money, as ``kit plan --clusters`` prints them.

    Takes what ``plan`` takes; of a recipe the cluster is not used. ``kit.report.clusters.clusters_named`` makes
    ``clusters`` from names and prices. Raises ``SpecError``.
    """
    from kit.report.clusters import compare_clusters

    one = None if isinstance(model, Recipe) else next(iter(clusters.values()))
    return compare_clusters(
        replace(_request(model, one, job, pins), calibration=load_calibration(calibration)), clusters
    )


def explain(plan: Plan, *what_if: str) -> Explanation:
    """Why the planner chose this plan, what limits it, and what a change would do. ``str(explain(…))`` is the text that
    ``kit explain`` prints.

    ``what_if``: ``"cluster=16xH200"``, ``"job.seq_length=131072"`` or ``"layout.tp=4"``. Raises ``SpecError``.
    """
    from kit.report.what_if import explain

    return explain(plan, changes=what_if)


def memory(
    model: str | Path | ModelSpec | Recipe,
    cluster: str | ClusterSpec | None = None,
    job: JobSpec | None = None,
    pins: Pins | None = None,
) -> FitReport:
    """GiB per GPU by component and pipeline stage. If no layout fits: of the layout that comes closest, with changes
    that would make it fit.

    Takes what ``plan`` takes. Raises ``SpecError``, and ``PlanError`` where no layout is legal.
    """
    from kit.report.memory_report import memory_report

    return memory_report(_request(model, cluster, job, pins))


def emit_run(recipe: Recipe, out: str | Path, targets: Sequence[str] = ()) -> RunDirectory:
    """Plan a recipe and write its run directory. ``targets``: k8s, sky, axolotl … . Raises ``RunDirectoryError`` if
    ``out`` exists."""
    from kit.emit.run_directory import write

    return write(plan(recipe), recipe.run or RunSpec(), out, targets)


def convert(
    source: str | Path,
    out: str | Path,
    to: str = "hf",
    dtype: str | None = None,
    extras_from: str | Path | None = None,
) -> str:
    """Write a checkpoint or a Hugging Face model in another format. Return a line that
    says what was written.

    ``to``: hf, step, megatron, dcp or universal. ``dtype``: of the weights, for hf and megatron; None: bfloat16.
    ``extras_from``: a Hugging Face directory whose tokenizer files are copied, for hf. Needs torch.
    Raises ``CheckpointError``.
    """
    from kit.training.checkpoint.convert import convert

    extras = None if extras_from is None else Path(extras_from)
    return convert(Path(source), to, Path(out), dtype=dtype, extras_from=extras)


def convert_data(sources: Sequence[str | Path], tokenizer: str | Path, out: str | Path) -> str:
    """Tokenise text into the .bin/.idx pair that the engines read. Return a line with the number of tokens. Needs
    transformers.

    Raises ``DataError``.
    """
    from kit.training.data.tokenise import tokenise

    return str(tokenise(sources, tokenizer, out))


def train(run_directory: str | Path, resume: str | Path | None = None, stop_at_step: int | None = None) -> None:
    """Start this node's processes of a run, and wait for them. They write to this process's stdout and stderr.

    ``resume``: ``"auto"`` for the newest good checkpoint, or the path of a checkpoint.
    Raises ``RunDirectoryError`` before anything starts, ``EngineError`` where a process fails, and KeyboardInterrupt
    after a Ctrl-C, once the run has saved.
    """
    from kit.emit.run_directory import RunDirectory
    from kit.preflight.run_checks import preflight
    from kit.training.hub_files import with_local_files

    rundir = with_local_files(RunDirectory.open(run_directory))
    preflight(rundir, None if resume in (None, "auto") else Path(resume))
    command = [str(rundir.path / "launch.sh"), *launch_arguments(resume, stop_at_step)]
    interrupted: KeyboardInterrupt | None = None
    with subprocess.Popen(command, env={"PYTHON": sys.executable, **os.environ}) as process:
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt as error:  # launch.sh got it too: the run writes its checkpoint and ends
                interrupted = error
    if interrupted is not None:
        raise interrupted
    if process.returncode:
        raise EngineError(
            f"{rundir.path.name}: launch.sh ended with exit code {process.returncode}; see its output above"
        )


def launch_arguments(resume: str | Path | None, stop_at_step: int | None) -> list[str]:
    """Arguments of a run directory's launch.sh."""
    args = ["--resume", "auto" if resume == "auto" else str(Path(resume).resolve())] if resume else []
    return [*args, "--stop-at-step", str(stop_at_step)] if stop_at_step else args


def rehearse(recipe: Recipe, out: str | Path | None = None) -> Rehearsal:
    """Run a scaled-down copy of a recipe on CPU processes: train, kill, resume, export. ``out`` keeps its files.

    Raises ``KitError`` where a run fails; ``passed`` says whether its losses and weights are plain torch's.
    """
    from kit.rehearsal.rehearse import rehearse

    with tempfile.TemporaryDirectory(prefix="kit-rehearsal-") as scratch:
        return rehearse(recipe.name, plan(recipe), recipe.run, Path(out) if out else Path(scratch) / "rehearsal")


def _request(
    model: str | Path | ModelSpec | Recipe,
    cluster: str | ClusterSpec | None,
    job: JobSpec | None,
    pins: Pins | None,
) -> Request:
    if isinstance(model, Recipe):
        if cluster is not None or job is not None or pins is not None:
            raise TypeError(
                "a recipe names its own cluster, job and layout; change them with load_recipe(path, overrides)"
            )
        return Request(model=model.model, cluster=model.cluster, job=model.job, pins=model.layout)
    if cluster is None:
        raise TypeError("a cluster is missing, for example '8xH100'")
    model = model if isinstance(model, ModelSpec) else load_model(str(model))
    cluster = cluster if isinstance(cluster, ClusterSpec) else parse_cluster(cluster)
    return Request(model=model, cluster=cluster, job=job or JobSpec(), pins=pins or Pins())


__all__ = [
    "ClusterSpec",
    "GpuSpec",
    "JobSpec",
    "KitError",
    "Layout",
    "ModelSpec",
    "OptimizerSpec",
    "Pins",
    "Plan",
    "Recipe",
    "RunSpec",
    "compare",
    "compare_clusters",
    "convert",
    "convert_data",
    "emit_run",
    "explain",
    "load_recipe",
    "memory",
    "plan",
    "rehearse",
    "train",
]
