"""The interface between the training loop and an engine.

An engine runs forward, backward and the optimizer step. The loop decides the learning rate, which it passes to
``apply``, the order of the data, and what is logged. A loss is a sum over unmasked tokens. For the gradient it is
divided by the **global** number of unmasked tokens in the step, so that every layout has the same gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from kit.specs.job import OptimizerName

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""Label of a token that does not count, as in torch and transformers."""


class StateKind(StrEnum):
    """The per-parameter tensors of a training state, all fp32 under Hugging Face names and shapes."""

    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRADIENT = "gradient"
    """Gradient of the mean loss over the step's tokens, before clipping. Exists only between ``forward_backward`` and
    ``apply``."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro batch of one data-parallel rank.

    All tensors are int64, on the CPU, of shape (micro_batch_size, s). In pretraining s is the job's seq_length. For
    other objectives rows are padded to the longest row of the micro batch: s is then at most seq_length, and differs
    between ranks and micro batches. Labels are **already shifted**: ``labels[:, i]`` is the token to predict from
    ``input_ids[:, : i + 1]``, or ``IGNORE_INDEX``.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    """Positions that start at 0 in every document of a row; None: 0, 1, 2, … over the whole row."""
    sequence_ids: torch.Tensor | None = None
    """Number of the document that a token belongs to, -1 for padding. A token attends to earlier tokens of the same
    number. None: every row is one document. Of whole rows, also where the other tensors are a rank's part of them."""
    source_ids: torch.Tensor | None = None
    """An encoder's input, whose length may differ from s; ``input_ids`` and ``labels`` are then the decoder's."""
    source_mask: torch.Tensor | None = None
    """1 for each token of ``source_ids``, 0 for padding."""
    data_set: int | None = None
    """Number of the set of a blend that all rows are of; None: of several, or no blend."""
    padding: int = 0
    """Positions of ``input_ids`` and ``source_ids`` that are padding."""
    squared_lengths: int | None = None
    """Sum, over the rows that attend to themselves alone, of the square of their tokens; None: every row is full."""
    whole_length: int | None = None
    """Positions of the longest document, where the tensors are a rank's part of each row; None: they are whole."""

    def part(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """A rank's part of each row; ``cut``: (batch, s) → (batch, part of s). Labels are already shifted, so the parts
        need no overlap. Positions stay those of the whole row."""
        import torch

        positions = self.position_ids
        if positions is None:
            positions = torch.arange(self.input_ids.shape[1]).expand_as(self.input_ids)
        inputs, labels, own = map(cut, (self.input_ids, self.labels, positions))
        longest = int(positions.max()) + 1
        return replace(self, input_ids=inputs, labels=labels, position_ids=own, whole_length=longest)

    @property
    def positions(self) -> int:
        """Positions of ``input_ids`` and ``source_ids``, padding included."""
        return self.input_ids.numel() + (0 if self.source_ids is None else self.source_ids.numel())

    @property
    def attended(self) -> int:
        """Sum, over the tokens that are not padding, of the tokens of their row."""
        return self.positions * self.input_ids.shape[1] if self.squared_lengths is None else self.squared_lengths


@dataclass(frozen=True)
class LossSum:
    """A loss summed over all ranks and micro batches; the same on every rank."""

    loss_sum: float
    """Cross entropy in nats, summed over the tokens whose label is not ``IGNORE_INDEX``."""
    tokens: int
    """Number of tokens in the sum."""

    @property
    def mean(self) -> float:
        """Mean loss, nats per token."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True)
class Norms:
    """What an optimizer step reports, the same on every rank."""

    gradient: float
    """Global L2 norm of the gradient before clipping, each parameter counted once."""
    skipped: bool = False
    """fp16: a scaled gradient overflowed. The optimizer lowered the scale and changed no weight; ``gradient`` is
    infinite."""
    loss_scale: float | None = None
    """fp16: the factor that multiplied this step's loss; None for other precisions."""


class TensorSource(ABC):
    """Reads named tensors one at a time, from a Hugging Face directory, a checkpoint or a random generator.

    ``shape``, ``read_flat`` and ``read_block`` take parts of the whole tensor, and cache the last one. A source whose
    ``read`` is no view of a file, and that can read less, overrides these methods.
    """

    collective: bool = False
    """Whether all ranks must read the same whole tensors in the same order."""
    _last: tuple[str, torch.Tensor] | None = None

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Hugging Face names of all tensors of this source."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the dtype on disk."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self._whole(name).shape)

    def read_flat(self, name: str, start: int, length: int) -> torch.Tensor:
        """At most ``length`` elements of the flattened tensor, from ``start`` on; on the CPU, in the dtype on disk."""
        return self._whole(name).flatten()[start : start + length]

    def read_block(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """``length`` rows (``dim`` 0) or columns (1) from ``start`` on; a view, on the CPU, in the dtype on disk."""
        return self._whole(name).narrow(dim, start, length)

    def _whole(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next tensor is read
            self._last = name, self.read(name)
        return self._last[1]


class GeneratedSource(TensorSource):
    """Generates each tensor from a seed and the tensor's name, so that all layouts start from equal weights."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes, self._seed = shapes, seed

    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self._shapes[name]


@dataclass(frozen=True)
class TensorShard:
    """Some rows and columns of one full tensor; a vector is a matrix of one column."""

    kind: StateKind
    name: str
    """Hugging Face name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    row: int
    column: int
    """First row and column of the block."""
    values: torch.Tensor
    """(rows, columns); fp32 or narrower, on any device, perhaps a view of the live state."""

    @classmethod
    def whole(cls, kind: StateKind, name: str, tensor: torch.Tensor) -> TensorShard:
        """A full tensor, of one or two dimensions and any dtype, as one block; ``values`` is a view of it."""
        return cls(kind, name, tuple(tensor.shape), 0, 0, as_matrix(tensor))


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a matrix: a vector (n) as (n, 1), a tensor (n, …) as (n, product of the other dimensions)."""
    return tensor.unsqueeze(1) if tensor.ndim == 1 else tensor.flatten(1)


def place(target: torch.Tensor, row: int, column: int, block: torch.Tensor) -> None:
    """Copy ``block`` (rows, columns), of any dtype, into ``as_matrix(target)``; its first element goes to
    (``row``, ``column``)."""
    as_matrix(target)[row : row + block.shape[0], column : column + block.shape[1]].copy_(block)


def rectangles(start: int, values: torch.Tensor, width: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Split a range of a flattened matrix into at most three (row, column, matrix): the end of a row, whole rows, the
    beginning of a row."""
    end = start + values.numel()
    edges = sorted({start, min(end, -(-start // width) * width), max(start, end // width * width), end})
    for lower, upper in pairwise(edges):
        row, column = divmod(lower, width)
        yield row, column, values[lower - start : upper - start].view(-1, min(width, upper - lower))


class Engine(Protocol):
    """One training engine. Every method is collective: all ranks call it, in the same order."""

    dp_rank: int
    """This rank's data-parallel rank. Ranks of equal ``dp_rank`` compute the same samples."""
    dp_size: int
    is_main: bool
    """True on exactly one rank: it writes logs and single files."""
    optimizer_name: OptimizerName = "adamw"
    set_sums: Mapping[int, tuple[float, float]] = MappingProxyType({})
    """Set of a blend → (loss sum, counted labels) of the micro batches of that set in the last ``forward_backward``, as
    far as this rank computed them."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Compute loss and gradients of one optimizer step. Keeps the gradients for ``apply`` or ``discard``."""

    def routing_metrics(self) -> Mapping[str, float | None]:
        """Fields of ``StepMetrics`` that describe the routers of experts, and heads of multi-token prediction, in the
        last ``forward_backward``, over all ranks. Empty for a model without both."""
        return {}

    def gradient_norm(self) -> float | None:
        """The norm that ``apply`` will report. Call this between ``forward_backward`` and ``apply``, while ``discard``
        is still possible. The norm is not finite if a gradient is not finite. None: fp16's scaled gradient overflowed,
        and ``apply`` will lower the scale and skip the step."""

    def apply(self, learning_rate: float) -> Norms:
        """Clip the gradients, step the optimizer at this learning rate, clear the gradients."""

    def discard(self) -> None:
        """Clear the gradients without an optimizer step."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Compute the loss without gradients. Changes neither parameters nor optimizer."""

    def export_blocks(self, kinds: Sequence[StateKind]) -> Iterator[TensorShard]:
        """This rank's blocks of the full tensors. The blocks of all ranks together contain each element of each tensor
        once. Moments that the optimizer does not have are zero.

        A block is valid until the next one. Tied parameters appear once, under the name that transformers saves. Not
        collective, except for gradients: of these all ranks must exhaust the iterator.
        """

    def import_state(self, kind: StateKind, source: TensorSource) -> None:
        """Set one kind of state from full tensors. Reads each tensor when it is needed, and does not keep it."""

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps (bias correction)."""

    def set_optimizer_steps(self, steps: int) -> None:
        """Set the number of optimizer steps; used after ``import_state``."""

    def scalars(self) -> Mapping[str, float]:
        """Numbers, equal on all ranks, that belong to the state of a run on any layout: fp16's loss scale."""
        return {}

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set those of ``scalars`` that this engine has."""
        return

    def private_tensors(self) -> Mapping[str, torch.Tensor]:
        """This rank's live tensors of which ``export_blocks`` gives a rounded copy. A checkpoint has them bit for bit,
        for the layout that wrote it."""
        return {}

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Module name → module, for all modules on this rank: leaves and containers, in no order."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of this rank's tensors, by kind: weights, gradients, optimizer."""

    def close(self) -> None:
        """Release the engine's memory, threads and files. The caller destroys the process group."""
