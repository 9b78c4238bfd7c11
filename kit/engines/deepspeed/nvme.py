"""ZeRO-Infinity's swap files: checks the machine before a run, and removes the files after it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from kit.emit.run_directory import RunDirectory
from kit.engines.deepspeed import ops
from kit.preflight.check_result import require
from kit.preflight.requirements import check_host_memory, check_nvme, swap_directory


def prepare_swapping(rundir: RunDirectory, settings: dict[str, Any]) -> None:
    """Collective. Check this machine, and set the directory of the swap files in ``settings``: one that only this run
    uses, unless an edit of ds_config.json names another.

    Raises KitError if disk, host memory or libaio are not sufficient.
    """
    require(check_host_memory(rundir.plan))
    if not rundir.plan.layout.uses_nvme:
        return
    dist.barrier()  # another engine of these processes may still be removing its files
    require(check_nvme(rundir.plan, rundir.run, rundir.path))
    ops.load_async_io()
    folder = swap_directory(rundir.plan, rundir.run, rundir.path)
    zero, edited = settings["zero_optimization"], {edit.key for edit in rundir.edits if edit.file == "ds_config.json"}
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme" and f"zero_optimization.{name}.nvme_path" not in edited:
            zero[name]["nvme_path"] = str(folder)


def remove_swap_files(rundir: RunDirectory) -> None:
    """Remove this rank's swap files, and folders that are empty. Other ranks may still write their files."""
    folder = swap_directory(rundir.plan, rundir.run, rundir.path)
    if folder is None:
        return
    for own in sorted(folder.glob(f"zero_stage_3/*/rank{dist.get_rank()}")):
        shutil.rmtree(own, ignore_errors=True)
    for parent in [*folder.glob("zero_stage_3/*"), folder / "zero_stage_3", folder]:
        with suppress(OSError):  # another rank still has files in it
            parent.rmdir()
