"""Blocks of sources → blocks of tokens, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kit.errors import DataError
from kit.specs.job import Objective
from kit.training.data.indexed_writer import PairFormat, TokenBlock, token_block
from kit.training.data.row_parts import Parts, learns, row_parts, shortened
from kit.training.data.sources import Block, json_rows, texts
from kit.training.data.tokenizers import fingerprint, load_tokenizer, model_config

BATCH_DOCUMENTS = 1000
"""Documents per call of the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How documents become tokens."""

    tokenizer: str
    """Its directory."""
    objective: Objective = "pretrain"
    text_key: str = "text"
    seq_length: int | None = None
    """Truncate longer rows for fine-tuning."""
    vocab_size: int | None = None
    """The model's; None: read it from the config.json beside the tokenizer, if there is one."""
    chat_template: str | None = None
    """Text of the template for chats; None: the tokenizer's own."""


class Encoder:
    """Tokenises blocks. Raises DataError for a tokenizer that cannot be read or does not fit the objective."""

    def __init__(self, encoding: Encoding) -> None:
        directory = Path(encoding.tokenizer)
        self._encoding = encoding
        self._tokenizer, ids = load_tokenizer(directory, encoding.vocab_size)
        if encoding.chat_template is not None:
            self._tokenizer.chat_template = encoding.chat_template
        if encoding.objective != "seq2seq" and self._tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer in {directory} has no end-of-sequence token; set eos_token in its config")
        self.pair = PairFormat(
            tokenizer=directory.name,
            vocab_size=ids,
            objective=encoding.objective,
            decoder_start_token_id=_decoder_start(directory) if encoding.objective == "seq2seq" else None,
            chat_template=_template(self._tokenizer) if encoding.objective == "sft" else None,
        )

    def fingerprint(self) -> str:
        """A hash of the tokenizer."""
        return fingerprint(self._tokenizer)

    def encode(self, block: Block) -> TokenBlock:
        """Tokenise a block. Raises DataError for a document of another form."""
        if self.pair.objective == "pretrain":
            return token_block(self._documents(block), self.pair)
        rows: list[Parts] = []
        cut = dropped = 0
        for where, row in json_rows(block):
            whole = row_parts(self._tokenizer, row, self.pair.objective, where)
            parts = shortened(whole, self.pair.objective, self._encoding.seq_length)
            cut += parts != whole
            if learns(parts, self.pair.objective):
                rows.append(parts)
            else:
                dropped += 1
        return token_block(rows, self.pair, cut, dropped)

    def _documents(self, block: Block) -> Iterator[list[list[int]]]:
        """Documents of text: one sequence each."""
        return ([ids] for ids in self.documents(texts(block, self._encoding.text_key)))

    def documents(self, texts: Iterator[str]) -> Iterator[list[int]]:
        """Token ids of each text, with the end-of-sequence token and no other special tokens. Skips empty texts."""
        tokenizer: Any = self._tokenizer
        for batch in iter(lambda: list(islice(texts, BATCH_DOCUMENTS)), []):
            for ids in tokenizer(batch, add_special_tokens=False, return_attention_mask=False)["input_ids"]:
                if ids:
                    yield [*ids, tokenizer.eos_token_id]


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
