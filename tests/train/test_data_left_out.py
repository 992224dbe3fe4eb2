# SPDX-License-Identifier: Apache-2.0
"""Nothing that a row holds is left out without a word: it is refused by name, or one line for each file names it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lorakernels.train.data.encode import Renderer
from lorakernels.train.data.formats import example_of, find_format
from lorakernels.train.data.prepare import about_files
from lorakernels.train.data.sources import Row
from lorakernels.train.data.template_check import TemplateCheck
from lorakernels.train.data.tokens import tokenize_files
from lorakernels.train.errors import DataError
from tests.train.chats import MARKED, PLAIN, jsonl, shown, tokenizer_with, tokens_of, turns

# As many templates do: it writes messages of two roles, a system prompt that comes first, and one call a message.
SKIPPING = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] or (m.role == 'system' and loop.first) %}"
    "{{ m.role }}: {% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}"
    "<eos>\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "now", "arguments": {}}}
ZONED = {"type": "function", "function": {"name": "now", "arguments": {"x": "UTC"}}}


def answer(**fields: Any) -> dict[str, Any]:
    """A question and an answer that has further fields."""
    return {"messages": [*turns("a"), {"role": "assistant", **fields}]}


NAMES = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + PLAIN
)  # of tools, and nothing else
FORMS = ("messages", "prompt", "completion", "conversations")
NOT_WRITTEN = {
    "tools": ({"tools": TOOLS, "messages": turns("a", "b")}, '"tools"'),
    "a call's arguments": (answer(tool_calls=[ZONED]), '"messages[1].tool_calls[0].arguments", of role assistant'),
    "a second call": (answer(tool_calls=[CALL, CALL]), '"messages[1].tool_calls[1].name"'),
    "text beside a call": (answer(content="b", tool_calls=[CALL]), '"messages[1].content"'),
    "a tool's result": (
        {"messages": [*turns("a"), {"role": "tool", "content": "1"}, *turns("b", "c")[1:]]},
        '"messages[1].content", of role tool',
    ),
    "a later system prompt": (
        {"messages": [*turns("a", "b"), *turns("c", "d", system="s")]},
        '"messages[2].content", of role system',
    ),
    "thoughts": (answer(content="b", reasoning_content="hm"), '"messages[1].reasoning_content"'),
    "text of a call of OpenAI's first form": (
        answer(content=None, function_call={"name": "f"}),
        '"messages[1].function_call"',
    ),
    "images": (answer(content="b", images=["a.png"]), '"messages[1].images"'),
    "a call of OpenAI's first form": (answer(content="b", function_call={"name": "f"}), '"messages[1].function_call"'),
    "documents": (
        {"messages": turns("a", "b"), "chat_template_kwargs": {"documents": [{"text": "c"}]}},
        '"chat_template_kwargs.documents"',
    ),
    "of a completion": (
        {"prompt": turns("a"), "completion": [{"role": "assistant", "content": "b", "thinking": "hm"}]},
        '"completion[0].thinking"',
    ),
    "of ShareGPT's form": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "thinking": "hm"}]},
        '"conversations[1].thinking"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_content_that_the_template_does_not_write_is_refused(tmp_path: Path, name: str) -> None:
    """A row like it counts as bad wherever it stands: what was tried once is remembered, not forgiven."""
    row, field = NOT_WRITTEN[name]
    good = {key: turns("a", "b")[key == "completion" :] for key in row if key in FORMS}
    path = jsonl(tmp_path / "a.jsonl", [good, row, good, row])
    message = f"a.jsonl line 2: the chat template does not write {field}"
    with pytest.raises(DataError) as caught:
        tokens_of(path, tokenizer_with(SKIPPING))
    assert message in str(caught.value) and "--chat-template FILE" in str(caught.value)
    file = tokens_of(path, tokenizer_with(SKIPPING), skip_bad_rows=True)
    assert (len(file.spans), file.files[0].bad) == (2, 2)


UNKNOWN = {
    "a field": (answer(content="b", weigth=0), 'unknown field "messages[1].weigth" (did you mean \'weight\'?)'),
    "a role": ({"messages": [{"role": "usr", "content": "a"}]}, "\"messages[0].role\" is 'usr', expected one of"),
    "a capital": ({"messages": [{"role": "Assistant", "content": "a"}]}, "(did you mean 'assistant'?)"),
    "a speaker": ({"conversations": [{"from": "GPT", "value": "a"}]}, "(did you mean 'gpt'?)"),
    "a weight": (answer(content="b", weight="0"), "\"messages[1].weight\" is '0', expected 0 or 1"),
    "half a weight": (answer(content="b", weight=0.5), '"messages[1].weight" is 0.5, expected 0 or 1'),
    "train as text": (answer(content="b", train="false"), "\"messages[1].train\" is 'false', expected false or true"),
    "train of a question": (
        {"messages": [{"role": "user", "content": "a", "train": True}, *turns("a", "b")[1:]]},
        '"messages[0].train" is true of a message of role user',
    ),
    "loss of a question": (
        {"messages": [{"role": "user", "content": "a", "loss": True}, *turns("a", "b")[1:]]},
        '"messages[0].loss" is true of a message of role user',
    ),
    "parameters of a call": (
        answer(tool_calls=[{"name": "f", "parameters": {"x": 3}}]),
        "(found 'parameters' beside it)",
    ),
    "two system prompts": (
        {"messages": turns("a", "b", system="s"), "system": "other"},
        '"system" and "messages[0]" are two system prompts',
    ),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image": "b"}]}]},
        "a part of \"messages[0].content\" has 'image'",
    ),
    "a system prompt of a text": ({"prompt": "a", "completion": "b", "system": "s"}, '"system" has no place beside'),
    "tools of a text": ({"prompt": "a", "completion": "b", "tools": TOOLS}, '"tools" has no place beside'),
    "both forms": ({"conversations": [{"from": "gpt", "value": "a", "content": "b"}]}, 'found "content"'),
    "a variable": (
        {**answer(content="b"), "chat_template_kwargs": {"greting": "x"}},
        'does not read "chat_template_kwargs.greting" (did you mean \'greeting\'?)',
    ),
    "a variable of the run": (
        {**answer(content="b"), "chat_template_kwargs": {"tokenize": True}},
        '"chat_template_kwargs.tokenize" is set by the run itself',
    ),
    "no variables": ({**answer(content="b"), "chat_template_kwargs": [3]}, "expected an object under"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, name: str) -> None:
    row, message = UNKNOWN[name]
    with pytest.raises(DataError) as caught:
        tokens_of(jsonl(tmp_path / "a.jsonl", [row]), tokenizer_with("{{ greeting }}" + MARKED))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("template", "tools", "field"),
    [
        (NAMES, [{"type": "function", "function": {"name": "f", "description": "d"}}], "tools[0].description"),
        (NAMES, [{"function": {"name": "f", "parameters": {"type": "object"}}}], "tools[0].parameters"),
        ("{{ tools[0] }}" + MARKED, [{"name": "f"}, {"name": "g"}], "tools[1].name"),
    ],
    ids=["description", "parameters", "a second tool"],
)  # fmt: skip
def test_a_part_of_a_tool_that_is_not_written_is_refused(
    tmp_path: Path, template: str, tools: list[Any], field: str
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": turns("a", "b"), "tools": tools}])
    with pytest.raises(DataError) as caught:
        tokens_of(path, tokenizer_with(template))
    assert f'does not write "{field}"' in str(caught.value)
    whole = tokenizer_with("{% for t in tools %}{{ t }}{% endfor %}" + template)
    assert len(tokens_of(path, whole).spans) == 1


def test_roles_by_sharegpts_names_are_those_of_templates(tmp_path: Path) -> None:
    tokenizer = tokenizer_with()
    named = [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]
    texts = [
        shown(tokens_of(jsonl(tmp_path / "a.jsonl", [{"messages": m}]), tokenizer), tokenizer)
        for m in (turns("a", "b"), named)
    ]
    assert texts[0] == texts[1] == "<bos>user: a<eos>\nassistant: ⟦b<eos>\n⟧"


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "markers"])
def test_variables_of_a_row_reach_the_template(tmp_path: Path, template: str) -> None:
    """In a table's cell they are JSON text. A template that drops them from a prompt would train another one."""
    tokenizer = tokenizer_with("{% if greeting %}{{ greeting }}, {% endif %}" + template)
    row = {"messages": turns("a", "b")}
    kwargs = {"greeting": "hi"}
    rows = [
        row,
        {**row, "chat_template_kwargs": kwargs},
        {**row, "chat_template_kwargs": json.dumps(kwargs)},
    ]
    file = tokens_of(jsonl(tmp_path / "a.jsonl", rows), tokenizer)
    assert file.files[0].unread == file.files[0].skipped == []
    texts = [shown(file, tokenizer, number) for number in range(3)]
    assert texts[0] == "<bos>user: a<eos>\nassistant: ⟦b<eos>\n⟧"
    assert texts[1] == texts[2] == "hi, " + texts[0]


