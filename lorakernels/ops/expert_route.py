# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a mixture's experts lie while these multiply them (numerics/groups.py).

The results are int32: group_of [M / 128], starts and ends [G], source and row [M], place [T, J]. Two Triton kernels
count and place; PyTorch's sort and search take some thirty.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.kernels.triton import expert_route as kernels
from lorakernels.numerics.groups import GROUP_ROWS, Routing, route, rows_of
from lorakernels.ops import checks
from lorakernels.ops.hardware import chosen_layer_kernel, why_not_layer_kernel
from lorakernels.ops.register import Implementation, Op, define
from lorakernels.values import Groups

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
MAX_EXPERTS = 1023  # for Triton, which compares a part's choices with all of them


class Route(NamedTuple):
    """chosen [T, J] has the experts of each token, int32 or int64; `experts`, their number E, stands for none."""

    chosen: Tensor
    experts: int


def reference(a: Route) -> Results:
    """(group_of, starts, ends, source, row, place).

    Raises:
        TypeError, ValueError: chosen is not a matrix of integers, or there is no expert.
    """
    check(a)
    groups, *rest = route(*a)
    return *groups, *rest  # type: ignore[return-value]


def fake(a: Route) -> Results:
    chosen, experts = a
    rows = rows_of(chosen.numel(), experts)

    def made(*shape: int) -> Tensor:
        return chosen.new_empty(shape, dtype=torch.int32)

    blocks = made(rows // GROUP_ROWS)
    return blocks, made(experts), made(experts), made(rows), made(rows), made(*chosen.shape)


def check(a: Route) -> None:
    """TypeError or ValueError unless chosen is a matrix of integers, and there are experts."""
    checks.matrix("chosen", a.chosen)
    if a.chosen.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"chosen must be int32 or int64, found {a.chosen.dtype}")
    if a.experts < 1:
        raise ValueError(f"experts must be at least 1, found {a.experts}")


def why_not_triton(a: Route) -> str | None:
    """None if Triton's kernels take these choices; otherwise the reason why not."""
    if a.experts > MAX_EXPERTS:
        return f"{a.experts} experts are more than {MAX_EXPERTS}"
    return why_not_layer_kernel(chosen=a.chosen)


def by_triton(a: Route) -> Results:
    """Two kernels. Rows of a group are in the order of the choices."""
    out = fake(a)
    kernels.route(out, *a)
    return out


expert_route = define(
    Op(
        "expert_route",
        Route,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        partial(chosen_layer_kernel, "two kernels, for experts alone"),
    ),
    "(Tensor chosen, SymInt experts) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def routing(chosen: Tensor, experts: int) -> Routing:
    """The results of `expert_route` as one value."""
    group_of, starts, ends, source, row, place = expert_route(chosen, experts)
    return Routing(Groups(group_of, starts, ends), source, row, place)
