"""ds_config.json: taken by DeepSpeed's own parser, and every key of it one that DeepSpeed reads."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.cost.memory.deepspeed_sizes import (
    buffer_sizes,
    largest_layer_matrix,
    nvme_queue_depth,
    nvme_threads,
)
from kit.emit.deepspeed import PLAN_OWNED_KEYS, ds_config
from kit.specs.catalog import load_model, parse_cluster
from tests.deepspeed import cases, plain
from tests.support.workers import pool

LAYOUTS = [
    {"stage": stage, "offload_optimizer": optimizer, "offload_param": param}
    for stage in (0, 1, 2, 3)
    for optimizer in ("none", "cpu")
    for param in ("none", "cpu")
    if (stage > 0 or optimizer == "none") and (stage == 3 or param == "none")
]
NAMES = ["-".join(str(value) for value in layout.values()) for layout in LAYOUTS]

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
        "dp": cases.WORLD_SIZE,
        "batch": (8, 2, 2),
        "stage": layout["stage"],
        "offload": (layout["offload_optimizer"], layout["offload_param"]),
        "bf16": precision == "bf16",
        "accumulate": "fp32" if precision == "bf16" and layout["stage"] else None,
        "clip": plain.GRAD_CLIP,
        "optimizer": "adamw",
        "unread": [],
    }


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deepspeed_parses_every_variant(name, device):
    chosen = on(device, cases.plan(**VARIANTS[name]))
    layout, config = chosen.layout, ds_config(chosen)
    over_megatron = layout.implementation != "huggingface"
    parsed = pool("deepspeed", cases.WORLD_SIZE).run(parse, config, layout.dp if over_megatron else None)[0]
    assert parsed["unread"] == []
    # AutoTP's ranks count as data-parallel ones until its groups exist.
    assert parsed["dp"] == (layout.dp * layout.tp if "tensor_parallel" in config else layout.dp)
    assert parsed["batch"][1:] == (layout.micro_batch_size, layout.gradient_accumulation_steps)
    assert parsed["stage"] == layout.zero_stage


def test_what_the_variants_ask_for_is_written():
    configs = {name: ds_config(on("cuda", cases.plan(**variant))) for name, variant in VARIANTS.items()}
    scaling = configs["fp16"]["fp16"]
    assert scaling["enabled"]
    assert scaling["loss_scale"] == 0
    assert 2 ** scaling["initial_scale_power"] == 65536
    assert "bf16" not in configs["fp16"]
    assert configs["fp16"]["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "bf16" not in configs["autocast"]
    assert configs["autocast"]["torch_autocast"]["dtype"] == "bfloat16"
    assert configs["fp32 sent in bf16"]["communication_data_type"] == "bf16"
    zero = configs["ZeRO++"]["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 2
    assert zero["zero_quantized_weights"] is zero["zero_quantized_gradients"] is True
    assert configs["AutoTP"]["tensor_parallel"]["autotp_size"] == 2
    assert configs["Ulysses"]["sequence_parallel_size"] == 2
    assert configs["over Megatron"]["train_batch_size"] == 8
    assert "tensor_parallel" not in configs["over Megatron"]
    # The plain file has none of it.
    plain = flat(ds_config(cases.plan(2)))
    assert not [key for key in plain if "autotp" in key or "hpz" in key or "quantized" in key or "sequence" in key]


def test_deepspeed_reads_the_flags_of_zeropp_and_its_dtypes():
    """Where a key is read but wrong for the stage nothing is said, so the parsed values are looked at."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = ds_config(on("cuda", cases.plan(**VARIANTS["ZeRO++"])))["zero_optimization"]
    parsed = DeepSpeedZeroConfig(**zero)
    assert (parsed.zero_hpz_partition_size, parsed.zero_quantized_weights, parsed.zero_quantized_gradients) == (2, 1, 1)
    assert isinstance(parsed, DeepSpeedConfigModel)  # refuses unknown keys, which `unread` cannot see inside a section
    with pytest.raises(ValueError, match="zero_hpz"):
        DeepSpeedZeroConfig(**zero, zero_hpz=2)


