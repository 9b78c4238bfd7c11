"""ds_config.json: taken by DeepSpeed's own parser, and every key of it one that DeepSpeed reads."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from kit.cost.deepspeed_sizes import largest_layer_matrix, reduce_bucket
from kit.emit.deepspeed import GUARDED, ds_config
from tests.deepspeed import cases
from tests.workers import pool

LAYOUTS = [
    {"stage": stage, "offload_optimizer": optimizer, "offload_param": param}
    for stage in (0, 1, 2, 3)
    for optimizer in ("none", "cpu")
    for param in ("none", "cpu")
    if (stage > 0 or optimizer == "none") and (stage == 3 or param == "none")
]
NAMES = ["-".join(str(value) for value in layout.values()) for layout in LAYOUTS]


def on(device, chosen):
    gpu = dataclasses.replace(chosen.cluster.gpu, device=device)
    return dataclasses.replace(chosen, cluster=dataclasses.replace(chosen.cluster, gpu=gpu))


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deepspeed_parses_it_as_meant(layout, precision, device):
    chosen = on(device, cases.plan(precision=precision, **layout))
    config = json.loads(json.dumps(ds_config(chosen)))
    assert config == ds_config(chosen)  # plain JSON, and the same again
    parsed = pool("deepspeed", cases.WORLD_SIZE).run(parse, config)[0]
    assert parsed == {
        "world_size": cases.WORLD_SIZE,
        "batch": (8, 2, 2),
        "stage": layout["stage"],
        "offload": (layout["offload_optimizer"], layout["offload_param"]),
        "bf16": precision == "bf16",
        "accumulate": "fp32" if precision == "bf16" and layout["stage"] else None,
        "clip": cases.GRAD_CLIP,
        "optimizer": "adamw",
        "unread": [],
    }


def parse(config):
    """What DeepSpeedConfig makes of it on 2 ranks (without a process group it takes 1, silently)."""
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    read = set()

    class Recording(dict):
        """Notes every top-level key that the parser asks for; `in` alone does not tell reading from refusing."""

        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

        def get(self, key, default=None):
            read.add(key)
            return super().get(key, default)

        def __copy__(self):
            return self

    parsed = DeepSpeedConfig(Recording(config))
    zero = parsed.zero_config
    devices = (zero.offload_optimizer, zero.offload_param)
    return {
        "world_size": parsed.world_size,
        "batch": (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps),
        "stage": int(zero.stage),
        "offload": tuple("none" if d is None else str(getattr(d.device, "value", d.device)) for d in devices),
        "bf16": parsed.bfloat16_config.enabled,
        "accumulate": parsed.grad_accum_dtype,
        "clip": parsed.gradient_clipping,
        "optimizer": parsed.optimizer_name,
        "unread": sorted(set(config) - read),
    }


def test_an_invented_key_would_be_noticed():
    """The proof that the test above can fail: DeepSpeed itself says nothing."""
    config = ds_config(cases.plan(2)) | {"gradient_clip": 1.0}
    assert pool("deepspeed", cases.WORLD_SIZE).run(parse, config)[0]["unread"] == ["gradient_clip"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_only_keys_of_the_stage(layout):
    zero = ds_config(cases.plan(**layout))["zero_optimization"]
    stage = layout["stage"]
    assert {"allgather_bucket_size"} <= zero.keys() if stage in (1, 2) else "allgather_bucket_size" not in zero
    assert any(key.startswith("stage3_") for key in zero) == (stage == 3)
    assert set(zero) == {"stage"} if stage == 0 else zero["contiguous_gradients"]


def test_sizes_follow_the_model():
    """Numbers of Llama-3-8B by hand: h=4096, ffn=14336."""
    chosen = cases.plan(3)
    shape = dataclasses.replace(
        chosen.model, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, head_dim=128
    )
    chosen = dataclasses.replace(chosen, model=shape)
    zero = ds_config(chosen)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["stage3_prefetch_bucket_size"] == 4096 * 14336 == 58_720_256
    assert zero["stage3_param_persistence_threshold"] == 40960
    # Norms stay whole, the smallest matrix (a key projection of 8 heads) does not.
    assert 4096 < zero["stage3_param_persistence_threshold"] < 4096 * 1024
    wide = dataclasses.replace(chosen, layout=dataclasses.replace(chosen.layout, dp=512))
    assert reduce_bucket(shape, wide.layout) == 512_000_000 > largest_layer_matrix(shape)


def test_a_gpu_gets_pinned_memory_overlap_and_fused_adam_and_a_cpu_none():
    chosen = cases.plan(3, offload_optimizer="cpu", offload_param="cpu")
    for device, expected in (("cuda", True), ("cpu", False)):
        config = ds_config(on(device, chosen))
        zero = config["zero_optimization"]
        assert zero["overlap_comm"] is expected
        assert zero["offload_optimizer"]["pin_memory"] is zero["offload_param"]["pin_memory"] is expected
        assert config["optimizer"]["params"].get("torch_adam", False) is not expected


def test_guarded_keys_are_emitted_or_would_add_what_the_plan_decides():
    emitted = set()
    for layout in LAYOUTS:
        for precision in ("fp32", "bf16"):
            emitted |= flat(ds_config(cases.plan(precision=precision, **layout)))
    assert GUARDED.keys() - emitted == {
        "fp16.enabled",
        "scheduler.type",
        "tensor_parallel.autotp_size",
        "sequence_parallel_size",
    }
    decided = {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization.stage",
    }
    assert decided <= GUARDED.keys()


def flat(config, prefix=""):
    keys = set()
    for key, value in config.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return keys


def test_deepspeed_reads_the_adam_flag_where_it_is_written():
    """``torch_adam`` is an optimizer parameter, not a documented key: look it up in the source."""
    import deepspeed

    source = (Path(deepspeed.__file__).parent / "runtime" / "config.py").read_text()
    assert re.search(r'TORCH_ADAM_PARAM = "torch_adam"', source)
