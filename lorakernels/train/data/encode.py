# SPDX-License-Identifier: Apache-2.0
"""Turn examples into token ids, and say which of them are trained.

    plain text   [BOS] text [EOS]                  all tokens
    completion   [BOS] prompt completion [EOS]     the completion's tokens, and EOS
    chat         as the chat template writes it    the tokens of the assistant's messages

BOS and EOS are not added where the text brings its own. A chat template that marks what the assistant generates
({% generation %}) says itself which tokens are trained. Otherwise a message begins where the template ends when it
asks for that message, and ends where the template ends after it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from lorakernels.train.data.formats import Chat, Completion, Example, Text
from lorakernels.train.data.sources import RowError
from lorakernels.train.errors import DataError

# A text is tokenized in blocks of about this many characters. Each block ends after a newline if it has one.
BLOCK = 1 << 20
AT_ONCE = 64  # examples
BLOCKS_AT_ONCE = 16
_PROMPTS = {"system", "developer"}  # roles of messages that ask nothing
_MARKER = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
Ids = np.ndarray[Any, np.dtype[np.uint32]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Range = tuple[int, int]


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


@dataclass(frozen=True)
class Encoded:
    """The tokens of one example.

    Attributes:
        ids: uint32 [n].
        trained: bool [n], whether a token is trained. None means that all are.
    """

    ids: Ids
    trained: Mask | None = None


@dataclass(frozen=True)
class Tokens:
    """The rules by which examples become tokens.

    Attributes:
        tokenizer: of transformers.
        train_on_inputs: train every token, including prompts and other speakers.
    """

    tokenizer: Any
    train_on_inputs: bool = False

    def encode(
        self, examples: Iterable[Example], read: Callable[[float], None] | None = None
    ) -> Iterator[Encoded | RowError]:
        """The tokens of each example, and an error in the place of an example that the template refuses.

        ``read`` reports progress within one long text, from 0 to 1, since a file may be a single text.

        Raises:
            DataError: the tokenizer lacks what the examples need.
        """
        waiting = iter(examples)
        while batch := list(islice(waiting, AT_ONCE)):
            yield from self._batch(batch, read if len(batch) == 1 else None)

    def _batch(
        self, batch: Sequence[Example], read: Callable[[float], None] | None
    ) -> Iterator[Encoded | RowError]:
        if isinstance(batch[0], Text):
            yield from self._texts([e.text for e in batch if isinstance(e, Text)], read)
            return
        written = [self._write(example) for example in batch]
        encoded = self._written([one for one in written if isinstance(one, _Written)])
        for one in written:
            yield next(encoded) if isinstance(one, _Written) else one

    def _texts(
        self, texts: Sequence[str], read: Callable[[float], None] | None
    ) -> Iterator[Encoded]:
        blocks = [list(_blocks(text)) for text in texts]
        encoded = self._ids([block for document in blocks for block in document], read)
        for document in blocks:
            ids = [token for _ in document for token in next(encoded)]
            head, tail = self._ends(ids)
            yield Encoded(np.asarray(head + ids + tail, dtype=np.uint32))

    def _ids(
        self, blocks: Sequence[str], read: Callable[[float], None] | None
    ) -> Iterator[Sequence[int]]:
        """The tokens of each block."""
        for start in range(0, len(blocks), BLOCKS_AT_ONCE):
            some = list(blocks[start : start + BLOCKS_AT_ONCE])
            yield from self.tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
            if read is not None:
                read((start + len(some)) / len(blocks))

    def _ends(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """BOS and EOS, as far as the tokenizer has them and the ids lack them."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        head = [] if bos is None or ids[:1] == [bos] else [bos]
        return head, [] if eos is None or ids[-1:] == [eos] else [eos]

    def _write(self, example: Example) -> _Written | RowError:
        if isinstance(example, Completion):
            text = example.prompt + example.completion
            return _Written(text, ((len(example.prompt), len(text)),), ends=True)
        assert isinstance(example, Chat)
        try:
            return self._chat(example)
        except RowError as error:
            return error

    def _chat(self, chat: Chat) -> _Written:
        renderer = Renderer(self.tokenizer, chat)
        if self.train_on_inputs:
            return _Written(renderer.text(), ())
        if not renderer.marks:
            return _Written(renderer.text(), tuple(renderer.answers()))
        text, ranges = renderer.marked()
        if len(chat.answers) < sum(m["role"] == "assistant" for m in chat.messages):
            ranges = _common(ranges, list(renderer.answers()))
        return _Written(text, tuple(ranges))

    def _written(self, texts: Sequence[_Written]) -> Iterator[Encoded]:
        if not texts:
            return
        masked = not self.train_on_inputs
        if masked and not self.tokenizer.is_fast:
            raise DataError(
                f"{type(self.tokenizer).__name__} does not tell which characters a token stands for, so the loss "
                "cannot cover answers only: use a tokenizer with a tokenizer.json, or --train-on-inputs"
            )
        tokenized = self.tokenizer(
            [text.text for text in texts],
            add_special_tokens=False,
            return_offsets_mapping=masked,
            verbose=False,
        )
        for number, text in enumerate(texts):
            ids = list(tokenized["input_ids"][number])
            trained = _within(tokenized["offset_mapping"][number], text.trained) if masked else None
            head, tail = self._ends(ids) if text.ends else ([], [])
            if trained is not None:
                trained = np.concatenate(
                    [np.zeros(len(head), bool), trained, np.ones(len(tail), bool)]
                )
            yield Encoded(np.asarray(head + ids + tail, dtype=np.uint32), trained)


