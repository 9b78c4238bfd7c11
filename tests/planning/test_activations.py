"""Activation formulas against the tensors that autograd really saves of transformers' layers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from transformers import AutoModelForCausalLM

from kit.cost.memory.activations_huggingface import layer_bytes, layer_input
from kit.cost.workload import Workload
from kit.engines.huggingface.expert_autocast import cast_experts
from kit.engines.huggingface.models import hf_config
from kit.specs.families import FAMILIES, Family, families_with
from kit.specs.job import JobSpec, Precision
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from tests.support import saved_tensors
from tests.support.models import cluster, deepspeed
from tests.support.models import torch as torch_layout
from tests.support.saved_tensors import storages

BATCH, SEQUENCE = 2, 40
FIRST: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "phi3")
LATER: tuple[Family, ...] = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "starcoder2",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
)
"""Not DeepSeek: on a CPU torch materialises the scores of heads whose values are narrower than their keys."""


PARTITIONED = aot_autograd(
    fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
    bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
    partition_fn=min_cut_rematerialization_partition,
    decompositions=select_decomp_table(),
)
"""Inductor's graphs of forward and backward, run operator by operator: what is saved between them is the same."""


def shape(family: Family, num_layers: int, key_value_heads: int) -> ModelSpec:
    """No two widths alike, so that no term can stand in for another."""
    traits = FAMILIES[family]
    own: dict[str, Any] = {"sliding_window": 16} if family == "mistral" else {}
    if family in families_with("num_experts"):
        width = 160 if family in ("mixtral", "gpt_oss") else 48
        own = {"num_experts": 4, "experts_per_token": 2, "moe_ffn_hidden_size": width}
        own |= {"num_shared_experts": 1} if family == "qwen2_moe" else {}
    if "full_attention_every" in traits.takes:  # no window: torch's mask of it is tested with Mistral
        own |= {"sliding_window": 16, "full_attention_every": 1}
    if "query_pre_attn_scalar" in traits.needs:
        own |= {"query_pre_attn_scalar": 24}
    if "parallel_residual" in traits.takes:
        own |= {"parallel_residual": True}
    if family == "gemma2":
        own |= {"attention_softcap": 50.0}
    return ModelSpec(
        name="shape",
        family=family,
        num_layers=num_layers,
        hidden_size=64,
        ffn_hidden_size=256 if family == "bloom" else 160,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads if traits.grouped_queries else 4,
        head_dim=16 if traits.even_heads else 24,
        vocab_size=100,
        max_position_embeddings=64,
        rope_theta=1e4 if traits.positions == "rope" else None,
        **own,
    )


def saved_bytes(model: ModelSpec, layout: Layout, precision: Precision) -> int:
    """Bytes of storage that autograd keeps of the transformer body, parameters and casts of them left out."""
    autocast = precision == "bf16" and layout.engine == "torch"
    dtype = torch.bfloat16 if precision == "bf16" and not autocast else torch.float32
    attention = "sdpa" if model.traits.fused_attention else "eager"
    module = AutoModelForCausalLM.from_config(hf_config(model), dtype=dtype, attn_implementation=attention).train()
    if layout.recompute == "full":
        module.activation_checkpointing_enable({"use_reentrant": False})
    if layout.compile_layers:
        torch._dynamo.reset()
        for layer in next(each for each in module.modules() if isinstance(each, torch.nn.ModuleList)):
            layer.forward = torch.compile(layer.forward, backend=PARTITIONED)  # type: ignore[method-assign]
    parameters = storages((*module.parameters(), *module.buffers()))
    casts = {tuple(sorted(parameter.shape)) for parameter in module.parameters() if parameter.ndim in (2, 3)}
    cast_experts(module)
    ids = torch.randint(0, model.vocab_size, (BATCH, SEQUENCE))

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return module.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def counts(tensor: torch.Tensor) -> bool:
        is_cast = autocast and tensor.dtype == torch.bfloat16 and tuple(sorted(tensor.shape)) in casts
        # Gemma's 1 + weight and Falcon's scalars do not grow with tokens.
        return tensor.untyped_storage().data_ptr() not in parameters and not is_cast and tensor.ndim > 1

    return saved_tensors.saved_bytes(forward, counts)


