# SPDX-License-Identifier: Apache-2.0
"""What a row means: a text, a prompt with its completion, or a chat.

    {"messages": [{"role", "content"}, …], "tools"}  a chat, as OpenAI and TRL write it
    {"conversations": [{"from", "value"}, …]}        a chat, as ShareGPT writes it
    {"prompt": …, "completion": …}                   two texts, or two lists of messages
    {"instruction", "input", "output"}               one question and its answer, as Alpaca writes it
    {"text": …}                                      plain text

The first of these that fits the first row of a file is the format of the whole file. Text comes last: data sets often
keep a rendered text beside the fields that it was made of.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lorakernels.train.data.sources import Row, RowError
from lorakernels.train.errors import DataError
from lorakernels.train.unique_names import NameTwice, load_json

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
CHAT_FIELDS = (
    "system",
    "tools",
    "chat_template_kwargs",
)  # what a row of every kind of chat may have
# The prompts of the Alpaca data, for a tokenizer without a chat template.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Text:
    """A document, of which every token is trained."""

    where: str
    text: str


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, both as they stand, without a chat template."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """Messages for a chat template.

    Attributes:
        answers: the numbers of the messages that are trained.
        fields: where in the row each message stands, such as "messages[0]".
        kwargs: further variables of the template, the row's ``chat_template_kwargs``.
    """

    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    answers: tuple[int, ...]
    fields: tuple[str, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


Example = Text | Completion | Chat


@dataclass(frozen=True)
class Format:
    """One form of rows. ``keys`` are the fields that tell it; ``make(row, template)`` gives the example.

    ``template`` is whether the tokenizer has a chat template. ``more`` are fields that are read if a row has them.
    """

    name: str
    keys: tuple[str, ...]
    make: Callable[[Row, bool], Example]
    more: tuple[str, ...] = ()


def find_format(row: Row) -> Format:
    """The format of a row, by its fields.

    Raises:
        RowError: the row is none of the formats.
    """
    if not isinstance(row.value, dict):
        wanted = 'an object, such as {"messages": [...]} or {"text": "..."}'
        raise RowError(f"{row.where}: expected {wanted}, found {_kind(row.value)}")
    for known in FORMATS:
        if all(key in row.value for key in known.keys):
            return known
    wanted = "; ".join(" and ".join(f'"{key}"' for key in known.keys) for known in FORMATS)
    raise RowError(
        f"{row.where}: found only the fields {sorted(map(str, row.value))[:8]}, expected one of: {wanted}"
    )


def example_of(row: Row, known: Format, template: bool) -> Example:
    """The example that a row of this format is.

    Raises:
        RowError: the row lacks a field of the format, or a field is of another kind.
    """
    if not isinstance(row.value, dict):
        wanted = f'an object with "{known.keys[0]}"'
        raise RowError(f"{row.where}: expected {wanted}, found {_kind(row.value)}")
    for key in known.keys:
        if key not in row.value:
            raise RowError(
                f'{row.where}: the field "{key}" is missing, which the first row of the file has; '
                f"found {sorted(map(str, row.value))[:8]}"
            )
    return known.make(row, template)


def unread(row: Row, known: Format, example: Example) -> list[str]:
    """The fields of a row, not empty, of which nothing is in the example."""
    read = (*known.keys, *known.more, *(CHAT_FIELDS if isinstance(example, Chat) else ()))
    left = (key for key, value in row.value.items() if key not in read and not is_empty(value))
    return [f"{key or repr(key)}{did_you_mean(str(key), read)}" for key in left]


def is_empty(value: Any) -> bool:
    """Whether a field holds as much as if it were not there. Numbers and truth values always hold something."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


@lru_cache(1024)  # rows have the same names again and again
def did_you_mean(name: str, known: tuple[str, ...], cutoff: float = 0.8) -> str:
    """The nearest of the known names, as a question in brackets. Empty if none is near."""
    near = difflib.get_close_matches(name.lower(), known, 1, cutoff)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _string(row: Row, value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise RowError(f'{row.where}: expected a string under "{field}", found {_kind(value)}')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            f"{row.where}: character {error.start} of the {field} is a lone surrogate"
        ) from error
    return value


def _list(row: Row, value: Any, field: str) -> list[Any]:
    """A list. A table's cell may hold it as JSON."""
    value = _loaded(row, value, field, "list")
    if not isinstance(value, list):
        raise RowError(f'{row.where}: expected a list under "{field}", found {_kind(value)}')
    return value


