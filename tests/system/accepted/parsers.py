"""The real parsers, on many configurations in one process."""

from __future__ import annotations

import inspect
import logging.handlers
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml

from tests.support.files import file_with
from tests.support.runs import free_port


def refused_by_deepspeed(configs: Iterable[tuple[dict[str, Any], int]]) -> list[str]:
    """What DeepSpeedConfig says against (config, data-parallel size): exceptions, and warnings that name a key."""
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    # Compiled at start for inference alone, minutes long, and behind a lock that a killed build leaves.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Without a process group DeepSpeedConfig takes world size 1, whatever it is told.
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    heard, logger = logging.handlers.BufferingHandler(10**6), logging.getLogger("DeepSpeed")
    heard.setLevel(logging.WARNING)
    logger.addHandler(heard)

    def read(given: tuple[dict[str, Any], int]) -> list[str]:
        config, dp = given
        heard.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parsed = DeepSpeedConfig(dict(config), SimpleNamespace(get_data_parallel_world_size=lambda: dp))
        keys = {*config, *(key for value in config.values() if isinstance(value, dict) for key in value)}
        told = [record.getMessage() for record in heard.buffer]
        problems = [f"warns: {message}" for message in told if any(key in message for key in keys)]
        if (parsed.train_batch_size, parsed.world_size) != (config["train_batch_size"], dp):
            problems.append(f"reads batch {parsed.train_batch_size} on {parsed.world_size} ranks at dp={dp}")
        return problems

    found = _refusals("DeepSpeed", configs, read)
    logger.removeHandler(heard)
    return found


def refused_by_accelerate(texts: Iterable[str]) -> list[str]:
    """What accelerate's loader says against YAML texts."""
    from accelerate.commands.config.config_args import load_config_from_file

    def read(file: Path) -> list[str]:
        load_config_from_file(str(file))
        return []

    return _refusals("accelerate", _files(texts), read)


def refused_by_fsdp_plugin(texts: Iterable[str]) -> list[str]:
    """What ``accelerate launch`` makes of the fsdp_config of YAML texts, and its plugin of that: the plugin reads
    environment variables that the launcher writes, so a key that neither knows falls away in silence."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser, prepare_multi_gpu_env
    from accelerate.utils import FullyShardedDataParallelPlugin

    def read(file: Path) -> list[str]:
        with mock.patch.dict(os.environ):  # as it is now, again afterwards
            arguments = launch_command_parser().parse_args(
                ["--config_file", str(file), "--main_process_port", str(free_port()), "train.py"]
            )
            os.environ.update(prepare_multi_gpu_env(_validate_launch_command(arguments)[0]))
            plugin = FullyShardedDataParallelPlugin()
        return _unlike(plugin, yaml.safe_load(file.read_text(encoding="utf-8"))["fsdp_config"])

    return _refusals("accelerate's FSDP plugin", _files(texts), read)


def _files(texts: Iterable[str]) -> Iterator[Path]:
    """The texts as files, one after the other under one name."""
    with tempfile.TemporaryDirectory(prefix="kit-accelerate-") as directory:
        for text in texts:
            yield file_with(Path(directory) / "accelerate.yaml", text)


def _refusals(reader: str, given: Iterable[Any], read: Callable[[Any], Iterable[str]]) -> list[str]:
    """What ``read`` says against each, and what it raises: whatever a parser raises is a refusal."""
    found: list[str] = []
    for each in given:
        try:
            found += [f"{reader}: {problem}" for problem in read(each)]
        except Exception as error:
            found.append(f"{reader}: {error!r}"[:400])
    return found


def _unlike(plugin: Any, asked: dict[str, Any]) -> list[str]:
    """Keys whose value the plugin has not."""
    kinds = {"fsdp_auto_wrap_policy": "transformer_auto_wrap_policy", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    words = asked | {key: kinds[key] for key in kinds if key in asked}
    has = {
        "fsdp_auto_wrap_policy": getattr(plugin.auto_wrap_policy, "__name__", None),
        "fsdp_state_dict_type": plugin.state_dict_type.name,
        "fsdp_version": plugin.fsdp_version,
    }
    values = {key: has.get(key, getattr(plugin, key.removeprefix("fsdp_"), None)) for key in words}
    return [f"{key}={asked[key]!r} is {values[key]!r}" for key in words if values[key] != words[key]]


def refused_by_megatron(all_settings: Iterable[dict[str, Any]]) -> list[str]:
    """What TransformerConfig, the optimizer's config and the signatures that take the rest say."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import initialize_model_parallel

    from kit.engines.megatron.model.build import transformer_config
    from kit.engines.megatron.optimizer import optimizer_config

    def read(settings: dict[str, Any]) -> list[str]:
        inspect.signature(initialize_model_parallel).bind(**settings["parallel_state"])
        inspect.signature(GPTModel.__init__).bind(None, None, None, **settings["model"])
        if "distributed_data_parallel" in settings:  # not where DeepSpeed reduces and steps
            DistributedDataParallelConfig(**settings["distributed_data_parallel"])
            optimizer_config(settings["optimizer"])
        transformer_config(settings["transformer_config"])
        return []

    return _refusals("megatron-core", all_settings, read)
