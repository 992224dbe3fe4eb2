# SPDX-License-Identifier: Apache-2.0
"""Token files of a version that made other tokens of rows are not read again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorakernels.train.data import sources, tokens
from lorakernels.train.data.formats import example_of
from lorakernels.train.data.sources import Row
from lorakernels.train.errors import CheckpointError, DataError
from lorakernels.train.run.same_run import check_equal
from tests.train.chats import MARKED, PLAIN, jsonl, shown, tokenizer_with, tokens_of, turns

INSTRUCTION = {"instruction": "b?", "output": "B"}
HISTORY = {"history": [["a?", "A"]]}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ROWS: tuple[Any, ...] = (
    {"text": "a b\n\nc"},
    {"text": ""},
    {"prompt": "a ", "completion": "b"},
    {"prompt": turns("a"), "completion": turns("b", "c")[1:]},
    INSTRUCTION,
    INSTRUCTION | {"input": "c"},
    INSTRUCTION | {"system": "s"},
    INSTRUCTION | {"tools": TOOLS},
    INSTRUCTION | HISTORY,
    INSTRUCTION | {"history": '[["a?", "A"]]'},
    {"messages": turns("a", "b", "c", "d", system="s")},
    {"messages": turns("a", "b"), "system": "s"},
    {"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 0}, *turns("c", "d")]},
    {"messages": [*turns("a"), CALL, {"role": "tool", "content": "1"}], "tools": TOOLS},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *turns("a", "b")[1:]]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"conversation": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": False}]},
    {"other": "a"},
    {"conversations": [{"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
)  # fmt: skip

# the first digits of the SHA-256 of what each of these becomes without a template, by PLAIN and by MARKED
FOUND = (
    "924163 65e2dc e6cc1a bd8017 67c8c2 f92bcc 675f73 e15f74 4e6db9 4e6db9 dc925a 952b8d 728029 a9b3db b2c79f b2c79f "
    "65e2dc 65e2dc c107fa"
)


def made(path: Path, tokenizer: Any, row: Any) -> str:
    """The tokens of a file of one row and which are trained, or that it is refused."""
    try:
        found = tokens_of(jsonl(path, [row]), tokenizer)
    except DataError:
        return "refused"
    masks = None if found.trained is None else found.trained.tolist()
    return f"{found.tokens.tolist()} {masks} {found.docs.tolist()}"


def test_other_tokens_of_a_row_are_another_version(tmp_path: Path) -> None:
    """If this fails after a change that is meant, raise VERSION and write down what is found."""
    tokenizers = [tokenizer_with(template) for template in (None, PLAIN, MARKED)]
    found = []
    for row in ROWS:
        every = "; ".join(made(tmp_path / "a.jsonl", each, row) for each in tokenizers)
        found.append(hashlib.sha256(every.encode()).hexdigest()[:6])
    assert (tokens.VERSION, " ".join(found)) == (5, FOUND)


def test_tokens_of_a_name_that_stands_twice_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier version took the last of its values."""
    tokenizer, file = tokenizer_with(None), tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "text": "b"}\n')
    with monkeypatch.context() as earlier:
        earlier.setattr(tokens, "VERSION", 3)
        earlier.setattr(sources, "load_json", json.loads)
        assert shown(tokens_of(file, tokenizer), tokenizer) == "⟦<bos>b<eos>⟧"
    with pytest.raises(DataError, match=r"a\.jsonl line 1: one object has 'text' twice"):
        tokens_of(file, tokenizer)


def test_tokens_of_an_earlier_version_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one left the "system" of an instruction out where there is no chat template."""
    tokenizer, file = (
        tokenizer_with(None),
        jsonl(tmp_path / "a.jsonl", [INSTRUCTION | {"system": "s"}]),
    )

    def without_system(row: Row, *given: Any) -> Any:
        return example_of(replace(row, value=INSTRUCTION), *given)

    with monkeypatch.context() as earlier:
        earlier.setattr(tokens, "VERSION", 2)
        earlier.setattr(tokens, "example_of", without_system)
        assert shown(tokens_of(file, tokenizer), tokenizer).endswith("⟦B<eos>⟧")
    with pytest.raises(DataError, match='"system" has no place in the Alpaca prompt'):
        tokens_of(file, tokenizer)


@pytest.mark.parametrize("name", ["tokens", "eval_tokens", "fox: tokens", "a: b: eval_tokens"])
def test_a_run_over_tokens_of_an_earlier_version_hears_what_may_differ(name: str) -> None:
    """Also of a job, by whose name the key is called."""
    with pytest.raises(
        CheckpointError, match=f"{name} was 'a', now it is 'b'; data, tokenizer or the"
    ):
        check_equal(3, {name: "a"}, {name: "b"})
