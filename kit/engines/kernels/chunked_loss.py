"""Output projection and cross entropy in one, some tokens at a time: the logits of all tokens never exist.

Gradients are made beside the loss and wait for backward (the order of work of Hsu et al. 2024, Liger Kernel, arXiv
2410.10989, section 3.2): logits are computed once, and what is kept is the gradient of the head's input and the fp32
gradient of its weight. Logits of a chunk are those of ``torch.nn.functional.linear`` in the precision of the forward
pass; softmax, loss and the sum of the weight's gradient are fp32. torch's own ``linear_cross_entropy`` does likewise,
but knows no capped logits and no frozen head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from kit.engines.base import IGNORE_INDEX
from kit.engines.kernels import compiled_blocks, liger
from kit.errors import EngineError
from kit.specs.layout import LOSS_CHUNK_TOKENS, LossKernel


class ChunkedLoss:
    """Takes the place of the head's own forward pass. Inside the module, so that whoever gathers weights around modules
    (FSDP2, ZeRO-3) or hooks them goes on doing so."""

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_tokens: int = LOSS_CHUNK_TOKENS,
        compiled: bool = False,
        kernel: LossKernel = "torch",
    ) -> None:
        """``compiled``: what is done to a chunk's logits is one kernel a pass (torch.compile). ``kernel``: Liger's in
        place of all of it. Raises EngineError where the head is no linear layer, or Liger is asked for and missing."""
        self._liger = kernel == "liger"
        if self._liger:
            liger.check_installed()
        head = model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise EngineError(
                f"chunked_loss=true with {type(model).__name__}, whose head is {type(head).__name__} and no linear "
                "layer; leave it out"
            )
        self._head, self._chunk_tokens = head, chunk_tokens
        self._slopes = compiled_gradients_of_logits() if compiled else gradients_of_logits
        self._labels: torch.Tensor | None = None
        # Gemma 2 caps logits after its head has returned them (modeling_gemma2.py): here it is done for a chunk.
        self._cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        if self._cap is not None:
            model.config.final_logit_softcapping = None
        head.forward = self._forward  # type: ignore[method-assign, assignment]

    @contextmanager
    def of(self, labels: torch.Tensor) -> Iterator[None]:
        """Inside the block the model's ``logits`` are the summed loss of ``labels`` (batch, sequence), in nats."""
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
        if self._liger:
            return liger.liger_cross_entropy(hidden, weight, bias, self._labels)
        return linear_cross_entropy(hidden, weight, bias, self._labels, self._cap, self._chunk_tokens, self._slopes)


_ChunkGradients = Callable[
    [torch.Tensor, torch.Tensor, float | None, torch.dtype, bool],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
]
"""The signature of ``gradients_of_logits``."""


def gradients_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, cap: float | None, dtype: torch.dtype, summed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(tokens, vocabulary) and (tokens) → summed loss; the loss's derivative by the logits, in ``dtype``; with
    ``summed`` its sum over tokens in fp32, a bias's gradient. Uses up the logits' memory where they are fp32."""
    logits, slope = _capped(logits.float(), cap)
    counts = labels != IGNORE_INDEX
    targets = labels.where(counts, 0)[:, None]
    # In the memory of the logits: exponentials, then softmax, then its difference from the target.
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
    """``gradients_of_logits`` by torch.compile: reads the logits three times in their own dtype, writes them once;
    eager operators read and write them eleven times in fp32. A new length is compiled once more, then any length."""
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
    """Summed over the labels that are not ``IGNORE_INDEX``, nats, fp32.

    ``hidden``: (…, h); ``weight``: (vocabulary, h); ``labels``: (…); ``cap``: logits are cap·tanh(logits/cap).
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
        # Of a weight of 16 bits too: hundreds of chunks would be rounded to it one after the other.
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
                del slopes  # before the next chunk's are made
        ctx.gradients = (hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a second backward pass through a chunked loss, whose gradients were already released")
        # In place: a second copy of the weight's gradient would be as large as what was saved.
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
    """(logits, derivative by what they were before they were capped; None for 1)."""
    if cap is None:
        return logits, None
    bent = logits.div_(cap).tanh_()
    slope = bent.square().neg_().add_(1)
    return bent.mul_(cap), slope
