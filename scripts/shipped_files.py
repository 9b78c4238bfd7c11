"""``launch/`` and ``ds_configs/`` of a checkout: one whole run for each way to start one, and one DeepSpeed
configuration for the Hugging Face Trainer per kind of sharding, with its reasons: ``python -m scripts.shipped_files``
writes them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kit.emit.copy_recipe import copy_recipe
from kit.emit.deepspeed import ds_config, with_nvme_path
from kit.emit.deepspeed_rationale import key_by_key
from kit.emit.derived_file import json_text
from kit.emit.of_recipe import plan_of_recipe
from kit.emit.trainer import for_trainer, trainer_config
from kit.errors import PlanError
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.recipe import load_recipe
from kit.specs.shipped import headline, recipe_path

NVME_PATH = "/mnt/nvme"
"""Placeholder for a folder on every node's own disk."""


@dataclass(frozen=True)
class Way:
    """How a run is started, shown on a recipe that people copy."""

    title: str
    recipe: str
    start: str
    """Lines of bash, from the directory of the way."""
    says: str
    """What these lines do, and what else the directory has for it."""


WAYS = {
    "accelerate": Way(
        "accelerate launch",
        "llama-3.1-8b-sft-zero2-8xh100",
        "cd run\naccelerate launch --config_file accelerate.yaml --module kit.training .",
        "accelerate reads `accelerate.yaml`, which names `ds_config.json`, and starts a process for each GPU. "
        "`./launch.sh` is the same command with the environment variables that the GPUs want.",
    ),
    "deepspeed": Way(
        "The deepspeed launcher, over several nodes",
        "llama-3-70b-sft-zero3-32xh100",
        "cd run\nnano hostfile                     # your hosts' names; ssh must reach them without a password\n"
        "./launch_hosts.sh                 # on the first of them",
        "The `deepspeed` launcher reads `hostfile` and starts `kit.training` on every host, by ssh. "
        "`LAUNCHER=pdsh`, `openmpi` or `slurm` choose its other ways. `ds_config.md` has a reason for every key of "
        "`ds_config.json`.",
    ),
    "torchrun": Way(
        "torchrun",
        "llama-3.1-8b-sft-fsdp2-8xh100",
        "cd run\ntorchrun --standalone --nproc-per-node 8 -m kit.training .",
        "FSDP2 of plain PyTorch: no engine is installed. `./launch.sh` is the same command with the environment "
        "variables that the GPUs want.",
    ),
    "slurm": Way(
        "Slurm",
        "llama-2-13b-pretrain-tp-fsdp2-16xh100",
        "cd run\nsbatch slurm.sbatch",
        "The batch script runs `launch.sh` on each node with srun. Before the time limit it lets the ranks save and "
        "queues itself again; the run goes on where it stopped. `sbatch --account NAME --partition NAME slurm.sbatch` "
        "adds what your site wants; `CONTAINER_IMAGE` and `APPTAINER_IMAGE` run it in a container.",
    ),
    "megatron": Way(
        "Megatron-core",
        "llama-3-70b-pretrain-64xh100",
        "cd run\nNODE_RANK=0 MASTER_ADDR=node-0 ./launch.sh     # on every node with its rank; or: sbatch slurm.sbatch",
        "torchrun starts kit's loop over Megatron-core's layers, with the settings of `megatron.yaml`. "
        "`MEGATRON_LM=/path/to/Megatron-LM ./pretrain_gpt.sh --data-path …` starts Megatron-LM's own trainer with the "
        "same layout.",
    ),
    "one-gpu": Way(
        "A fine-tune on one GPU",
        "llama-3.1-8b-qlora-1xrtx-4090",
        "kit train run",
        "One process of plain PyTorch trains adapters beside frozen weights in four bits. `./launch.sh` in `run/` is "
        "the same.",
    ),
}
"""Folder of ``launch/`` → what it shows."""


