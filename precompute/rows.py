"""What one input row means: a conversation, plain text or ready tokens. Anything else is a named problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_ROLES = {"system", "developer", "user", "assistant", "tool"}


class RowProblem(Exception):
    """A row that cannot be used. `reason` is one of few texts and is counted; `detail` is about this row only."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and text `content`. `cut`: the last answer hit the length limit and has no end token."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    cut: bool = False


@dataclass(frozen=True)
class PlainText:
    """Text without roles."""

    text: str


@dataclass(frozen=True)
class ReadyTokens:
    """Tokens that were made elsewhere: int64 [L], and uint8 [L] of zeros and ones if the row had a loss mask."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.uint8] | None


def parse_row(row: dict[str, Any]) -> Conversation | PlainText | ReadyTokens:
    """Decides by key: input_ids, then messages, conversations, text. Raises RowProblem."""
    if row.get("input_ids") is not None:
        return _ready_tokens(row)
    cut = row.get("finish_reason") == "length"
    tools = row.get("tools") or None
    if row.get("messages") is not None:
        return _conversation([_message(item) for item in _items(row["messages"])], tools, cut)
    if row.get("conversations") is not None:
        return _conversation([_sharegpt_message(item) for item in _items(row["conversations"])], tools, cut)
    if row.get("text") is not None:
        return PlainText(_checked_text(row["text"], "text"))
    raise RowProblem(
        "row has none of messages, conversations, text, input_ids", f"keys: {', '.join(map(str, list(row)[:8]))}"
    )


def _conversation(messages: list[dict[str, Any]], tools: Any, cut: bool) -> Conversation:
    if not messages:
        raise RowProblem("no messages in the row")
    if not any(message["role"] == "assistant" for message in messages):
        raise RowProblem("no assistant message in the row")
    if cut and messages[-1]["role"] != "assistant":
        raise RowProblem("finish_reason is length but the last message is not the assistant's")
    if tools is not None and not isinstance(tools, list):
        raise RowProblem("tools is not a list", type(tools).__name__)
    return Conversation(messages, tools, cut)


def _items(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowProblem("messages is not a list of objects", type(value).__name__)
    return value


def _message(item: dict[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RowProblem("unknown role", repr(role))
    message = {key: value for key, value in item.items() if value is not None}
    if "content" not in message and not message.get("tool_calls"):
        raise RowProblem("message without content")
    message["content"] = _content_text(message.get("content", ""))
    for key, value in message.items():
        if isinstance(value, str):
            _checked_text(value, key)
    return message


def _sharegpt_message(item: dict[str, Any]) -> dict[str, Any]:
    if "from" not in item and "role" in item:
        return _message(item)
    speaker = item.get("from")
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RowProblem("unknown role", repr(speaker))
    return _message({"role": role, "content": item.get("value")})


def _content_text(content: Any) -> str:
    """Text content as it is; a list of text parts joined, because many templates print a list as Python code."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
    raise RowProblem("message content is not text", type(content).__name__)


def _checked_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowProblem("text is not a string", f"{where}: {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowProblem("text holds broken Unicode", f"{where}: {error}") from None
    return value


def _ready_tokens(row: dict[str, Any]) -> ReadyTokens:
    input_ids = _integers(row["input_ids"], "input_ids")
    if row.get("loss_mask") is None:
        return ReadyTokens(input_ids, None)
    mask = _integers(_without_bools(row["loss_mask"]), "loss_mask")
    if len(mask) != len(input_ids):
        raise RowProblem("loss_mask and input_ids differ in length", f"{len(mask)} and {len(input_ids)}")
    if mask.size and (mask.min() < 0 or mask.max() > 1):
        raise RowProblem("loss_mask holds something other than 0 and 1")
    return ReadyTokens(input_ids, mask.astype(np.uint8))


def _without_bools(values: Any) -> Any:
    return [int(v) if isinstance(v, bool) else v for v in values] if isinstance(values, list) else values


def _integers(values: Any, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise RowProblem(f"{name} is not a list of integers")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise RowProblem(f"{name} is not a list of integers", "a value does not fit 64 bits") from None
