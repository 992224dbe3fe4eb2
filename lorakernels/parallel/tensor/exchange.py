# SPDX-License-Identifier: Apache-2.0
"""What the T ranks that share a linear layer send each other, and when.

    column   W_t [N/T, K], B_t [N/T, R], A whole       row   W_t [N, K/T], A_t [R, K/T], B whole

                 column                                       row
    forward      x8, s = quantize_lora_down(x, A)             x8_t, s_t = quantize_lora_down(x_t, A_t)
                 gather {x8, s}                    (1)        y = x8_t W_tᵀ + scaling · s_t Bᵀ
                 y_t = x8 W_tᵀ + scaling · s B_tᵀ + bias      sum {y, s}, then + bias           (2)
    backward     dy8_t, ds, dB_t = quantize_grad(dy_t, …)     dy8, ds, dB = quantize_grad(dy, B, s)
                 dx = dy8_t W_t + mask ⊙ (ds A)               gather {dy8, ds}                  (1)
                 sum {dx, ds}                      (2)        dx_t = dy8 W_t + mask ⊙ (ds A_t)
                 dA = dsᵀ D(x8)                    (3)        dA_t = dsᵀ D(x8_t);  sum dB       (3)

With sequence parallelism a rank has M/T of the M rows on the narrow side. Then (1) gathers rows: bytes and R-wide
factors, never a plain x or dy. (2) leaves a rank its own rows of the sum, and (3) sums over the ranks, because each saw
its own rows only. Without it, (1) and (3) do nothing, and (2) sums whole tensors.

A mask is drawn at its place in the whole x: `row0` is a rank's first row, `col0` its first column. Sums of R-wide
factors are taken in fp32, because s and ds are rounded once more than on one GPU. y and dx are summed in their dtype.

autograd/linear/linear.py calls an `OverRanks` for these steps, and projections.py implements it. Under BlockScaling (1)
gathers the scales of the rows, too. A part ends with a block, so that scales need no reduction.
"""

from __future__ import annotations

from torch import Tensor

from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.values import Scaled


def gathered(
    ranks: Ranks, part: Scaled, factor: Tensor | None, partial: Tensor | None = None
) -> tuple[Scaled, Tensor | None, Tensor | None]:
    """All rows of an operand and of its R-wide factor. `partial` travels with them, and is summed over the ranks.

    Without sequence parallelism, they are returned unchanged.
    """
    if not ranks.sequence:
        return part, factor, partial
    in_blocks = part.scale_inv is not None and part.scale_inv.dim() == 2  # [blocks, M]
    sent = [part.data, part.scale_inv.t() if in_blocks else None, factor]  # type: ignore[union-attr]
    totals = [] if partial is None else [partial]
    rows = iter(ranks.rows.gather(*(t for t in sent if t is not None), totals=totals))
    whole = part._replace(data=next(rows))
    if in_blocks:
        whole = whole._replace(scale_inv=next(rows).t().contiguous())
    return whole, None if factor is None else next(rows), next(rows, None)


def summed(
    ranks: Ranks, partial: Tensor, factor: Tensor | None = None, added: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The sums over the ranks of `partial` [M, …] + `added`, and of `factor` (s or ds) [M, R].

    The factor's sum is taken in fp32 and rounded once. With sequence parallelism the results, and `added`, have this
    rank's rows alone.
    """
    if ranks.sequence:
        return ranks.rows.sum(partial, factor, added)
    total = _reduced(ranks, partial.contiguous())
    if added is not None:
        total.add_(added)
    return total, None if factor is None else _reduced(ranks, factor.float()).to(factor.dtype)


def summed_factor(ranks: Ranks, factor: Tensor | None) -> Tensor | None:
    """`summed` of s or ds alone."""
    if factor is None:
        return None
    return summed(ranks, factor.float())[0].to(factor.dtype)


def _reduced(ranks: Ranks, partial: Tensor) -> Tensor:
    comm.all_reduce(ranks.group, partial)
    return partial


def summed_over_rows(ranks: Ranks, *partials: Tensor) -> list[Tensor]:
    """Gradients of parameters that all ranks hold, from each rank's sums over its own rows, in one exchange."""
    return ranks.rows.total(*partials) if ranks.sequence else [*partials]
