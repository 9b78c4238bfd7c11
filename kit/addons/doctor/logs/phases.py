"""The phase of a run in which an error was raised, from the frames of its traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FRAME_OR_SOURCE = re.compile(r"(?:[\w.-]+: ?)?(?:\[rank\d+\]:)?(?:[ \t│|]|File \S+:\d+, in |-+> \d+ )")
"""Lines of a traceback below its heading are indented, or stand in a frame that rich draws, or are a notebook's; log
lines are none of these."""
_CLASSES = re.compile(r"\bin (?:\w+\.)+(?=\w+\()")
"""A notebook names the class of a method."""
_OPTIMIZER_FILE = r"(?:\boptim\w*/[\w/.]*|\w*(?:optim|adam|muon|lion|adafactor)\w*)\.py\"?(?:, line |:)\d+,? in "
_PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "optimizer step",
        re.compile(
            _OPTIMIZER_FILE + r"(?:\w*step\w*|_?init_(?:group|state)|update\w*|_\w*(?:adam|foreach|fused)\w*)\b"
            r"|\boptim(?:izer)?s?\.step\(|in _take_model_step\b|deepspeed/runtime/\S+, line \d+, in step\b"
            r"|in (?:_?initialize_optimizer_states|_configure_\w*optimizer|_create_fp32_partitions)\b"
            r"|in (?:_setup_for_real_optimizer|get_megatron_optimizer)\b"
        ),
    ),
    ("backward", re.compile(r"\.backward\(|in backward\b|autograd.*backward|run_backward")),
    (
        "loading a checkpoint",
        re.compile(
            r"\bdcp\.load\(|in (?:_?load_(?:checkpoint|optimizer\w*|state)|_load_from_checkpoint)\b"
            r"|in load_and_broadcast\w*\b"
        ),
    ),
    (
        "checkpoint",
        re.compile(
            r"\btorch\.save\(|\bdcp\.(?:async_)?save\(|\.save_(?:checkpoint|pretrained|model|state|16bit_model)\("
            r"|in _?(?:maybe_log_)?save(?:_(?!for_backward)\w+)?\b|in \w*(?<!load_)(?<!load_module_)state_dict\b"
            r"|kit/training/checkpoint/"
        ),
    ),
    (
        "building the model",
        re.compile(
            r"from_pretrained|in (?:from_config|build_model|get_model|setup_model\w*|model_provider|prepare_model)\b"
            r"|load_state_dict|import_state|zero\.Init|in (?:to_empty|init_empty_weights|caching_allocator_warmup)\b"
            r"|\bmodel\.(?:to|cuda|bfloat16|half|float)\(|nn/modules/module\.py\"?(?:, line |:)\d+,? in _apply\b"
            r"|nn/(?:modules/\S+|init\.py\"?)(?:, line |:)\d+,? in (?:__init__|reset_parameters|\w*(?:form|mal)_)"
            r"|in _configure_distributed_model\b|fully_shard\(|FullyShardedDataParallel\("
        ),
    ),
    ("evaluation", re.compile(r"in (?:evaluat(?:e|ion_loop)|prediction_step|validat(?:e|ion_step|ion_loop))\b")),
    ("forward", re.compile(r"in (?:training_step|forward_step)\b")),
)
"""(phase, pattern of a frame or of its source line)."""
_INSIDE_OTHERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("optimizer step", re.compile(r"in (?:step|apply)\b")),
    ("loading a checkpoint", re.compile(r"\btorch\.load\(")),
    ("forward", re.compile(r"in forward\b|\.forward\(|_call_impl")),
)
"""Weaker patterns: recomputation runs a forward pass in the backward pass, and so does an evaluation; building
a model reads files; a function of the user's may be named ``step``."""


def phase_of(lines: Sequence[str]) -> str | None:
    """The phase of an error below these lines of its traceback, the nearest first: of the innermost frame with a
    phase."""
    frames = [_CLASSES.sub("in ", line) for line in lines if _FRAME_OR_SOURCE.match(line)]
    for phases in (_PHASES, _INSIDE_OTHERS):
        for frame in frames:
            for phase, pattern in phases:
                if pattern.search(frame):
                    return phase
    return None
