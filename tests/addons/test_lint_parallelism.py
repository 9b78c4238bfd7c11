"""What lint refuses of a parallelism_config is what accelerate itself refuses: each pair differs in one thing."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from kit.addons.lint import lint
from kit.specs import strict_yaml
from tests.support.files import file_with, files_in
from tests.support.refusals import refusal

FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FSDP1 = FSDP2 | {"fsdp_version": 1}


def config(processes: int, kind: str = "FSDP", fsdp: dict[str, Any] = FSDP2, **sizes: Any) -> dict[str, Any]:
    split = {f"parallelism_config_{name}": value for name, value in sizes.items()}
    given = {"fsdp_config": fsdp} if kind == "FSDP" else {}
    return {"distributed_type": kind, "num_processes": processes, "parallelism_config": split} | given


PAIRS = (
    # (refused, accepted)
    (config(2, dp_shard_size=2, tp_size=2), config(4, dp_shard_size=2, tp_size=2)),
    (config(8, dp_shard_size=2, cp_size=2), config(8, dp_shard_size=4, cp_size=2)),
    (config(4, tp_size=4), config(4, dp_shard_size=2, tp_size=2)),
    (config(4, dp_replicate_size=4), config(4, dp_replicate_size=2, dp_shard_size=2)),
    (config(4, dp_replicate_size=2, tp_size=2), config(4, dp_shard_size=2, tp_size=2)),
    (config(4, "MULTI_GPU", dp_replicate_size=2, tp_size=2), config(4, "MULTI_GPU", tp_size=4)),
    (config(4, fsdp=FSDP1, dp_shard_size=4), config(4, dp_shard_size=4)),
    (config(4, fsdp=FSDP1, cp_size=4), config(4, cp_size=4)),
    (config(4, "MULTI_GPU", cp_size=4), config(4, "MULTI_GPU", dp_replicate_size=4)),
    (config(4, cp_size=2, sp_size=2), config(4, cp_size=2, dp_shard_size=2)),
    (config(4, cp_size=4, cp_backend="deepspeed"), config(4, cp_size=4, cp_backend="torch")),
    (config(4, dp_shard_size=0), config(4, dp_shard_size=4)),
    (
        config(4, "DEEPSPEED", sp_size=2, sp_attn_implementation="eager"),
        config(4, "DEEPSPEED", sp_size=2, sp_attn_implementation="sdpa"),
    ),
    (config(4, "DEEPSPEED", sp_size=2, sp_backend="torch"), config(4, "DEEPSPEED", sp_size=2)),
    (config(4, "MEGATRON_LM", tp_size=4), config(4, "MULTI_GPU", tp_size=4)),
    (config(4, "DEEPSPEED", dp_shard_size=2), config(4, "DEEPSPEED", dp_shard_size=4)),
    (config(8, "MULTI_GPU", dp_shard_size=4), config(8, "MULTI_GPU")),
    (config(2, tp_size=2), config(2, tp_size=1)),
)


def accelerate_refuses(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """As ``accelerate launch`` hands the section to a script and its Accelerator takes it up, without the processes."""
    import torch
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.commands.launch import launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import TorchDynamoPlugin
    from accelerate.utils.launch import prepare_extend_env_parallelism_config

    line = launch_command_parser().parse_args(["train.py"])
    line.__dict__.update(data["parallelism_config"])
    for name, value in prepare_extend_env_parallelism_config(line, {}).items():  # type: ignore[attr-defined]
        monkeypatch.setitem(os.environ, name, value)
    kind = data["distributed_type"]
    plugin = (
        FullyShardedDataParallelPlugin(fsdp_version=data["fsdp_config"]["fsdp_version"]) if kind == "FSDP" else None
    )
    ranks = {"process_index": 0, "local_process_index": 0, "num_processes": data["num_processes"], "_cpu": True}
    begins = {"FSDP": "MULTI_GPU", "MEGATRON_LM": "MULTI_GPU"}.get(kind, kind)
    started = {"distributed_type": DistributedType[begins], "device": torch.device("cpu"), "backend": "gloo", **ranks}
    monkeypatch.setattr(PartialState, "_shared_state", started | {"debug": False, "fork_launched": False})
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    try:
        split = ParallelismConfig()
        given = {"dynamo_plugin": TorchDynamoPlugin(), "fsdp_plugin": plugin, "_from_accelerator": True}
        state = AcceleratorState(parallelism_config=split, **given)
        asking = {
            "multi_device": kind.startswith("MULTI_"),
            "num_processes": state.num_processes,
            "is_fsdp2": state.is_fsdp2,
            "is_main_process": False,
            "distributed_type": DistributedType[kind],
        }
        split._validate_accelerator(Namespace(**asking))  # type: ignore[arg-type]
    except ValueError:
        return True
    return False


def lint_refuses(data: dict[str, Any], directory: Path) -> bool:
    path = file_with(directory / "accelerate.yaml", strict_yaml.dump(data))
    return ("parallelism", "error") in {(each.rule, each.severity) for each in lint(path)}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: str(pair[0]["parallelism_config"]))
def test_lint_refuses_one_of_two(pair: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    assert [lint_refuses(data, tmp_path) for data in pair] == [True, False]


@pytest.mark.slow
def test_accelerate_refuses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in PAIRS:
        with monkeypatch.context() as own:
            assert [accelerate_refuses(data, own) for data in pair] == [True, False], pair


@pytest.mark.slow
def test_no_group_for_sequences_without_deepspeed() -> None:
    """The Trainer takes DeepSpeed's group of it (transformers/trainer.py, deepspeed_ulysses_dl_adapter)."""
    from deepspeed.utils import groups

    refusal(KeyError, groups._get_sequence_parallel_group)


def test_sequence_parallelism_needs_deepspeed(tmp_path: Path) -> None:
    assert lint_refuses(config(4, dp_shard_size=2, sp_size=2), tmp_path)
    assert not lint_refuses(config(4, "DEEPSPEED", sp_size=2), tmp_path)
    assert lint_refuses(config(3, "DEEPSPEED", sp_size=2), tmp_path)


def test_the_line_that_starts_it_comes_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(strict_yaml.dump(config(2, dp_shard_size=2, tp_size=2)))
    script = tmp_path / "run.sh"
    for line, rules in (
        ("", {"parallelism"}),
        ("--num_processes 4", set()),
        ("--num_processes $N", {"unset-variable"}),
        ("--multi_gpu", set()),
        ("--use_fsdp", set()),
        ("--parallelism_config_tp_size 1", set()),
    ):
        assert {
            each.rule for each in lint(file_with(script, f"accelerate launch --config_file a.yaml {line} train.py"))
        } == rules, line


@pytest.mark.parametrize("line", ["--packing", "--packing true", "--eval-packing True"])
def test_trl_packs_no_rows_that_ranks_split(tmp_path: Path, line: str) -> None:
    """Each of these it takes without the other."""

    def found(cp: int, arguments: str) -> bool:
        files_in(tmp_path, {
            "a.yaml": strict_yaml.dump(config(4, dp_shard_size=4 // cp, cp_size=cp)),
            "run.sh": f"accelerate launch --config_file a.yaml sft.py --model_name_or_path m {arguments}\n",
        })  # fmt: skip
        return "packing-split" in {each.rule for each in lint(tmp_path / "run.sh")}

    assert [found(2, line), found(1, line), found(2, ""), found(2, "--packing false")] == [True, False, False, False]
