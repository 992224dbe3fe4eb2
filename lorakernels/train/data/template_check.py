# SPDX-License-Identifier: Apache-2.0
"""Whether a chat template writes what the chats hold.

A template skips what it does not know, without a word: tool calls, thoughts, a second system prompt. Its text does not
tell what it skips. So each field is changed once, and what the template writes must change with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from lorakernels.train.data.encode import Renderer
from lorakernels.train.data.fields import did_you_mean, is_empty
from lorakernels.train.data.formats import Chat
from lorakernels.train.data.messages import ASSISTANT, TRAINED
from lorakernels.train.data.sources import RowError

# Fields of a message that are to be learned or to be answered. The rest tells about the message.
CONTENT = (
    *("content", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal"),
    *("documents", "image", "images", "video", "videos", "audio"),
)  # fmt: skip
ABOUT = ("role", "name", "id", "tool_call_id", *TRAINED)
PROBE = "a probe"
THOUGHT = "</think>"  # ends the thoughts of an answer
Message = dict[str, Any]


class TemplateCheck:
    """The fields that a tokenizer's chat template does not write. Each set of fields is tried once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tried: dict[Hashable, list[str]] = {}
        self._variables: dict[str, tuple[str, ...]] = {}

    def skipped(self, chat: Chat) -> list[str]:
        """The names of fields that tell about the chat or its messages, and that the template does not write.

        Raises:
            RowError: the template does not write a field that is content, or one whose name looks like an error in
                writing; or it refuses the messages.
        """
        skipped = self._kwargs(chat)
        for name in self._once(_form_of_tools(chat), partial(self._tools, chat)):
            raise self._refused(chat, name)
        for number, message in enumerate(chat.messages):
            for name in self._once(_form(chat, number), partial(self._message, chat, number)):
                key, field = name.partition("[")[0], f"{chat.fields[number]}.{name}"
                if key in CONTENT:
                    raise self._refused(chat, field, message["role"])
                near = "" if key in ABOUT else did_you_mean(key, (*CONTENT, *ABOUT))
                if near:
                    raise RowError(f'{chat.where}: unknown field "{field}"{near}')
                skipped.append(key)
        return skipped

    def _once(self, form: Hashable, attempt: Callable[[], list[str]]) -> list[str]:
        if form not in self._tried:
            self._tried[form] = attempt()
        return self._tried[form]

    def _tools(self, chat: Chat) -> list[str]:
        if not chat.tools:
            return []
        whole = Renderer(self.tokenizer, chat).text()
        probes = [("tools", [_TOOL]), *_probes_of_tools(chat.tools)]
        return [name for name, tools in probes if self._text(replace(chat, tools=tools)) == whole]

    def _message(self, chat: Chat, number: int) -> list[str]:
        whole = Renderer(self.tokenizer, chat).text()
        probes = _probes(chat.messages[number])
        return [name for name, probe in probes if not self._writes(chat, number, probe, whole)]

    def _writes(self, chat: Chat, number: int, probe: Message, whole: str) -> bool:
        """Whether the text changes with a message. Some templates write the thoughts of the last answer only."""
        messages = [*chat.messages[:number], probe, *chat.messages[number + 1 :]]
        changed, after = replace(chat, messages=messages), number + 1
        if self._text(changed) != whole:
            return True
        return probe["role"] == ASSISTANT and self._text(changed, after) != self._text(chat, after)

    def _text(self, chat: Chat, count: int | None = None) -> str | None:
        try:
            return Renderer(self.tokenizer, chat).text(count)
        except RowError:
            return None

    def _refused(self, chat: Chat, field: str, role: str = "") -> RowError:
        whose = f", of role {role}" if role else ""
        return RowError(
            f'{chat.where}: the chat template does not write "{field}"{whose}, so the model would not see it: take it '
            "out of the row, or give a template that writes it with --chat-template FILE"
        )

    def _kwargs(self, chat: Chat) -> list[str]:
        if not chat.kwargs:
            return []
        template = Renderer(self.tokenizer, chat).template()
        if template not in self._variables:
            self._variables[template] = _variables(template)
        variables, skipped = self._variables[template], []
        for name in chat.kwargs:
            field = f"chat_template_kwargs.{name}"
            if name in self._reserved:
                raise RowError(f'{chat.where}: "{field}" is set by the run itself: take it out')
            if name not in variables and name in CONTENT:
                raise self._refused(chat, field)
            if name not in variables:
                if near := did_you_mean(name, variables):
                    raise RowError(f'{chat.where}: the chat template does not read "{field}"{near}')
                skipped.append(field)
        return skipped

    @cached_property
    def _reserved(self) -> set[str]:
        """Names that no row may give to the template."""
        names = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return {*names, "messages"} - {"documents", "kwargs"}


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": PROBE,
        "parameters": {"type": "object", "properties": {PROBE: {"type": "string"}}},
    },
}


