# SPDX-License-Identifier: Apache-2.0
"""Chat templates, data files, and a view of what is trained of them, for the tests of finetune's data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from lorakernels.train.data.byte_tokenizer import byte_tokenizer
from lorakernels.train.data.tokens import Rules, TokenFile, tokenize_files

PLAIN = (
    "<bos>{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}{{ m.role }}: "
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments.x }})"
    "{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = (
    "<bos>{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>\n{% endgeneration %}{% else %}{{ m.content }}<eos>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# As Qwen3's: the last answer opens with its thoughts, earlier answers lose theirs.
THINKING = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# As DeepSeek-R1's: it asks with an opened tag, which it does not keep.
OPENED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>{% endif %}"
)
COUNTING = (
    "{{ messages | length }}{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
)


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    head = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return head + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def tokenizer_with(template: str | None = PLAIN) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tokens_of(path: Path, tokenizer: Any, **rules: bool) -> TokenFile:
    return tokenize_files([path], tokenizer, path.parent / "cache", Rules(**rules))


def shown(file: TokenFile, tokenizer: Any, number: int = 0) -> str:
    """One document as text, with ⟦ ⟧ around what is trained."""
    start, stop = file.spans[number].tolist()
    trained = np.ones(len(file.tokens)) if file.trained is None else file.trained
    pairs = zip(trained[start:stop].tolist(), file.tokens[start:stop].tolist(), strict=True)
    text = ""
    for learned, group in groupby(pairs, key=lambda pair: pair[0]):
        part = tokenizer.decode([token for _, token in group])
        text += f"⟦{part}⟧" if learned else part
    return text
