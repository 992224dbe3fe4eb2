# SPDX-License-Identifier: Apache-2.0
"""Packed documents that are longer than a sliding window: the model's own masks must keep them apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lorakernels.train.errors import OptionError
from lorakernels.train.model.checks import evaluating, isolation
from lorakernels.train.model.model import decoder_and_head, window_of
from lorakernels.train.options.options import FinetuneOptions

NARROW = 4  # fewer tokens than the documents of `isolation` have


def check_windows(model: Any, options: FinetuneOptions) -> None:
    """Compute packed documents with a sliding window of `NARROW` tokens. The model is left as it was.

    Raises:
        OptionError: seq_len is above the window, and documents see each other.
    """
    decoder: Any = decoder_and_head(model)[0]
    config = decoder.config.get_text_config()
    window = window_of(config, options.seq_len)
    if window is None or not options.isolate_documents:
        return
    with _narrowed(config), evaluating(model):
        seen = isolation(model)
    if not max(seen.neighbour, seen.place) <= seen.rounding:
        raise OptionError(
            f"seq_len must be at most {window}, the model's sliding window, got {options.seq_len}: the masks that "
            f"{type(model).__name__} makes for longer rows let packed documents see each other. "
            "--no-isolate-documents takes longer rows, each causal as a whole"
        )


@contextlib.contextmanager
def _narrowed(config: Any) -> Iterator[None]:
    window, config.sliding_window = config.sliding_window, NARROW
    try:
        yield
    finally:
        config.sliding_window = window
