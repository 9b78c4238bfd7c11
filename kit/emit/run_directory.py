"""The run directory: the only thing an engine reads.

    plan.yaml         the truth: model, cluster, job, layout, predictions, decisions
    run.yaml          data, schedule, checkpoints, logging
    ds_config.json, accelerate.yaml, megatron.yaml, launch.sh, slurm.sbatch, pretrain_gpt.sh
                      the plan, for the programs that read these files
    ds_config.md      a reason for each key of ds_config.json
    ds_config.trainer.json
                      ds_config.json for the Hugging Face Trainer
    ds_config.own_optimizer.json, accelerate.own_optimizer.yaml
                      for accelerate scripts that make their own optimizer
    own_script.py     starts a rank of a script that knows nothing of kit
    ds_config.deepcompile.json, ds_config.superoffload.json
                      with one of DeepSpeed's newer switches, where --target asks for them
    hostfile, launch_hosts.sh, launch_elastic.sh, .deepspeed_env, rank.py
                      files that start several nodes
    k8s.jobset.yaml, k8s.trainjob.yaml, sky.yaml
                      the run for Kubernetes and SkyPilot, where --target asks for them
    accelerate.parallelism.yaml, axolotl.yaml, llamafactory.yaml, ms_swift.yaml, torchtitan.sh, verl.sh, openrlhf.sh
                      the plan for other training programs, where --target asks for them
    README.md         which file starts what
    manifest.json     the SHA-256 of each file as kit wrote it

At start kit compares each file with its hash. A changed plan is an error; so is a changed batch, stage or parallelism
in a derived file. kit honours every other edit of a derived file, prints it, and records it in edits.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kit.cost.hardware import usable_gib
from kit.cost.memory.offload import host_ram_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.cost.workload import Workload
from kit.emit import (
    accelerate,
    deepspeed,
    deepspeed_rationale,
    launch,
    megatron,
    own_optimizer,
    own_script,
    readme,
    slurm,
    trainer,
)
from kit.emit.derived_file import DerivedFile, added_files, json_text
from kit.emit.extra import check_extra
from kit.entry_points import load, registered
from kit.errors import RunDirectoryError, SpecError
from kit.files import complete_directory, write_text
from kit.planner.length import known_length
from kit.planner.plan import Plan
from kit.planner.schedule import with_usual_warmup
from kit.specs import strict_yaml
from kit.specs.extra import flat
from kit.specs.job import TRL
from kit.specs.layout import ZERO_KEYS, describe
from kit.specs.run import RunSpec, absolute_paths, run_paths, with_paths
from kit.specs.text import check_line, shown
from kit.specs.text_files import MOST_BYTES, open_regular, parse_json, read_text, reason

MANIFEST = "manifest.json"
FORMAT = "kit-run-directory/1"


@dataclass(frozen=True)
class Edit:
    """A value of a derived file that was changed by hand after it was emitted."""

    file: str
    key: str
    planned: Any
    found: Any

    def __str__(self) -> str:
        return (
            f"{self.file}: {shown(self.key, str)}: {shown(self.planned)} was planned, the file has {shown(self.found)}"
        )


@dataclass(frozen=True)
class RunDirectory:
    """A run directory as read from disk. The paths in ``run`` are absolute."""

    path: Path
    plan: Plan
    run: RunSpec
    settings: Mapping[str, Any]
    """Content of the engine's own file: ds_config.json or megatron.yaml; empty for torch."""
    megatron: Mapping[str, Any]
    """Content of megatron.yaml; empty without one. ZeRO over Megatron's tensor parallelism has it beside
    ds_config.json."""
    edits: tuple[Edit, ...]
    """Edits by hand that kit honours."""

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Read and check a run directory. Raises ``RunDirectoryError`` for a missing or changed plan, and for an edit
        of a value that the plan decides; ``SpecError`` for a schedule that does not fit the run."""
        path = Path(path).resolve()
        check_line("run directory", str(path))
        hashes = _read_manifest(path)
        plan = Plan.load(path / "plan.yaml")
        if _sha256(path / "plan.yaml") != hashes.get("plan.yaml"):
            raise RunDirectoryError(
                f"{path.name}/plan.yaml was changed after it was written; every other file follows from it: "
                "change the recipe and emit again (kit emit RECIPE --out NEW_DIR)"
            )
        document = strict_yaml.read(path / "run.yaml")  # users may edit it; it never changes the plan
        run = with_usual_warmup(absolute_paths(strict_yaml.parse(RunSpec, document.data, document), path), plan.job)
        _check(plan, run)
        files = {file.name: file for file in DERIVED_FILES}
        if others := _edited_beside(path, hashes, files.keys()):
            of_targets = (file for target in registered(TARGETS) for file in files_of_target(target))
            files |= {file.name: file for file in (*added_files(), *of_targets)}
        edits = (
            *(edit for file in files.values() for edit in _edits(path, file, plan, run, hashes)),
            *(Edit(name, "(text)", "as emitted", "edited") for name in others if name not in files),
        )
        _refuse_plan_owned(path, edits, files)
        own_file = {"deepspeed": "ds_config.json", "megatron": "megatron.yaml"}.get(plan.layout.engine)
        return cls(
            path=path,
            plan=plan,
            run=run,
            settings=_parse(path / own_file) if own_file else {},
            megatron=_parse(path / "megatron.yaml") if megatron.applies(plan) else {},
            edits=edits,
        )

    @property
    def edited_workload(self) -> Workload:
        """The plan's workload, with the buffer sizes that were edited in ds_config.json."""
        names = {f"zero_optimization.{key}": name for name, key in ZERO_KEYS.items()}
        found = {names[edit.key]: edit.found for edit in self.edits if edit.key in names}
        sizes = {
            name: int(size) for name, size in found.items() if isinstance(size, int | float) and 0 <= size < math.inf
        }
        return self.plan.workload.with_layout(self.plan.layout.but(**sizes))

    def memory_after_edits(self) -> str:
        """One line with the memory peak of the edited buffer sizes; empty if no edit changes a size."""
        edited = self.edited_workload
        if edited == self.plan.workload:
            return ""
        gpu, planned = peak_gib(edited), peak_gib(self.plan.workload)
        usable = usable_gib(self.plan.cluster.gpu)
        host, host_planned = host_ram_gib_per_node(edited), host_ram_gib_per_node(self.plan.workload)
        line = f"with the edits of ds_config.json: {gpu:.1f} GiB per GPU ({planned:.1f} planned, {usable:.1f} usable)"
        if host != host_planned:
            line += f", {host:.1f} GiB of host memory per node ({host_planned:.1f} planned)"
        return f"{line}; it does not fit" if gpu > usable else line

    def record_edits(self) -> None:
        """Write ``edits.json``: the edits by hand with which this run started."""
        data = [dataclasses.asdict(edit) for edit in self.edits]
        write_text(self.path / "edits.json", json.dumps(data, indent=2) + "\n")