def test_activation_checkpointing_is_read_by_nothing_that_we_start():
    """Why the section is not written: only ``deepspeed.checkpointing.configure`` reads it, and models must call it."""
    import deepspeed

    root = Path(deepspeed.__file__).parent
    readers = [
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        if "activation_checkpointing_config" in file.read_text(encoding="utf-8")
    ]
    assert sorted(readers) == ["runtime/activation_checkpointing/checkpointing.py", "runtime/config.py"]


@pytest.mark.parametrize("key", ["compression_training", "sparse_gradients", "elasticity"])
def test_methods_of_the_past_are_refused(key):
    """docs/deepspeed.md says that they are gone."""
    message = pool("deepspeed", cases.WORLD_SIZE).run(refused, ds_config(cases.plan(1)) | {key: {"enabled": True}})[0]
    assert "removed" in message


def refused(config):
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    with pytest.raises(DeepSpeedConfigError) as error:
        DeepSpeedConfig(config)
    return str(error.value)


def test_compressed_optimizers_are_gone():
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    assert not [name for name in DEEPSPEED_OPTIMIZERS if "onebit" in name or "zero" in name]


def parse(config, dp=None):
    """What DeepSpeedConfig makes of it on 2 ranks (without a process group it takes 1, silently).

    ``dp`` is what Megatron's process groups would say, by the argument through which they say it.
    """
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

        def __contains__(self, key):
            if key == "sequence_parallel_size":
                read.add(key)
            return super().__contains__(key)

    mpu = None if dp is None else SimpleNamespace(get_data_parallel_world_size=lambda: dp)
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


def test_sizes_follow_links_and_memory():
    shape, layout = load_model("llama-3.1-8b"), cases.plan(3).layout
    fabrics = {
        gpus: dataclasses.replace(layout, dp=parse_cluster(gpus).num_gpus)
        for gpus in ("8xA100-40", "8xA100-80", "64xA100-80", "512xA100-80")
    }
    chosen = {gpus: buffer_sizes(shape, parse_cluster(gpus), on_it) for gpus, on_it in fabrics.items()}
    sizes = {gpus: (of["reduce_bucket_size"], of["stage3_max_live_parameters"]) for gpus, of in chosen.items()}
    matrix = largest_layer_matrix(shape)
    assert sizes["8xA100-80"][0] == matrix  # within a node latency is short: a matrix fills the link
    assert matrix <= sizes["64xA100-80"][0] < sizes["512xA100-80"][0]  # a longer ring needs longer messages
    assert sizes["512xA100-80"][0] <= 0.02 * 80 * 1024**3 / 2
    assert 1.9 < sizes["8xA100-80"][1] / sizes["8xA100-40"][1] < 2.1  # a twentieth of the memory


def test_disks_set_threads_and_queues():
    slow, fast = parse_cluster("8xA100-80"), dataclasses.replace(parse_cluster("8xA100-80"), nvme_gbytes_per_s=56.0)
    assert (nvme_threads(slow), nvme_queue_depth(slow)) == (1, 8)
    assert (nvme_threads(fast), nvme_queue_depth(fast)) == (4, 8)
    lone = dataclasses.replace(fast, gpus_per_node=1)
    assert (nvme_threads(lone), nvme_queue_depth(lone)) == (8, 32)


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
    for variant in VARIANTS.values():
        emitted |= flat(ds_config(cases.plan(**variant)))
    adamw = cases.plan(2)
    sgd = dataclasses.replace(adamw.job, optimizer=dataclasses.replace(adamw.job.optimizer, name="sgd"))
    emitted |= flat(ds_config(dataclasses.replace(adamw, job=sgd)))
    assert PLAN_OWNED_KEYS.keys() - emitted == {"scheduler.type", "expert_parallel.enabled"}
    decided = {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization.stage",
    }
    assert decided <= PLAN_OWNED_KEYS.keys()


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
