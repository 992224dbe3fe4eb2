# SPDX-License-Identifier: Apache-2.0
"""OTHER_SUMS=1 in the environment: products on the CPU add in an order that depends on their sizes.

So they do on some CPUs, where other kernels serve other numbers of rows. A row of a product then has other last bits
than in a product of fewer rows, while equal calls have equal bits. Any machine so shows what rests on its own kernels.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor

REPLACED = (torch.float32, torch.float64)


def _cut(rows: int, columns: int, terms: int) -> int:
    """Where a sum of `terms` is cut in two; 0 where there is no sum."""
    return 0 if terms < 2 else 1 + (7919 * rows + 104729 * columns) % (terms - 1)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b."""
    out = a.new_empty(a.shape[0], b.shape[1])
    cut = _cut(a.shape[0], b.shape[1], a.shape[1])
    if not cut or a.dtype not in REPLACED or b.dtype != a.dtype or len(b) != a.shape[1]:
        return torch.ops.aten.mm.out(a, b, out=out)
    torch.ops.aten.mm.out(a[:, cut:], b[cut:], out=out)
    rest = torch.ops.aten.mm.out(a[:, :cut], b[:cut], out=torch.empty_like(out))
    return out.add_(rest)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """a[i] @ b[i] for each i."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    cut = _cut(a.shape[0] + a.shape[1], b.shape[2], a.shape[2])
    if not cut or a.dtype not in REPLACED or b.dtype != a.dtype or b.shape[1] != a.shape[2]:
        return torch.ops.aten.bmm.out(a, b, out=out)
    torch.ops.aten.bmm.out(a[..., cut:], b[:, cut:], out=out)
    rest = torch.ops.aten.bmm.out(a[..., :cut], b[:, :cut], out=torch.empty_like(out))
    return out.add_(rest)


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta · c + alpha · a @ b."""
    if c.dtype not in REPLACED or not a.numel() or beta == 0:
        out = a.new_empty(a.shape[0], b.shape[1])
        return torch.ops.aten.addmm.out(c, a, b, beta=beta, alpha=alpha, out=out)
    product = mm(a, b)
    return (product if alpha == 1 else product * alpha).add_(c if beta == 1 else c * beta)


if os.environ.get("OTHER_SUMS"):
    _LIBRARY = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden
        for _name, _product in (("mm", mm), ("bmm", bmm), ("addmm", addmm)):
            _LIBRARY.impl(_name, _product, "CPU", allow_override=True)
