"""Liger's fused loss beside kit's, in Triton's interpreter. Both are installed beside the environment
(``make prove NAME=liger``): inside it, every other test would import Triton too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kit.cost.memory.activations_huggingface import loss_bytes
from kit.cost.workload import Workload, liger_chunk
from kit.engines.kernels import liger
from kit.engines.kernels.chunked_loss import linear_cross_entropy
from kit.errors import EngineError
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Layout

NAMES = ("liger_kernel", "triton")
INSTALLED = all(importlib.util.find_spec(name) for name in NAMES)
BESIDE = Path(sys.prefix) / "interpreted"
TOKENS, HIDDEN, VOCABULARY = 20, 16, 97


def differences() -> list[float]:
    """Relative, of loss and gradients, fp32; then whether the head's gradient is fp32 with inputs in bf16."""
    found = []
    for with_bias in (False, True):
        generator = torch.Generator().manual_seed(3)
        shapes = ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
        hidden, weight, bias = (torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes)
        operands = [hidden, weight, bias] if with_bias else [hidden, weight]
        labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        labels[::7] = -100
        both = []
        for function in (linear_cross_entropy, liger.liger_cross_entropy):
            loss = function(hidden, weight, bias if with_bias else None, labels) * 0.3
            both.append([loss.detach(), *torch.autograd.grad(loss, operands)])
        found += [((b - a).norm() / a.norm()).item() for a, b in zip(*both, strict=True)]
    return found


@pytest.mark.skipif(
    not INSTALLED and not all((BESIDE / name).is_dir() for name in NAMES),
    reason="liger-kernel and triton are not installed: make prove NAME=liger (285 MB, once)",
)
def test_the_same_loss_and_gradients() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    code = "from tests.training.test_liger import differences; print(max(differences()))"
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(BESIDE)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-6


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_without_it_the_engine_says_what_to_install() -> None:
    with pytest.raises(EngineError, match="pip install liger-kernel"):
        liger.check_installed()


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "hidden", "expected"),
    [
        (16384, 128256, 2048, 2048),  # 512 by default
        (4096, 128256, 2048, 2048),
        (16384, 32000, 4096, 2048),
        (65536, 32000, 4096, 8192),  # the smallest that it has
        (100, 128256, 2048, 100),
    ],
)
def test_chunks_are_ours_where_it_has_such(tokens: int, vocabulary: int, hidden: int, expected: int) -> None:
    assert liger_chunk(tokens, vocabulary, hidden)[1] == expected


def test_its_logits_are_replaced_by_their_gradient() -> None:
    """A chunk as large as kit's takes 2 bytes a logit, where kit's takes 6."""
    model, cluster = load_model("llama-3.2-1b"), parse_cluster("1xH100")

    def size(kernel: str) -> float:
        layout = Layout(
            engine="torch",
            implementation="huggingface",
            chunked_loss=True,
            loss_kernel=kernel,  # type: ignore[arg-type]
        )
        return loss_bytes(Workload(model, cluster, JobSpec(), layout))

    assert size("torch") - size("liger") == 4 * 2048 * model.vocab_size
