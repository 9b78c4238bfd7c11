"""The real parsers, on many configurations in one process."""

from __future__ import annotations

import inspect
import logging
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def refused_by_deepspeed(configs: Iterable[tuple[dict[str, Any], int]]) -> list[str]:
    """What DeepSpeedConfig says against (config, data-parallel size): exceptions, and warnings that name a key."""
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without a process group DeepSpeedConfig takes world size 1, whatever it is told.
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    heard = _Heard()
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(heard)
    found = []
    for config, dp in configs:
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda dp=dp: dp)
        heard.messages.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                parsed = DeepSpeedConfig(dict(config), mpu)
        except Exception as error:  # whatever a parser raises is a refusal
            found.append(f"DeepSpeed at dp={dp}: {error!r}"[:400])
            continue
        batch = parsed.train_batch_size
        if batch != config["train_batch_size"] or parsed.world_size != dp:
            found.append(f"DeepSpeed reads batch {batch} on {parsed.world_size} ranks")
        found += [f"DeepSpeed warns: {message}" for message in heard.messages if _names_a_key(message, config)]
    logger.removeHandler(heard)
    return found


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _names_a_key(message: str, config: dict[str, Any]) -> bool:
    keys = {*config, *(key for value in config.values() if isinstance(value, dict) for key in value)}
    return any(key in message for key in keys)


def refused_by_accelerate(texts: Iterable[str]) -> list[str]:
    """What accelerate's loader says against YAML texts."""
    from accelerate.commands.config.config_args import load_config_from_file

    found = []
    with tempfile.TemporaryDirectory(prefix="kit-accelerate-") as directory:
        file = Path(directory) / "accelerate.yaml"
        for text in texts:
            file.write_text(text, encoding="utf-8")
            try:
                load_config_from_file(str(file))
            except Exception as error:  # whatever a parser raises is a refusal
                found.append(f"accelerate: {error!r}"[:400])
    return found


def refused_by_megatron(all_settings: Iterable[dict[str, Any]]) -> list[str]:
    """What TransformerConfig, the optimizer's config and the signatures that take the rest say."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import initialize_model_parallel

    from kit.engines.megatron.model import transformer_config
    from kit.engines.megatron.optimizer import optimizer_config

    found = []
    for settings in all_settings:
        try:
            inspect.signature(initialize_model_parallel).bind(**settings["parallel_state"])
            inspect.signature(GPTModel.__init__).bind(None, None, None, **settings["model"])
            DistributedDataParallelConfig(**settings["distributed_data_parallel"])
            optimizer_config(settings["optimizer"])
            transformer_config(settings["transformer_config"])
        except Exception as error:  # whatever a parser raises is a refusal
            found.append(f"megatron-core: {error!r}"[:400])
    return found
