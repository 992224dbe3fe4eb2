# SPDX-License-Identifier: Apache-2.0
"""Rows of every format become the tokens that their template writes, and the loss covers answers only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lorakernels.train.data.encode import Tokens
from lorakernels.train.data.formats import example_of, find_format
from lorakernels.train.data.sources import Row, RowError
from lorakernels.train.errors import DataError
from tests.train.chats import (
    COUNTING,
    MARKED,
    OPENED,
    PLAIN,
    THINKING,
    jsonl,
    shown,
    tokenizer_with,
    tokens_of,
    turns,
)

HELLO = "<bos>system: Be short.<eos>\nuser: Grüß<eos>\nassistant: ⟦Gott<eos>\n⟧user: So?<eos>\nassistant: ⟦Ja<eos>\n⟧"
MESSAGES = turns("Grüß", "Gott", "So?", "Ja", system="Be short.")
SPOKEN = [
    {"from": {"system": "system", "user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]}
    for m in MESSAGES
]  # fmt: skip


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "markers"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES},
        {"messages": [{**m, "name": None, "tool_calls": None} for m in MESSAGES], "tools": None},
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]},
        {"conversations": SPOKEN},
        {"conversations": SPOKEN[1:], "system": "Be short."},
        {"conversation": MESSAGES},
    ],
    ids=["messages", "nulls", "parts", "ShareGPT", "ShareGPT, system", "conversation"],
)  # fmt: skip
def test_a_chat_is_written_by_the_template_and_its_answers_are_trained(
    tmp_path: Path, row: dict[str, Any], template: str
) -> None:
    """The template brings its own <bos> and <eos>, and gets no others."""
    tokenizer = tokenizer_with(template)
    file = tokens_of(jsonl(tmp_path / "a.jsonl", [row]), tokenizer)
    assert shown(file, tokenizer) == HELLO
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=True)["input_ids"]
    assert file.tokens.tolist() == expected
    everything = tokens_of(tmp_path / "a.jsonl", tokenizer, train_on_inputs=True)
    assert everything.trained is None and everything.tokens.tolist() == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "<bos>2+2=⟦4<eos>⟧"),
        ({"prompt": "<bos>2+2=", "completion": "4<eos>"}, "<bos>2+2=⟦4<eos>⟧"),
        (
            {"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]},
            "<bos>user: a<eos>\nassistant: b<eos>\nuser: c<eos>\nassistant: ⟦d<eos>\n⟧",
        ),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            "<bos>user: Add.\n1 2<eos>\nassistant: ⟦3<eos>\n⟧",
        ),
        (
            {"instruction": "b?", "output": "B", "history": [["a?", "A"]], "system": "S"},
            "<bos>system: S<eos>\nuser: a?<eos>\nassistant: ⟦A<eos>\n⟧user: b?<eos>\nassistant: ⟦B<eos>\n⟧",
        ),
        (
            {"messages": [*turns("a"), {"role": "assistant", "content": "b", "loss": False}, *turns("c", "d")]},
            "<bos>user: a<eos>\nassistant: b<eos>\nuser: c<eos>\nassistant: ⟦d<eos>\n⟧",
        ),
        (
            {"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 0}, *turns("c", "d")]},
            "<bos>user: a<eos>\nassistant: b<eos>\nuser: c<eos>\nassistant: ⟦d<eos>\n⟧",
        ),
        (
            {"prompt": turns("a", "b"), "completion": turns("", "c")[1:], "system": "S"},
            "<bos>system: S<eos>\nuser: a<eos>\nassistant: b<eos>\nassistant: ⟦c<eos>\n⟧",
        ),
    ],
    ids=["texts", "with ends", "messages", "instruction", "history", "loss false", "weight 0", "system of a prompt"],
)  # fmt: skip
def test_what_is_trained_of_other_rows(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    for template in (PLAIN, MARKED):
        tokenizer = tokenizer_with(template)
        assert (
            shown(tokens_of(jsonl(tmp_path / "a.jsonl", [row]), tokenizer), tokenizer) == expected
        )


@pytest.mark.parametrize(
    "more",
    [{"system": "S"}, {"history": [["a?", "A"]]}, {"history": '[["a?", "A"]]'}, {"tools": [{}]}],
    ids=["system", "history", "history as JSON", "tools"],
)
def test_an_instruction_without_a_template_loses_nothing(more: dict[str, Any]) -> None:
    """The Alpaca prompt has no place for them. Empty ones are as none."""
    (field,) = more
    row = {"instruction": "b?", "output": "B"}
    known = find_format(Row("here", row))
    message = f'^here: "{field}" has no place in the Alpaca prompt.*--chat-template FILE$'
    with pytest.raises(RowError, match=message):
        example_of(Row("here", row | more), known, False)
    for nothing in ("", None, [], "[]") if field == "history" else ("", None):
        given = Row("here", row | {field: nothing})
        assert example_of(given, known, False) == example_of(Row("here", row), known, False)


def test_history_in_a_table_s_cell_is_json() -> None:
    row = {"instruction": "b?", "output": "B", "history": [["a?", "A"]]}
    known = find_format(Row("here", row))
    expected = example_of(Row("here", row), known, True)
    assert example_of(Row("here", row | {"history": '[["a?", "A"]]'}), known, True) == expected
    with pytest.raises(RowError, match='the text under "history" is not a JSON list'):
        example_of(Row("here", row | {"history": "a?"}), known, True)


def test_an_instruction_without_a_template_is_alpacas_prompt(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(None)
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    found = shown(tokens_of(jsonl(tmp_path / "a.jsonl", [row]), tokenizer), tokenizer)
    assert found.startswith("<bos>Below is an instruction that describes a task, paired with")
    assert found.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n⟦3<eos>⟧")


def test_tools_and_their_calls_reach_the_template(tmp_path: Path) -> None:
    """In both forms; arguments that are JSON text become the object that templates expect."""
    tools = [{"type": "function", "function": {"name": "sq", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "sq", "arguments": '{"x": 3}'}}
    openai = [
        {"role": "user", "content": "3²?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "Nine"},
    ]
    spoken = [
        {"from": "human", "value": "3²?"},
        {"from": "function_call", "value": '{"name": "sq", "arguments": {"x": 3}}'},
        {"from": "observation", "value": "9"},
        {"from": "gpt", "value": "Nine"},
    ]
    rows = [
        {"messages": openai, "tools": tools},
        {"conversations": spoken, "tools": json.dumps(tools)},
    ]
    for row in rows:
        tokenizer = tokenizer_with()
        found = shown(tokens_of(jsonl(tmp_path / "a.jsonl", [row]), tokenizer), tokenizer)
        assert found == (
            "<bos>[sq]user: 3²?<eos>\nassistant: ⟦sq(3)<eos>\n⟧tool: 9<eos>\nassistant: ⟦Nine<eos>\n⟧"
        )


def test_templates_that_change_what_they_wrote(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": turns("a", "b", "c", "d")}])
    thinking, opened = tokenizer_with(THINKING), tokenizer_with(OPENED)
    assert shown(tokens_of(path, thinking), thinking) == (
        "user: a<eos>\nassistant: ⟦b<eos>\n⟧user: c<eos>\nassistant: ⟦<think></think>d<eos>\n⟧"
    )
    assert shown(tokens_of(path, opened), opened) == (
        "user: a<eos>\nassistant: ⟦b<eos>\n⟧user: c<eos>\nassistant: ⟦d<eos>\n⟧"
    )
    with pytest.raises(
        DataError, match=r'line 1: .* before "messages\[1\]" otherwise .* generation %'
    ):
        tokens_of(path, tokenizer_with(COUNTING))
    assert tokens_of(path, tokenizer_with(COUNTING), train_on_inputs=True).trained is None


# A system prompt of its own where the chat brings none, as Qwen2.5's
DEFAULT = "{% if messages[0].role != 'system' %}system: Help.<eos>\n{% endif %}"
TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}assistant: {% endif %}"
# A system prompt becomes the beginning of the first question, as Llama 2's, and stands alone as nothing
FOLDED = (
    "{% set first = messages[0].role == 'system' %}{% for m in (messages[1:] if first else messages) %}"
    "{{ m.role }}: {% if first and loop.first %}{{ messages[0].content }} {% endif %}{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt and messages | length > 1 %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        (
            DEFAULT + TURN + ASKS,
            turns("", "hello", "q", "a")[1:],
            "system: Help.<eos>\nassistant: ⟦hello<eos>\n⟧user: q<eos>\nassistant: ⟦a<eos>\n⟧",
        ),
        (DEFAULT + TURN + ASKS, turns("", "hello")[1:], "system: Help.<eos>\nassistant: ⟦hello<eos>\n⟧"),
        (
            TURN + ASKS,
            [*turns("", "", system="s")[::2], *turns("", "two")[1:]],
            "system: s<eos>\nassistant: ⟦<eos>\n⟧assistant: ⟦two<eos>\n⟧",
        ),
        (FOLDED, turns("", "hello", system="s")[::2], "assistant: s ⟦hello<eos>\n⟧"),
        (OPENED, turns("", "<b>", "q", "<i>")[1:], "assistant: ⟦<b><eos>\n⟧user: q<eos>\nassistant: ⟦<i><eos>\n⟧"),
        (OPENED, turns("q", ""), "user: q<eos>\nassistant: ⟦<eos>\n⟧"),
        (
            DEFAULT + TURN + ASKS,
            [{"role": "assistant", "content": "hello", "weight": 0}, *turns("q", "a")],
            "system: Help.<eos>\nassistant: hello<eos>\nuser: q<eos>\nassistant: ⟦a<eos>\n⟧",
        ),
    ],
    ids=["first", "alone", "after a system prompt", "folded", "opened tag", "empty", "weight 0"],
)  # fmt: skip
def test_answers_without_a_question_before_them(
    tmp_path: Path, template: str, row: list[dict[str, Any]], expected: str
) -> None:
    """As ShareGPT's data often begin. No template writes an empty chat, which would tell where they begin."""
    tokenizer = tokenizer_with(template)
    file = tokens_of(jsonl(tmp_path / "a.jsonl", [{"messages": row}]), tokenizer)
    assert shown(file, tokenizer) == expected


