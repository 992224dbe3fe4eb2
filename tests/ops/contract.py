# SPDX-License-Identifier: Apache-2.0
"""What the tests and the benchmarks know of an op beside its code: cases, a bound, and what it refuses.

`bound` is derived once for each op, in words, beside the cases. It goes through the results of one call and says of
each what exact arithmetic gives and how far off the op's arithmetic may be. tests/ops/test_contract.py runs every
battery over every op; benchmarks/ops does not time what is beyond its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lorakernels.numerics.dropout import drops
from lorakernels.numerics.fp8 import quantize, scale_that_tells
from lorakernels.ops import Dropout, Groups, Scaled, Scaling, Weight
from lorakernels.ops.register import Op
from lorakernels.values import RowChunks

BF16, FP16, FP32, UINT8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32_UNIT = 2.0**-24  # half a step, relative
FP8_STEP = {E4M3: (2.0**-3, 2.0**-9), E5M2: (2.0**-2, 2.0**-16)}  # relative, and the least
STATES = ("kept", "unset", "eval", "none")
Arguments = tuple[Any, ...]


class Made:
    """Fresh random tensors on `device`, of M = `rows` where they have rows."""

    def __init__(self, device: torch.device | str, rows: int) -> None:
        self.device, self.rows = device, rows
        self.one = torch.ones(1, device=device)

    def randn(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device)

    def fp8(self, *shape: int, dtype: torch.dtype = E4M3) -> Tensor:
        return self.randn(*shape).to(dtype).view(UINT8)

    def scales(self, *shape: int) -> Tensor:
        """Of blocks: from 1/4 to 4, so that a scale of another block is far off."""
        return 4.0 ** (2 * self.rand(*shape) - 1)

    def dropout(self, p: float = 0.3, row0: int = 0, col0: int = 0) -> Dropout:
        slot = torch.tensor([2**40 + 77, 2**33 + 5], device=self.device)
        return Dropout(slot, p, 3, row0, col0)

    def groups(self) -> tuple[Groups, list[tuple[int, slice, slice]]]:
        """Groups that take all rows, and of each block of 128 its group, its rows, and those that are the group's.

        Of three groups the second has no row. The others end inside of their last block. M is a multiple of 128.
        """
        blocks = self.rows // 128
        counts = [128 * (blocks - 1) - 28 if blocks > 1 else 0, 0, 77 if blocks else 0]
        starts, group_of = [], list[int]()
        for g, count in enumerate(counts):
            starts.append(128 * len(group_of))
            group_of += [g] * -(-count // 128)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        made = (
            torch.tensor(t, dtype=torch.int32, device=self.device) for t in (group_of, starts, ends)
        )
        found = [
            (
                g,
                slice(128 * i, 128 * i + 128),
                slice(128 * i, max(128 * i, min(ends[g], 128 * i + 128))),
            )
            for i, g in enumerate(group_of)
        ]
        return Groups(*made), found

    def scaling(self, kind: str = "kept") -> Scaling | None:
        """By column 1 of a state: "kept", a scale that saturates some; "unset", 0; "eval"; "none"."""
        if kind == "none":
            return None
        state = torch.zeros(4, 3, device=self.device)
        state[-1] = torch.tensor([7.0, 0.0 if kind == "unset" else 211.7, 5.0])
        state[0] = 1e6 if kind == "unset" else 0.25  # above every amax, and below
        return Scaling(state, 1, kind != "eval")


class Case(NamedTuple):
    """Arguments of an op.

    Attributes:
        make: makes them anew, of a `Made` that has M.
        rows: M.
        why_not: part of the reason why the first implementation does not take them on a Hopper GPU; None: it does.
        is_traced: whether torch.library's opcheck and torch.compile judge it. None: where the first implementation
            takes it, or the base is plain. What else goes through PyTorch mostly looks the same to a trace. opcheck
            cannot judge NaN among the results.
    """

    make: Callable[[Made], Arguments]
    rows: int = 7
    why_not: str | None = None
    is_traced: bool | None = None

    def arguments(self, device: torch.device | str, rows: int | None = None) -> Arguments:
        return self.make(Made(device, self.rows if rows is None else rows))


def over_chunks(arguments: Arguments, chunks: RowChunks, row0: int = 5) -> Arguments:
    """`arguments` of a rank with chunks of rows; () where no element is dropped, or a mask is drawn already."""

    def of(x: Any) -> Any:
        return x._replace(chunks=chunks, row0=row0) if isinstance(x, Dropout) else x

    masks = [x for x in arguments if isinstance(x, Dropout)]
    if not any(drops(x) and x.dropped is None for x in masks):
        return ()
    return tuple(map(of, arguments))


class Call(NamedTuple):
    """A call of an op that is over.

    Attributes:
        before, after: its arguments, which it may have written to.
        results: the tensors that it returned.
        roundings: how often a result may be rounded: once by a kernel of ours, more often by PyTorch's one by one.
    """

    before: Arguments
    after: Arguments
    results: tuple[Tensor, ...]
    roundings: int = 1


class Checked(NamedTuple):
    """A tensor that a call left, what it is in exact arithmetic, and how far off it may be; None: not at all."""

    name: str
    found: Tensor
    exact: Tensor
    allowed: Tensor | None = None

    def is_right(self) -> bool:
        found, exact = self.found, self.exact
        if found.shape != exact.shape or (self.allowed is None and found.dtype != exact.dtype):
            return False
        return not self.wrong().any()

    def wrong(self) -> Tensor:
        """By element. NaN is where it has to be, and so are numbers that the dtype turns into an inf.

        How far off is asked by a finite bound alone: every number is within inf of an inf.
        """
        found, exact = self.found, self.exact
        fine = (found == exact.to(found.dtype)) | (found.isnan() & exact.isnan())
        if self.allowed is not None:
            near = (found.double() - exact).abs() <= self.allowed
            fine |= near & self.allowed.isfinite()
        return ~fine

    def told_by_a_kernel(self, of_scale: bool) -> Checked:
        """What a GPU's kernel may make of an operand that is not finite: a NaN, where float64 has an inf.

        Kernels multiply zeros beside the operand, too, and 0 · inf is NaN. A zero may be NaN only `of_scale`, where the
        operand is a scale: it is multiplied before a sum, or after it. An amax and GradScaler see NaN as they see an
        inf. Nothing else is allowed: no finite number where float64 has none, and what is finite there is right.
        """
        found, exact = self.found, self.exact
        if found.shape != exact.shape or not exact.is_floating_point():
            return self
        may_be_nan = exact.isinf() | (exact == 0) if of_scale else exact.isinf()
        return self._replace(exact=exact.masked_fill(found.isnan() & may_be_nan, torch.nan))


Bound = Callable[[Call], Iterator[Checked]]


class Refusal(NamedTuple):
    """What an op refuses: arguments that differ from those of its refusals, the error, a pattern of its message."""

    change: Mapping[str, Any]
    error: type[Exception]
    message: str


class Large(NamedTuple):
    """A call on more than 2³¹ elements whose last row alone is not zero, and the call on that row alone."""

    arguments: Arguments
    last: Arguments


@dataclass(frozen=True)
class Contract:
    """An op and what is known of it.

    Attributes:
        cases: for every battery: few elements, with and without the optional values.
        bound: of every result of a call.
        shapes: for the bound alone: the edges of the kernels.
        valid: arguments by name that are taken, from which `refusals` differ.
        large: makes a `Large` on a device; None where no kernel of ours counts elements of a large tensor.
    """

    op: Op[..., Any, Any]
    cases: Mapping[str, Case]
    bound: Bound
    shapes: Mapping[str, Case] = field(default_factory=dict)
    valid: Mapping[str, Any] = field(default_factory=dict)
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    large: Callable[[torch.device | str], Large] | None = None


def tensors(*trees: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def cloned(arguments: Arguments) -> Arguments:
    """Copies with the same strides and alignment."""
    return tree_map_only(Tensor, _cloned, arguments)


def _cloned(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor.clone()
    memory = tensor.untyped_storage().clone()
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return tensor.new_empty(0).set_(memory, *place)  # type: ignore[call-overload]


def fault(bound: Bound, call: Call) -> str:
    """Names what is wrong first in a call, "" if nothing is."""
    return next((each.name for each in bound(call) if not each.is_right()), "")


def same(name: str, found: Tensor, expected: Tensor) -> Checked:
    """The same bits, but for which NaN it is and the sign of zero."""
    return Checked(name, found, expected)


def same_bytes(name: str, found: Tensor, expected: Tensor, fp8: torch.dtype) -> Checked:
    """FP8 bytes, a NaN's being any: its sign is the GPU's to choose."""
    return Checked(name, found.view(fp8).float(), expected.view(fp8).float())


def near(
    name: str,
    found: Tensor,
    exact: Tensor,
    size: Tensor,
    fp32: float | Tensor,
    again: float = 0.0,
    coarse: float = 0.0,
) -> Checked:
    """One rounding to found's dtype at the store, and on the way `fp32` roundings of fp32, each of at most `size`.

    `size` is the sum of the magnitudes of what was added up. Further roundings, to 16 bits, add `again` relative to the
    result where it is rounded anew, and `coarse` relative to `size` where operands or terms are.
    """
    info = torch.finfo(found.dtype)
    allowed = (0.5 * info.eps + again) * exact.abs() + (fp32 * FP32_UNIT + coarse) * size
    return Checked(name, found, exact, allowed + info.smallest_normal * info.eps)


def rounded_again(call: Call, dtype: torch.dtype) -> float:
    """The roundings to `dtype` beyond the one at the store."""
    return (call.roundings - 1) * torch.finfo(dtype).eps / 2


def quantized(
    name: str,
    x: Tensor,
    found: tuple[Tensor, Tensor],
    scalings: tuple[Any, Any],
    fp8: torch.dtype,
    tells: bool = False,
) -> Iterator[Checked]:
    """x's bytes, scale_inv and the FP8 state, bit for bit: x is as it was stored, the state before and after.

    `tells`: the scale_inv of an fp16 x that is not finite everywhere is NaN.
    """
    before, after = scalings
    if before is not None:
        before = before._replace(state=before.state.clone())
    bytes_, scale_inv = quantize(x, before, fp8)
    yield same_bytes(name, found[0], bytes_, fp8)
    scale_inv = scale_that_tells(x, scale_inv) if tells else scale_inv
    yield same("scale_inv", found[1], scale_inv)
    if before is not None:  # the amax is in row 0 of its column, and nothing else is new
        yield same("state", after.state, before.state)


def quantized_in_blocks(
    name: str, x: Tensor, found: tuple[Tensor, Tensor], fp8: torch.dtype, power_of_two: bool
) -> Iterator[Checked]:
    """Bit for bit what the recipe says of each block by itself: fp8_max / amax, rounded once, or the power below.

    x is as it was stored.
    """
    bytes_, scale_inv = found
    most = torch.finfo(fp8).max
    for number, block in enumerate(x.float().split(128, 1)):
        amax = block.abs().amax(1)
        usable = amax.isfinite() & (amax > 0)
        scale = (torch.full_like(amax, most) / amax).clamp(max=torch.finfo(FP32).max)
        scale = torch.where(usable, scale, 1.0)
        if power_of_two:
            mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
            scale = torch.ldexp(torch.ones_like(mantissa), (exponent - 1).clamp(max=126))
        columns = slice(128 * number, 128 * number + block.shape[1])
        expected = (block * scale[:, None]).clamp(-most, most).to(fp8).view(torch.uint8)
        yield same_bytes(f"{name} of block {number}", bytes_[:, columns], expected, fp8)
        inverse = torch.where(amax.isfinite(), 1 / scale, torch.nan)
        yield same(f"scale_inv of block {number}", scale_inv[number], inverse)


def near_fp8(name: str, found: tuple[Tensor, Tensor], exact: Tensor, fp8: torch.dtype) -> Checked:
    """Bytes of what was not stored: one rounding to 16 bits and one to FP8, ±max beyond its range.

    A block of 128 that is not finite has NaN for its scale_inv, and so for all its values.
    """
    bytes_, scale_inv = found
    if scale_inv.numel() == 0:
        return same(name, bytes_, bytes_.new_empty(0))
    relative, least = FP8_STEP[fp8]
    of_block = torch.zeros((), device=exact.device)
    if scale_inv.dim() == 2:
        zeros = [(block * 0).sum(1, keepdim=True).expand_as(block) for block in exact.split(128, 1)]
        exact = exact + torch.cat(zeros, 1)  # NaN in all of a block that is not finite
        scale_inv = scale_inv.t().repeat_interleave(128, 1)[:, : exact.shape[1]]
        of_block = scale_inv * 0
    scaled = (exact / scale_inv.double()).clamp(-torch.finfo(fp8).max, torch.finfo(fp8).max)
    stored = 2.0**-25 / scale_inv.double()  # half of fp16's least step
    allowed = (relative / 2 + 2.0**-7) * scaled.abs() + least + stored
    return Checked(name, bytes_.view(fp8).float() + of_block, scaled, allowed)


def wide(operand: Scaled | Weight, fp8: torch.dtype = E4M3) -> Tensor:
    """An operand's values in float64; a scale is one number, one for each row, or one for each block of 128."""
    data, scale_inv = operand
    if scale_inv is None:
        return data.double()
    if scale_inv.dim() != 2:
        return data.view(fp8).double() * scale_inv.double().view(-1, 1)
    rows, cols = (torch.arange(size, device=data.device) // 128 for size in data.shape)
    of_rows = scale_inv[rows] if isinstance(operand, Weight) else scale_inv.t()
    return data.view(fp8).double() * of_rows.double()[:, cols]


def blocks_of(size: int) -> int:
    return -(-size // 128)


def near_gemm(
    call: Call,
    factors: tuple[Tensor, Tensor],
    exact: Tensor,
    size: Tensor,
    depth: int,
    splits: bool,
) -> Checked:
    """y or dx, the product of the FP8 `factors`: one rounding at the store, and fp32 sums of `depth` products.

    An addition of 32 products on Hopper's FP8 tensor cores keeps 13 bits below the largest term (DeepSeek-V3 report,
    3.3.2, found 14), so that four lose 2⁻¹¹ of the largest sum at most. As many times that are lost as there are 128s
    in the depth, or in the parts of 512 that `splits` adds in fp32.

    Beside an outlier the products themselves are cut off, each by 2⁻¹³ of the largest at most. Their signs differ, so
    that √depth of these cuts add up, and twice as many at the tail.
    """
    found = call.results[0]
    coarse = rounded_again(call, BF16)
    scale_inv = call.before[0].scale_inv
    if scale_inv is not None and scale_inv.dim() == 2:
        return near_block_gemm(found, exact, size, depth, coarse)
    checked = near("y", found, exact, size, depth + 4, coarse=coarse)
    of_fp8 = call.before[0].scale_inv is not None and found.is_cuda
    if of_fp8 and exact.numel() and checked.allowed is not None:
        of_sums, of_rows, of_cols = (
            t.abs().nan_to_num(0.0, posinf=0.0) for t in (exact, factors[0], factors[1])
        )
        parts = max(1.0, (min(depth, 512) if splits else depth) / 128)
        product = of_rows.amax(1, keepdim=True) * of_cols.amax(0)
        lost = 2.0**-11 * parts * of_sums.max() + 2.0**-12 * depth**0.5 * product
        return checked._replace(allowed=checked.allowed + lost)
    return checked


def near_block_gemm(
    found: Tensor, exact: Tensor, size: Tensor, depth: int, coarse: float
) -> Checked:
    """One rounding at the store, and fp32 sums of `depth` products in blocks.

    On a GPU each block's sum of 128 products stays on the FP8 tensor cores, which keep 13 bits below the largest term
    (DeepSeek-V3 report, 3.3.2, found 14). Four additions of 32 products lose 2⁻¹¹ of the largest sum of a block at
    most, and the magnitudes of a block's products bound that. `size` is their sum over all blocks. A cut product loses
    2⁻¹³ of the largest of its block, which is within the same magnitudes, for each of 128.

    PyTorch's way rounds both operands to 16 bits, which `coarse` has where a kernel of ours comes before it.
    """
    lost = 2.0**-10 if found.is_cuda else 0.0
    return near("y", found, exact, size, depth + 4, coarse=coarse + lost)
