"""What the programs that read a configuration say of it: the findings that lint is held to on public files.

    python -m tests.diagnose.corpus_readers > tests/diagnose/corpus/expected.yaml

Nothing here comes from kit: DeepSpeed's own parser, accelerate's own loader and the launchers' own argparse read each
file. What they pass over in silence and run otherwise is written here from their sources, one line a rule.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

CORPUS = Path(__file__).parent / "corpus"
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
    if any((key,) not in asked and not key.startswith("_") for key in rest):
        said.add("unknown-key")
    rest = {key: value for key, value in data.items() if key not in removed}
    inner = {path[1] for path in asked if path[0] == "aio" and len(path) > 1}
    if inner and set(rest.get("aio", {})) - inner:
        said.add("unknown-key")
    fields = DeepSpeedZeroConfig.model_fields
    if isinstance(zero, bool) or "bfloat16" in rest:
        said.add("deprecated-key")
    stage = int(zero) if isinstance(zero, bool) else zero.get("stage", 0)
    zero = {} if isinstance(zero, bool) else zero
    for key in zero:
        for name, field in fields.items():
            if key in (name, field.alias) and (field.json_schema_extra or {}).get("deprecated"):
                said.add("deprecated-key")
    offload = {name: (zero.get(f"offload_{name}") or {}).get("device", "none") for name in ("param", "optimizer")}
    if offload["param"] != "none" and stage < 3:
        said.add("offload-stage")  # stage_1_and_2.py has no such argument
    if "nvme" in offload.values() and "aio" not in rest:
        said.add("nvme-aio")
    if any(key.startswith("stage3_") for key in zero) and stage < 3:
        said.add("other-stage-key")
    if set(zero) & {"allgather_bucket_size", "allgather_partitions", "round_robin_gradients"} and stage == 3:
        said.add("other-stage-key")
    gathers = [key for key in zero if "gather_16bit" in key or "gather_fp16" in key]
    if stage == 3 and not any(zero[key] in (True, "auto") for key in gathers):
        said.add("gather-on-save")  # engine.py, save_16bit_model: returns False and saves nothing
    fp16, optimizer = rest.get("fp16", {}), rest.get("optimizer", {})
    if fp16.get("enabled") is True and fp16.get("loss_scale"):
        said.add("static-loss-scale")
    if not -1 < fp16.get("initial_scale_power", 16) < 128:
        said.add("value-range")  # 2 ** 128 is not a number of 32 bits
    if "max_grad_norm" in optimizer.get("params", {}):
        said.add("clipping-in-optimizer")  # engine.py, _configure_basic_optimizer raises
    if re.fullmatch(r"(?i)(zero)?(one|0/?1|1)-?bit\w+", optimizer.get("type", "")):
        said.add("removed-optimizer")
    if stage and optimizer.get("type", "Adam").lower() == "lamb" and not rest.get("zero_allow_untested_optimizer"):
        said.add("untested-optimizer")
    if (rest.get("bf16") or {}).get("enabled") is True and int(filled(rest).get("gradient_accumulation_steps", 1)) >= 8:
        said.add("bf16-accumulation")
    for path, value in leaves(rest):
        if (
            value == "auto"
            and not FILLED.fullmatch(path)
            and not path.startswith(("zero_optimization.", "fp16.", "bf16."))
        ):
            said.add("auto-unfilled")
    return said


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
    if kind in ("NO", "MULTI_CPU") and processes > 1 and not data.get("mpirun_config"):
        said.add("one-process")  # launch.py, launch_command: simple_launcher
    if "," in str(data.get("gpu_ids")) and len(str(data["gpu_ids"]).split(",")) < processes / machines:
        said.add("visible-devices")  # utils/launch.py: CUDA_VISIBLE_DEVICES
    if processes % machines:
        said.add("processes-per-machine")
    if machines > 1 and not data.get("main_process_ip"):
        said.add("main-process-ip")
    if kind == "FSDP":
        from accelerate import FullyShardedDataParallelPlugin

        fsdp = data.get("fsdp_config") or {}
        policy = FullyShardedDataParallelPlugin(auto_wrap_policy=fsdp.get("fsdp_auto_wrap_policy")).auto_wrap_policy
        said |= {"wrap-policy"} if policy is None else set()  # one group
    if data.get("parallelism_config") and not _splits(data["parallelism_config"], processes):
        said.add("parallelism")
    if kind != "DEEPSPEED":
        return said
    named, stage = inline.get("deepspeed_config_file"), inline.get("zero_stage")
    if named is not None:
        said.add("config-file-missing")  # no file beside these
        refused = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device")
        if any(key in inline for key in refused) or data.get("mixed_precision"):
            said.add("decided-by-file")  # utils/dataclasses.py, _deepspeed_config_checks
        return said
    if stage is not None and stage != 3:
        if inline.get("offload_param_device") in ("cpu", "nvme"):
            said.add("offload-stage")
        if inline.get("zero3_init_flag"):
            said.add("other-stage-key")
    if stage == 3 and not inline.get("zero3_save_16bit_model"):
        said.add("gather-on-save")  # accelerator.py, get_state_dict raises
    return said


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
    said: set[str] = set()
    slurm = re.search(r"--ntasks-per-node=(\d+)", text)
    for line in text.splitlines():
        words = shlex.split(re.sub(r"\$\(\([^)]*\)\)", "$N", line), comments=True)
        opaque = any(word.startswith("$") for word in words)
        if "torch.distributed.launch" in words:
            said.add("former-launcher")
        begins = next((index for index, word in enumerate(words) if word in ("torchrun", "deepspeed", "launch")), None)
        if "accelerate.commands.launch" in words:
            begins = words.index("accelerate.commands.launch")
        if begins is None:
            continue
        begin, rest = words[begins], words[begins + 1 :]
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                _parser(begin)([re.sub(r"\$\{?\w+\}?|\$@", "1", word) for word in rest])
            except SystemExit:
                said.add("unknown-option")
        if begin == "torchrun" and not any("nproc" in word for word in rest) and not opaque and not slurm:
            said.add("one-process")
        for option in ("--deepspeed", "--deepspeed_config", "--config_file"):
            if option in rest and rest.index(option) + 1 < len(rest):
                value = rest[rest.index(option) + 1]
                said |= {"config-file-missing"} if re.fullmatch(r"[^$]+\.(json|ya?ml)", value) else set()
        if re.search(r"fastchat/train/|/run_glue", line):  # these parse a dataclass that extends TrainingArguments
            from transformers import HfArgumentParser, TrainingArguments

            literal = [re.sub(r"\$\{?\w+\}?|\$@", "1", word) for word in rest]
            _, refused = HfArgumentParser(TrainingArguments).parse_known_args(literal)  # type: ignore[arg-type]
            said |= {"dropped-argument"} if any(map(FORMER.match, refused)) else set()
        if "--fsdp" in rest and "--deepspeed" in rest:
            said.add("fsdp-and-deepspeed")
    return said


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
            if kind == "launch":
                said = launch(text)
            elif kind == "other":
                said = {"not-read"}  # no program of these reads it: it has none of their keys
            else:
                try:
                    data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
                except json.JSONDecodeError:
                    said = {"unreadable"}
                else:
                    said = deepspeed(data) if kind == "deepspeed" else accelerate(path, data)
            expected[f"{kind}/{path.name}"] = sorted(said)
    print(yaml.safe_dump(expected, sort_keys=True, default_flow_style=None, width=200), end="")


if __name__ == "__main__":
    main()
