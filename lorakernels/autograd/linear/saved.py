# SPDX-License-Identifier: Apache-2.0
"""Tensors that an autograd node saves for backward, by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

ByName = dict[str, Any]


def keep(ctx: Any, **tensors: Tensor | None) -> None:
    """`ctx.save_for_backward`, by name."""
    ctx.kept_names = tuple(tensors)
    ctx.save_for_backward(*tensors.values())


def kept(ctx: Any) -> ByName:
    """{name: tensor} that `keep` was given."""
    return dict(zip(ctx.kept_names, ctx.saved_tensors, strict=True))