def test_what_is_not_read_is_named_once_for_each_file(tmp_path: Path) -> None:
    """Also of tokens that were there. Empty fields hold nothing that could be left out."""
    rows = [
        {"messages": turns("a", "b"), "id": 1, "source": "", "tool": TOOLS},
        {"messages": [{"role": "user", "content": "a", "name": "Ann", "mood": 0}, *turns("a", "b")[1:]], "id": 2},
    ]  # fmt: skip
    one = jsonl(tmp_path / "a.jsonl", [{"messages": turns("a", "b"), "source": None}])
    two = jsonl(tmp_path / "b.jsonl", rows)
    three = jsonl(tmp_path / "c.jsonl", [{"text": "a", **{f"column{i}": i for i in range(10)}}])
    for _ in range(2):
        file = tokenize_files([one, two, three], tokenizer_with(), tmp_path / "cache")
        assert about_files(file) == [
            f"{one}: 1 rows of messages",
            f"{two}: 2 rows of messages",
            f"{two}: fields that are not read: id, tool (did you mean 'tools'?)",
            f"{two}: fields that the chat template does not write: name, mood",
            f"{three}: fields that are not read: {', '.join(f'column{i}' for i in range(8))} and 2 more",
        ]


def test_prompts_without_the_template_are_said(tmp_path: Path) -> None:
    """Of a model that has one, which was trained on chats. Messages in a table's cells are a chat."""
    path, tokenizer = tmp_path / "a.csv", tokenizer_with()
    path.write_text("prompt,completion\nWho?,Ann\n")
    line = f"{path}: prompts stand without the chat template that this model has; "
    line += '{"prompt": [messages], "completion": [messages]} uses it'
    assert line in about_files(tokens_of(path, tokenizer))
    assert line not in about_files(tokens_of(path, tokenizer_with(None)))
    with path.open("w", newline="") as file:
        cells = [json.dumps(part) for part in (turns("Who?"), turns("", "Ann")[1:])]
        csv.writer(file).writerows([["prompt", "completion"], cells, ["[1]", "[]"]])
    found = tokens_of(path, tokenizer)
    assert [shown(found, tokenizer, n) for n in (0, 1)] == [
        "<bos>user: Who?<eos>\nassistant: ⟦Ann<eos>\n⟧",
        "<bos>[1]⟦[]<eos>⟧",
    ]
    assert line in about_files(found)


