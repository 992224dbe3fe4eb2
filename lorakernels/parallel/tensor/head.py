# SPDX-License-Identifier: Apache-2.0
"""The losses of some tokens, from the hidden states before a model's head. Logits of all tokens never exist at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lorakernels.autograd.loss import CHUNK, linear_cross_entropy
from lorakernels.modules.model.logits import change_of_logits
from lorakernels.parallel.tensor.vocabulary import VocabularyHead

IGNORE = -100


def sum_of_losses(model: Any, hidden: Tensor, labels: Tensor, chunk: int = CHUNK) -> Tensor:
    """The sum of the losses of a causal language model, fp32 [] (fp64 if hidden is).

    Args:
        model: of transformers.
        hidden: [..., H], after the last norm.
        labels: int64 [...], shifted; IGNORE does not count.
        chunk: number of tokens whose logits exist at the same time, with an nn.Linear as head.

    Raises:
        ValueError: the model changes its logits, and its head is neither an nn.Linear nor split over ranks.
    """
    head = model.get_output_embeddings()
    change = change_of_logits(model.config.get_text_config())
    if isinstance(head, VocabularyHead):
        return head.loss(hidden.flatten(0, 1), labels.flatten(), 1)
    if type(head) is nn.Linear:
        return linear_cross_entropy(
            hidden,
            head.weight,
            labels,
            bias=head.bias,
            ignore_index=IGNORE,
            chunk=chunk,
            reduction="sum",
            change=change,
        )
    if change is not None:
        raise ValueError(
            f"the head is a {type(head).__name__}: a model that changes its logits needs a plain nn.Linear"
        )
    logits = head(hidden).float().flatten(0, 1)
    return nn.functional.cross_entropy(
        logits, labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
