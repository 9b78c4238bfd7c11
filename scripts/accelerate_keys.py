"""Write ``kit/addons/lint/accelerate_keys.yaml``: what accelerate reads of its YAML.

    python scripts/accelerate_keys.py > kit/addons/lint/accelerate_keys.yaml

Top-level keys are fields of accelerate's own class, which refuses others. The keys of a section become arguments of
``accelerate launch`` (commands/launch.py, _validate_launch_command), where an unknown one is never looked at again; a
few are read (utils/launch.py) without being arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import re

import accelerate
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import launch

SECTIONS = {
    "deepspeed_config": "DeepSpeed Arguments",
    "fsdp_config": "FSDP Arguments",
    "parallelism_config": "ParallelismConfig Arguments",
    "megatron_lm_config": "Megatron-LM Arguments",
}


def known_keys() -> dict[str, object]:
    """``{version, keys: {top level: null | {key: null}}}``."""
    tree: dict[str, object] = {field.name: None for field in dataclasses.fields(ClusterConfig)}
    # Of the former format; both are converted (config_args.py, process_config).
    tree |= {"fp16": None, "dynamo_backend": None}
    groups = {group.title: group for group in launch_command_parser()._action_groups}
    for section, title in SECTIONS.items():
        names = [action.dest for action in groups[title]._group_actions]
        prefix = {"parallelism_config": "parallelism_config_", "megatron_lm_config": "megatron_lm_"}.get(section, "")
        names += re.findall(rf"getattr\(args, \"({section.split('_')[0]}_\w+)\"", inspect.getsource(launch))
        tree[section] = dict.fromkeys(sorted({prefix + re.sub(f"^{prefix}", "", name) for name in names}))
    return {"version": accelerate.__version__, "keys": dict(sorted(tree.items()))}


if __name__ == "__main__":
    print("# Written by scripts/accelerate_keys.py from the installed accelerate; null: a value.")
    print(yaml.safe_dump(known_keys(), sort_keys=False), end="")
