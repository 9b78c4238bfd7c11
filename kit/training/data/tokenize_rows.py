"""Sources → batches of tokenised documents, on the tokenizer's own threads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kit.errors import DataError
from kit.specs.job import Objective
from kit.training.data.indexed import PairFormat
from kit.training.data.segments import Segments, learns, row_segments, shortened
from kit.training.data.sources import Advance, Source, rows, texts
from kit.training.data.tokenizers import fingerprint, load_tokenizer, model_config
from kit.training.hub_files import local

BATCH_DOCUMENTS = 256
"""Documents per call of the tokenizer, at most."""
_BATCH_CHARACTERS = 1 << 22
"""Characters after which a batch is full: a token costs the tokenizer a hundred bytes of memory."""


class DocumentTokenizer:
    """Tokenises documents and rows."""

    def __init__(
        self,
        tokenizer: str,
        *,
        objective: Objective = "pretrain",
        text_key: str = "text",
        seq_length: int | None = None,
        vocab_size: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """``tokenizer``: its directory. ``seq_length``: truncate longer rows for fine-tuning. ``vocab_size``: the
        model's; None: read it from the config.json beside the tokenizer, if there is one. ``chat_template``: text of
        the template for chats; None: the tokenizer's own. Raises DataError for a tokenizer that cannot be read or does
        not fit."""
        directory = local(tokenizer)
        self._text_key, self._seq_length = text_key, seq_length
        self.cut = self.dropped = 0
        """Number of truncated rows, and of dropped ones, in which no token was left to learn."""
        self._tokenizer, ids = load_tokenizer(directory, vocab_size)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        if objective != "seq2seq" and self._tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer in {directory} has no end-of-sequence token; set eos_token in its config")
        self.pair = PairFormat(
            tokenizer=Path(tokenizer).name,
            vocab_size=ids,
            objective=objective,
            decoder_start_token_id=_decoder_start(directory) if objective == "seq2seq" else None,
            chat_template=_template(self._tokenizer) if objective == "sft" else None,
        )

    def fingerprint(self) -> str:
        """A hash of the tokenizer."""
        return fingerprint(self._tokenizer)

    def encode(self, source: Source, advance: Advance) -> Iterator[list[Segments]]:
        """Batches of tokenised documents of a source, each a list of its sequences. Raises DataError for a document of
        another form."""
        if self.pair.objective == "pretrain":
            documents: Iterator[Segments] = ([ids] for ids in self.documents(texts(source, self._text_key, advance)))
        else:
            documents = self._rows(source, advance)
        return iter(lambda: list(islice(documents, BATCH_DOCUMENTS)), [])

    def _rows(self, source: Source, advance: Advance) -> Iterator[Segments]:
        for where, row in rows(source, advance):
            whole = row_segments(self._tokenizer, row, self.pair.objective, where)
            parts = shortened(whole, self.pair.objective, self._seq_length)
            self.cut += parts != whole
            if learns(parts, self.pair.objective):
                yield parts
            else:
                self.dropped += 1

    def documents(self, texts: Iterator[str]) -> Iterator[list[int]]:
        """Token ids of each text, with the end-of-sequence token and no other special tokens. Skips empty texts."""
        for batch in _batches(texts):
            for ids in self._ids(batch):
                if ids:
                    yield [*ids, self._tokenizer.eos_token_id]

    def _ids(self, batch: list[str]) -> list[list[int]]:
        if not _is_plain(self._tokenizer):
            return [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in batch]
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()  # which its file may ask for
        backend.no_padding()
        return [encoded.ids for encoded in backend.encode_batch_fast(batch, add_special_tokens=False)]


def _is_plain(tokenizer: Any) -> bool:
    """Whether ``tokenizer(text)`` is what its backend does: it is a fast one, and its class adds no step of its own."""
    from transformers import PreTrainedTokenizerFast

    steps = ("__call__", "_encode_plus")
    return all(getattr(type(tokenizer), step) is getattr(PreTrainedTokenizerFast, step) for step in steps)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _template(tokenizer: Any) -> str | None:
    """The template that chats are written with; None if the tokenizer has none, or several and no default."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return None


def _decoder_start(directory: Path) -> int:
    start = model_config(directory).get("decoder_start_token_id")
    if not isinstance(start, int):
        raise DataError(
            f"{directory}/config.json has no decoder_start_token_id, which a decoder is given first; copy the model's "
            f"config.json there"
        )
    return start
