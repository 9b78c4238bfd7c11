"""Files of the plans for other training programs, read by those programs' own parsers.

    python -m tests.system.other_trainers [--environment DIR] [--torchtitan CHECKOUT] [--plant]

axolotl's schema, LLaMA-Factory's argument classes, torchtitan's ConfigManager and accelerate's launcher read each file,
and what they hold afterwards is compared with the file. verl composes its configuration of the overrides, validates it
and builds the optimizer; OpenRLHF's argument parsers take the flags, and the ds_config.json that it makes of them is
compared with kit's. Keys of ms-swift, and of LLaMA-Factory's TrainingArguments, are
compared with the fields of their classes alone: to build those classes takes a model. Their pins clash with kit's, so
they stand without their dependencies in a virtual environment of their own, DIR, which borrows torch and transformers
from this one. No weights, data or GPU are asked for. torchtitan's files are for a commit that is no release
(``kit.addons.targets.programs``): they are read where a checkout of it is given.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
from kit.addons.targets import rl_trainers
from kit.addons.targets.other_trainers import FILES
from kit.addons.targets.programs import PROGRAMS
from kit.emit.run_directory import files_of
from kit.planner.plan import Plan
from kit.specs.job import GrpoSpec, JobSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Pins
from kit.specs.shipped import recipe_names
from scripts.shipped_files import shipped_plan
from tests.support import readers
from tests.support.files import files_in
from tests.support.program import run

ENVIRONMENT = Path(".venv/other-trainers")
ALONE = (
    *("axolotl==0.19.0", "llamafactory==0.9.5", "ms-swift==4.6.0", "torchtitan==0.3.0", "omegaconf==2.3.0", "tyro"),
    *("antlr4-python3-runtime==4.9.3", "shtab", "docstring-parser", "typeguard", "addict", "modelscope", "wandb"),
    *("modelscope-hub", "spmd_types==0.2.3", "torchdata", "torch_checkpointing", "tensorboard", "einops", "triton"),
    *("verl==0.9.1", "openrlhf==0.11.2", "hydra-core==1.3.2", "tensordict==0.10.0", "ray==2.55.0", "codetiming"),
    *("pylatexenc", "orjson", "pyvers", "cloudpickle"),
)
WHOLE = ("requests", "cryptography", "json-repair", "dacite", "binpacking", "simplejson", "sortedcontainers")
READER = """
import argparse, ast, contextlib, dataclasses, datetime, functools, importlib.util, json, os, pathlib, shlex, sys, yaml
from unittest.mock import MagicMock
os.environ |= {"DISABLE_VERSION_CHECK": "1", "CUDA_VISIBLE_DEVICES": ""}

def axolotl(path):
    from axolotl.utils.schemas.config import AxolotlInputConfig
    return AxolotlInputConfig(**yaml.safe_load(path.read_text())).model_dump()

def of_classes(path, kinds):
    data, held = yaml.safe_load(path.read_text()), {}
    for kind in kinds:
        names = {field.name: field for field in dataclasses.fields(kind) if field.init}
        for name in names & data.keys():
            default = names[name].default
            wrong = isinstance(default, bool) and not isinstance(data[name], bool)
            held[name] = None if wrong else data[name]
    return held

def llamafactory(path):
    from llamafactory.hparams import DataArguments, FinetuningArguments, ModelArguments, TrainingArguments
    from llamafactory.hparams import GeneratingArguments
    from transformers import HfArgumentParser
    kinds = (DataArguments, FinetuningArguments, ModelArguments, GeneratingArguments)
    data = yaml.safe_load(path.read_text())
    own = {name for kind in kinds for name in {field.name for field in dataclasses.fields(kind)}}
    parsed = HfArgumentParser(kinds).parse_dict({name: data[name] for name in own & data.keys()})
    held = {name: getattr(each, name) for each in parsed for name in own & data.keys() if hasattr(each, name)}
    rest = {name: data[name] for name in data.keys() - own}
    return held | of_classes(path, [TrainingArguments]) | {"dataset": data["dataset"]} if rest else held

def ms_swift(path):
    from swift.arguments import SftArguments
    return of_classes(path, [SftArguments])

