"""Formulas of plain-torch layers against the bytes that autograd keeps of the same operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.accuracy.programs.published import PublishedModel, PublishedWorkload
from benchmarks.accuracy.programs.torch_layer import layer_terms, logits_bytes
from kit.specs.layout import Layout
from tests.support.models import cluster, job
from tests.support.saved_tensors import saved_bytes, storages

TOKENS, HIDDEN, FFN, VOCABULARY = 24, 32, 80, 120


def run(implementation: str, **flags: Any) -> PublishedWorkload:
    return PublishedWorkload(
        model=PublishedModel(
            name="tiny",
            family="llama",
            num_layers=1,
            hidden_size=HIDDEN,
            ffn_hidden_size=FFN,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCABULARY,
            max_position_embeddings=TOKENS,
        ),
        cluster=cluster("1xH100"),
        job=job(seq_length=TOKENS),
        layout=Layout(engine="torch", implementation="huggingface", **flags),
        implementation=implementation,
    )


def kept(
    compute: Callable[[torch.Tensor], torch.Tensor], width: int, parameters: tuple[torch.nn.Parameter, ...] = ()
) -> int:
    """Bytes of storage kept by the operators of ``compute``, parameters and their transposes left out."""
    own = storages(parameters)
    value = torch.randn(TOKENS, width, dtype=torch.bfloat16, requires_grad=True)

    def counts(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in own and tensor.is_floating_point()

    return saved_bytes(lambda: compute(value * 1.0), counts)


def parameter(*sizes: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*sizes, dtype=torch.bfloat16))


@pytest.mark.parametrize("kernels", ["litgpt", "torchtune"])
def test_norm_and_the_matrix_behind_it(kernels: str) -> None:
    """litgpt scales in fp32 (model.py, RMSNorm), torchtune in 16 bits (modules/rms_norm.py)."""
    scale, matrix = parameter(HIDDEN), parameter(HIDDEN, HIDDEN)

    def compute(value: torch.Tensor) -> torch.Tensor:
        wide = value.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        result = (normed * scale.float()).to(value.dtype) if kernels == "litgpt" else normed.to(value.dtype) * scale
        return functional.linear(result, matrix)

    reciprocal_and_scale = 4 * TOKENS + (4 * HIDDEN if kernels == "litgpt" else 0)
    assert 2 * (kept(compute, HIDDEN, (scale, matrix)) - reciprocal_and_scale) == layer_terms(run(kernels))["norms"]


def test_gated_mlp() -> None:
    """Gate, its activation, up, and product; the input of gate and up counts as the norm's result."""
    gate, up, down = parameter(FFN, HIDDEN), parameter(FFN, HIDDEN), parameter(HIDDEN, FFN)

    def compute(value: torch.Tensor) -> torch.Tensor:
        product = functional.silu(functional.linear(value, gate)) * functional.linear(value, up)
        return functional.linear(product, down)

    assert kept(compute, HIDDEN, (gate, up, down)) - 2 * TOKENS * HIDDEN == layer_terms(run("torchtune"))["mlp"]


def test_sixteen_bit_loss_keeps_log_probabilities_beside_the_logits() -> None:
    """litgpt: logits of all chunks stay referenced (finetune/lora.py, fit), log-probabilities are saved."""
    labels = torch.randint(0, VOCABULARY, (TOKENS,))

    def compute(value: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(value, labels, reduction="none")

    logits, small = 2 * TOKENS * VOCABULARY, 8 * TOKENS + 64
    predicted = pytest.approx(logits_bytes(run("litgpt", chunked_loss=True)), abs=small)
    assert kept(compute, VOCABULARY) + logits == predicted