def _object(row: Row, value: Any, field: str) -> dict[str, Any]:
    """An object. A table's cell may hold it as JSON."""
    value = _loaded(row, value, field, "object")
    if not isinstance(value, dict):
        raise RowError(f'{row.where}: expected an object under "{field}", found {_kind(value)}')
    return value


def _loaded(row: Row, value: Any, field: str, wanted: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except NameTwice as error:
        raise RowError(f'{row.where}: the text under "{field}": {error}') from error
    except (ValueError, RecursionError) as error:
        raise RowError(
            f'{row.where}: the text under "{field}" is not a JSON {wanted} ({error})'
        ) from error


def _text(row: Row, template: bool) -> Text:
    return Text(row.where, _string(row, row.value["text"], "text"))


def _messages(key: str) -> Callable[[Row, bool], Chat]:
    def make(row: Row, template: bool) -> Chat:
        messages = _read_messages(row, row.value[key], key)
        return _chat(row, messages, _numbered(key, messages))

    return make


def _numbered(key: str, messages: Sequence[Any]) -> list[str]:
    return [f"{key}[{i}]" for i in range(len(messages))]


def _chat(
    row: Row, messages: list[dict[str, Any]], fields: Sequence[str], first: int = 0
) -> Chat:  # fmt: skip
    """``first`` is the number of the first message that may be trained."""
    system = row.value.get("system")
    if not is_empty(system):
        system = _string(row, system, "system")
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
            fields, first = ["system", *fields], first + 1
        elif messages[0].get("content") != system:
            raise RowError(
                f'{row.where}: "system" and "{fields[0]}" are two system prompts: leave one of them'
            )
    answers = [
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == ASSISTANT and _is_trained(message)
    ]
    shown = [{k: v for k, v in m.items() if k not in TRAINED} for m in messages]
    tools = row.value.get("tools")
    tools = None if is_empty(tools) else _list(row, tools, "tools") or None
    kwargs = row.value.get("chat_template_kwargs")
    kwargs = {} if is_empty(kwargs) else _object(row, kwargs, "chat_template_kwargs")
    return Chat(row.where, shown, tools, tuple(answers), tuple(fields), kwargs)


def _is_trained(message: Mapping[str, Any]) -> bool:
    return all(message.get(key) != 0 for key in TRAINED)


def _read_messages(row: Row, value: Any, field: str) -> list[dict[str, Any]]:
    found = [_message(row, m, f"{field}[{i}]") for i, m in enumerate(_list(row, value, field))]
    if not found:
        raise RowError(f'{row.where}: the list under "{field}" is empty')
    return found


def _message(row: Row, message: Any, field: str) -> dict[str, Any]:
    """A message with a role that chat templates know, and all else that it has but nulls."""
    if not isinstance(message, dict):
        raise RowError(f'{row.where}: expected a message under "{field}", found {_kind(message)}')
    spoken = "from" in message and "role" not in message  # ShareGPT's form
    said_by, text, known = ("from", "value", SPEAKERS) if spoken else ("role", "content", ROLES)
    if spoken and "content" in message:
        raise RowError(f'{row.where}: "{field}" has "from", so expected "value", found "content"')
    speaker = _string(row, message.get(said_by), f"{field}.{said_by}")
    if speaker not in known:
        raise RowError(
            f'{row.where}: "{field}.{said_by}" is {speaker!r}, expected one of {", ".join(known)}'
            f"{did_you_mean(speaker, tuple(known), 0.6)}"
        )
    made: dict[str, Any] = {k: v for k, v in message.items() if v is not None}
    if spoken:
        made = {{"from": "role", "value": "content"}.get(k, k): made[k] for k in made}
    made["role"] = known[speaker]
    _check_trained(row, made, field)
    if speaker == "function_call":
        made["tool_calls"] = [made.pop("content", None)]
    calls = made.get("tool_calls")
    if calls:
        listed = _list(row, calls, f"{field}.tool_calls")
        made["tool_calls"] = [_call(row, call, f"{field}.tool_calls") for call in listed]
    if "content" in made or not calls:
        made["content"] = _content(row, made.get("content"), f"{field}.{text}")
    return made


def _check_trained(row: Row, message: Mapping[str, Any], field: str) -> None:
    """Refuse what would train less or more of a message than it says."""
    for key, values in TRAINED.items():
        if key in message and message[key] not in values:
            wanted = " or ".join(map(str, values)).lower()
            raise RowError(f'{row.where}: "{field}.{key}" is {message[key]!r}, expected {wanted}')
    asked = [key for key in ("train", "loss") if message.get(key)]
    if asked and message["role"] != ASSISTANT:
        raise RowError(
            f'{row.where}: "{field}.{asked[0]}" is true of a message of role {message["role"]}, and the loss covers '
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
        for part, known in parts:
            if others := [key for key in part if key not in known and part[key] is not None]:
                raise TypeError(f"found {others[0]!r} beside it")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        wanted = 'an object with "name" and "arguments"'
        raise RowError(f'{row.where}: expected {wanted} under "{field}" ({error})') from error
    kept = {key: call[key] for key in ("id",) if key in call}
    return {**kept, "type": "function", "function": function}


def _content(row: Row, content: Any, field: str) -> str:
    """Text, or a list of parts, of which each is text."""
    if not isinstance(content, list):
        return _string(row, content, field)
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            found = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RowError(
                f'{row.where}: "{field}" holds a part of kind {found!r}, only text is trained'
            )
        if others := [
            key for key in part if key not in ("type", "text") and not is_empty(part[key])
        ]:
            raise RowError(
                f'{row.where}: a part of "{field}" has {others[0]!r}, only text is trained'
            )
    return "".join(_string(row, part.get("text"), f"{field}.text") for part in content)


def _completion(row: Row, template: bool) -> Completion | Chat:
    prompt, completion = (_texts_or_messages(row.value[key]) for key in ("prompt", "completion"))
    if isinstance(prompt, list) or isinstance(completion, list):
        before = _read_messages(row, prompt, "prompt")
        after = _read_messages(row, completion, "completion")
        fields = [*_numbered("prompt", before), *_numbered("completion", after)]
        return _chat(row, before + after, fields, len(before))
    if lost := [key for key in ("system", "tools") if not is_empty(row.value.get(key))]:
        raise RowError(
            f'{row.where}: "{lost[0]}" has no place beside a prompt that is a text: write {{"prompt": [messages], '
            '"completion": [messages]}'
        )
    return Completion(
        row.where, _string(row, prompt, "prompt"), _string(row, completion, "completion")
    )


def _texts_or_messages(value: Any) -> Any:
    """A list of messages that a table's cell holds as JSON. Another text stays as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        loaded = load_json(value)
    except (ValueError, RecursionError):
        return value
    said = [isinstance(one, dict) and bool({"role", "from"} & one.keys()) for one in loaded]
    return loaded if said and all(said) else value


def _instruction(row: Row, template: bool) -> Completion | Chat:
    """With a chat template, a chat of one question. Without one, the Alpaca prompt, which has no place for more."""
    value = row.value
    question = _string(row, value["instruction"], "instruction")
    more = _string(row, value.get("input") or "", "input")
    answer = _string(row, value["output"], "output")
    history = _list(row, value["history"], "history") if value.get("history") else []
    if not template:
        given = {"system": value.get("system"), "tools": value.get("tools"), "history": history}
        if lost := [key for key, content in given.items() if content]:
            raise RowError(
                f'{row.where}: "{lost[0]}" has no place in the Alpaca prompt, which instructions get as the model\'s '
                "tokenizer has no chat template: give one with --chat-template FILE"
            )
        form = ALPACA_INPUT if more else ALPACA
        return Completion(row.where, form.format(instruction=question, input=more), answer)
    before = [turn for i, pair in enumerate(history) for turn in _pair(row, pair, i)]
    asked = f"{question}\n{more}" if more else question
    fields = [f"history[{i // 2}]" for i in range(len(before))]
    return _chat(row, [*before, *_turns(asked, answer)], [*fields, "instruction", "output"])


def _pair(row: Row, pair: Any, number: int) -> list[dict[str, Any]]:
    field = f"history[{number}]"
    if not isinstance(pair, list) or len(pair) != 2:
        raise RowError(f'{row.where}: expected a question and its answer under "{field}"')
    return _turns(*(_string(row, text, field) for text in pair))


def _turns(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]


PLAIN = "plain text"
FORMATS = (
    Format("messages", ("messages",), _messages("messages")),
    Format("conversations", ("conversations",), _messages("conversations")),
    Format("conversations", ("conversation",), _messages("conversation")),
    Format("prompt and completion", ("prompt", "completion"), _completion),
    Format("instruction and output", ("instruction", "output"), _instruction, ("input", "history")),
    Format(PLAIN, ("text",), _text),
)


def check_template(template: bool, example: Example) -> None:
    """Raise DataError if the example is a chat and the tokenizer has no template for it."""
    if isinstance(example, Chat) and not template:
        raise DataError(
            f"{example.where} is a chat, and the model's tokenizer has no chat template: "
            "give one with --chat-template FILE"
        )