def test_a_set_of_fields_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of rows have few of them."""
    written: list[int | None] = []
    text = Renderer.text

    def counted(self: Renderer, count: int | None = None, ask: bool = False) -> str:
        written.append(count)
        return text(self, count, ask)

    monkeypatch.setattr(Renderer, "text", counted)
    check = TemplateCheck(tokenizer_with())
    for number in range(50):
        row = Row("here", {"messages": turns(f"a{number}", "b", "c", f"d{number}")})
        check.skipped(example_of(row, find_format(row), True))  # type: ignore[arg-type]
    assert len(written) < 12


def test_thoughts_that_a_template_drops_later_are_no_error(tmp_path: Path) -> None:
    """It writes them while their message is the last, as Qwen3's does."""
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ m.role }}: {% if loop.last %}{{ m.reasoning_content }}{% endif %}"
        "{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    row = {"messages": [*answer(content="b", reasoning_content="hm")["messages"], *turns("c", "d")]}
    file = tokens_of(jsonl(tmp_path / "a.jsonl", [row]), tokenizer)
    assert shown(file, tokenizer).startswith("user: a<eos>\nassistant: ⟦b<eos>\n⟧user: c")


THOUGHTS = "<think>hm</think>b"
CUT = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")  # as DeepSeek-R1's
LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}" + MARKED.replace(
        "{{ m.content }}<eos>\n{% endif %}", "{% if m.role == 'user' %}{{ m.content }}<eos>\n{% endif %}{% endif %}"
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("template", "row", "field"),
    [
        (CUT, answer(content=THOUGHTS), "messages[1].content[</think>]"),
        (LAST_SYSTEM, {"messages": turns("a", "b", system="s") + turns("c", "d", system="t")}, "messages[0].content"),
    ],
    ids=["thoughts in the last answer", "an earlier system prompt"],
)  # fmt: skip
def test_a_part_of_a_chat_that_is_cut_off_is_refused(
    tmp_path: Path, template: str, row: dict[str, Any], field: str
) -> None:
    """Rows without that part come first: they say nothing of it."""
    whole = {"messages": turns("a", "<think>\n</think>b", system="s")}
    path = jsonl(tmp_path / "a.jsonl", [whole, {"messages": turns("a", "b", "c", "d")}, row])
    with pytest.raises(DataError) as caught:
        tokens_of(path, tokenizer_with(template))
    assert f'line 3: the chat template does not write "{field}"' in str(caught.value)


@pytest.mark.parametrize("calls", [[], None, "", "[]"], ids=["empty", "null", "no cell", "a cell"])
def test_an_empty_list_of_calls_is_none(tmp_path: Path, calls: Any) -> None:
    """Some templates ask whether the field is there."""
    tokenizer = tokenizer_with(PLAIN.replace("if m.tool_calls", "if 'tool_calls' in m"))
    row = answer(content="b", tool_calls=calls)
    file = tokens_of(jsonl(tmp_path / "a.jsonl", [row]), tokenizer)
    assert shown(file, tokenizer) == "<bos>user: a<eos>\nassistant: ⟦b<eos>\n⟧"
