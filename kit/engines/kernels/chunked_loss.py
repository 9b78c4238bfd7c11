"""Fuses output projection and cross entropy over chunks of tokens, so that the logits of all tokens never exist.

The forward pass computes each chunk's logits, loss and gradients (the order of Hsu et al. 2024, Liger Kernel, arXiv
2410.10989, section 3.2). For backward it saves the gradient of the head's input and the fp32 gradient of the head's
weight. Logits have the precision of the forward pass; softmax, loss and the sum of the weight's gradient are fp32.
torch's own ``linear_cross_entropy`` does the same, but supports neither capped logits nor a frozen head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from kit.engines.kernels import compiled_blocks
from kit.engines.protocol import IGNORE_INDEX
from kit.errors import EngineError
from kit.specs.layout import LOSS_CHUNK_TOKENS


class ChunkedLoss:
    """Replaces ``forward`` of the model's head. The head remains a module, so FSDP2 and ZeRO-3 still gather its weight,
    and hooks on it still run."""

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_tokens: int = LOSS_CHUNK_TOKENS,
        compiled: bool = False,
    ) -> None:
        """``compiled``: fuse the operators on a chunk's logits by torch.compile. Raises EngineError if the
        head is not a linear layer."""
        head = model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise EngineError(
                f"chunked_loss=true with {type(model).__name__}, whose head is {type(head).__name__} and no linear "
                "layer; leave it out"
            )
        self._head, self._chunk_tokens = head, chunk_tokens
        self._slopes = compiled_gradients_of_logits() if compiled else gradients_of_logits
        self._labels: torch.Tensor | None = None
        # Gemma 2 caps logits after its head (modeling_gemma2.py). Here each chunk is capped.
        self._cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        if self._cap is not None:
            model.config.final_logit_softcapping = None
        head.forward = self._forward  # type: ignore[method-assign, assignment]

    @contextmanager
    def of(self, labels: torch.Tensor) -> Iterator[None]:
        """While entered, the model's ``logits`` are the summed loss of ``labels`` (batch, sequence): a scalar in
        nats."""
        self._labels = labels
        try:
            yield
        finally:
            self._labels = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self._head.weight, self._head.bias
        if self._labels is None:
            logits = torch.nn.functional.linear(hidden, weight, bias)
            return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)
        return linear_cross_entropy(hidden, weight, bias, self._labels, self._cap, self._chunk_tokens, self._slopes)


_ChunkGradients = Callable[
    [torch.Tensor, torch.Tensor, float | None, torch.dtype, bool],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
]
"""Type of ``gradients_of_logits``."""


def gradients_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, cap: float | None, dtype: torch.dtype, summed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Summed loss and its gradients. ``logits``: (tokens, vocabulary), overwritten if fp32; ``labels``: (tokens).

    Returns (loss, gradient of the logits in ``dtype``, gradient of a bias). The bias's gradient is the sum over tokens
    in fp32, and None without ``summed``.
    """
    logits, slope = _capped(logits.float(), cap)
    counts = labels != IGNORE_INDEX
    targets = labels.where(counts, 0)[:, None]
    # The memory of the logits is reused for exponentials, then softmax, then softmax minus target.
    largest, picked = logits.amax(1, keepdim=True), logits.gather(1, targets)
    exponentials = logits.sub_(largest).exp_()
    sums = exponentials.sum(1, keepdim=True)
    loss = ((sums.log() + largest - picked)[:, 0] * counts).sum()
    kept = counts[:, None].float()
    slopes = exponentials.mul_(kept / sums)
    slopes.scatter_add_(1, targets, -kept)
    if slope is not None:
        slopes.mul_(slope)
    return loss, slopes.to(dtype), slopes.sum(0) if summed else None


def compiled_gradients_of_logits() -> _ChunkGradients:
    """``gradients_of_logits`` by torch.compile. It reads the logits three times in their own dtype and writes them
    once; eager operators read and write them eleven times in fp32. A second length compiles once more, for any
    length."""
    return torch.compile(gradients_of_logits, backend=compiled_blocks.BACKEND)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    cap: float | None = None,
    chunk_tokens: int = LOSS_CHUNK_TOKENS,
    slopes: _ChunkGradients = gradients_of_logits,
) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels that are not ``IGNORE_INDEX``: an fp32 scalar.

    ``hidden``: (…, h); ``weight``: (vocabulary, h); ``labels``: (…); ``cap``: logits become cap·tanh(logits/cap).
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    flat = hidden.reshape(-1, hidden.shape[-1])
    arguments = (labels.reshape(-1), cap, chunk_tokens, dtype, torch.is_grad_enabled(), slopes)
    return _LinearCrossEntropy.apply(flat, weight, bias, *arguments)  # type: ignore[no-untyped-call]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        cap: float | None,
        chunk_tokens: int,
        dtype: torch.dtype,
        with_gradients: bool,
        chunk_gradients: _ChunkGradients,
    ) -> torch.Tensor:
        needs = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # fp32 also for a 16-bit weight: the sum over hundreds of chunks would be rounded after each chunk.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs[2] and bias is not None else None
        hidden_grad = torch.empty_like(hidden) if needs[0] else None
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(dtype)
            vector = None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), chunk_tokens):
                part = slice(start, start + chunk_tokens)
                inputs = hidden[part].to(dtype)
                logits = torch.nn.functional.linear(inputs, matrix, vector)
                if not any(needs):
                    loss += _loss_alone(logits, labels[part], cap)
                    continue
                part_loss, slopes, of_bias = chunk_gradients(logits, labels[part], cap, dtype, needs[2])
                del logits
                loss += part_loss
                if bias_grad is not None and of_bias is not None:
                    bias_grad += of_bias
                if hidden_grad is not None:
                    hidden_grad[part] = slopes @ matrix
                if weight_grad is not None and dtype == torch.float32:
                    weight_grad.addmm_(slopes.t(), inputs)
                elif weight_grad is not None:
                    weight_grad += slopes.t() @ inputs
                del slopes  # frees the memory before the next chunk
        ctx.gradients = (hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a second backward pass through a chunked loss, whose gradients were already released")
        # In place: a copy of the weight's gradient would double the memory.
        given = [
            None if gradient is None else gradient.mul_(of_loss).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return (*given, *[None] * 6)


def _loss_alone(logits: torch.Tensor, labels: torch.Tensor, cap: float | None) -> torch.Tensor:
    capped, _ = _capped(logits.float(), cap)
    return torch.nn.functional.cross_entropy(capped, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def _capped(logits: torch.Tensor, cap: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(capped logits, derivative of the capped logits by the logits; None means 1). Overwrites ``logits``."""
    if cap is None:
        return logits, None
    bent = logits.div_(cap).tanh_()
    slope = bent.square().neg_().add_(1)
    return bent.mul_(cap), slope