def torchtitan(path):
    from torchtitan.config.manager import ConfigManager
    words = path.read_text().split('"$@"')[1].replace(chr(92), "").split()
    config = ConfigManager().parse_args(words)
    wanted = dict(zip(words, words[1:]))
    for name, value in wanted.items():
        if name.startswith("--") and "." in name:
            section, key = name[2:].replace("-", "_").split(".")
            assert str(getattr(getattr(config, section), key)) in (value, f"{value}.0"), name
    kind = type(config.activation_checkpoint).__qualname__.split(".")[0]
    assert kind == {"full": "FullAC", "none": "NoneType"}[words[-1].split(":")[1]], kind
    return {}

def accelerate(path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    parser = launch_command_parser()
    options = vars(parser.parse_args(["script.py"])).keys()  # the launcher itself takes any key
    args, _, _ = _validate_launch_command(parser.parse_args(["--config_file", str(path), "script.py"]))
    data = yaml.safe_load(path.read_text())
    for key, value in data["parallelism_config"].items():
        assert key in options and int(getattr(args, key)) == value, key
    return data

def words_after(path, start):
    return shlex.split(path.read_text().replace(chr(92) + chr(10), "").split(start)[1])[:-1]  # without "$@"

def verl(path):
    from hydra import compose, initialize_config_module
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf
    from torch.nn import Parameter
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.workers.config.optimizer import build_optimizer
    words = words_after(path, "verl.trainer.main_ppo")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words)
    checked = OmegaConf.merge(config, {"actor_rollout_ref": {"rollout": {"name": "sglang"}}})  # vLLM is asked of LoRA
    with contextlib.redirect_stdout(sys.stderr):
        validate_config(checked, need_reference_policy(config), need_critic(config))
    for given in OverridesParser.create().parse_overrides(words):
        assert OmegaConf.select(config, given.key_or_group) == given.value(), given.key_or_group
    plan = yaml.safe_load((path.parent / "plan.yaml").read_text())
    layout, job = plan["layout"], plan["job"]
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    rows = actor.ppo_mini_batch_size * actor.rollout_n // ranks
    assert rows // actor.ppo_micro_batch_size_per_gpu == layout["gradient_accumulation_steps"], rows
    assert rows * ranks == job["global_batch_size"] == config.data.train_batch_size * actor.rollout_n, rows
    assert actor.engine.strategy == "fsdp2" and actor.engine.reshard_after_forward is (layout["zero_stage"] == 3)
    adam = build_optimizer([Parameter()], actor.optim).defaults
    wanted = (job["optimizer"]["beta1"], job["optimizer"]["beta2"]), job["optimizer"]["eps"], job["learning_rate"]
    assert (tuple(adam["betas"]), adam["eps"], adam["lr"]) == wanted, adam
    return {}

