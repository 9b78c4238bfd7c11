"""Pretraining samples: fixed windows over the concatenated documents."""

from __future__ import annotations

import numpy as np

from kit.errors import DataError
from kit.training.data.indexed import IndexedTokens


class GptSamples:
    """Sample i reads tokens i·s to i·s + s + 1: inputs are the first s of them, labels the last s.

    Documents follow each other with their end-of-document tokens; attention is not reset between them, as in
    Megatron-LM's default. Raises DataError where there is less than one sample, or where the data's largest token
    id, as far as it is known, has no row in the model's embedding.
    """

    def __init__(self, tokens: IndexedTokens, seq_length: int, vocab_size: int) -> None:
        self._tokens, self._seq_length, self._vocab_size = tokens, seq_length, vocab_size
        self._length = (len(tokens) - 1) // seq_length
        if self._length < 1:
            raise DataError(
                f"{tokens.prefix} has {len(tokens)} tokens, and one sample of seq_length={seq_length} takes "
                f"{seq_length + 1}; add data or shorten the sequence"
            )
        if tokens.sidecar is not None:
            self._check(tokens.sidecar.max_token_id)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels), int64, (seq_length,) each; labels are already shifted."""
        window = self._tokens.read(index * self._seq_length, self._seq_length + 1)
        # Without a sidecar nobody has looked at the ids; an unknown one would only show as a device-side assert.
        self._check(int(window.max()))
        return window[:-1], window[1:]

    def _check(self, token_id: int) -> None:
        if token_id >= self._vocab_size:
            raise DataError(
                f"token id {token_id} in {self._tokens.prefix} is outside the model's vocabulary of "
                f"{self._vocab_size}; tokenise with the model's own tokenizer"
            )
