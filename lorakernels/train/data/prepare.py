# SPDX-License-Identifier: Apache-2.0
"""From the options of a run to its packed rows, with sentences about all that was cut or left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lorakernels.train.data.formats import PLAIN
from lorakernels.train.data.packing import PackedRows
from lorakernels.train.data.preview import preview
from lorakernels.train.data.sources import held_entries, some
from lorakernels.train.data.split import documents_of, hold_out, repeated, truncated, weighted
from lorakernels.train.data.tokens import Rules, Spans, TokenFile, tokenize_files
from lorakernels.train.errors import DataError, OptionError
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.progress import Phase
from lorakernels.train.ranks.ranks import RunRanks

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunData:
    """The packed rows of a run.

    Attributes:
        train, held: rows to train on and to evaluate.
        identity: what a run that goes on must find again.
        files: the tokens that the rows are of.
    """

    train: PackedRows
    held: PackedRows
    identity: dict[str, str | None]
    files: tuple[TokenFile, ...]


def set_chat_template(tokenizer: Any, path: str | None) -> None:
    """Give the tokenizer the chat template of a file.

    Raises:
        OptionError: the file cannot be read.
    """
    if path is None:
        return
    try:
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"chat_template: the file {path} cannot be read: {error}") from error


def load_data(
    options: FinetuneOptions,
    tokenizer: Any,
    cache: Path,
    say: Say,
    ranks: RunRanks,
    phase: Callable[[str], Phase] = Phase,
) -> RunData:
    """Tokenize the data of a run, or find its tokens in the cache, and pack them. Rank 0 writes, and shows a phase.

    Raises:
        DataError: a file or a row cannot be used, or there is nothing to train on.
    """
    rules = Rules(options.train_on_inputs, options.skip_bad_rows)

    evaluated, alone = held_entries([Path(name) for name in options.eval_data])

    def tokens_of(paths: list[Path]) -> TokenFile:
        def write() -> None:
            with phase("tokenizing") as shown:
                tokenize_files(paths, tokenizer, cache, rules, shown)

        ranks.on_first(write)
        return tokenize_files(paths, tokenizer, cache, rules)

    tokens = tokens_of([Path(name) for name in options.data])
    held = tokens_of(evaluated) if evaluated else None
    for line in alone:
        say(line)
    for file in (tokens, held):
        for line in [] if file is None else about_files(file):
            say(line)
    train_rows, held_rows = pack_data(tokens, options, say, held)
    for line in preview(tokens, tokenizer):
        say(line)
    identity = {"tokens": tokens.path.name, "eval_tokens": held.path.name if held else None}
    files = (tokens,) if held is None else (tokens, held)
    return RunData(train_rows, held_rows, identity, files)


def check_rows(data: RunData, ranks: RunRanks) -> None:
    """Collective: refuse data that differ between the ranks, such as of two machines with other files.

    Raises:
        DataError: a rank's tokens, number of rows or longest document differ from the first rank's.
    """
    facts: dict[str, object] = {**data.identity}
    for kind, rows in (("training", data.train), ("held-out", data.held)):
        facts |= {f"{kind} sequences": len(rows), f"{kind} longest document": rows.longest}
    first = ranks.from_first(facts)

    def check() -> None:
        for name in {**first, **facts}:
            here, there = facts.get(name), first.get(name)
            if here != there:
                raise DataError(
                    f"data: all ranks must have the same rows, found {name} {here}, on rank 0 {there}"
                )

    ranks.together(check)


def about_files(file: TokenFile) -> list[str]:
    """A sentence for each file that has rows other than plain text, or from which rows were left out."""
    lines = list(file.notes)
    for one in file.files:
        if one.format != PLAIN:
            lines.append(f"{one.name}: {one.documents:,} rows of {one.format}")
        if one.bare:
            lines.append(
                f"{one.name}: prompts stand without the chat template that this model has; "
                '{"prompt": [messages], "completion": [messages]} uses it'
            )
        if one.bad:
            lines.append(f"{one.name}: {one.bad:,} bad rows skipped; the first: {one.first_bad}")
        if one.empty:
            lines.append(
                f"{one.name}: {one.empty:,} rows dropped, because they have no answer to train"
            )
        if one.unread:
            lines.append(f"{one.name}: fields that are not read: {some(one.unread)}")
        if one.skipped:
            lines.append(
                f"{one.name}: fields that the chat template does not write: {some(one.skipped)}"
            )
    return lines


def pack_data(
    tokens: TokenFile,
    options: FinetuneOptions,
    say: Say = lambda line: None,
    held: TokenFile | None = None,
) -> tuple[PackedRows, PackedRows]:
    """Pack the training and the held-out rows. Says how many documents, tokens and rows there are.

    Without a file `held`, documents of `tokens` are held out.

    Raises:
        DataError: there is nothing to train on.
    """
    spans = truncated(tokens, tokens.spans, options.seq_len)
    fraction = 0 if held else options.eval_fraction
    once, held_spans, how = hold_out(tokens, fraction, options.seed, spans)
    train_spans = weighted(tokens, once, options.data_weights, options.seed)
    if held is not None:
        held_spans = truncated(held, held.spans, options.seq_len)
        how = f"{len(held_spans):,} documents of eval_data held out"
        trained = spans[np.unique(documents_of(tokens, train_spans))]
        if twice := repeated(tokens, trained, held, held_spans):
            say(f"held-out data: {twice:,} of its {len(held_spans):,} documents are trained, too")
    for line in _about_weights(tokens, once, train_spans, options):
        say(line)
    train = _pack(tokens, train_spans, options, lambda line: say(f"training data: {line}"))
    kept = _pack(held or tokens, held_spans, options, lambda line: say(f"held-out data: {line}"))
    if not len(train):
        raise DataError(
            f"nothing to train on: {len(tokens.tokens)} tokens in {len(tokens.spans)} documents"
        )
    say(
        f"{len(tokens.tokens):,} tokens in {len(tokens.spans):,} documents; {how}; "
        f"{len(train):,} sequences of {options.seq_len} to train on, {100 * train.fill:.1f} % full"
    )
    if train.trained is not None:
        say(
            f"loss on {train.targets:,} of the {train.inputs:,} tokens of an epoch, those of answers"
        )
    if split := train.split_documents + kept.split_documents:
        say(f"{split:,} documents are longer than seq_len {options.seq_len} and were split")
    return train, kept


def _about_weights(
    file: TokenFile, once: Spans, spans: Spans, options: FinetuneOptions
) -> Iterator[str]:
    """A sentence for each entry of --data, if it has a weight."""
    for entry, weight in enumerate(options.data_weights):
        total, taken = (
            int(np.diff(kept[file.entries[documents_of(file, kept)] == entry]).sum())
            for kept in (once, spans)
        )
        yield f"data_weights: {weight:g} of {options.data[entry]} is {taken:,} tokens an epoch, of {total:,}"


def _pack(file: TokenFile, spans: Spans, options: FinetuneOptions, say: Say) -> PackedRows:
    documents = documents_of(file, spans)
    cut = int((file.whole[documents] & (spans[:, 1] < file.spans[documents, 1])).sum())
    rows = PackedRows(file.tokens, spans, options.seq_len, trained=file.trained)
    if cut:
        say(f"{cut:,} documents are longer than seq_len {options.seq_len} and were truncated")
    if rows.untrained_pieces:
        say(
            f"{rows.untrained_pieces:,} of them were dropped, because their answers begin after that"
        )
    return rows
