"""The run directory: the only thing an engine reads.

    plan.yaml         the truth: model, cluster, job, layout, predictions, decisions
    run.yaml          data, schedule, checkpoints, logging
    ds_config.md, ds_config.trainer.json
                      why each key of ds_config.json, and the same for the Hugging Face Trainer
    ds_config.json, accelerate.yaml, megatron.yaml, launch.sh, slurm.sbatch, pretrain_gpt.sh
                      projections of the plan for the programs that read them
    hostfile, launch_hosts.sh, launch_elastic.sh, .deepspeed_env, rank.py
                      those of several nodes
    manifest.json     the hash of each, as written

At start the engine compares. A changed plan, or a changed batch, stage or parallelism in a projection, is an
error; any other change of a projection is honoured, announced and recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit.emit.accelerate
import kit.emit.deepspeed
import kit.emit.megatron
from kit.emit import environment, hosts, launch, pretrain_gpt, slurm
from kit.emit.deepspeed_rationale import ds_config_page
from kit.emit.trainer import for_trainer, trainer_config
from kit.errors import RunDirectoryError, SpecError
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.recipe import map_paths
from kit.specs.run import RunSpec
from kit.specs.text import check_line

MANIFEST = "manifest.json"
FORMAT = "kit-run-directory/1"


@dataclass(frozen=True)
class Projection:
    """A file made from the plan alone, and the keys of it that a user may not change there."""

    name: str
    render: Callable[[Plan], str]
    guarded: Mapping[str, str]
    """Dotted key in the file → dotted key of the recipe that decides it."""
    applies: Callable[[Plan], bool]


@dataclass(frozen=True)
class Edit:
    """A value of a projection that was changed by hand after it was emitted."""

    file: str
    key: str
    planned: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: {self.planned!r} was planned, {self.found!r} stands there"


@dataclass(frozen=True)
class RunDirectory:
    """A run directory as read from disk, paths of ``run`` absolute."""

    path: Path
    plan: Plan
    run: RunSpec
    settings: Mapping[str, Any]
    """The engine's own projection, as it stands in the file: ds_config.json, megatron.yaml, or nothing for torch."""
    megatron: Mapping[str, Any]
    """megatron.yaml where there is one, also beside ds_config.json: ZeRO over Megatron's tensor parallelism."""
    edits: tuple[Edit, ...]
    """Changes by hand that are honoured."""

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Read and check. Raises ``RunDirectoryError`` for a missing or changed plan or a guarded edit."""
        path = Path(path).resolve()
        check_line("run directory", str(path))
        hashes = _read_manifest(path)
        plan = Plan.load(path / "plan.yaml")
        if _sha256(path / "plan.yaml") != hashes.get("plan.yaml"):
            raise RunDirectoryError(
                f"{path.name}/plan.yaml was changed after it was written; every other file follows from it: "
                "change the recipe and emit again (kit emit RECIPE --out NEW_DIR)"
            )
        edits = tuple(edit for projection in PROJECTIONS for edit in _edits(path, projection, plan, hashes))
        _refuse_guarded(path, edits)
        return cls(
            path=path,
            plan=plan,
            run=_read_run(path),
            settings=_engine_settings(path, plan),
            megatron=_parse(path / "megatron.yaml") if kit.emit.megatron.applies(plan) else {},
            edits=edits,
        )

    def record_edits(self) -> None:
        """Write ``edits.json``: which hand-made changes this run was started with."""
        data = [dataclasses.asdict(edit) for edit in self.edits]
        (self.path / "edits.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


PROJECTIONS: tuple[Projection, ...] = (
    Projection(
        "ds_config.json",
        lambda plan: json.dumps(kit.emit.deepspeed.ds_config(plan), indent=2) + "\n",
        kit.emit.deepspeed.GUARDED,
        lambda plan: plan.layout.engine == "deepspeed",
    ),
    Projection("ds_config.md", ds_config_page, {}, lambda plan: plan.layout.engine == "deepspeed"),
    Projection(
        "ds_config.trainer.json",
        lambda plan: json.dumps(trainer_config(plan), indent=2) + "\n",
        {},
        lambda plan: plan.layout.engine == "deepspeed" and for_trainer(plan),
    ),
    Projection(
        "accelerate.yaml",
        lambda plan: strict_yaml.dump(kit.emit.accelerate.accelerate_config(plan)),
        kit.emit.accelerate.GUARDED,
        kit.emit.accelerate.applies,
    ),
    Projection(
        "megatron.yaml",
        lambda plan: strict_yaml.dump(kit.emit.megatron.megatron_settings(plan)),
        kit.emit.megatron.GUARDED,
        kit.emit.megatron.applies,
    ),
    Projection("pretrain_gpt.sh", pretrain_gpt.pretrain_gpt_script, {}, pretrain_gpt.expressible),
    Projection("launch.sh", launch.launch_script, {}, lambda plan: True),
    Projection("launch_elastic.sh", launch.elastic_script, {}, lambda plan: plan.cluster.num_nodes > 1),
    Projection("launch_hosts.sh", hosts.launch_hosts_script, {}, lambda plan: plan.cluster.num_nodes > 1),
    Projection("hostfile", hosts.hostfile, {}, lambda plan: plan.cluster.num_nodes > 1),
    Projection(".deepspeed_env", environment.deepspeed_env, {}, lambda plan: _by_deepspeed_launcher(plan)),
    Projection("rank.py", lambda plan: hosts.RANK_PY, {}, lambda plan: _by_deepspeed_launcher(plan)),
    Projection("slurm.sbatch", slurm.sbatch, {}, slurm.applies),
)


def _by_deepspeed_launcher(plan: Plan) -> bool:
    return plan.layout.engine == "deepspeed" and plan.cluster.num_nodes > 1


def files_of(plan: Plan) -> dict[str, str]:
    """Name → text of every file that follows from the plan alone, plan.yaml included."""
    files = {"plan.yaml": plan.to_yaml()}
    files.update({p.name: p.render(plan) for p in PROJECTIONS if p.applies(plan)})
    return files


def write(plan: Plan, run: RunSpec, path: str | Path) -> RunDirectory:
    """Write a new run directory; complete or absent. Raises ``RunDirectoryError`` if the path exists."""
    path = Path(path).resolve()
    check_line("run directory", str(path))
    if path.exists():
        raise RunDirectoryError(
            f"{path.name} exists already and is not overwritten; choose another --out, or remove it yourself"
        )
    files = files_of(plan)
    files["run.yaml"] = strict_yaml.dump(strict_yaml.to_plain(map_paths(run, lambda p: _portable(p, path))))
    manifest = {
        "format": FORMAT,
        "plan_hash": plan.digest,
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())},
    }
    files[MANIFEST] = json.dumps(manifest, indent=2) + "\n"
    staging = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        for name in files:
            if name.endswith(".sh"):
                (staging / name).chmod(0o755)
        staging.rename(path)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise RunDirectoryError(
            f"{path.name} cannot be written: {error.strerror}; make room or choose another --out"
        ) from None
    return RunDirectory.open(path)


def _read_manifest(path: Path) -> dict[str, str]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise RunDirectoryError(
                f"{path.name}/{MANIFEST} has format {manifest['format']!r}; this kit reads {FORMAT!r}: emit again"
            )
        files: dict[str, str] = manifest["files"]
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{path} is not a run directory (no {MANIFEST}); make one with: kit emit RECIPE --out DIR"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path.name}/{MANIFEST} is damaged ({error}); emit again") from None
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        raise RunDirectoryError(f"{path.name} lacks {', '.join(missing)}, which its manifest names; emit again")
    return files


def _read_run(path: Path) -> RunSpec:
    """run.yaml is the user's to edit: it never changes the plan."""
    document = strict_yaml.read(path / "run.yaml")
    run = strict_yaml.parse(RunSpec, document.data, document)
    return map_paths(run, lambda p: str((path / Path(p).expanduser()).resolve()))


