"""The worker, ``python -m kit.training RUN_DIR``. A launcher starts one per rank.

It compares the number of started processes with the plan, joins the process group, builds the engine and runs the
loop. Environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun sets them.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Before the loop there is nothing to save, and Python's KeyboardInterrupt would print a traceback of every rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import io
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TextIO

import kit.emit.megatron
from kit.emit.extra import NOT_PREDICTED
from kit.emit.run_directory import RunDirectory
from kit.errors import EngineError, KitError
from kit.preflight.check_result import require
from kit.preflight.requirements import check_gpus, check_optimizer
from kit.preflight.versions import check_versions
from kit.specs.text import shown
from kit.training.elastic import on_started, wait_as_spare
from kit.training.launcher_watchdog import ends_with_launcher
from kit.training.stopping import INTERRUPTED_CODE, STOPPED_CODE, UNSAVED_CODE, Reason
from kit.units import to_gib

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives. Longer than any checkpoint write that ranks wait for, and at least ten minutes longer than
the watchdog's limit, so that the watchdog writes the stacks of all ranks first."""
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable: how often torchrun has restarted its workers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank. Returns the exit code: 0 done, 2 a printed error that the user can correct, 74 some data was not
    saved, 75 stopped on request, 130 by Ctrl-C (``kit.training.stopping``)."""
    started = time.monotonic()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe to the launcher, which a log should follow at once
    arguments = _arguments(argv)
    try:
        rundir = RunDirectory.open(arguments.run_directory)
        if arguments.min_nodes is not None:
            rundir = on_started(rundir, int(os.environ.get("WORLD_SIZE", "1")), arguments.min_nodes)
            _announce_nodes(rundir)
            if int(os.environ.get("RANK", "0")) >= rundir.plan.layout.world_size:
                with ends_with_launcher():
                    return wait_as_spare(rundir.path)
            os.environ["WORLD_SIZE"] = str(rundir.plan.layout.world_size)
        _check_world_size(rundir)
        with ends_with_launcher(), process_group(rundir):
            from kit.training.run_lock import run_lock

            with run_lock(rundir.path, arguments.take_over):
                _announce_edits(rundir)
                return run(rundir, arguments, started)
    except KitError as error:
        report_error(error)
        return 2


def run(rundir: RunDirectory, arguments: argparse.Namespace, started: float) -> int:
    """Build the engine and train, in an initialised process group. Returns the exit code."""
    from kit.engines import build_engine
    from kit.training.data.loader import counted
    from kit.training.hub_files import with_local_files
    from kit.training.loop import train

    rundir, line = counted(with_local_files(rundir))
    if line:
        _say(line)
    resume = _where_to_resume(rundir, arguments.resume)
    _warn_of_random_weights(rundir, resume)
    engine = build_engine(rundir)
    try:
        summary = train(
            engine,
            rundir,
            resume=resume,
            stop_at_step=arguments.stop_at_step,
            started=started,
            profile=arguments.profile,
        )
    finally:
        engine.close()
    if summary.unsaved:
        report_error(EngineError(summary.unsaved))
        return UNSAVED_CODE
    if not summary.stopped:
        _say_next(rundir, summary.loss)
        return 0
    where = " on every node" if rundir.plan.cluster.num_nodes > 1 else ""
    _say(
        f"saved {rundir.path / 'checkpoints' / f'step-{summary.step:08d}'}; to go on{where}:\n"
        f"kit train {shlex.quote(str(rundir.path))} --resume auto"
    )
    return INTERRUPTED_CODE if summary.stopped == Reason.SIGINT.words else STOPPED_CODE


def _say(text: str, stream: TextIO | None = None) -> None:
    """Print, on rank 0. ``stream``: None: standard output."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=stream)


def _say_next(rundir: RunDirectory, loss: float | None) -> None:
    """What the run has made and what to do with it."""
    path, end = shlex.quote(str(rundir.path)), "" if loss is None else f", loss {loss:.4f}"
    _say(f"trained{end}: the model is in {path}")
    if rundir.run.model_path is not None:
        _say(f"  kit generate {path} --prompt 'Hello'")
    _say(f"  kit convert model {path} --out {path}-model")


def _warn_of_random_weights(rundir: RunDirectory, resume: str | None) -> None:
    """Say that fine-tuning begins from random weights: tests want that, people have forgotten the model."""
    resumes = resume not in (None, "auto") or (resume and _has_own_checkpoint(rundir))
    objective = rundir.plan.job.objective
    if objective != "pretrain" and rundir.run.model_path is None and not resumes:
        said = f"job.objective={objective} without run.model_path: training starts from RANDOM weights"
        _say(f"warning: {said}; to fine-tune a model, give its directory", sys.stderr)


def _has_own_checkpoint(rundir: RunDirectory) -> bool:
    return any((rundir.path / "checkpoints").glob("step-*"))