DERIVED_FILES: tuple[DerivedFile, ...] = (
    *deepspeed.FILES,
    *deepspeed_rationale.FILES,
    *trainer.FILES,
    *own_optimizer.FILES,
    *own_script.FILES,
    *accelerate.FILES,
    *megatron.FILES,
    *launch.FILES,
    *slurm.FILES,
    *readme.FILES,
)
"""Every file of the core that follows from a plan. Add-ons have more (``added_files``), and those of ``--target``."""
TARGETS = "kit.targets"
"""Group of entry points: value of ``kit emit --target`` → ``FILES`` of a module, of which those with this target are
its files. A package that is installed may have some of its own (docs/how-to/add-a-launcher.md)."""


def files_of_target(name: str) -> tuple[DerivedFile, ...]:
    """The files that ``--target NAME`` adds. Raises SpecError for a name that no installed package has."""
    known = registered(TARGETS)
    if name not in known:
        raise SpecError(f"--target {shown(name, str)}: unknown; use {' or '.join(sorted(known)) or 'none'}")
    return tuple(file for file in load(known[name]) if file.target == name)


def files_of(plan: Plan, targets: Sequence[str] = ()) -> dict[str, str]:
    """Name → text of every file that follows from the plan alone, plan.yaml included."""
    files = {"plan.yaml": plan.to_yaml()}
    return files | {file.name: file.text(plan) for file in _wanted(targets) if _applies(file, plan)}


def _wanted(targets: Sequence[str]) -> Iterator[DerivedFile]:
    return itertools.chain(DERIVED_FILES, added_files(), *map(files_of_target, targets))


