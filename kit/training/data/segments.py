"""Tokenises one row for fine-tuning: a chat, a prompt with its completion, or a pair."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kit.errors import DataError
from kit.specs.text import listed, shown
from kit.training.data.tokenizers import one_line

_PAIR_KEYS = {"sft": (("prompt", "completion"),), "seq2seq": (("source", "target"), ("prompt", "completion"))}
"""Objective → accepted pairs of fields, for rows that are not chats."""


def row_segments(tokenizer: Any, row: Any, objective: str, where: object) -> Segments:
    """Token ids of a row.

    sft rows: ``{"messages": [{"role", "content"}, …]}`` through the tokenizer's chat template, the same as ShareGPT,
    Alpaca or TRL write it (``chat_of``), or ``{"prompt", "completion"}``; the targets are replies and completions.
    seq2seq rows: ``{"source", "target"}`` or ``{"prompt", "completion"}``. Raises DataError for a row of another form.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; one JSON object a line is needed")
    if objective == "sft" and (chat := chat_of(row, where)) is not None:
        return chat_segments(tokenizer, chat.messages, where, chat.tools, chat.asked)
    for first, second in _PAIR_KEYS[objective]:
        if isinstance(row.get(first), str) and isinstance(row.get(second), str):
            write = pair_segments if objective == "seq2seq" else prompt_segments
            return write(tokenizer, row[first], row[second])
    wanted = " or ".join("{" + ", ".join(keys) + "}" for keys in _PAIR_KEYS[objective])
    raise DataError(
        f"{where} has the fields {listed(map(str, row)) or 'of nothing'}; for objective={objective} give "
        + ("{messages} or " if objective == "sft" else "")
        + wanted
    )


class Chat(NamedTuple):
    """A row that a chat template writes."""

    messages: Any
    tools: Any = None
    """What the assistant may call, as the template takes it."""
    asked: int = 0
    """Number of first messages that are context, whoever writes them."""


def chat_of(row: Mapping[str, Any], where: object) -> Chat | None:
    """The chat of a row: ``messages``; ShareGPT's ``conversations`` of ``{"from", "value"}``; TRL's ``prompt`` and
    ``completion`` of messages; Alpaca's ``instruction``, ``input`` and ``output``. None for rows of another form.
    Raises DataError for a writer of ShareGPT's that kit does not know."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    prompt, completion = row.get("prompt"), row.get("completion")
    if "messages" in row:
        return Chat(_turns(row["messages"], where), tools)
    if isinstance(row.get("conversations"), list):
        return Chat(_turns(row["conversations"], where), tools)
    if isinstance(prompt, list) and isinstance(completion, list):
        return Chat(_turns([*prompt, *completion], where), tools, len(prompt))
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        return Chat([{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}])
    return None


def _turns(turns: Any, where: object) -> Any:
    """Messages as templates take them; what is no list of them is refused later."""
    whole = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    return [_turn(turn, where) for turn in turns] if whole else turns


def _turn(turn: Mapping[str, Any], where: object) -> dict[str, Any]:
    """A message with one text. Without keys of nothing, which columns of a table have where another row has a value."""
    rest = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    if "from" in turn:
        if turn["from"] not in list(_ROLES):  # which takes what cannot be hashed
            raise DataError(f"{where}: from={shown(turn['from'])} is none of ShareGPT's {listed(_ROLES)}; mend the row")
        rest["role"] = _ROLES[turn["from"]]
    content = turn.get("value", turn.get("content"))
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    return {**rest, "content": "" if content is None and rest.get("tool_calls") else content}


_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "assistant": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""ShareGPT's names of who writes → those of chat templates."""


def shortened(parts: Segments, objective: str, seq_length: int | None) -> Segments:
    """Truncate a row to ``seq_length`` inputs. For sft this is seq_length + 1 tokens; for seq2seq seq_length tokens of
    the source and of the target."""
    if seq_length is None:
        return parts
    if objective == "seq2seq":
        return [part[:seq_length] for part in parts]
    room, kept = seq_length + 1, []
    for part in parts:
        kept.append(part[:room])
        room -= len(kept[-1])
    return [part for place, part in enumerate(kept) if part or any(kept[place:])]


def learns(parts: Segments, objective: str) -> bool:
    """Whether a row has a token to learn."""
    if objective == "seq2seq":
        return all(parts)
    # The first token of a row is never a label, because no token precedes it.
    return sum(map(len, parts[1::2])) - (not parts[0]) > 0


Segments = list[list[int]]
"""Token ids of a row's sequences: context, target, context, target, … (``fine_tuning_rows``)."""


def chat_segments(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: object, tools: Any = None, asked: int = 0
) -> Segments:
    """Tokenise a chat with the tokenizer's chat template. The assistant's replies after the first ``asked`` messages
    are targets, including the template's end of a turn.

    Tokenises the whole text at once, as in inference; a token belongs to the part in which it begins. Raises DataError
    for a tokenizer without a template, for messages of another form, and for templates that format earlier turns
    differently when a later turn follows.
    """
    _check_messages(messages, where, asked)
    if not tokenizer.chat_template:
        raise DataError(
            f"{where} holds messages and the tokenizer has no chat template; give --chat-template FILE, the Jinja file "
            "of a model that shares these special tokens, or --chat-template plain, which comes with kit and needs none"
        )
    text = _render(tokenizer, messages, False, where, tools)
    bounds = [0]
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or place < asked:
            continue
        before = _render(tokenizer, messages[:place], True, where, tools)
        after = _render(tokenizer, messages[: place + 1], False, where, tools)
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(
                f"{where}: the chat template writes a turn differently when another follows; give rows that end with "
                "their only assistant turn"
            )
        bounds += [len(before), len(after)]
    if bounds[-1] < len(text):
        bounds.append(len(text))
    return _split(tokenizer, text, bounds)


def prompt_segments(tokenizer: Any, prompt: str, completion: str) -> Segments:
    """Tokenise a prompt and its completion as plain text, without a template. Appends the end-of-sequence token."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    return [ids, [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]]


def pair_segments(tokenizer: Any, source: str, target: str) -> Segments:
    """Tokenise the encoder's source and the decoder's target, with the tokenizer's special tokens."""
    return [tokenizer(source)["input_ids"], tokenizer(text_target=target)["input_ids"]]


def _check_messages(messages: Any, where: object, asked: int) -> None:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise DataError(f"{where}: messages should be a list of {{role, content}}; mend the row")
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("content"), str):
            raise DataError(
                f"{where}: message {number} (role={message['role']}) has no text in content; kit trains on text alone, "
                "so leave out images and sound, and rows of them"
            )
    if not any(m["role"] == "assistant" for m in messages[asked:]):
        raise DataError(f"{where}: no message to learn, with role=assistant; mend the row, or leave it out")


def _render(tokenizer: Any, messages: Sequence[Any], prompt: bool, where: object, tools: Any) -> str:
    if not messages and not prompt:
        return ""
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt)
        )
    except Exception as error:  # a template is a program and may raise anything
        raise DataError(f"{where}: the chat template refuses these messages ({one_line(error)})") from error


def _split(tokenizer: Any, text: str, bounds: Sequence[int]) -> Segments:
    """Tokens of each part of ``text``. ``bounds``: character offsets at which parts begin, and the end of the text."""
    if not tokenizer.is_fast:
        raise DataError("the tokenizer gives no offsets (it is a slow one); give a directory with tokenizer.json")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    parts: Segments = [[] for _ in bounds[1:]]
    for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        parts[bisect_right(bounds, start, hi=len(parts)) - 1].append(token)
    return parts
