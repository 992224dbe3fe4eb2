# SPDX-License-Identifier: Apache-2.0
"""Whether tokens and labels are of the vocabulary. A rank that raised alone would leave the others waiting.

On a CPU an embedding and a loss raise for a number that they do not know, and asking first costs no wait. On a GPU an
unknown token is a device assertion, after which the process cannot go on. Asking there lets the host wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorakernels.parallel.head import IGNORE
from lorakernels.parallel.tensor_vocabulary import VocabularyEmbedding, VocabularyHead


def vocabulary_of(model: Any) -> int:
    """How many tokens the embedding of a model of transformers knows; 0 where another rank has it."""
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if weight is None:
        return 0
    split = isinstance(embedding, VocabularyEmbedding)
    return len(weight) * (embedding.ranks.size if split else 1)


def unknown(tokens: Tensor, vocabulary: int) -> Tensor:
    """bool []: whether one of `tokens` is not in [0, vocabulary)."""
    return ((tokens < 0) | (tokens >= vocabulary)).any()


def refuse_unknown(model: Any, tokens: Any, labels: Tensor | None = None) -> None:
    """Refuse what the model's embedding or head would raise for. Nothing is read from a GPU.

    Args:
        model: a causal language model of transformers, or one rank's stages of it.
        tokens: int64 [B, S]; anything else is not looked at.
        labels: int64 [B, S] before the model's shift; IGNORE does not count. A head that is split over ranks is not
            asked: it gives NaN for a label beyond the vocabulary.

    Raises:
        ValueError: one is outside of the vocabulary.
    """
    known = vocabulary_of(model)
    if known and _can_be_read(tokens) and unknown(tokens, known):
        raise ValueError(f"input_ids must be in [0, {known}), found {_ends(tokens)}")
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or isinstance(head, VocabularyHead) or not _can_be_read(labels):
        return
    assert labels is not None
    counted = labels[:, 1:][labels[:, 1:] != IGNORE]
    if unknown(counted, len(weight)):
        raise ValueError(
            f"labels must be {IGNORE} or in [0, {len(weight)}), found {_ends(counted)}"
        )


def _can_be_read(numbers: Any) -> bool:
    """Whether these are integers that the host can read without waiting for a device."""
    is_tensor = isinstance(numbers, Tensor) and numbers.device.type == "cpu"
    return is_tensor and numbers.dtype in (torch.int64, torch.int32)


def _ends(numbers: Tensor) -> str:
    least, most = numbers.aminmax()
    return f"{int(least)} to {int(most)}"