def described(model: ModelSpec, layout: Layout, precision: Precision = "bf16", seq_length: int = SEQUENCE) -> Workload:
    job = JobSpec(precision=precision, seq_length=seq_length)
    return Workload(model, cluster("8xH100"), job, dataclasses.replace(layout, micro_batch_size=BATCH))


def predicted_per_token(model: ModelSpec, layout: Layout, precision: Precision) -> float:
    setup = described(model, layout, precision)
    return layer_bytes(setup, bool(model.num_experts)) / setup.tokens


def measured_per_layer(family: Family, layout: Layout, precision: Precision, key_value_heads: int = 2) -> float:
    two, three = (saved_bytes(shape(family, layers, key_value_heads), layout, precision) for layers in (2, 3))
    return (three - two) / (BATCH * SEQUENCE)


@pytest.mark.everyday("bf16-gemma2")
@pytest.mark.parametrize("family", [*FIRST, "gpt2", *LATER])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_in_one_dtype(family: Family, precision: Precision) -> None:
    predicted = predicted_per_token(shape(family, 2, 2), deepspeed(zero_stage=2), precision)
    assert measured_per_layer(family, deepspeed(zero_stage=2), precision) == predicted


@pytest.mark.everyday("qwen3-2")
@pytest.mark.parametrize(
    ("family", "key_value_heads"),
    [*itertools.product(FIRST, (1, 2, 4)), *((family, 2) for family in LATER)],
)
def test_layers_under_autocast(family: Family, key_value_heads: int) -> None:
    """GPT-2 is missing: autocast keeps pow in fp32 on CUDA and not on CPUs."""
    predicted = predicted_per_token(shape(family, 2, key_value_heads), torch_layout(), "bf16")
    assert measured_per_layer(family, torch_layout(), "bf16", key_value_heads) == predicted


@pytest.mark.slow
@pytest.mark.everyday("autocast-qwen3", "fp32-phi3")
@pytest.mark.parametrize("family", [*FIRST, "gpt2", "gemma", "gemma3_text", "olmo2", "starcoder2", "gpt_neox", "opt"])
@pytest.mark.parametrize(
    ("layout", "precision"),
    [(torch_layout(), "bf16"), (deepspeed(zero_stage=1), "bf16"), (torch_layout(), "fp32")],
    ids=["autocast", "zero1", "fp32"],
)
def test_compiled_layers_save_what_the_partitioner_keeps(family: Family, layout: Layout, precision: Precision) -> None:
    compiled = dataclasses.replace(layout, compile_layers=True)
    predicted = predicted_per_token(shape(family, 2, 2), compiled, precision)
    assert measured_per_layer(family, compiled, precision) == predicted


def test_compiled_layers_in_fp8_save_neither_the_inputs_of_attention_and_mlp_nor_the_product() -> None:
    """Three GEMMs' inputs of 2, 2 and 2 · 160 / 64 bytes an element; on an H200 the 1B recipe saved 18.0 GiB less."""
    model, compiled = shape("llama", 2, 2), torch_layout(compile_layers=True)
    bf16, fp8 = (predicted_per_token(model, compiled, precision) for precision in ("bf16", "fp8"))
    assert bf16 - fp8 == 2 * 64 + 2 * 64 + 2 * 160


@pytest.mark.everyday("ddp-bf16-qwen2_moe")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [deepspeed(zero_stage=2), torch_layout()], ids=["zero2", "ddp"])
def test_experts_but_for_indices_and_scores(family: Family, precision: Precision, layout: Layout) -> None:
    predicted = predicted_per_token(shape(family, 2, 2), layout, precision)
    assert 0 < measured_per_layer(family, layout, precision) - predicted < 128


@pytest.mark.parametrize("layout", [torch_layout(recompute="full"), deepspeed(zero_stage=2, recompute="full")])
def test_full_recompute_keeps_the_input_of_a_layer(layout: Layout) -> None:
    setup = described(shape("llama", 2, 2), layout)
    assert measured_per_layer("llama", layout, "bf16") == layer_input(setup) / setup.tokens