def test_an_answer_of_which_nobody_knows_the_beginning_is_refused(tmp_path: Path) -> None:
    """As by Qwen3's template, which opens an answer with its thoughts only if there is a question."""
    thinking = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and messages[0].role == 'user' %}"
        "<think></think>{% endif %}{{ m.content }}<eos>\n{% endfor %}" + ASKS
    )
    path = jsonl(tmp_path / "a.jsonl", [{"messages": turns("", "a")[1:]}])
    with pytest.raises(DataError, match=r'line 1: no question precedes "messages\[0\]".*inputs$'):
        tokens_of(path, tokenizer_with(thinking))


@pytest.mark.parametrize(
    "name",
    [
        *("cohere", "deepseekv3", "gemma3", "glm4moe", "lfm2", "llama3", "llama3_2", "nemotron_3_nano", "phi3"),
        *("phi3_5", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_6", "qwen3_instruct_2507"),
    ],
)  # fmt: skip
def test_templates_of_real_models(tmp_path: Path, name: str) -> None:
    """Without markers: both answers are trained, and nothing of the questions and of the headers before answers."""
    folder = Path(str(pytest.importorskip("trl").__file__)).parent / "chat_templates"
    template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = tokenizer_with(template)
    row = {"messages": turns("Where then?", "Here, now.", "And why?", "For fun.")}
    text = shown(tokens_of(jsonl(tmp_path / "a.jsonl", [row]), tokenizer), tokenizer)
    parts = re.findall("⟦(.*?)⟧", text, re.DOTALL)
    assert [
        part.count(answer) for part, answer in zip(parts, ("Here, now.", "For fun."), strict=True)
    ] == [1, 1]
    assert not re.search("(?i)where|why|user|assistant", "".join(parts))
    assert not {"Here", "now", "fun"} & set(
        re.findall(r"\w+", re.sub("⟦.*?⟧", "", text, flags=re.DOTALL))
    )


def test_thoughts_and_calls_of_a_real_template(tmp_path: Path) -> None:
    """Qwen3 writes a call otherwise once its result follows, and keeps thoughts after the last question only."""
    folder = Path(str(pytest.importorskip("trl").__file__)).parent / "chat_templates"
    tokenizer = tokenizer_with((folder / "qwen3.jinja").read_text(encoding="utf-8"))
    call = {"type": "function", "function": {"name": "sq", "arguments": {"x": 3}}}
    messages = [
        *turns("Hi", "<think>\nhm\n</think>\n\nHello", "3²?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nNine"},
    ]
    text = shown(
        tokens_of(jsonl(tmp_path / "a.jsonl", [{"messages": messages}]), tokenizer), tokenizer
    )
    assert re.findall("⟦(.*?)⟧", text, re.DOTALL) == [
        "Hello<|im_end|>\n",
        '<tool_call>\n{"name": "sq", "arguments": {"x": 3}}\n</tool_call><|im_end|>\n',
        "<think>\nso\n</think>\n\nNine<|im_end|>\n",
    ]


def test_a_tokenizer_of_longer_tokens(tmp_path: Path) -> None:
    """Tokens of several characters, with the blank before a word: markers and prefixes give the same masks."""
    transformers, tokenizers = (pytest.importorskip(n) for n in ("transformers", "tokenizers"))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    texts = ["user: where is the ferry now?", "assistant: the ferry is in the harbour."] * 9
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    rows = [
        {"messages": turns("where is the ferry?", " the ferry is  in\nthe harbour", "é?", "  ")},
        {"prompt": "the ferry ", "completion": " is in the harbour"},
    ]
    for number, row in enumerate(rows):
        found = []
        for template in (PLAIN, MARKED):
            tokenizer.chat_template = template
            file = tokens_of(jsonl(tmp_path / f"{number}.jsonl", [row]), tokenizer)
            assert file.trained is not None
            found.append((file.tokens.tolist(), file.trained.tolist(), shown(file, tokenizer)))
        assert found[0] == found[1]
        assert len(found[0][0]) < len(found[0][2]) / 2, "tokens are longer than one character"
    assert found[0][2] == "<bos>the ferry ⟦ is in the harbour<eos>⟧"


GOOD = {"messages": turns("a", "b")}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, 'the list under "messages" is empty'),
        ({"messages": "hi"}, 'the text under "messages" is not a JSON list'),
        ({"messages": ["hi"]}, 'expected a message under "messages[0]", found str'),
        ({"messages": [{"content": "a"}]}, 'expected a string under "messages[0].role", found null'),
        (
            {"messages": [*turns("a"), {"role": "assistant"}]},
            'expected a string under "messages[1].content", found null',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "\"messages[0].content\" holds a part of kind 'image', only text is trained",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": 3}]}]},
            'under "messages[0].tool_calls"',
        ),
        ({"messages": turns("\ud800")}, "character 0 of the messages[0].content is a lone surrogate"),
        ({"messages": [{"from": "x", "value": "a"}]}, "\"messages[0].from\" is 'x', expected one of human"),
        (
            {"messages": [{"role": "developer", "content": "a"}]},
            'the chat template refuses the "messages": TemplateError: no role developer',
        ),
        ({"text": "a"}, 'the field "messages" is missing, which the first row of the file has'),
        (3, 'expected an object with "messages", found int'),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_row_is_named_or_skipped_and_counted(tmp_path: Path, row: Any, message: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [GOOD, row, GOOD])
    with pytest.raises(DataError) as caught:
        tokens_of(path, tokenizer_with())
    assert str(caught.value).startswith(f"{path} line 2: ") and message in str(caught.value)
    file = tokens_of(path, tokenizer_with(), skip_bad_rows=True)
    assert (file.files[0].documents, file.files[0].bad) == (2, 1) == (len(file.spans), 1)
    assert message in file.files[0].first_bad
    again = tokens_of(path, tokenizer_with(), skip_bad_rows=True)
    assert again.files == file.files, "a file that is there already says it, too"
    moved = path.rename(tmp_path / "b.jsonl")
    found = tokens_of(moved, tokenizer_with(), skip_bad_rows=True)
    assert found.path == file.path and found.files[0].name == str(moved)