def _engine_settings(path: Path, plan: Plan) -> Mapping[str, Any]:
    name = {"deepspeed": "ds_config.json", "megatron": "megatron.yaml"}.get(plan.layout.engine)
    return {} if name is None else _parse(path / name)


def _edits(path: Path, projection: Projection, plan: Plan, hashes: Mapping[str, str]) -> list[Edit]:
    """What differs between a projection on disk and the plan's own rendering of it."""
    file = path / projection.name
    if not projection.applies(plan) or _sha256(file) == hashes.get(projection.name):
        return []
    if file.suffix not in (".json", ".yaml"):
        return [Edit(file=projection.name, key="(text)", planned="as emitted", found="edited")]
    planned = _flat(_parse_text(projection.render(plan), projection.name))
    found = _flat(_parse(file))
    keys = [key for key in {**planned, **found} if planned.get(key) != found.get(key)]
    return [Edit(file=projection.name, key=key, planned=planned.get(key), found=found.get(key)) for key in keys]


def _refuse_guarded(path: Path, edits: tuple[Edit, ...]) -> None:
    guarded = {projection.name: projection.guarded for projection in PROJECTIONS}
    refused = [
        f"{path.name}/{edit}; change {guarded[edit.file][edit.key]} in the recipe and emit again"
        for edit in edits
        if edit.key in guarded[edit.file]
    ]
    if refused:
        raise RunDirectoryError("\n".join(refused))


def _parse(file: Path) -> dict[str, Any]:
    try:
        return _parse_text(file.read_text(encoding="utf-8"), file.name)
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{file.name} cannot be read: {error}") from None


def _parse_text(text: str, name: str) -> dict[str, Any]:
    """JSON or YAML text → a mapping; JSON is a subset of YAML, but its own parser says better what is wrong."""
    try:
        data = json.loads(text) if name.endswith(".json") else strict_yaml.parse_text(text, name).data
    except json.JSONDecodeError as error:
        raise RunDirectoryError(f"{name}:{error.lineno}: not valid JSON: {error.msg}") from None
    except SpecError as error:
        raise RunDirectoryError(str(error)) from None
    if not isinstance(data, dict):
        raise RunDirectoryError(f"{name}: holds a {type(data).__name__} where an object of keys is expected")
    return data


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _portable(path: str, run_directory: Path) -> str:
    """How a path is written into run.yaml: relative where that stays below the user's home, and never with its name."""
    relative = os.path.relpath(path, run_directory)
    home = Path.home().resolve()
    if not Path(path).is_relative_to(home) or run_directory.is_relative_to(home):
        return relative
    return f"~/{Path(path).relative_to(home)}"
