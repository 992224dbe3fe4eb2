# SPDX-License-Identifier: Apache-2.0
"""The meaning of a row: a text, a prompt with its completion, or a chat.

    {"messages": [{"role", "content"}, …], "tools"}  a chat, as OpenAI and TRL write it
    {"conversations": [{"from", "value"}, …]}        a chat, as ShareGPT writes it
    {"prompt": …, "completion": …}                   two texts, or two lists of messages
    {"instruction", "input", "output"}               one question and its answer, as Alpaca writes it
    {"text": …}                                      plain text

The first of these that fits the first row of a file is the format of the whole file. Text comes last: data sets often
keep a rendered text beside the fields that it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorakernels.train.data.fields import (
    did_you_mean,
    is_empty,
    kind_name,
    list_of,
    object_of,
    string_of,
)
from lorakernels.train.data.messages import ASSISTANT, TRAINED, is_trained, read_messages
from lorakernels.train.data.sources import Row, RowError
from lorakernels.train.errors import DataError
from lorakernels.train.files.unique_names import load_json

# what a row of every kind of chat may have
CHAT_FIELDS = ("system", "tools", "chat_template_kwargs")
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
    """A document. Every token is trained."""

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
        raise RowError(f"{row.where}: expected {wanted}, found {kind_name(row.value)}")
    for candidate in FORMATS:
        if all(key in row.value for key in candidate.keys):
            return candidate
    wanted = "; ".join(" and ".join(f'"{key}"' for key in candidate.keys) for candidate in FORMATS)
    raise RowError(
        f"{row.where}: found only the fields {sorted(map(str, row.value))[:8]}, expected one of: {wanted}"
    )


def example_of(row: Row, form: Format, template: bool) -> Example:
    """The example that a row of this format is.

    Raises:
        RowError: the row lacks a field of the format, or a field is of another kind.
    """
    if not isinstance(row.value, dict):
        wanted = f'an object with "{form.keys[0]}"'
        raise RowError(f"{row.where}: expected {wanted}, found {kind_name(row.value)}")
    for key in form.keys:
        if key not in row.value:
            raise RowError(
                f'{row.where}: the field "{key}" is missing, which the first row of the file has; '
                f"found {sorted(map(str, row.value))[:8]}"
            )
    return form.make(row, template)


def unread(row: Row, form: Format, example: Example) -> list[str]:
    """The non-empty fields of a row that the example does not use."""
    read = (*form.keys, *form.more, *(CHAT_FIELDS if isinstance(example, Chat) else ()))
    left = (key for key, value in row.value.items() if key not in read and not is_empty(value))
    absent = tuple(key for key in read if key not in row.value)
    return [f"{key or repr(key)}{did_you_mean(str(key), absent)}" for key in left]


def _text(row: Row, template: bool) -> Text:
    return Text(row.where, string_of(row, row.value["text"], "text"))


def _messages(key: str) -> Callable[[Row, bool], Chat]:
    def make(row: Row, template: bool) -> Chat:
        messages = read_messages(row, row.value[key], key)
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
        system = string_of(row, system, "system")
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
        if number >= first and message["role"] == ASSISTANT and is_trained(message)
    ]
    shown = [{k: v for k, v in m.items() if k not in TRAINED} for m in messages]
    tools = row.value.get("tools")
    tools = None if is_empty(tools) else list_of(row, tools, "tools") or None
    kwargs = row.value.get("chat_template_kwargs")
    kwargs = {} if is_empty(kwargs) else object_of(row, kwargs, "chat_template_kwargs")
    return Chat(row.where, shown, tools, tuple(answers), tuple(fields), kwargs)


def _completion(row: Row, template: bool) -> Completion | Chat:
    prompt, completion = (_texts_or_messages(row.value[key]) for key in ("prompt", "completion"))
    if isinstance(prompt, list) or isinstance(completion, list):
        before = read_messages(row, prompt, "prompt")
        after = read_messages(row, completion, "completion")
        fields = [*_numbered("prompt", before), *_numbered("completion", after)]
        return _chat(row, before + after, fields, len(before))
    if lost := [key for key in ("system", "tools") if not is_empty(row.value.get(key))]:
        raise RowError(
            f'{row.where}: "{lost[0]}" has no place beside a prompt that is a text: write {{"prompt": [messages], '
            '"completion": [messages]}'
        )
    return Completion(
        row.where, string_of(row, prompt, "prompt"), string_of(row, completion, "completion")
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
    question = string_of(row, value["instruction"], "instruction")
    more = string_of(row, value.get("input") or "", "input")
    answer = string_of(row, value["output"], "output")
    history = list_of(row, value["history"], "history") if value.get("history") else []
    if not template:
        extras = {"system": value.get("system"), "tools": value.get("tools"), "history": history}
        if lost := [key for key, content in extras.items() if content]:
            raise RowError(
                f'{row.where}: "{lost[0]}" has no place in the Alpaca prompt, which instructions get as the model\'s '
                "tokenizer has no chat template: give one with --chat-template FILE"
            )
        form = ALPACA_INPUT if more else ALPACA
        return Completion(row.where, form.format(instruction=question, input=more), answer)
    before = [turn for i, pair in enumerate(history) for turn in _pair(row, pair, i)]
    request = f"{question}\n{more}" if more else question
    fields = [f"history[{i // 2}]" for i in range(len(before))]
    return _chat(row, [*before, *_turns(request, answer)], [*fields, "instruction", "output"])


def _pair(row: Row, pair: Any, number: int) -> list[dict[str, Any]]:
    field = f"history[{number}]"
    if not isinstance(pair, list) or len(pair) != 2:
        raise RowError(f'{row.where}: expected a question and its answer under "{field}"')
    return _turns(*(string_of(row, text, field) for text in pair))


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