def test_a_file_of_bad_rows_alone_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": []}])
    with pytest.raises(
        DataError, match=r'no row that can be used: .*line 1: the list under "messages"'
    ):
        tokens_of(path, tokenizer_with(), skip_bad_rows=True)


def test_rows_without_an_answer_are_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [GOOD, {"messages": turns("a")}])
    file = tokens_of(path, tokenizer_with())
    assert (len(file.spans), file.files[0].empty) == (1, 1)
    assert len(tokens_of(path, tokenizer_with(), train_on_inputs=True).spans) == 2
    alone = jsonl(tmp_path / "b.jsonl", [{"messages": turns("a")}])
    with pytest.raises(DataError, match="no answer to train: give --train-on-inputs"):
        tokens_of(alone, tokenizer_with())


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no chat template: give one with --chat-template FILE"):
        tokens_of(jsonl(tmp_path / "a.jsonl", [GOOD]), tokenizer_with(None), skip_bad_rows=True)


def test_the_text_of_a_chat_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template takes a millisecond, and there are millions of rows. Each answer needs one text more, or two."""
    tokenizer, row = tokenizer_with(), Row("here", {"messages": MESSAGES})
    chat, written = example_of(row, find_format(row), True), []
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *a, **k: written.append(a) or apply(*a, **k)
    )
    assert len(list(Tokens(tokenizer).encode([chat]))) == 1
    assert len(written) == 4