@dataclass(frozen=True)
class Template:
    """A kind of sharding, and a plan that has it."""

    name: str
    when: str
    cluster: str
    pins: dict[str, Any]
    model: str = "llama-3.1-8b"
    seq_length: int = 4096

    @cached_property
    def plan(self) -> Plan:
        """The plan whose sizes the template has."""
        job = JobSpec(seq_length=self.seq_length, global_batch_size=128, total_tokens=10**9)
        # The Trainer needs Hugging Face layers; without these pins the planner may choose Megatron's layers.
        model: dict[str, Any] = {"implementation": "huggingface", "tp": 1}
        pins = Pins(engine="deepspeed", **model, **self.pins)
        return make_plan(load_model(self.model), parse_cluster(self.cluster), job, pins)

    @property
    def config(self) -> dict[str, Any]:
        """For the Trainer if it can run the plan, otherwise with the plan's numbers."""
        return trainer_config(self.plan) if for_trainer(self.plan) else ds_config(self.plan)

    def text(self) -> str:
        """JSON."""
        return json_text(with_nvme_path(self.config, NVME_PATH))

    def page(self) -> str:
        """Markdown: when to take it, and a reason for every key."""
        return "\n".join(key_by_key(self.plan, f"{self.name}.json", self.config, f"For {self.when}."))