def openrlhf(path):
    # Its models import a package for GPUs; no model is made here.
    sys.modules.update({name: MagicMock() for name in ("openrlhf.models", "openrlhf.models.ring_attn_utils")})
    from openrlhf.utils import get_strategy
    module, *words = words_after(path, " -m ")
    program = ast.parse(pathlib.Path(importlib.util.find_spec(module).origin).read_text()).body[-1].body
    assert ast.unparse(program.pop()) == "train(args)"  # what is left reads and checks the arguments
    held = {"argparse": argparse, "datetime": datetime.datetime}
    sys.argv = [module, *words]
    with contextlib.redirect_stdout(sys.stderr):
        exec(compile(ast.Module(program, []), module, "exec"), held)
    args, kit = held["args"], json.loads((path.parent / "ds_config.json").read_text())
    owner = getattr(args, "actor", args)
    adam = {"params": vars(owner.adam)}
    made = get_strategy(args).get_ds_train_config(adam, max_norm=owner.max_norm)
    zero = ("stage", "overlap_comm", "zero_hpz_partition_size", "offload_optimizer.device", "offload_param.device")
    keys = [f"zero_optimization.{key}" for key in zero]
    keys += ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "bf16.enabled", "fp16.enabled"]
    keys += [f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")]
    for key in (*keys, "data_types.grad_accum_dtype"):
        theirs, ours = (functools.reduce(lambda at, part: at.get(part, {}), key.split("."), all) for all in (made, kit))
        assert (theirs or 0) == (ours or 0) or (ours == {} and theirs in (1, "none")), f"{key}: {theirs}, {ours}"
    return {}

READERS = {"axolotl.yaml": axolotl, "llamafactory.yaml": llamafactory, "ms_swift.yaml": ms_swift}
READERS |= {"verl.sh": verl, "openrlhf.sh": openrlhf}
READERS |= {"torchtitan.sh": torchtitan, "accelerate.parallelism.yaml": accelerate}
problems = {}
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        held = READERS[path.name](path)
        data = {} if path.suffix == ".sh" else yaml.safe_load(path.read_text())
        lost = [name for name in data if name != "datasets" and name not in held]
        other = [name for name in data if name in held and not isinstance(held[name], dict) and name != "datasets"
                 and held[name] != data[name] and str(held[name]) != str(data[name])
                 and held[name] not in ([data[name]], data[name] is True and "bf16")]
        assert not lost and not other, f"not read: {lost}, read as others: {other}"
    except (Exception, SystemExit) as error:
        problems[str(path)] = repr(error)[:400]
print(json.dumps(problems))
"""


def plans() -> dict[str, Plan]:
    """Plans of the shipped recipes, and of models that torchtitan has."""
    vllm, lora = GrpoSpec(vllm_gpu_memory_utilization=0.3), LoraSpec(target_modules=("q_proj", "v_proj"))
    torch2, torch3 = (Pins(engine="torch", zero_stage=stage) for stage in (2, 3))
    chosen: tuple[tuple[Pins, dict[str, Any]], ...] = (
        (torch3, {"objective": "grpo", "grpo": replace(vllm, beta=0.04)}),
        (torch2, {"objective": "grpo", "grpo": vllm, "grad_clip": 0.0, "optimizer": OptimizerSpec(eps=1e-6)}),
        (torch3, {"objective": "grpo", "grpo": vllm, "lora": lora}),
        (Pins(engine="deepspeed", zero_stage=3, zero_hpz=4), {"objective": "grpo", "grpo": replace(vllm, beta=0.04)}),
        (Pins(engine="deepspeed", zero_stage=2, offload_optimizer="cpu"), {"objective": "dpo"}),
        (Pins(engine="deepspeed"), {"objective": "reward", "lora": LoraSpec(four_bit=True)}),
        (Pins(engine="deepspeed", zero_stage=1), {"objective": "reward", "precision": "fp16", "grad_clip": 0.0}),
    )
    titan = (("8xH100", Pins(engine="torch", implementation="huggingface")), ("16xH100", torch3.but(tp=2)))
    return {
        **{name: plan for name in recipe_names() if (plan := shipped_plan(name)) is not None},
        **{f"llama-3.1-8b-{cluster}": kit.plan("llama-3.1-8b", cluster, pins=pins) for cluster, pins in titan},
        **{
            f"{number}-{job['objective']}": kit.plan(
                "llama-3.1-8b", "16xH100", JobSpec(seq_length=2048, global_batch_size=256, **job), pins
            )
            for number, (pins, job) in enumerate(chosen)
        },
    }


def main(environment: Path = ENVIRONMENT, torchtitan: Path | None = None, plant: bool = False) -> int:
    """0 where every file is accepted. ``--plant``: misspell a key of each file, which has to be noticed."""
    python = readers.environment(environment, ALONE, WHOLE)
    files = [file for file in (*FILES, *rl_trainers.FILES) if file.target != "torchtitan" or torchtitan is not None]
    if torchtitan is None:
        print(f"torchtitan.sh: not read; --torchtitan CHECKOUT of {PROGRAMS['torchtitan'][1]}")
    given = {} if torchtitan is None else {"PYTHONPATH": str(torchtitan.absolute())}
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, plan in plans().items():
            there = {file.name: file.text(plan) for file in files if file.applies(plan)}
            files_in(Path(folder) / name, files_of(plan) if there else {})
            for beside, text in there.items():
                for key in ("micro_batch_size", "per_device_train_batch_size", "-per-dp-rank", "_shard_size"):
                    text = text.replace(key, f"{key}_x") if plant else text
                paths.append(Path(folder) / name / beside)
                paths[-1].write_text(text, encoding="utf-8")
        return readers.judged(python, READER, paths, plant, **given)


if __name__ == "__main__":
    run(main)
