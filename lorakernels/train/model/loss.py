# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over any output head, without the logits of all tokens at once.

A plain nn.Linear goes through `linear_cross_entropy`, which keeps only dh for backward. Any other head, such as one
with adapters, is checkpointed per chunk. Its logits are computed again in backward, in fp32 for `chunk` tokens.
A head that ranks have in parts has a loss of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lorakernels import LogitChange, VocabularyHead, linear_cross_entropy
from lorakernels.train.data.packing import IGNORE


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    chunk: int,
    items: Tensor | None = None,
    fp8: tuple[Tensor, Tensor] | None = None,
    change: LogitChange | None = None,
) -> Tensor:
    """Sum of the token losses, an fp32 scalar, divided by `items` if given.

    Args:
        hidden: [n, H].
        head: the output head.
        labels: [n], with IGNORE where no token is predicted.
        chunk: number of tokens whose logits exist at the same time.
        items: scalar tensor, the divisor.
        fp8: what `quantize_head` made of a plain frozen head's weight, to multiply by in FP8.
        change: what the model does to its logits, or None.

    Raises:
        ValueError: the shapes of `hidden` and `labels` do not fit.
    """
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [n, H] and labels [n], got {tuple(hidden.shape)}, {tuple(labels.shape)}"
        )
    if isinstance(head, VocabularyHead):
        return head.loss(hidden, labels, 1 if items is None else items, chunk)
    if type(head) is nn.Linear:
        weight, scale_inv = (head.weight, None) if fp8 is None else fp8
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=head.bias,
            ignore_index=IGNORE,
            chunk=chunk,
            reduction="sum" if items is None else "mean",
            num_items=items,
            fp8=fp8 is not None,
            weight_scale_inv=scale_inv,
            change=change,
        )
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part in range(0, len(hidden), chunk):
        rows = slice(part, part + chunk)
        total = total + checkpoint(
            _head_loss, head, hidden[rows], labels[rows], change, use_reentrant=False
        )
    return total if items is None else total / items


def _head_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor, change: LogitChange | None
) -> Tensor:
    logits = changed(head(hidden).float(), change)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def changed(logits: Tensor, change: LogitChange | None) -> Tensor:
    """The logits that the model returns, computed from its head's `logits`."""
    if change is None:
        return logits
    logits = logits * change.scale
    return logits if change.cap is None else change.cap * torch.tanh(logits / change.cap)