def _where_to_resume(rundir: RunDirectory, asked: str | None) -> str | None:
    """The value of --resume. After a restart by torchrun ``auto``, this run's own newest checkpoint; but ``asked``
    again if this run has no checkpoint yet."""
    restarted = int(os.environ.get(_RESTARTS, "0")) > 0
    return "auto" if restarted and (_has_own_checkpoint(rundir) or asked is None) else asked


def report_error(error: KitError) -> None:
    """Print an error. Ranks other than 0 name themselves."""
    rank = os.environ.get("RANK", "0")
    prefix = "error" if rank == "0" else f"error on rank {rank}"
    print(f"{prefix}: {error}", file=sys.stderr)


def _check_world_size(rundir: RunDirectory) -> None:
    """Raises EngineError if the number of processes differs from the plan: some launchers start fewer processes than
    requested, and exit with 0."""
    planned, started = rundir.plan.layout.world_size, int(os.environ.get("WORLD_SIZE", "1"))
    if planned != started:
        raise EngineError(
            f"{started} processes were started where the plan has {planned}; start it with launch.sh, "
            "or re-plan for the GPUs at hand (kit emit RECIPE cluster=…)"
        )


def _announce_nodes(rundir: RunDirectory) -> None:
    """Say on how many nodes an elastic run goes on."""
    nodes, layout = rundir.plan.cluster.num_nodes, rundir.plan.layout
    idle = int(os.environ.get("WORLD_SIZE", "1")) * nodes // layout.world_size - nodes
    spare = f" ({idle} more wait: no layout for {nodes + idle})" if idle else ""
    _say(
        f"elastic: {nodes} nodes{spare}, dp={layout.dp}, gradient_accumulation_steps="
        f"{layout.gradient_accumulation_steps}, global_batch_size={layout.global_batch_size}"
    )


def _announce_edits(rundir: RunDirectory) -> None:
    """Print the recipe's extra keys and the user's edits of the run directory on rank 0, and record the edits."""
    if os.environ.get("RANK", "0") != "0":
        return
    for key, value in rundir.plan.extra.flat().items():
        print(f"extra: {shown(key, str)}={shown(value)}: {NOT_PREDICTED}")
    for edit in rundir.edits:
        print(f"honoured edit: {edit}")
    if rundir.edits:
        rundir.record_edits()


@contextmanager
def process_group(rundir: RunDirectory) -> Iterator[None]:
    """Initialise torch.distributed for the plan's device; destroy it at the end, because gloo would abort at exit."""
    versions = check_versions()
    require(versions, check_optimizer(rundir.plan))
    if versions:
        _say(f"{versions.state}: {versions.said}; {versions.fix}")
    on_cpu = rundir.plan.cluster.gpu.device == "cpu"
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed reads it on its first import
    import torch
    import torch.distributed as dist

    from kit.training import determinism

    determinism.prepare(rundir.run.deterministic)
    if on_cpu and kit.emit.megatron.applies(rundir.plan):
        from kit.engines.megatron import cpu

        cpu.install()
    if not on_cpu:
        if not torch.cuda.is_available():
            raise EngineError(
                f"the plan is for {rundir.plan.cluster.gpu.name} and torch sees no CUDA device; "
                "install torch's CUDA build and the driver, or plan for cluster: 2xcpu"
            )
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        require(check_gpus(rundir.plan, [(device.name, to_gib(device.total_memory)) for device in devices]))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # FSDP2's offload reduces the gradient norm, and gathers tensors for checkpoints, in host memory.
    offloads = rundir.plan.layout.engine == "torch" and rundir.plan.layout.offload_param != "none"
    backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl" if offloads else "nccl"
    if "RANK" in os.environ:
        hang = timedelta(seconds=rundir.run.limits.hang_seconds or 0)
        dist.init_process_group(backend, timeout=max(_COLLECTIVE_TIMEOUT, hang + timedelta(minutes=10)))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End the process without finalising Python.

    Threads of gloo outlive ``destroy_process_group`` if an object still refers to the group, such as a default argument
    of torch.distributed.nn. If such a thread frees a tensor while Python finalises, a successful run aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kit.training", description="One rank of a training run.")
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--resume", default=None, help="auto, or the path of a checkpoint or a run")
    parser.add_argument("--stop-at-step", type=int, default=None, help="stop after this step, with a checkpoint")
    parser.add_argument("--profile", type=steps_range, default=None, metavar="FIRST-LAST", help="trace these steps")
    parser.add_argument("--take-over", action="store_true", help="whoever holds run.lock: it is surely gone")
    parser.add_argument("--min-nodes", type=int, default=None, help="go on with so few nodes (launch_elastic.sh)")
    # DeepSpeed's launcher adds this option to every command. The environment has the same value in LOCAL_RANK.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def steps_range(text: str) -> tuple[int, int]:
    """Parse ``5-8`` or ``5`` to (first step, last step). Raises argparse.ArgumentTypeError."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not last)) or not 1 <= int(first) <= int(last or first):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps; use 5-8, or 5")
    return int(first), int(last or first)


if __name__ == "__main__":
    leave(main())
