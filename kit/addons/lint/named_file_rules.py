"""Findings of the configurations that another file names: a launch line, or accelerate's YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kit.addons.lint.accelerate_line import with_line
from kit.addons.lint.command_rules import one_thread, processes, wrapped_classes
from kit.addons.lint.commands import Command
from kit.addons.lint.config import Config, Given, Reader
from kit.addons.lint.config_files import ENDINGS, named_file, read
from kit.addons.lint.finding import Finding
from kit.addons.lint.rule import Rule, check, findings
from kit.addons.lint.trainer_rules import contradicts_config, packs_split_rows
from kit.specs import strict_yaml
from kit.specs.strict_yaml import Document

OF_OPTIONS = {"fsdp2-key", "parallelism", "wrap-policy"}
"""Rules of accelerate's YAML for the options of ``accelerate launch`` too; the others have rules of their own there."""
Find = Callable[[Path, str], Path | None]
"""(a file, what it names) → the file that is meant; None where it is not found."""
_DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"


@check(
    None,
    Rule(
        "config-file-missing",
        "accelerate, script",
        "a configuration file that is missing",
        "fails at start",
    ),
)
def of_accelerate(path: Path, config: Config) -> Iterator[Finding]:
    """``config``: accelerate's file, or what a launch line makes of it; with the DeepSpeed file that it names."""
    if (started := config.number("num_processes")) is not None:
        config = replace(config, processes=int(started))
    yield from findings("accelerate", config)
    if isinstance(named := config.get(_DEEPSPEED_FILE), str) and config.get("distributed_type") == "DEEPSPEED":
        if (other := named_file(path, named)) is None:
            why = f"{named} is neither here nor above this file"
            fix = "its path is relative to where accelerate launch is started: start it there"
            yield config.finding("config-file-missing", "warning", _DEEPSPEED_FILE, why, fix)
        else:
            ranks = config.processes and config.processes // model_parallel(other.with_name("megatron.yaml"))
            inner = read(other, replace(config, reader="accelerate"))
            yield from findings("deepspeed", replace(inner, processes=ranks))


def of_line(path: Path, command: Command, given: Given, find: Find) -> list[Finding]:
    """Findings of the configuration files that a launch line names, and contradictions between file and line."""
    by_accelerate, document = command.launcher == "accelerate launch", Document(path.name, {}, {})
    launch = Config(document=with_line(command, document) if by_accelerate else document)
    found, files = list(wrapped_classes(command, given.model)), list[Config]()
    readers: tuple[tuple[str | None, Reader | None], ...] = (
        (command.argument("deepspeed"), "trainer"),
        (command.argument("deepspeed_config"), "deepspeed"),
        (command.value("deepspeed_config_file"), "accelerate"),
        (command.value("config_file") if by_accelerate else None, None),
    )
    literal = [(name, reader) for name, reader in readers if name and "$" not in name and name.endswith(ENDINGS)]
    for named, reader in literal:
        if (other := find(path, named)) is None:
            why, fix = f"{named} is neither here nor above this script", "start it where the path is right"
            found.append(command.finding("config-file-missing", "warning", "", why, fix))
        elif reader is not None and other.suffix == ".json":
            files.append(replace(read(other, replace(given, reader=reader)), processes=processes(command)))
            found += [*findings("deepspeed", files[-1]), *contradicts_config(command, files[-1])]
        else:
            launch = read(other, given)
            launch = replace(launch, document=with_line(command, launch.document))
            found += of_accelerate(other, launch)
            inside = find(other, str(launch.get(_DEEPSPEED_FILE)))
            files += [read(inside)] if inside else []
    if by_accelerate and command.value("config_file") is None and launch.has("distributed_type"):
        found += [each for each in findings("accelerate", launch) if each.rule in OF_OPTIONS]
    return [*found, *one_thread(command, launch, files), *packs_split_rows(command, launch)]


def model_parallel(megatron: Path) -> int:
    """Model-parallel ranks (tp · pp) under ZeRO with Megatron's layers. DeepSpeed gets this number from the program's
    mpu object, not from its configuration; kit writes it to Megatron's file in the same directory."""
    if not megatron.is_file():
        return 1
    sizes = strict_yaml.read(megatron).data.get("parallel_state", {})
    return int(sizes.get("tensor_model_parallel_size", 1)) * int(sizes.get("pipeline_model_parallel_size", 1))
