"""Faults of what DeepSpeed splits and shards, planted in pools of processes that live on: see ``faults``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.system_tests.parity.faults import FAULTS, _replace, uproot


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """A fault of this module or of ``faults`` while the block runs; none for None."""
    if fault is not None:
        (SPLIT_FAULTS[fault] if fault in SPLIT_FAULTS else FAULTS[fault].install)()
    try:
        yield
    finally:
        uproot()


def _ulysses_local_positions() -> None:
    """Each rank counts the positions of its part of the sequence from 0."""
    from kit.engines.deepspeed.ulysses import UlyssesSequenceParallel

    build = UlyssesSequenceParallel.build

    def first(self, settings):
        model = build(self, settings)
        forward = model.forward
        model.forward = lambda *args, position_ids, **rest: forward(
            *args, position_ids=position_ids - position_ids[:, :1], **rest
        )
        return model

    _replace(UlyssesSequenceParallel, "build", first)


def _ulysses_one_average() -> None:
    """Stage 3 treated as the stages below it, whose gradients are not divided by the sequence-parallel ranks."""
    from kit.engines.deepspeed.ulysses import UlyssesSequenceParallel

    _replace(UlyssesSequenceParallel, "averaged_over", property(lambda self: self.dp_size))


def _autotp_partial_norms() -> None:
    """Norms of single heads keep the gradient of their own rank's heads."""
    from deepspeed.module_inject.auto_tp import AutoTP

    _replace(AutoTP, "register_replicated_grad_hooks", lambda self, model: None)


def _over_megatron_partial_norms() -> None:
    """Gradients of norms stay those of one rank's part of the sequence."""
    from kit.engines.deepspeed import over_megatron

    _replace(over_megatron, "_sum_over", lambda group, gradient: gradient)


def _over_megatron_rounded_frequencies() -> None:
    """zero.Init makes bf16 of everything, RoPE's frequencies too. That becomes of a dtype of fp32 on CPUs without
    fp16 (partition_parameters.py, _set_dtype); on others it would not show."""
    import torch

    from kit.engines.deepspeed.over_megatron import DeepSpeedTensorOverride, deepspeed

    init = deepspeed.zero.Init

    def overriding(**keywords):
        keywords["tensor_overrides"] = [DeepSpeedTensorOverride.device, DeepSpeedTensorOverride.dtype]
        return init(**keywords, dtype=torch.bfloat16)

    _replace(deepspeed.zero, "Init", overriding)


def _hpz_stale_copy() -> None:
    """The second copy of the weights stays what it was before they were set."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    _replace(DeepSpeedZeroOptimizer_Stage3, "invalidate_secondary_tensor", lambda self: None)


def _pairs_see_padding() -> None:
    """The decoder attends to what pads its source."""
    from kit.engines.deepspeed import data_parallel

    given = data_parallel.call_arguments
    _replace(
        data_parallel,
        "call_arguments",
        lambda batch, device: {key: value for key, value in given(batch, device).items() if key != "attention_mask"},
    )


def _exchange_forgets_moments() -> None:
    """A resumed optimizer begins with empty moments."""
    from kit.engines.base import StateKind
    from kit.engines.deepspeed.engine import DeepSpeedEngine

    import_state = DeepSpeedEngine.import_state

    def forgetful(self, kind, source):
        if kind is StateKind.MASTER:
            import_state(self, kind, source)

    _replace(DeepSpeedEngine, "import_state", forgetful)


SPLIT_FAULTS: dict[str, Callable[[], None]] = {
    "ulysses-local-positions": _ulysses_local_positions,
    "ulysses-one-average": _ulysses_one_average,
    "autotp-partial-norms": _autotp_partial_norms,
    "over-megatron-partial-norms": _over_megatron_partial_norms,
    "over-megatron-rounded-frequencies": _over_megatron_rounded_frequencies,
    "hpz-stale-copy": _hpz_stale_copy,
    "pairs-see-padding": _pairs_see_padding,
    "exchange-forgets-moments": _exchange_forgets_moments,
}
"""Name → what plants it in this process; where it must show is in ``deepspeed_layouts.PLANTED``."""
