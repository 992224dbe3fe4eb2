# SPDX-License-Identifier: Apache-2.0
"""The messages of a chat, in OpenAI's form and in ShareGPT's, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorakernels.train.data.fields import did_you_mean, is_empty, kind_name, list_of, string_of
from lorakernels.train.data.sources import Row, RowError
from lorakernels.train.files.unique_names import load_json

ASSISTANT = "assistant"
# ShareGPT's names of who speaks → roles of chat templates
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Roles as chat templates know them, and what ShareGPT calls them
ROLES = {
    **{name: name for name in ("system", "developer", "user", ASSISTANT)},
    **{name: name for name in ("tool", "function", "ipython", "observation")},
}
ROLES = {**ROLES, **{name: role for name, role in SPEAKERS.items() if name not in ROLES}}
# What a message may say of whether it is trained: in OpenAI's files weight, in Axolotl's train, in ms-swift's loss
TRAINED = {"weight": (0, 1), "train": (False, True), "loss": (False, True)}
_CALL = ("function", "id", "type", "index")  # of a tool call, and of its function
_FUNCTION = ("name", "arguments", "id", "type", "index")


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether nothing in a message says that it is not to be learned."""
    return all(message.get(key) != 0 for key in TRAINED)


def read_messages(row: Row, value: Any, field: str) -> list[dict[str, Any]]:
    """The messages under a field of a row. Raises RowError for one that is none, or if there are none."""
    messages = [_message(row, m, f"{field}[{i}]") for i, m in enumerate(list_of(row, value, field))]
    if not messages:
        raise RowError(f'{row.where}: the list under "{field}" is empty')
    return messages


def _message(row: Row, message: Any, field: str) -> dict[str, Any]:
    """A message with a role that chat templates know, and all else that it has but nulls and no tool calls."""
    if not isinstance(message, dict):
        raise RowError(
            f'{row.where}: expected a message under "{field}", found {kind_name(message)}'
        )
    spoken = "from" in message and "role" not in message  # ShareGPT's form
    said_by, text, roles = ("from", "value", SPEAKERS) if spoken else ("role", "content", ROLES)
    if spoken and "content" in message:
        raise RowError(f'{row.where}: "{field}" has "from", so expected "value", found "content"')
    speaker = string_of(row, message.get(said_by), f"{field}.{said_by}")
    if speaker not in roles:
        raise RowError(
            f'{row.where}: "{field}.{said_by}" is {speaker!r}, expected one of {", ".join(roles)}'
            f"{did_you_mean(speaker, tuple(roles), 0.6)}"
        )
    made: dict[str, Any] = {k: v for k, v in message.items() if v is not None}
    if spoken:
        made = {{"from": "role", "value": "content"}.get(k, k): made[k] for k in made}
    made["role"] = roles[speaker]
    _check_trained(row, made, field)
    if speaker == "function_call":
        made["tool_calls"] = [made.pop("content", None)]
    calls = list_of(row, made.pop("tool_calls", None) or [], f"{field}.tool_calls")
    if calls:
        made["tool_calls"] = [_call(row, call, f"{field}.tool_calls") for call in calls]
    if "content" in made or not (calls or made.get("function_call")):
        made["content"] = _content(row, made.get("content"), f"{field}.{text}")
    return made


def _check_trained(row: Row, message: Mapping[str, Any], field: str) -> None:
    """Refuse what would train less or more of a message than it says."""
    for key, values in TRAINED.items():
        if key in message and message[key] not in values:
            wanted = " or ".join(map(str, values)).lower()
            raise RowError(f'{row.where}: "{field}.{key}" is {message[key]!r}, expected {wanted}')
    flags = [key for key in ("train", "loss") if message.get(key)]
    if flags and message["role"] != ASSISTANT:
        raise RowError(
            f'{row.where}: "{field}.{flags[0]}" is true of a message of role {message["role"]}, and the loss covers '
            "those of the assistant: leave it out"
        )


def _call(row: Row, call: Any, field: str) -> dict[str, Any]:
    """A tool call as chat templates take it: {"type": "function", "function": {"name", "arguments": object}}."""
    try:
        call = load_json(call) if isinstance(call, str) else call
        function = dict(call.get("function", call))
        if isinstance(function.get("arguments"), str):
            function["arguments"] = load_json(function["arguments"])
        if not isinstance(function["name"], str):
            raise TypeError("its name is not a string")
        parts = (
            ((call, _CALL), (function, _FUNCTION)) if "function" in call else ((call, _FUNCTION),)
        )
        for part, allowed in parts:
            if others := [key for key in part if key not in allowed and part[key] is not None]:
                raise TypeError(f"found {others[0]!r} beside it")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        wanted = 'an object with "name" and "arguments"'
        raise RowError(f'{row.where}: expected {wanted} under "{field}" ({error})') from error
    kept = {key: call[key] for key in ("id",) if key in call}
    return {**kept, "type": "function", "function": function}


def _content(row: Row, content: Any, field: str) -> str:
    """Text, or a list of text parts."""
    if not isinstance(content, list):
        return string_of(row, content, field)
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, dict) else kind_name(part)
            raise RowError(
                f'{row.where}: "{field}" holds a part of kind {kind!r}, only text is trained'
            )
        if others := [
            key for key in part if key not in ("type", "text") and not is_empty(part[key])
        ]:
            raise RowError(
                f'{row.where}: a part of "{field}" has {others[0]!r}, only text is trained'
            )
    return "".join(string_of(row, part.get("text"), f"{field}.text") for part in content)
