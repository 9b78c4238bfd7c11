"""ds_config.json: taken by DeepSpeed's own parser, and every key of it one that DeepSpeed reads. Values, key by key:
tests/emit/test_deepspeed_config.py."""

from __future__ import annotations

import json
import math
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.emit.deepspeed import PLAN_OWNED_KEYS, ds_config
from kit.emit.extra import with_extra
from kit.emit.run_directory import RunDirectory
from kit.engines.deepspeed.engine import DeepSpeedEngine
from kit.specs.extra import Extra, flat
from tests.deepspeed import cases, plain
from tests.deepspeed.test_optimizers import plan as sgd_plan
from tests.support import tiny
from tests.support.refusals import refusal
from tests.support.workers import WorkerError, pool

LAYOUTS = [
    {"stage": stage, "offload_optimizer": optimizer, "offload_param": param}
    for stage in (0, 1, 2, 3)
    for optimizer in ("none", "cpu")
    for param in ("none", "cpu")
    if (stage > 0 or optimizer == "none") and (stage == 3 or param == "none")
]

ONE_RANK_OF_DATA = {"dp": 1, "gradient_accumulation_steps": 4}
VARIANTS = {
    "fp16": {"stage": 2, "precision": "fp16"},
    "fp16 stage 3 host": {"stage": 3, "precision": "fp16", "offload_optimizer": "cpu", "offload_param": "cpu"},
    "autocast": {"stage": 2, "precision": "bf16", "autocast": True},
    "bf16 state": {"stage": 3, "precision": "bf16", "optimizer_state_dtype": "bf16"},
    "bf16 state on the host": {
        "stage": 2,
        "precision": "bf16",
        "optimizer_state_dtype": "bf16",
        "offload_optimizer": "cpu",
    },
    "fp32 sent in bf16": {"stage": 2, "gradient_compression": "bf16"},
    "hpZ": {"stage": 3, "zero_hpz": 2},
    "ZeRO++": {
        "stage": 3,
        "precision": "bf16",
        "zero_hpz": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
    "AutoTP": {"stage": 2, "precision": "bf16", "tp": 2, **ONE_RANK_OF_DATA},
    "AutoTP stage 3": {"stage": 3, "tp": 2, **ONE_RANK_OF_DATA},
    "Ulysses": {"stage": 3, "precision": "bf16", "cp": 2, "cp_comm_type": "a2a", **ONE_RANK_OF_DATA},
    "Ulysses stage 2": {"stage": 2, "cp": 2, "cp_comm_type": "a2a", **ONE_RANK_OF_DATA},
    "over Megatron": {"stage": 2, "precision": "bf16", "tp": 2, "implementation": "local", **ONE_RANK_OF_DATA},
    "NVMe": {"stage": 3, "precision": "bf16", "offload_optimizer": "nvme"},
    "all NVMe": {"stage": 3, "precision": "bf16", "offload_optimizer": "nvme", "offload_param": "nvme"},
}
"""What is not stage, offload and the two usual precisions; keys are those of ``cases.plan``."""


USUAL = {
    f"{'-'.join(map(str, layout.values()))}-{precision}": layout | {"precision": precision}
    for layout in LAYOUTS
    for precision in ("fp32", "bf16")
}
PLANS = {
    (name, device): cases.on(device, cases.plan(**asked))
    for name, asked in (USUAL | VARIANTS).items()
    for device in ("cpu", "cuda")
}


@pytest.fixture(scope="module")
def parsed():
    """What DeepSpeed makes of each plan's file. Where Megatron has the groups, it says how many ranks share data."""
    asked = [
        (json.loads(json.dumps(ds_config(plan))), plan.layout.implementation != "huggingface" and plan.layout.dp)
        for plan in PLANS.values()
    ]
    return dict(zip(PLANS, pool("deepspeed", cases.WORLD_SIZE).run(parse_all, asked)[0], strict=True))


@pytest.mark.parametrize("key", PLANS, ids="-".join)
def test_deepspeed_parses_it_as_meant(key, parsed):
    layout, job, config = PLANS[key].layout, PLANS[key].job, ds_config(PLANS[key])
    # AutoTP's ranks count as data-parallel ones until its groups exist.
    dp = layout.dp * layout.tp if "tensor_parallel" in config else layout.dp
    sizes = layout.micro_batch_size, layout.gradient_accumulation_steps
    expected = {
        "dp": dp,
        "batch": (math.prod(sizes) * dp, *sizes),
        "stage": layout.zero_stage,
        "offload": (layout.offload_optimizer, layout.offload_param),
        "clip": plain.GRAD_CLIP,
        "optimizer": "adamw",
        "unread": [],
    }
    if key[0] in USUAL:
        accumulate = "fp32" if job.precision == "bf16" and layout.zero_stage else None
        expected |= {"bf16": job.precision == "bf16", "accumulate": accumulate}
    assert {name: parsed[key][name] for name in expected} == expected


def parse_all(asked):
    """``parse`` of each (config, dp)."""
    return [parse(*each) for each in asked]


def parse(config, dp=0):
    """What DeepSpeedConfig makes of it on 2 ranks (without a process group it takes 1, silently).

    ``dp``, unless 0, is what Megatron's process groups would say, by the argument through which they say it.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute otherwise
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

        def __contains__(self, key):
            if key == "sequence_parallel_size":
                read.add(key)
            return super().__contains__(key)

    mpu = None if not dp else SimpleNamespace(get_data_parallel_world_size=lambda: dp)
    parsed = DeepSpeedConfig(Recording(config), mpu)
    zero = parsed.zero_config
    devices = (zero.offload_optimizer, zero.offload_param)
    return {
        "dp": parsed.world_size,
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


def test_guarded_keys_are_emitted_or_would_add_what_the_plan_decides():
    nvme = [cases.plan(3, offload_optimizer="nvme", offload_param=place) for place in ("none", "nvme")]
    emitted = {key for plan in [*PLANS.values(), *nvme, sgd_plan("sgd", 2)] for key in flat(ds_config(plan))}
    assert PLAN_OWNED_KEYS.keys() - emitted == {"scheduler.type", "expert_parallel.enabled"}
    decided = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    assert decided | {"zero_optimization.stage"} <= PLAN_OWNED_KEYS.keys()


def engine_of(path: Path) -> tuple[dict[str, Any], int, bool]:
    """Of a run directory: what the engine's own configuration has of ``extra``."""
    rundir = RunDirectory.open(path)
    with closing(DeepSpeedEngine(rundir)) as engine:
        zero = engine._engine._config.zero_config
        return dict(rundir.settings), int(zero.stage), bool(zero.use_multi_rank_bucket_allreduce)


@pytest.mark.parametrize("extra", [True, False])
def test_extra_of_a_recipe_reaches_the_engine(tmp_path: Path, extra: bool) -> None:
    """By kit emit, and from the run directory into DeepSpeed's own object."""
    own = {"zero_optimization": {"use_multi_rank_bucket_allreduce": extra}, "memory_breakdown": extra}
    layout = {"engine": "deepspeed", "zero_stage": 2, "implementation": "huggingface", "tp": 1, "cp": 1}
    emitted = tiny.emitted(tmp_path, tiny.model(), {"deepspeed": own}, **layout)
    engines = pool("deepspeed", cases.WORLD_SIZE).run(engine_of, emitted)
    assert [(settings["memory_breakdown"], *found) for settings, *found in engines] == [(extra, 2, extra)] * len(
        engines
    )


def test_what_would_silently_be_wrong_in_the_engine_is_refused_there(tmp_path: Path) -> None:
    """The plan does not decide it, so it gets as far as an edit by hand."""
    plan = with_extra(cases.plan(2), Extra(deepspeed={"zero_optimization": {"round_robin_gradients": True}}))
    assert re.search(
        r"zero_optimization\.round_robin_gradients=true: .*; remove the key",
        refusal(WorkerError, pool("deepspeed", cases.WORLD_SIZE).run, cases.build, plan, None, tmp_path),
    )
