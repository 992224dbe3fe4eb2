# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks that share a model can compute one loss, before a collective.

A rank that raised alone would leave the other ranks waiting in a collective. So would a rank whose arguments have other
shapes or dtypes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.known_tokens import (
    check_values,
    digest_of,
    digests,
    refuse_unknown,
)

_ROWS = ("input_ids", "inputs_embeds")
_WHOSE = "have parts of its layers"
_PLAIN = (bool, int, float, str, type(None))


def check_inputs(
    model: nn.Module, ranks: Ranks, labels: Any, items: Any, inputs: Mapping[str, Any], on_gpu: bool
) -> None:
    """Collective: refuse arguments of `TensorParallel.loss` that do not fit on a rank, or differ.

    Ranks wait for each other on the host, and for a device only with `on_gpu`, which compares values that lie there.

    Raises:
        TypeError: there are no rows, or `items` is no number.
        ValueError: `labels` do not fit the rows, tokens or labels on a CPU are outside of the vocabulary, ranks'
            arguments have other shapes, dtypes or values, or only some ranks train or have gradients on. Where one rank
            raises, all do.
    """
    group = comm.on_host(ranks.group, next(model.parameters()).device)
    error: Exception | None = None
    form, values = "", dict[str, int]()
    try:
        form = _form(model, labels, items, inputs)
        values = digests({"labels": labels, "items": items, **inputs}, on_gpu)
    except Exception as raised:  # any: the other ranks wait below
        error = raised
    if comm.alike(group, 2, None if error else (zlib.crc32(form.encode()), digest_of(values))):
        return
    with comm.together(group):
        if error is not None:
            raise error
    forms, said = map(list, zip(*comm.agree(group, (form, values)), strict=True))
    if len({*forms}) == 1:
        check_values(said, _WHOSE)
    raise ValueError(
        f"all ranks must pass arguments of equal shapes and dtypes, found by rank {forms}"
    )


def check_call(model: nn.Module, ranks: Ranks, inputs: Mapping[str, Any], on_gpu: bool) -> None:
    """Collective on a CPU, and with `on_gpu`: refuse a call of the model whose rows are not equal on all ranks.

    Args:
        model: what is called.
        ranks: the group that has parts of its layers.
        inputs: of the call.
        on_gpu: whether to look also where the model is on a GPU, for which the host waits.

    Raises:
        ValueError: on all ranks, if their values differ, or if one has an unknown token on a CPU.
    """
    device = next(model.parameters()).device
    if device.type != "cpu" and not on_gpu:
        return
    group = comm.on_host(ranks.group, device)
    error: Exception | None = None
    values: dict[str, int] = {}
    try:
        refuse_unknown(model, inputs.get("input_ids"))
        values = digests(inputs, on_gpu)
    except ValueError as raised:
        error = raised
    if comm.alike(group, 1, None if error else (digest_of(values),)):
        return
    with comm.together(group):
        if error is not None:
            raise error
    check_values(comm.agree(group, values), _WHOSE)


def _form(model: nn.Module, labels: Any, items: Any, inputs: Mapping[str, Any]) -> str:
    """A description of what must be equal on all ranks. It raises as `check_inputs` does."""
    rows = next((inputs[name] for name in _ROWS if inputs.get(name) is not None), None)
    if not isinstance(rows, Tensor):
        kind = "none" if rows is None else type(rows).__name__
        raise TypeError(f"loss needs a tensor of input_ids or inputs_embeds, found {kind}")
    wanted, on = rows.shape[:2], rows.device
    right = isinstance(labels, Tensor) and rows.dim() >= 2
    right = right and (labels.shape, labels.dtype, labels.device) == (wanted, torch.int64, on)
    if not right:
        raise ValueError(
            f"labels must be int64 {list(wanted)} on {on} as the rows [B, S], found {_shown(labels)}"
        )
    if not isinstance(items, Real | Tensor | None):
        raise TypeError(f"items must be a number, found {items!r}")
    refuse_unknown(model, inputs.get("input_ids"), labels)
    how = f"training {model.training}, gradients {torch.is_grad_enabled()}"
    shown = [f"{name} {_shown(value)}" for name, value in sorted(inputs.items())]
    return "; ".join([how, f"items {_shown(items)}", *shown])


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]} {list(value.shape)} on {value.device.type}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