def _probes_of_tools(tools: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """(the name of a field, the tools with another value there) for the parts of the last tool."""
    tool = tools[-1] if isinstance(tools[-1], dict) else {}
    nested = isinstance(tool.get("function"), dict)
    function = tool["function"] if nested else tool
    for part, other in _TOOL["function"].items():
        if not is_empty(function.get(part)):
            changed = {**function, part: other}
            changed = {**tool, "function": changed} if nested else changed
            yield f"tools[{len(tools) - 1}].{part}", [*tools[:-1], changed]


def _form_of_tools(chat: Chat) -> Hashable:
    """The values by which a template may decide to leave out the tools."""
    if not chat.tools:
        return None
    roles = [message["role"] for message in chat.messages]
    parts = tuple(name for name, _ in _probes_of_tools(chat.tools))
    return parts, roles[0], roles[-1], frozenset(roles), _settings(chat)


def _form(chat: Chat, number: int) -> Hashable:
    """The values by which a template may decide to leave out a field of a message."""
    message = chat.messages[number]
    before = chat.messages[number - 1]["role"] if number else None
    after = frozenset(later["role"] for later in chat.messages[number + 1 :])
    keys = frozenset(key for key, value in message.items() if not is_empty(value))
    calls = len(message.get("tool_calls") or ()), _has_thoughts(message)
    return message["role"], before, after, keys, calls, bool(chat.tools), _settings(chat)


def _settings(chat: Chat) -> str:
    return repr(sorted(chat.kwargs.items(), key=str))


def _probes(message: Message) -> Iterator[tuple[str, Message]]:
    """(the name of a field, the message with another value there) for each field that is not empty."""
    if _has_thoughts(message):
        answer = message["content"].rpartition(THOUGHT)[2]
        yield f"content[{THOUGHT}]", {**message, "content": f"<think>{PROBE}{THOUGHT}{answer}"}
    for key, value in message.items():
        if key == "tool_calls":
            for number in range(len(value)):
                for part, other in (("name", PROBE), ("arguments", {PROBE: PROBE})):
                    if not is_empty(value[number]["function"].get(part)):
                        call = value[number]
                        call = {**call, "function": {**call["function"], part: other}}
                        calls = [*value[:number], call, *value[number + 1 :]]
                        yield f"tool_calls[{number}].{part}", {**message, key: calls}
        elif key != "role" and not is_empty(value):
            yield key, {**message, key: PROBE if value != PROBE else f"not {PROBE}"}


def _has_thoughts(message: Message) -> bool:
    """Whether an answer's content begins with thoughts. Some templates cut them off."""
    thoughts = str(message.get("content") or "").rpartition(THOUGHT)[0]
    return message["role"] == ASSISTANT and bool(thoughts.replace("<think>", "").strip())


def _variables(template: str) -> tuple[str, ...]:
    """The names that a template reads and does not set."""
    import jinja2.ext
    from jinja2.meta import find_undeclared_variables

    class Generation(jinja2.ext.Extension):
        tags: set[str] = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.Environment(extensions=[Generation, jinja2.ext.loopcontrols])
    return tuple(sorted(find_undeclared_variables(environment.parse(template))))
