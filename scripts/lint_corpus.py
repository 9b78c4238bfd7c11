"""What the programs that read a configuration say of it: the findings that lint is held to on public files.

    python scripts/lint_corpus.py > tests/addons/corpus/expected.yaml

Nothing here comes from kit: DeepSpeed's own parser, accelerate's own loader and the launchers' own argparse read each
file. What they pass over in silence and run otherwise is written here from their sources, one line a rule.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "addons" / "corpus"
FILLED = re.compile(
    r"train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps|gradient_clipping|(fp16|bf16)\.enabled|"
    r"optimizer\.params\.(lr|betas|eps|weight_decay)|scheduler\.params\.(warmup_(min|max)_lr|(warmup|total)_num_steps)|"
    r"zero_optimization\.(stage|reduce_bucket_size|stage3_prefetch_bucket_size|stage3_param_persistence_threshold|"
    r"stage3_gather_16bit_weights_on_model_save|offload_\w+\.(device|nvme_path))"
)
"""transformers/integrations/deepspeed.py and accelerate's DeepSpeedPlugin: what they put in for "auto"."""
FORMER = re.compile(r"--(evaluation_strategy|warmup_ratio|group_by_length|fsdp_(min_num_params|transformer_layer\w+))")
"""transformers 4.57.3 defines these, as the Trainer's programs below use them."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, node


def filled(node: Any, path: str = "") -> Any:
    """As the Trainer hands it to DeepSpeed: micro batch 1, one process, bf16 where both are open."""
    if isinstance(node, dict):
        inner = {key: filled(value, f"{path}.{key}" if path else key) for key, value in node.items()}
        return {key: value for key, value in inner.items() if value != "auto"}
    if node != "auto" or not FILLED.fullmatch(path):
        return node
    return False if path.endswith("enabled") else True if "gather" in path else 1


def without(section: Any, keys: tuple[Any, ...]) -> Any:
    return {key: value for key, value in section.items() if key not in keys} if isinstance(section, dict) else section


def deepspeed(data: dict[str, Any]) -> set[str]:
    from deepspeed.runtime import config as parser
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    from scripts.deepspeed_keys import Remembering

    said: set[str] = set()
    removed = [key for key in parser._REMOVED_TOP_LEVEL_CONFIG_KEYS if key in data]
    if removed:  # runtime/config.py, _reject_removed_config_keys: raised before anything else is looked at
        said.add("removed-key")
    rest = {key: value for key, value in data.items() if key not in removed}
    if rest.get("train_batch_size") not in (None, "auto"):  # what fits it depends on what the Trainer is given
        rest = {key: value for key, value in rest.items() if key not in BATCH or value != "auto"}
    zero = rest.get("zero_optimization") or {}
    asked: set[tuple[str, ...]] = set()
    while True:  # the parser stops at the first thing: what it stopped at is put right, and the rest is read again
        try:
            parser.DeepSpeedConfig(Remembering(filled(rest), asked))
            break
        except ValidationError as error:
            for each in error.errors():
                said.add("unknown-key" if each["type"] == "extra_forbidden" else "value-range")
                rest = {key: without(value, each["loc"]) for key, value in rest.items()}
        except AssertionError as error:
            missing = "needs to be provided" in str(error)
            said.add("batch-missing" if missing else "batch-arithmetic")
            rest = {key: value for key, value in rest.items() if key not in BATCH} | {"train_batch_size": 1}
    unread = any((key,) not in asked and not key.startswith("_") for key in rest)
    rest = {key: value for key, value in data.items() if key not in removed}
    inner = {path[1] for path in asked if path[0] == "aio" and len(path) > 1}
    stage = int(zero) if isinstance(zero, bool) else zero.get("stage", 0)
    given, fields = {} if isinstance(zero, bool) else zero, DeepSpeedZeroConfig.model_fields
    offload = {name: (given.get(f"offload_{name}") or {}).get("device", "none") for name in ("param", "optimizer")}
    gathers = [key for key in given if "gather_16bit" in key or "gather_fp16" in key]
    fp16, optimizer = rest.get("fp16", {}), rest.get("optimizer", {})
    bf16, steps = (rest.get("bf16") or {}).get("enabled"), int(filled(rest).get("gradient_accumulation_steps", 1))
    own = ("zero_optimization.", "fp16.", "bf16.")
    silent = {  # what the parser passes over
        "unknown-key": unread or (inner and set(rest.get("aio", {})) - inner),
        "deprecated-key": isinstance(zero, bool) or "bfloat16" in rest or any(
            key in (name, field.alias) and (field.json_schema_extra or {}).get("deprecated")
            for key in given for name, field in fields.items()),
        "offload-stage": offload["param"] != "none" and stage < 3,  # stage_1_and_2.py has no such argument
        "nvme-aio": "nvme" in offload.values() and "aio" not in rest,
        "other-stage-key": any(key.startswith("stage3_") for key in given) if stage < 3 else
        set(given) & {"allgather_bucket_size", "allgather_partitions", "round_robin_gradients"},
        # engine.py, save_16bit_model: returns False and saves nothing
        "gather-on-save": stage == 3 and not any(given[key] in (True, "auto") for key in gathers),
        "static-loss-scale": fp16.get("enabled") is True and fp16.get("loss_scale"),
        "value-range": not -1 < fp16.get("initial_scale_power", 16) < 128,  # 2 ** 128 is not a number of 32 bits
        # engine.py, _configure_basic_optimizer raises
        "clipping-in-optimizer": "max_grad_norm" in optimizer.get("params", {}),
        "removed-optimizer": re.fullmatch(r"(?i)(zero)?(one|0/?1|1)-?bit\w+", optimizer.get("type", "")),
        "untested-optimizer": stage and optimizer.get("type", "Adam").lower() == "lamb"
        and not rest.get("zero_allow_untested_optimizer"),
        "bf16-accumulation": bf16 is True and steps >= 8,
        "auto-unfilled": any(value == "auto" and not FILLED.fullmatch(path) and not path.startswith(own)
                             for path, value in leaves(rest)),
    }  # fmt: skip
    return said | {rule for rule, holds in silent.items() if holds}


def accelerate(path: Path, data: dict[str, Any]) -> set[str]:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    said: set[str] = set()
    try:
        load_config_from_file(str(path))
    except ValueError as error:
        said.add("unknown-key" if "unknown keys" in str(error) else "distributed-type")
    options = {action.dest for action in launch_command_parser()._actions}
    sections = {"deepspeed_config": "", "fsdp_config": "fsdp_", "megatron_lm_config": "megatron_lm_"}
    sections["parallelism_config"] = "parallelism_config_"
    for section, prefix in sections.items():  # launch.py, _validate_launch_command: options of these names
        for key in data.get(section) or {}:
            if not options & {key, prefix + key}:
                said.add("unknown-key")
    inline, kind = data.get("deepspeed_config") or {}, data.get("distributed_type")
    processes, machines = data.get("num_processes") or 1, data.get("num_machines") or 1
    policy, fsdp = "", data.get("fsdp_config") or {}
    if kind == "FSDP":
        from accelerate import FullyShardedDataParallelPlugin

        policy = FullyShardedDataParallelPlugin(auto_wrap_policy=fsdp.get("fsdp_auto_wrap_policy")).auto_wrap_policy
    stage = inline.get("zero_stage") if kind == "DEEPSPEED" else None
    named = kind == "DEEPSPEED" and inline.get("deepspeed_config_file") is not None
    decided = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device")
    visible, split = str(data.get("gpu_ids")), data.get("parallelism_config")
    below_3 = not named and stage not in (None, 3)
    silent = {
        # launch.py, launch_command: simple_launcher
        "one-process": kind in ("NO", "MULTI_CPU") and processes > 1 and not data.get("mpirun_config"),
        # utils/launch.py: CUDA_VISIBLE_DEVICES
        "visible-devices": "," in visible and len(visible.split(",")) < processes / machines,
        "processes-per-machine": processes % machines,
        "main-process-ip": machines > 1 and not data.get("main_process_ip"),
        "wrap-policy": policy is None,  # one group
        "parallelism": split and not _splits(split, processes),
        "config-file-missing": named,  # no file beside these
        # utils/dataclasses.py, _deepspeed_config_checks
        "decided-by-file": named and (any(key in inline for key in decided) or data.get("mixed_precision")),
        "offload-stage": below_3 and inline.get("offload_param_device") in ("cpu", "nvme"),
        "other-stage-key": below_3 and inline.get("zero3_init_flag"),
        # accelerator.py, get_state_dict raises
        "gather-on-save": not named and stage == 3 and not inline.get("zero3_save_16bit_model"),
    }
    return said | {rule for rule, holds in silent.items() if holds}


def _splits(section: dict[str, Any], processes: int) -> bool:
    """accelerate/parallelism_config.py: its constructor, and the product of _validate_accelerator."""
    from accelerate.parallelism_config import ParallelismConfig

    given = {key.removeprefix("parallelism_config_"): value for key, value in section.items()}
    known = {key: value for key, value in given.items() if key in ParallelismConfig.__dataclass_fields__}
    try:
        return ParallelismConfig(**known).total_size in (1, processes)
    except ValueError:
        return False


def launch(text: str) -> set[str]:
    said, slurm = set[str](), re.search(r"--ntasks-per-node=(\d+)", text)
    said |= {"former-launcher"} if "torch.distributed.launch" in text else set()
    for line in text.splitlines():
        words = shlex.split(re.sub(r"\$\(\([^)]*\)\)", "$N", line), comments=True)
        begin, *rest = itertools.dropwhile(lambda word: word not in _STARTS, [*words, "launch"])
        literal, refused = [re.sub(r"\$\{?\w+\}?|\$@", "1", word) for word in rest], list[str]()
        if not rest:
            continue
        if re.search(r"fastchat/train/|/run_glue", line):  # these parse a dataclass that extends TrainingArguments
            from transformers import HfArgumentParser, TrainingArguments

            _, refused = HfArgumentParser(TrainingArguments).parse_known_args(literal[:-1])  # type: ignore[arg-type]
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                _parser(begin)(literal[:-1])
            except SystemExit:
                said.add("unknown-option")
        named = {option: value for option, value in itertools.pairwise(rest[:-1]) if option in _NAME_A_FILE}
        alone = not any("nproc" in word for word in rest) and not any(word.startswith("$") for word in words)
        told = {
            "one-process": begin == "torchrun" and alone and not slurm,
            "config-file-missing": any(re.fullmatch(r"[^$]+\.(json|ya?ml)", value) for value in named.values()),
            "dropped-argument": any(map(FORMER.match, refused)),
            "fsdp-and-deepspeed": "--fsdp" in rest and "--deepspeed" in rest,
        }
        said |= {rule for rule, holds in told.items() if holds}
    return said


_STARTS = ("torchrun", "deepspeed", "launch", "accelerate.commands.launch")
_NAME_A_FILE = ("--deepspeed", "--deepspeed_config", "--config_file")


def _parser(name: str) -> Callable[[list[str]], Any]:
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        return get_args_parser().parse_args
    if name == "deepspeed":
        from deepspeed.launcher import runner

        return runner.parse_args
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_args


def main() -> None:
    expected: dict[str, list[str]] = {}
    with contextlib.redirect_stdout(sys.stderr):
        for path in sorted(CORPUS.glob("*/*")):
            kind, text = path.parent.name, path.read_text()
            try:
                data = {} if kind == "launch" else json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
                said = (
                    launch(text) if kind == "launch"
                    else deepspeed(data) if kind == "deepspeed"
                    else accelerate(path, data) if kind == "accelerate"
                    else {"not-read"}  # no program of these reads it: it has none of their keys
                )  # fmt: skip
            except json.JSONDecodeError:
                said = {"unreadable"}
            expected[f"{kind}/{path.name}"] = sorted(said)
    print(yaml.safe_dump(expected, sort_keys=True, default_flow_style=None, width=200), end="")


if __name__ == "__main__":
    main()
