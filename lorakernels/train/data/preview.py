# SPDX-License-Identifier: Apache-2.0
"""Show one document with its loss mask."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from lorakernels.train.data.tokens import TokenFile

BEGIN, END = "⟦", "⟧"
MOST = 400  # tokens that are shown


def preview(file: TokenFile, tokenizer: Any) -> list[str]:
    """Lines that show the first document that is not plain text, its trained parts in brackets. None for plain text."""
    places = file.whole.nonzero()[0]
    if not len(places):
        return []
    start, stop = file.spans[places[0]].tolist()
    shown = min(stop, start + MOST)
    ids = file.tokens[start:shown].tolist()
    trained = (
        [True] * len(ids)
        if file.trained is None
        else file.trained[start:shown].astype(bool).tolist()
    )
    text = ""
    for learned, pairs in groupby(zip(trained, ids, strict=True), key=lambda pair: pair[0]):
        part = tokenizer.decode([token for _, token in pairs], skip_special_tokens=False)
        text += f"{BEGIN}{part}{END}" if learned else part
    rest = f" … {stop - shown:,} more tokens" if shown < stop else ""
    return [f"the first chat or completion, its trained parts in {BEGIN}{END}:", text + rest]
