# SPDX-License-Identifier: Apache-2.0
"""The mean loss of rows that ranks share. Arguments are whole rows; they are cut, checked and compared over the ranks.

Each rank computes the losses of its tokens, and the ranks sum them. Logits of all tokens never exist at once
(tensor/head.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.parallel.context.rows import chunks_of
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.head import IGNORE, sum_of_losses
from lorakernels.parallel.tensor.known_tokens import (
    check_values,
    digest_of,
    digests,
    refuse_unknown,
)

# inputs of transformers' models whose dimension 1 is the tokens of a row
_CUT = ("input_ids", "inputs_embeds", "position_ids")
_WHOLE = ("cu_seq_lens_q", "max_length_q")


class LossArguments(NamedTuple):
    """The arguments of `ContextParallel.loss`, for whole rows."""

    labels: Tensor
    items: Any
    inputs: dict[str, Any]


class RankInputs(NamedTuple):
    """The inputs of this rank's part of the loss.

    Attributes:
        inputs: the model's keyword arguments, for this rank's tokens.
        targets: int64 [B, S/n], the next token of each token.
        items: fp32 [], the divisor of the summed losses.
        waits: whether the host waits for the device, to check where documents begin.
    """

    inputs: dict[str, Any]
    targets: Tensor
    items: Tensor
    waits: bool


class _Total(torch.autograd.Function):
    """Sums the loss over the ranks, with the same bits on all. In backward each rank passes its gradient through."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: Any) -> Tensor:
        total = loss.clone()
        comm.all_reduce(group, total)
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        return dloss, None


def mean_loss(model: Any, group: Any, part: RankInputs) -> Tensor:
    """Collective: the mean loss over all ranks' tokens, fp32 []. `model` is a causal language model of transformers."""
    hidden = model.base_model(use_cache=False, **part.inputs).last_hidden_state
    loss = sum_of_losses(model, hidden, part.targets) / part.items
    total: Tensor = _Total.apply(loss, group)
    return total


def own_inputs(ranks: Ranks, labels: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of the `inputs` of whole rows, with positions. It raises as `ContextParallel.loss` does."""
    for name in inputs:
        if name not in (*_CUT, *_WHOLE):
            raise TypeError(f"loss takes {[*_CUT, *_WHOLE]} of whole rows, found {name}")
    rows = next((inputs[n] for n in _CUT[:2] if inputs.get(n) is not None), None)
    if rows is None:
        raise TypeError("loss needs input_ids or inputs_embeds")
    if labels is None or labels.shape != rows.shape[:2] or labels.dtype != torch.int64:
        text = None if labels is None else f"{labels.dtype} {list(labels.shape)}"
        raise ValueError(f"labels must be int64 {list(rows.shape[:2])} as the rows, found {text}")
    if labels.device != rows.device:
        raise ValueError(f"labels must be on {rows.device} as the rows, found {labels.device}")
    if inputs.get("position_ids") is None:
        plain = torch.arange(rows.shape[1], device=rows.device)[None]
        inputs = {**inputs, "position_ids": plain}
    present = {n: x for n, x in inputs.items() if x is not None}
    return {n: chunks_of(ranks, x).own(x) if n in _CUT else x for n, x in present.items()}


def targets(labels: Tensor, items: Any) -> tuple[Tensor, Tensor]:
    """(the next label of each token [B, S], the divisor of the summed losses, fp32 []), for whole rows.

    Raises:
        TypeError: `items` is no number.
    """
    if not isinstance(items, Real | Tensor | None):
        raise TypeError(f"items must be a number, found {items!r}")
    shifted = nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
    if isinstance(items, Real):  # filled in: a copy from the host would wait for the device
        items = torch.full((), float(items), dtype=torch.float32, device=labels.device)
    count = (shifted != IGNORE).sum().clamp(min=1) if items is None else items
    return shifted, torch.as_tensor(count, dtype=torch.float32, device=labels.device)


def agreed(
    model: nn.Module,
    ranks: Ranks,
    arguments: LossArguments,
    cut: Callable[[], RankInputs],
    on_gpu: bool,
) -> RankInputs:
    """Collective: the result of `cut`, if arguments are valid and equal on all ranks. They wait on the host.

    Args:
        model: the model that runs.
        ranks: the ranks that share the rows.
        arguments: this rank's arguments.
        cut: returns this rank's part of them, or raises.
        on_gpu: whether to compare tensors on a GPU, for which the host waits.

    Raises:
        ValueError: the ranks' shapes, values, modes or items differ, or another rank raised.
        Exception: any exception of `cut`.
    """
    group = comm.on_host(ranks.group, next(model.parameters()).device)
    error: Exception | None = None
    values: dict[str, int] = {}
    form: tuple[int, ...] | None = None
    how = f"training {model.training}, gradients {torch.is_grad_enabled()}, items "
    labels, items, inputs = arguments
    how += repr(items) if isinstance(items, Real) else type(items).__name__
    try:
        part = cut()
        refuse_unknown(model, inputs.get("input_ids"), labels)
        form = (*labels.shape, "cu_seq_lens_q" in part.inputs, part.waits)
        values = digests({"labels": labels, "items": items, **inputs}, on_gpu)
        form += (zlib.crc32(how.encode()), digest_of(values))
    except Exception as raised:  # any: the other ranks wait below
        error = raised
    if comm.alike(group, 6, form):
        return part
    with comm.together(group):
        if error is not None:
            raise error
    mine = form[:4] if form else None, how, values
    forms, hows, digested = zip(*comm.agree(group, mine), strict=True)
    if len({*hows}) > 1:
        raise ValueError(f"all ranks must have equal modes and items, found by rank {[*hows]}")
    if len({*forms}) == 1:
        check_values([*digested], "share rows")
    differing = [
        [*rows, "cu_seq_lens_q" if packed else "position_ids" if waits else "neither"]
        for *rows, packed, waits in forms
    ]
    raise ValueError(
        "all ranks must have equal rows [B, S], and cu_seq_lens_q and position_ids on all or on none, found by "
        f"rank {differing}"
    )