def _applies(file: DerivedFile, plan: Plan) -> bool:
    """Whether a plan's run directory may have the file. TRL's objectives are not of kit's own loop."""
    return file.applies(plan) and not (file.own_loop and plan.job.objective in TRL)


def write(
    plan: Plan,
    run: RunSpec,
    path: str | Path,
    targets: Sequence[str] = (),
    beside: Mapping[str, str] = MappingProxyType({}),
) -> RunDirectory:
    """Writes a new run directory, complete or not at all. ``targets``: values of ``--target`` whose files to add.
    Without training data it has no file of kit's own loop: it is for a user's own script. ``beside``: name → text of
    further files, which kit does not read.

    Raises ``RunDirectoryError`` if the path exists. Raises ``SpecError`` for an unknown target, a schedule that is
    longer than the run, or a batch ramp that the layout cannot run.
    """
    for target in targets:
        of_target = files_of_target(target)
        if not any(_applies(file, plan) for file in of_target):
            raise SpecError(f"--target {target} for {describe(plan.layout)}: {of_target[0].refuses(plan)}")
    check_extra(plan)
    run = with_usual_warmup(run, plan.job)
    _check(plan, run)
    path = Path(path).resolve()
    check_line("run directory", str(path))
    refuse_existing(path)
    files = {name: _of_run(name, text, run) for name, text in files_of(plan, targets).items()}
    if not run.data.named:
        if not targets and not files.keys() & {own_script.NAME, *(file.name for file in added_files())}:
            raise SpecError(
                f"run.data.train is required and missing: only kit's own loop runs {describe(plan.layout)}; give the "
                "prefix of one set, or several as run.data.blend"
            )
        own_loop = {file.name for file in _wanted(targets) if file.own_loop}
        files = {name: text for name, text in files.items() if name not in own_loop}
        files["README.md"] = readme.readme(plan, own_loop=False)
    portable = _with_portable_paths(run, path)
    files["run.yaml"] = strict_yaml.dump(strict_yaml.to_plain(portable))
    files |= {file.name: file.of_run(files[file.name], portable) for file in added_files() if file.name in files}
    manifest = {
        "format": FORMAT,
        "plan_hash": plan.digest,
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())},
    }
    files[MANIFEST] = json_text(manifest)
    try:
        with complete_directory(path) as staging:
            for name, text in {**beside, **files}.items():
                (staging / name).write_text(text, encoding="utf-8")
            for name in files:
                if name.endswith(".sh"):
                    (staging / name).chmod(0o755)
    except OSError as error:
        raise RunDirectoryError(
            f"{path.name} cannot be written: {error.strerror}; make room or choose another --out"
        ) from None
    return RunDirectory.open(path)


def refuse_existing(path: Path) -> None:
    """Raises RunDirectoryError if there is something, and says how to go on with a run that began there."""
    if path.exists():
        began = (
            f"; kit train {shlex.quote(str(path))} --resume auto goes on with its run" * (path / "launch.sh").exists()
        )
        raise RunDirectoryError(
            f"{path.name} exists already and is not overwritten; use --out {_free(path)}, or remove it yourself{began}"
        )


def _free(path: Path) -> str:
    """The name with the smallest number that is free beside it: run2, run3, …"""
    taken = (f"{path.name}{number}" for number in itertools.count(2))
    return shlex.quote(next(str(path.with_name(name)) for name in taken if not path.with_name(name).exists()))


def _check(plan: Plan, run: RunSpec) -> None:
    """Raises SpecError if the schedule does not fit the run, or the data the job."""
    known_length(plan, run)
    if run.data.stream is not None and plan.job.objective != "pretrain":
        raise SpecError(
            f"run.data.stream with job.objective={plan.job.objective}: only text for pretrain is streamed; convert the "
            f"rows (kit convert data … --objective {plan.job.objective}) and use run.data.train"
        )


def _of_run(name: str, text: str, run: RunSpec) -> str:
    """The text with the run's NVMe path in DeepSpeed's files, for scripts that start without kit's worker. A path in
    the user's home is left out."""
    its_own = name.startswith("ds_config") and name.endswith(".json")
    if not its_own or not run.nvme_path or Path(run.nvme_path).is_relative_to(Path.home().resolve()):
        return text
    return json_text(deepspeed.with_nvme_path(parse_json(text), run.nvme_path))