@dataclass(frozen=True)
class _Written:
    """A text, the ranges of its characters that are trained, and whether it gets BOS and EOS."""

    text: str
    trained: tuple[Range, ...]
    ends: bool = False


def _within(offsets: Sequence[Range], ranges: Sequence[Range]) -> Mask:
    """Whether each token stands for characters of the ranges, by where it ends."""
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    inside = np.zeros(len(places), dtype=bool)
    for start, stop in ranges:
        inside |= (places[:, 1] > start) & (places[:, 1] <= stop)
    return inside


def _common(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """The intersection of two lists of ranges."""
    pairs = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return [(start, stop) for start, stop in pairs if start < stop]


def _blocks(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > BLOCK:
        cut = text.rfind("\n", start, start + BLOCK) + 1 or start + BLOCK
        yield text[start:cut]
        start = cut
    yield text[start:]


def _shared(text: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    differs = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(differs, min(len(text), len(other)))


def _core(message: dict[str, Any]) -> str:
    """The part of a message that every template keeps: its content without thoughts, or the name of its tool."""
    content = str(message.get("content") or "").rpartition("</think>")[2].strip()
    calls = message.get("tool_calls")
    return content or (str(calls[0]["function"]["name"]) if calls else "")


class Renderer:
    """One chat, written by the tokenizer's chat template."""

    def __init__(self, tokenizer: Any, chat: Chat) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    @property
    def marks(self) -> bool:
        """Whether the template marks what the assistant generates."""
        return _MARKER.search(self.template()) is not None

    def text(self, count: int | None = None, ask: bool = False) -> str:
        """The text of the first ``count`` messages. With ``ask`` it ends where the assistant's next one begins.

        Raises:
            RowError: the template refuses the messages.
        """
        if count == 0:
            return ""
        if not ask and count in (None, len(self.chat.messages)):
            return self._whole
        return self._write(count, ask)

    @cached_property
    def _whole(self) -> str:
        return self._write(None, ask=False)

    def _write(self, count: int | None, ask: bool) -> str:
        with self._refusals():
            return str(
                self.tokenizer.apply_chat_template(
                    self.chat.messages[:count],
                    tools=self.chat.tools,
                    add_generation_prompt=ask,
                    tokenize=False,
                    **self.chat.kwargs,
                )
            )

    def marked(self) -> tuple[str, list[Range]]:
        """The text of the chat, and the ranges of characters that the template marks as generated.

        apply_chat_template gives a mask of tokens instead. In transformers 5.23 that is wrong where a range begins or
        ends with a blank that the tokenizer leaves out of its offsets: it loses answers, or goes on to the end.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with self._refusals():
            texts, ranges = render_jinja_template(
                conversations=[self.chat.messages],
                tools=self.chat.tools,
                chat_template=self.template(),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.chat.kwargs},
            )
        return str(texts[0]), [(int(start), int(stop)) for start, stop in ranges[0]]

    def template(self) -> str:
        """The text of the template that writes this chat; some tokenizers have another for chats with tools."""
        return str(self.tokenizer.get_chat_template(None, self.chat.tools))

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise RowError for what a template raises: jinja2's errors, and any of its expressions' errors."""
        try:
            yield
        except Exception as error:
            raise RowError(
                f'{self.chat.where}: the chat template refuses the "messages": {type(error).__name__}: {error}'
            ) from error

    def answers(self) -> Iterator[Range]:
        """The range of characters of each trained message in the text of the chat.

        Raises:
            RowError: the template writes the messages before an answer otherwise once the answer follows.
        """
        full = self.text()
        for number in self.chat.answers:
            before = {message["role"] for message in self.chat.messages[:number]}
            yield (self._opening if before <= _PROMPTS else self._range)(full, number)

    def _range(self, full: str, number: int) -> Range:
        start = self._start(full, number)
        return start, self._stop(full, number, start)

    def _opening(self, full: str, number: int) -> Range:
        """The range of an answer that no question precedes.

        No template says where it begins: few write a system prompt alone as they do before messages, and none writes
        no messages. So a question is put before the answer, and the answer must end the chat in the same words.
        """
        messages, fields = self.chat.messages, self.chat.fields
        messages = [*messages[:number], {"role": "user", "content": "?"}, *messages[number:]]
        fields = (*fields[:number], "a question", *fields[number:])
        renderer = Renderer(self.tokenizer, replace(self.chat, messages=messages, fields=fields))
        text = renderer.text()
        start, stop = renderer._range(text, number + 1)
        if not full.endswith(text[start:]):
            raise RowError(
                f'{self.chat.where}: no question precedes "{fields[number + 1]}", and the chat template writes it '
                "otherwise after one, so its tokens are not known: give a template with {% generation %}, or "
                "--train-on-inputs"
            )
        moved = len(full) - len(text)
        return start + moved, stop + moved

    def _start(self, full: str, number: int) -> int:
        """Some templates ask with more than they keep of an answer, such as an opened tag for its thoughts."""
        prompt = self.text(number, ask=True)
        if full.startswith(prompt):
            return len(prompt)
        before = self.text(number)
        if not full.startswith(before):
            raise self._changes(number)
        # an answer may begin with the same letters as that tag
        messages = list(self.chat.messages)
        messages[number] = {**messages[number], "content": "?"}
        other = Renderer(self.tokenizer, replace(self.chat, messages=messages)).text()
        return min(_shared(full, prompt), _shared(other, prompt))

    def _stop(self, full: str, number: int, start: int) -> int:
        """The end of message `number` in `full`. Some templates write EOS after the last message only."""
        after = self.text(number + 1)
        for written in (after, after.removesuffix(self.tokenizer.eos_token or "")):
            if full.startswith(written):
                return len(written)
        if not after.startswith(full[:start]):
            raise self._changes(number)
        return start + self._kept(full[start:], after[start:], number)

    def _kept(self, rest: str, answer: str, number: int) -> int:
        """How much of `answer` is left where `rest` begins, in a template that drops the thoughts of earlier ones."""
        core = _core(self.chat.messages[number])
        start = answer.find(rest[:4])
        while start >= 0 and core in answer[start:]:
            if rest.startswith(answer[start:]):
                return len(answer) - start
            start = answer.find(rest[:4], start + 1)
        raise self._changes(number)

    def _changes(self, number: int) -> RowError:
        return RowError(
            f'{self.chat.where}: the chat template writes what comes before "{self.chat.fields[number]}" otherwise '
            "once that message follows, so its tokens are not known: give a template with {% generation %}, or "
            "--train-on-inputs"
        )
