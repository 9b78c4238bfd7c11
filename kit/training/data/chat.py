"""Chats and prompts → tokens, and which of them the model is to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kit.errors import DataError

_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '' if loop.first else '\n\n' }}"
    "### {{ message['role'] + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n' if messages else '' }}### assistant:{{ '\n' }}{% endif %}"
)
"""Template for tokenizers without one: no special tokens but the end of a reply."""

Parts = list[list[int]]
"""Context, target, context, target, …: the sequences of a row (``rows``)."""


def chat_parts(tokenizer: Any, messages: Sequence[Mapping[str, str]], where: str) -> Parts:
    """A chat through the tokenizer's chat template, or ``_PLAIN_TEMPLATE``. What the assistant says is target, with the
    template's end of a turn.

    The whole text is tokenised at once, as it will be when the model is used; a token belongs to the part in which it
    begins. Raises DataError for messages of another form and for templates that write earlier turns differently once a
    later one is there.
    """
    _check_messages(messages, where)
    template = tokenizer.chat_template or _PLAIN_TEMPLATE
    text = _render(tokenizer, template, messages, False, where)
    bounds, is_target = [0], []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, template, messages[:place], True, where)
        after = _render(tokenizer, template, messages[: place + 1], False, where)
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(
                f"{where}: the tokenizer's chat template writes a turn otherwise once another follows; give rows that "
                "end with their only assistant turn"
            )
        bounds += [len(before), len(after)]
        is_target += [False, True]
    if bounds[-1] < len(text):
        bounds.append(len(text))
        is_target.append(False)
    return _split(tokenizer, text, bounds, is_target)


def prompt_parts(tokenizer: Any, prompt: str, completion: str) -> Parts:
    """A prompt and what follows it, with the end-of-sequence token: plain text, no template."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    return [ids, [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]]


def pair_parts(tokenizer: Any, source: str, target: str) -> Parts:
    """What an encoder reads and a decoder writes, with the special tokens that the tokenizer puts around each."""
    return [tokenizer(source)["input_ids"], tokenizer(text_target=target)["input_ids"]]


def _check_messages(messages: Any, where: str) -> None:
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not good or not any(m["role"] == "assistant" for m in messages):
        raise DataError(
            f"{where}: messages should be a list of {{role, content}} with at least one role=assistant; mend the row"
        )


def _render(tokenizer: Any, template: str, messages: Sequence[Any], prompt: bool, where: str) -> str:
    if not messages and not prompt:
        return ""
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
        )
    except Exception as error:  # a template is a program: it may raise what it likes
        raise DataError(f"{where}: the tokenizer's chat template refuses these messages ({_line(error)})") from error


def _split(tokenizer: Any, text: str, bounds: Sequence[int], is_target: Sequence[bool]) -> Parts:
    if not tokenizer.is_fast:
        raise DataError("the tokenizer tells no offsets (it is a slow one); give a directory with tokenizer.json")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    parts: Parts = [[] for _ in is_target]
    place = 0
    for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        while place + 1 < len(parts) and start >= bounds[place + 1]:
            place += 1
        parts[place].append(token)
    assert all(one != other for one, other in pairwise(is_target)), "parts take turns"
    return parts


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