def _read_manifest(path: Path) -> dict[str, str]:
    try:
        manifest = parse_json(read_text(path / MANIFEST))
        if manifest["format"] != FORMAT:
            raise RunDirectoryError(
                f"{path.name}/{MANIFEST} has format {shown(manifest['format'])}; this kit reads {FORMAT!r}: emit again"
            )
        files: dict[str, str] = manifest["files"]
        if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
            raise ValueError("files is no mapping of names to hashes")
    except (FileNotFoundError, NotADirectoryError):
        raise RunDirectoryError(
            f"{path} is not a run directory (no {MANIFEST}); make one with: kit emit RECIPE --out DIR"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path.name}/{MANIFEST} is damaged ({reason(error)}); emit again") from None
    missing = [name for name in files if not os.path.isfile(path / name)]
    if missing:
        names = shown(", ".join(missing), str)
        raise RunDirectoryError(f"{path.name} lacks {names}, which its manifest names; emit again")
    return files


def _edits(path: Path, derived: DerivedFile, plan: Plan, run: RunSpec, hashes: Mapping[str, str]) -> list[Edit]:
    """Differences between a file on disk and the text that kit derives from plan and run."""
    file, name = path / derived.name, derived.name
    # Not written: of a target, of kit's own loop in a directory without data, or newer than the directory.
    absent = name not in hashes and (bool(derived.target) or not file.exists())
    if not _applies(derived, plan) or absent or _sha256(file) == hashes.get(name):
        return []
    if file.suffix not in (".json", ".yaml"):
        return [Edit(file=name, key="(text)", planned="as emitted", found="edited")]
    text = derived.of_run(_of_run(name, derived.text(plan), run), _with_portable_paths(run, path))
    planned, found = flat(_parse_text(text, name)), flat(_parse(file))
    keys = [key for key in {**planned, **found} if planned.get(key) != found.get(key)]
    return [Edit(file=name, key=key, planned=planned.get(key), found=found.get(key)) for key in keys]


def _edited_beside(path: Path, hashes: Mapping[str, str], core: Collection[str]) -> list[str]:
    """Edited files that ``--target`` wrote. The package that knows their keys may be gone."""
    others = hashes.keys() - {"plan.yaml", "run.yaml", *core}
    return sorted(name for name in others if _sha256(path / name) != hashes[name])


def _refuse_plan_owned(path: Path, edits: tuple[Edit, ...], files: Mapping[str, DerivedFile]) -> None:
    owners = {name: file.plan_owned_keys for name, file in files.items()}
    refused = [
        f"{path.name}/{edit}; change {owners[edit.file][edit.key]} in the recipe and emit again"
        for edit in edits
        if edit.key in owners.get(edit.file, ())
    ]
    if refused:
        raise RunDirectoryError("\n".join(refused))


def _parse(file: Path) -> dict[str, Any]:
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file.name} cannot be read: {reason(error)}") from None
    return _parse_text(text, file.name)


def _parse_text(text: str, name: str) -> dict[str, Any]:
    """JSON or YAML text → a mapping. JSON is a subset of YAML, but the JSON parser has better error messages."""
    try:
        data = parse_json(text) if name.endswith(".json") else strict_yaml.parse_text(text, name).data
    except json.JSONDecodeError as error:
        raise RunDirectoryError(f"{name}:{error.lineno}: not valid JSON: {error.msg}") from None
    except ValueError as error:
        raise RunDirectoryError(f"{name}: not valid JSON: {error}") from None
    except SpecError as error:
        raise RunDirectoryError(str(error)) from None
    if not isinstance(data, dict):
        raise RunDirectoryError(f"{name}: holds a {type(data).__name__} where an object of keys is expected")
    return data


def _sha256(file: Path) -> str:
    try:
        with open_regular(file) as stream:
            return hashlib.sha256(stream.read(MOST_BYTES)).hexdigest()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file.name} cannot be read: {reason(error)}; emit again") from None


def _with_portable_paths(run: RunSpec, path: Path) -> RunSpec:
    return with_paths(run, {key: _portable(named, path) for key, named in run_paths(run).items()})


def _portable(path: str, run_directory: Path) -> str:
    """A path as run.yaml has it: relative if that stays below the user's home, and never with the home's name."""
    relative = os.path.relpath(path, run_directory)
    home = Path.home().resolve()
    if not Path(path).is_relative_to(home) or run_directory.is_relative_to(home):
        return relative
    return f"~/{Path(path).relative_to(home)}"
