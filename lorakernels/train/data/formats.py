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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """Messages for a chat template. ``answers`` are the numbers of the messages that are trained."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    answers: tuple[int, ...]


Example = Text | Completion | Chat


@dataclass(frozen=True)
class Format:
    """One form of rows. ``keys`` are the fields that tell it; ``make(row, template)`` gives the example.

    ``template`` is whether the tokenizer has a chat template.
    """

    name: str
    keys: tuple[str, ...]
    make: Callable[[Row, bool], Example]


def find_format(row: Row) -> Format:
    """The format of a row, by its fields.

    Raises:
        RowError: the row is none of the formats.
    """
    if not isinstance(row.value, dict):
        raise RowError(f'{row.where}: expected an object with "text", found {_kind(row.value)}')
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
    if isinstance(value, str):
        try:
            value = load_json(value)
        except NameTwice as error:
            raise RowError(f'{row.where}: the text under "{field}": {error}') from error
        except (ValueError, RecursionError) as error:
            raise RowError(
                f'{row.where}: the text under "{field}" is not a JSON list ({error})'
            ) from error
    if not isinstance(value, list):
        raise RowError(f'{row.where}: expected a list under "{field}", found {_kind(value)}')
    return value


def _text(row: Row, template: bool) -> Text:
    return Text(row.where, _string(row, row.value["text"], "text"))


def _messages(key: str) -> Callable[[Row, bool], Chat]:
    def make(row: Row, template: bool) -> Chat:
        return _chat(row, _read_messages(row, row.value[key], key))

    return make


def _chat(row: Row, messages: list[dict[str, Any]], first: int = 0) -> Chat:
    """``first`` is the number of the first message that may be trained."""
    system = row.value.get("system")
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _string(row, system, "system")}, *messages]
        first += 1
    answers = [
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == ASSISTANT and _is_trained(message)
    ]
    shown = [{k: v for k, v in m.items() if k not in ("weight", "train")} for m in messages]
    tools = row.value.get("tools")
    return Chat(row.where, shown, _list(row, tools, "tools") if tools else None, tuple(answers))


def _is_trained(message: Mapping[str, Any]) -> bool:
    """OpenAI's files say weight 0, Axolotl's train false, of an answer that is not to be learned."""
    return message.get("weight") != 0 and message.get("train") is not False


def _read_messages(row: Row, value: Any, field: str) -> list[dict[str, Any]]:
    found = [_message(row, m, f"{field}[{i}]") for i, m in enumerate(_list(row, value, field))]
    if not found:
        raise RowError(f'{row.where}: the list under "{field}" is empty')
    return found


def _message(row: Row, message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f'{row.where}: expected a message under "{field}", found {_kind(message)}')
    if "from" in message and "role" not in message:
        return _spoken(row, message, field)
    made = {key: value for key, value in message.items() if value is not None}
    made["role"] = _string(row, message.get("role"), f"{field}.role")
    calls = made.get("tool_calls")
    if calls:
        made["tool_calls"] = [
            _call(row, call, f"{field}.tool_calls") for call in _list(row, calls, field)
        ]
    elif "content" not in made:
        raise RowError(
            f'{row.where}: expected a string under "{field}.content", found {_kind(None)}'
        )
    if "content" in made:
        made["content"] = _content(row, made["content"], f"{field}.content")
    return made


def _spoken(row: Row, message: dict[str, Any], field: str) -> dict[str, Any]:
    """A message of ShareGPT's form."""
    speaker = _string(row, message["from"], f"{field}.from")
    if speaker not in SPEAKERS:
        raise RowError(
            f'{row.where}: "{field}.from" is {speaker!r}, expected one of {", ".join(SPEAKERS)}'
        )
    value = _string(row, message.get("value"), f"{field}.value")
    made: dict[str, Any] = {"role": SPEAKERS[speaker], "content": value}
    if speaker == "function_call":
        made = {"role": ASSISTANT, "tool_calls": [_call(row, value, f"{field}.value")]}
    return made | {key: message[key] for key in ("weight", "train") if key in message}


def _call(row: Row, call: Any, field: str) -> dict[str, Any]:
    """A tool call as chat templates take it: {"type": "function", "function": {"name", "arguments": object}}."""
    try:
        call = load_json(call) if isinstance(call, str) else call
        function = dict(call.get("function", call))
        if isinstance(function.get("arguments"), str):
            function["arguments"] = load_json(function["arguments"])
        if not isinstance(function["name"], str):
            raise TypeError("its name is not a string")
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
    return "".join(_string(row, part.get("text"), f"{field}.text") for part in content)


def _completion(row: Row, template: bool) -> Completion | Chat:
    prompt, completion = row.value["prompt"], row.value["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        before = _read_messages(row, prompt, "prompt")
        after = _read_messages(row, completion, "completion")
        return _chat(row, before + after, len(before))
    made = Completion(
        row.where, _string(row, prompt, "prompt"), _string(row, completion, "completion")
    )
    return made


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
    return _chat(row, [*before, *_turns(asked, answer)])


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
    Format("instruction and output", ("instruction", "output"), _instruction),
    Format(PLAIN, ("text",), _text),
)


def check_template(template: bool, example: Example) -> None:
    """Raise DataError if the example is a chat and the tokenizer has no template for it."""
    if isinstance(example, Chat) and not template:
        raise DataError(
            f"{example.where} is a chat, and the model's tokenizer has no chat template: "
            "give one with --chat-template FILE"
        )
