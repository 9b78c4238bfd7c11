"""Write ``kit/addons/lint/deepspeed_keys.yaml``: every key that the installed DeepSpeed reads of its configuration.

    python scripts/deepspeed_keys.py > kit/addons/lint/deepspeed_keys.yaml

DeepSpeed has no list of its keys: a misspelt one at the top level is ignored. So its parser is given a dictionary that
remembers what it is asked for, once empty and once for every section; pydantic models list their own fields.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, get_args

import yaml

READ_ELSEWHERE = ("sequence_parallel_size", "data_parallel_size")
"""Read by ``deepspeed.initialize`` itself, where a process group is up (deepspeed/__init__.py, runtime/config.py)."""


class _Keys:
    """A view that remembers membership tests, as ``dict.keys()`` gives."""

    def __init__(self, owner: Remembering) -> None:
        self.owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self.owner

    def __iter__(self) -> Iterator[Any]:
        return dict.__iter__(self.owner)


class Remembering(dict[str, Any]):
    """A dictionary that notes every key it is asked for."""

    def __init__(self, data: dict[str, Any], seen: set[tuple[str, ...]], prefix: tuple[str, ...] = ()) -> None:
        nested = {
            key: Remembering(value, seen, (*prefix, key)) if isinstance(value, dict) else value
            for key, value in data.items()
        }
        super().__init__(nested)
        self.seen, self.prefix = seen, prefix

    def _note(self, key: object) -> None:
        if isinstance(key, str):
            self.seen.add((*self.prefix, key))

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return _Keys(self)

    def __copy__(self) -> Remembering:
        return Remembering(dict(dict.items(self)), self.seen, self.prefix)


def known_keys() -> dict[str, Any]:
    """``{version, removed, deprecated, keys}``; ``keys`` nests, ``null`` = a value, ``any`` = free form."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        from deepspeed.comm.config import CommsLoggerConfig
        from deepspeed.runtime import config as parser
        from pydantic import BaseModel

    def asked(document: dict[str, Any]) -> set[tuple[str, ...]]:
        seen: set[tuple[str, ...]] = set()
        # A section that wants values, not an empty mapping, has said by then which ones.
        with contextlib.suppress(Exception):
            parser.DeepSpeedConfig(Remembering({"train_batch_size": 1, **document}, seen))
        return seen

    def sub_models(annotation: Any) -> list[type[BaseModel]]:
        options = (annotation, *get_args(annotation))
        return [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]

    limits: dict[str, str] = {}
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

    def fields(model: type[BaseModel], deprecated: dict[str, str], prefix: str) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            # Limits as large as a machine's whole numbers limit nothing.
            asked_of = {
                f"{sign} {getattr(each, word):g}"
                for each in field.metadata
                for word, sign in signs.items()
                if abs(getattr(each, word, None) or 0) < sys.maxsize and hasattr(each, word)
            }
            for alias in {name, field.alias or name} if asked_of else ():
                limits[f"{prefix}.{alias}"] = " and ".join(sorted(asked_of))
            extra = field.json_schema_extra or {}
            if isinstance(extra, dict) and extra.get("deprecated"):
                deprecated[f"{prefix}.{field.alias or name}"] = str(extra.get("new_param", ""))
            inner = sub_models(field.annotation)
            tree[field.alias or name] = fields(inner[0], deprecated, f"{prefix}.{name}") if inner else None
            if field.alias:
                tree[name] = tree[field.alias]  # DeepSpeedConfigModel sets populate_by_name
        return tree

    removed = {**parser._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed.update({f"zero_optimization.{key}": text for key, text in parser._REMOVED_ZERO_CONFIG_KEYS.items()})
    config = parser.DeepSpeedConfig({"train_batch_size": 1})
    models = {
        "zero_optimization": type(config.zero_config),
        "fp16": type(config.float16_config),
        "bf16": type(config.bfloat16_config),
        "hybrid_engine": type(config.hybrid_engine),
        "compile": type(config.compile_config),
        "tensor_parallel": type(config.tensor_parallel_config),
        "comms_logger": CommsLoggerConfig,
        "weight_quantization": parser.WeightQuantConfig,
        **dict(_monitors(type(config.monitor_config), sub_models)),
    }
    deprecated: dict[str, str] = {}
    tree: dict[str, Any] = {}
    top = {path[0] for path in asked({})} | set(READ_ELSEWHERE)
    for key in sorted(top - set(removed)):
        model = models.get(key)
        if model is not None:
            tree[key] = dict(sorted(fields(model, deprecated, key).items()))
            continue
        inner = {path[1] for section in ({}, {"enabled": True}) for path in asked({key: section}) if len(path) > 1}
        tree[key] = dict.fromkeys(sorted(inner)) or None
    tree["optimizer"]["params"] = tree["scheduler"]["params"] = "any"
    return {
        "version": deepspeed.__version__.split("+")[0],
        "removed": sorted(removed),
        "deprecated": dict(sorted(deprecated.items())),
        "refuses": sorted(models),
        "limits": dict(sorted(limits.items())),
        "keys": tree,
    }


def _monitors(model: Any, sub_models: Any) -> list[tuple[str, Any]]:
    return [(name, sub_models(field.annotation)[0]) for name, field in model.model_fields.items()]


if __name__ == "__main__":
    print("# Written by scripts/deepspeed_keys.py from the installed DeepSpeed; null: a value; any: free form.")
    print(yaml.safe_dump(known_keys(), sort_keys=False, width=110), end="")