TEMPLATES = (
    Template(
        "zero1",
        "models that fit on a GPU except for the optimizer state; the least communication",
        "8xH100",
        {"zero_stage": 1},
        model="llama-3.2-1b",
    ),
    Template(
        "zero2",
        "models whose weights fit on one GPU; gradients and optimizer state do not",
        "8xH100",
        {"zero_stage": 2},
    ),
    Template(
        "zero2-offload",
        "models whose weights fit on one GPU, while the optimizer state needs host memory",
        "8xA100-40",
        {"zero_stage": 2, "offload_optimizer": "cpu"},
    ),
    Template(
        "zero3",
        "models whose weights do not fit on one GPU: each layer is gathered when it is needed",
        "8xA100-80",
        {"zero_stage": 3},
    ),
    Template(
        "zero3-offload",
        "training state that does not fit on all GPUs together, but in host memory",
        "8xA100-40",
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        model="llama-2-13b",
    ),
    Template(
        "zero-infinity-nvme",
        "training state that does not fit in host memory either: optimizer state and weights on the node's disks",
        "dgx-h100",
        {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
        model="llama-3-70b",
    ),
    Template(
        "zero++",
        "slow links between nodes: ZeRO-3 gathers weights inside a node and in int8, and reduces gradients in int4",
        "16xA100-80",
        {"zero_stage": 3, "zero_hpz": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    ),
    Template(
        "ulysses",
        "sequences that are too long for one GPU: all-to-alls split the heads; not for the Trainer",
        "8xH100",
        {"zero_stage": 3, "cp": 8, "cp_comm_type": "a2a"},
        seq_length=131072,
    ),
)
"""Templates, from the simplest to the slowest, then those for several nodes and for long sequences."""


def shipped_files() -> dict[str, str]:
    """Path, relative to the root of a checkout → text."""
    files = {"launch/README.md": _ways_page(), "ds_configs/README.md": _configs_page()}
    for template in TEMPLATES:
        files |= {
            f"ds_configs/{template.name}.json": template.text(),
            f"ds_configs/{template.name}.md": template.page(),
        }
    for name, way in WAYS.items():
        files |= {f"launch/{name}/{path}": text for path, text in _whole_run(way).items()}
    return files


def _whole_run(way: Way) -> dict[str, str]:
    """Path → text of a copy of the way's recipe, with a page for the way."""
    with tempfile.TemporaryDirectory() as directory:
        made = copy_recipe(way.recipe, Path(directory) / "copy")
        paths = (path for path in sorted(made.rglob("*")) if path.is_file())
        texts = {path.relative_to(made).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return texts | {"README.md": _way_page(way, texts["README.md"])}


def check(root: Path) -> list[str]:
    """Differences between a checkout's files and its recipes, one per line; empty if there are none."""
    return [
        f"{name} follows from no recipe"
        if text is None
        else f"{name} is not what its recipe says today"
        if (root / name).is_file()
        else f"{name} is missing"
        for name, text in _changes(root).items()
    ]


def write_shipped(root: Path) -> list[str]:
    """Writes all files, and removes files without a recipe. Returns the names of changed files."""
    changes = _changes(root)
    for name, text in changes.items():
        path = root / name
        if text is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    return list(changes)


def _changes(root: Path) -> dict[str, str | None]:
    """Name → text to write, or None for a file without a recipe."""
    files = (path for folder in ("ds_configs", "launch") for path in (root / folder).rglob("*") if path.is_file())
    present = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(files)}
    wanted = shipped_files()
    changed = {name: text for name, text in wanted.items() if present.get(name) != text}
    return {**changed, **{name: None for name in present if name not in wanted}}


def shipped_plan(name: str) -> Plan | None:
    """The plan of a shipped recipe; None if no layout is legal or fits."""
    recipe = load_recipe(recipe_path(name))
    try:
        return plan_of_recipe(recipe)
    except PlanError:
        return None


_WRITTEN = "Written by `python -m scripts.shipped_files`; do not edit them here."


def _way_page(way: Way, of_copy: str) -> str:
    """``of_copy``: README.md of the copied recipe, which says what it needs and how data is made."""
    needs = of_copy.partition("It needs, here or where you point it:\n\n")[2].partition("\n\n")[0]
    data = next(line.split("  ")[0] for line in of_copy.splitlines() if line.startswith("kit convert data"))
    return f"""# {way.title}

```bash
{way.start}
```

{headline(recipe_path(way.recipe))}

{way.says}

This is a whole run: a person wrote `recipe.yaml`, and `run/` follows from it. It needs, beside `run/`:

{needs}

A model of the hub comes by `hf download ORG/NAME --local-dir models/NAME`, data by the first of these commands:

```bash
{data}     # the same for data/validation
kit train run --resume auto        # after an interruption; on several nodes start as above, with --resume auto
kit convert model run/checkpoints/step-N --out trained
```

While it runs, `run/metrics.jsonl` gets a line for each step, and `run/checkpoints/` what a run can go on from.

Make it yours: `kit recipes copy {way.recipe} mine`, edit `mine/recipe.yaml`, then
`kit emit recipe.yaml --out run2` in that directory. `kit recipes list` has the others.
"""


def _ways_page() -> str:
    rows = "\n".join(f"| [{name}]({name}/README.md) | {way.title} | {way.recipe} |" for name, way in WAYS.items())
    return f"""# Six ways to start a run

One whole run for each. Every other recipe is one command away: `kit recipes copy NAME DIR`, or
`kit emit recipes/NAME.yaml --out DIR`. {_WRITTEN}

| directory | started by | recipe |
|---|---|---|
{rows}
"""


def _configs_page() -> str:
    rows = "\n".join(f"| [{each.name}]({each.name}.json) | {each.when} | [why]({each.name}.md) |" for each in TEMPLATES)
    return f"""# DeepSpeed configurations

One file for each way to shard. {_WRITTEN}

The Hugging Face Trainer fills in `"auto"` from its arguments. Sizes of buffers are numbers: they fit the model that
each template was planned for (mostly 8B), and `kit emit` computes them for yours. Without the Trainer,
`kit emit RECIPE --out DIR` writes a `ds_config.json` that holds numbers only, for `deepspeed.initialize`, an
`Accelerator`, or kit's own loop.

| file | for | every key |
|---|---|---|
{rows}
"""


if __name__ == "__main__":
    print("\n".join(write_shipped(Path(__file__).resolve().parents[1])) or "nothing to write")
