# SPDX-License-Identifier: Apache-2.0
"""The mean loss of rows that ranks share: what is given of whole rows, whether it fits on all ranks, and the sum.

Each rank has the losses of its own tokens. Logits of all of them never exist at once (tensor/head.py).
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

# what transformers' models take, and dimension 1 is a row's tokens
_CUT = ("input_ids", "inputs_embeds", "position_ids")
_WHOLE = ("cu_seq_lens_q", "max_length_q")


class Asked(NamedTuple):
    """`labels`, `items` and `inputs` of `ContextParallel.loss`, of whole rows."""

    labels: Tensor
    items: Any
    inputs: dict[str, Any]


class Given(NamedTuple):
    """What the loss is computed from, of this rank's tokens.

    Attributes:
        inputs: of the model.
        wanted: int64 [B, S/n], of each token the next one.
        items: fp32 [], by which the losses' sum is divided.
        looked_at: whether the host waits for the device to look at where documents begin.
    """

    inputs: dict[str, Any]
    wanted: Tensor
    items: Tensor
    looked_at: bool


class _Total(torch.autograd.Function):
    """The sum of every rank's loss, the same bits on all. Its gradient is that of this rank's."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        total = own.clone()
        comm.all_reduce(group, total)
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        return dloss, None


def mean_loss(model: Any, group: Any, given: Given) -> Tensor:
    """Collective: the mean loss over all ranks' tokens, fp32 []. `model` is a causal language model of transformers."""
    hidden = model.base_model(use_cache=False, **given.inputs).last_hidden_state
    own = sum_of_losses(model, hidden, given.wanted) / given.items
    total: Tensor = _Total.apply(own, group)
    return total


def own_inputs(ranks: Ranks, labels: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of `inputs` of whole rows, with positions. Errors are those of `ContextParallel.loss`."""
    for name in inputs:
        if name not in (*_CUT, *_WHOLE):
            raise TypeError(f"loss takes {[*_CUT, *_WHOLE]} of whole rows, found {name}")
    rows = next((inputs[n] for n in _CUT[:2] if inputs.get(n) is not None), None)
    if rows is None:
        raise TypeError("loss needs input_ids or inputs_embeds")
    if labels is None or labels.shape != rows.shape[:2] or labels.dtype != torch.int64:
        found = None if labels is None else f"{labels.dtype} {list(labels.shape)}"
        raise ValueError(f"labels must be int64 {list(rows.shape[:2])} as the rows, found {found}")
    if labels.device != rows.device:
        raise ValueError(f"labels must be on {rows.device} as the rows, found {labels.device}")
    if inputs.get("position_ids") is None:
        plain = torch.arange(rows.shape[1], device=rows.device)[None]
        inputs = {**inputs, "position_ids": plain}
    present = {n: x for n, x in inputs.items() if x is not None}
    return {n: chunks_of(ranks, x).own(x) if n in _CUT else x for n, x in present.items()}


def targets(labels: Tensor, items: Any) -> tuple[Tensor, Tensor]:
    """(labels [B, S] of each token's next one, by what the losses' sum is divided, fp32 []), of whole rows.

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
    model: nn.Module, ranks: Ranks, asked: Asked, give: Callable[[], Given], on_gpu: bool
) -> Given:
    """Collective: what `give` gives, if it is right on all ranks. They wait on the host.

    Args:
        model: what runs.
        ranks: who share the rows.
        asked: what this rank is asked for.
        give: makes this rank's part of it, or raises.
        on_gpu: whether values on a GPU are compared, for which the host waits.

    Raises:
        ValueError: ranks are asked for other shapes, values, modes or items, or another rank raised.
        Exception: what `give` raises.
    """
    group = comm.on_host(ranks.group, next(model.parameters()).device)
    error: Exception | None = None
    values: dict[str, int] = {}
    form: tuple[int, ...] | None = None
    how = f"training {model.training}, gradients {torch.is_grad_enabled()}, items "
    how += repr(asked.items) if isinstance(asked.items, Real) else type(asked.items).__name__
    try:
        given = give()
        refuse_unknown(model, asked.inputs.get("input_ids"), asked.labels)
        form = (*asked.labels.shape, "cu_seq_lens_q" in given.inputs, given.looked_at)
        values = digests({"labels": asked.labels, "items": asked.items, **asked.inputs}, on_gpu)
        form += (zlib.crc32(how.encode()), digest_of(values))
    except Exception as found:  # any: the other ranks wait below
        error = found
    if comm.alike(group, 6, form):
        return given
    with comm.together(group):
        if error is not None:
            raise error
    mine = form[:4] if form else None, how, values
    forms, hows, digested = zip(*comm.agree(group, mine), strict=True)
    if len({*hows}) > 1:
        raise ValueError(f"all ranks must have equal modes and items, found by rank {[*hows]}")
    if len({*forms}) == 1:
        check_values([*digested], "share rows")
    said = [
        [*rows, "cu_seq_lens_q" if packed else "position_ids" if places else "neither"]
        for *rows, packed, places in forms
    ]
    raise ValueError(
        "all ranks must have equal rows [B, S], and cu_seq_lens_q and position_ids on all or on none, found by "
        f"rank {said}"
    )
