"""The projection of a plan: every key is one of megatron-core's, and what must not be edited is known."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from kit.emit.megatron import PLAN_OWNED_KEYS, megatron_settings, padded_vocab_size
from kit.emit.run_directory import RunDirectory
from kit.specs.families import families_where, families_with
from kit.specs.job import BalancingSpec
from tests.megatron.shapes import BY_FAMILY
from tests.support import tiny
from tests.support.refusals import refusal
from tests.support.workers import pool

LAYOUTS = (
    {},
    {"tp": 2, "sp": True, "ep": 2},
    {"pp": 2, "recompute": "full"},
    {"pp": 2, "first_stage_layers": 1, "recompute": "selective"},
    {"pp": 2, "vp": 2, "dp": 2, "zero_stage": 1},
)


def plans():
    for family in families_where("megatron"):
        for layout in LAYOUTS:
            for precision in ("fp32", "bf16"):
                spec = tiny.model(family, num_layers=4, vocab_size=127, **BY_FAMILY.get(family, {}))
                job = {"precision": precision}
                if family in families_with("mtp_num_layers"):
                    spec, job["mtp_num_layers"] = dataclasses.replace(spec, mtp_num_layers=1), 1
                if spec.num_experts:
                    both = {"moe_z_loss_coeff": 0.125, "moe_expert_capacity_factor": 2.0}
                    job["balancing"] = BalancingSpec(**(spec.traits.balancing | both))
                yield tiny.plan(spec, job=job, engine="megatron", implementation="local", **layout)


def test_every_key_is_accepted_by_megatron_core():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import initialize_model_parallel

    from kit.engines.megatron.model.build import transformer_config
    from kit.engines.megatron.optimizer import optimizer_config

    for plan in plans():
        settings = megatron_settings(plan)
        assert json.loads(json.dumps(settings)) == settings  # survives YAML and JSON
        inspect.signature(initialize_model_parallel).bind(**settings["parallel_state"])
        inspect.signature(GPTModel.__init__).bind(None, None, None, **settings["model"])
        assert DistributedDataParallelConfig(**settings["distributed_data_parallel"]).grad_reduce_in_fp32
        assert optimizer_config(settings["optimizer"]).lr == plan.job.learning_rate
        config = transformer_config(settings["transformer_config"])
        assert (config.num_layers, config.bf16) == (plan.model.num_layers, plan.job.precision == "bf16")
        if plan.model.num_experts:
            chosen = plan.job.balancing
            assert config.moe_router_load_balancing_type == chosen.moe_router_load_balancing_type
            assert config.moe_router_bias_update_rate in (chosen.moe_router_bias_update_rate, 1e-3)  # or its default
            assert (config.moe_z_loss_coeff, config.moe_expert_capacity_factor) == (0.125, 2.0)


def test_experts_of_transformer_engine_are_one_grouped_gemm():
    from kit.engines.megatron.model.transformer_engine import plain_name

    plan = tiny.plan(tiny.model("mixtral"), engine="megatron", implementation="transformer_engine")
    written = megatron_settings(plan)["transformer_config"]
    assert all(written[f"moe_{option}"] for option in ("grouped_gemm", "permute_fusion"))
    grouped = "decoder.layers.0.mlp.experts.linear_fc2.weight13"
    assert plain_name(grouped) == "decoder.layers.0.mlp.experts.local_experts.13.linear_fc2.weight"


def test_fp8_is_emitted_as_the_gpu_has_it():
    from kit.engines.megatron.model.build import transformer_config

    plan = tiny.plan(
        tiny.model(), job={"precision": "fp8"}, engine="megatron", implementation="transformer_engine", tp=2
    )
    for gpu, words in (("H100", ("hybrid", "tensorwise")), ("B200", ("e4m3", "mxfp8"))):
        cluster = dataclasses.replace(plan.cluster, gpu=dataclasses.replace(plan.cluster.gpu, name=gpu, device="cuda"))
        settings = megatron_settings(dataclasses.replace(plan, cluster=cluster))["transformer_config"]
        assert (settings["fp8"], settings["fp8_recipe"]) == words
        assert (settings["bf16"], settings["params_dtype"]) == (True, "bfloat16")
        assert settings["gradient_accumulation_fusion"]
        config = transformer_config(settings)  # megatron-core's own checks
        assert (config.fp8, config.fp8_recipe, config.bf16) == (*words, True)
    assert "fp8" not in megatron_settings(next(plans()))["transformer_config"]


def test_transformer_engine_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    from megatron.core.models.gpt import gpt_layer_specs

    from kit.engines.megatron.model import transformer_engine
    from kit.engines.megatron.model.transformer_engine import fused_block_spec, plain_name
    from kit.errors import EngineError

    assert "transformer_engine and it is not installed" in refusal(EngineError, fused_block_spec, None, None)
    monkeypatch.setattr(transformer_engine.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpt_layer_specs, "get_gpt_decoder_block_spec", lambda *given, **named: (*given, named))
    assert fused_block_spec("config", 1) == ("config", {"use_transformer_engine": True, "vp_stage": 1})
    assert [
        plain_name(f"decoder.layers.3.{fused}")
        for fused in (
            "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias", "mlp.linear_fc1.weight"
        )
    ] == [
        f"decoder.layers.3.{plain}"
        for plain in ("input_layernorm.weight", "pre_mlp_layernorm.bias", "mlp.linear_fc1.weight")
    ]  # fmt: skip


def test_an_unknown_value_or_key_is_refused():
    from kit.engines.megatron.model.build import transformer_config
    from kit.errors import EngineError

    settings = megatron_settings(next(plans()))["transformer_config"]
    assert re.search(
        r"params_dtype=float64 .* use float32 or bfloat16",
        refusal(EngineError, transformer_config, {**settings, "params_dtype": "float64"}),
    )
    assert "num_layerz" in refusal(EngineError, transformer_config, {**settings, "num_layerz": 2})
    assert "calculate_per_token_loss=False" in refusal(
        EngineError, transformer_config, {**settings, "calculate_per_token_loss": False}
    )


def test_guarded_keys_exist_and_name_recipe_keys():
    """rotary_base is not emitted, but adding it would be ignored: the frequencies are transformers' own. fp8, options
    of experts and those of the state have tests of their own."""
    emitted = {
        f"{section}.{key}" for plan in plans() for section, keys in megatron_settings(plan).items() for key in keys
    }
    moe = {f"transformer_config.moe_{option}" for option in ("grouped_gemm", "permute_fusion")}
    other = {"model.rotary_base", "transformer_config.fp8", "optimizer.main_grads_dtype"}
    on_request = [
        f"layout.{name}"
        for name in ("offload_optimizer", "optimizer_offload_fraction", "optimizer_state_dtype", "fp8_param_gather")
    ]
    of_state = {key for key, name in PLAN_OWNED_KEYS.items() if name in on_request}
    assert set(PLAN_OWNED_KEYS) - emitted == moe | other | of_state
    sections = {name: type(getattr(next(plans()), name)) for name in ("model", "job", "layout")}
    assert [
        key
        for key in PLAN_OWNED_KEYS.values()
        if key.rpartition(".")[2] not in sections[key.partition(".")[0]].__dataclass_fields__
    ] == []


@pytest.mark.parametrize(("vocab_size", "tp", "rows"), [(127, 2, 128), (128, 2, 128), (128256, 8, 128256), (5, 4, 8)])
def test_vocabulary_is_padded_to_a_multiple_of_tp(vocab_size, tp, rows):
    plan = tiny.plan(tiny.model(vocab_size=vocab_size), engine="megatron", implementation="local", tp=tp)
    assert padded_vocab_size(plan.model, plan.layout) == rows


def shared_expert_overlap(path: Path) -> bool:
    """Of a run directory: the switch in the engine's own configuration."""
    from kit.engines.megatron.engine import MegatronEngine

    with closing(MegatronEngine(RunDirectory.open(path))) as engine:
        return bool(engine._config.moe_shared_expert_overlap)


@pytest.mark.parametrize("extra", [True, False])
def test_extra_of_a_recipe_reaches_the_engine(tmp_path: Path, extra: bool) -> None:
    """By kit emit, and from the run directory into megatron-core's own object."""
    spec, own = tiny.model("glm4_moe", **BY_FAMILY["glm4_moe"]), {"moe_shared_expert_overlap": extra}
    layout = {"engine": "megatron", "implementation": "local", "ep": 2, "tp": 1, "pp": 1}
    emitted = tiny.emitted(tmp_path, spec, {"megatron": {"transformer_config": own}}, **layout)
    assert pool("megatron", 2).run(shared_expert_overlap, emitted) == [extra] * 2
