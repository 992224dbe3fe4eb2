# SPDX-License-Identifier: Apache-2.0
"""swiglu_quantize, swiglu_quantize_and_pack, swiglu_quantize_grad: cases, and bounds from float64's silu."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.gate_up import PACKED_COLUMNS, halves, packed
from lorakernels.ops import Scaled
from tests.ops.contract import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    STATES,
    UINT8,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Large,
    Made,
    Refusal,
    near,
    near_fp8,
    quantized,
    quantized_in_blocks,
    rounded_again,
    same,
    same_bytes,
)


def gate_up(f: int, dtype: torch.dtype, as_bytes: bool, m: Made) -> Scaled:
    """Gates of order 4; as bytes with scales of their own."""
    plain = (4 * m.randn(m.rows, 2 * f)).to(dtype)
    if not as_bytes:
        return Scaled(plain)
    scale_inv = 0.03 + 0.02 * m.rand(m.rows, -(-f // PACKED_COLUMNS))
    columns = scale_inv.repeat_interleave(PACKED_COLUMNS, 1)[:, :f].repeat(1, 2)
    bytes_ = (plain.float() / columns).clamp(-448, 448).to(E4M3)
    return Scaled(bytes_.view(UINT8), scale_inv)


def forward(
    f: int,
    dtype: torch.dtype,
    as_bytes: bool,
    kind: str,
    keep: bool,
    m: Made,
    power: bool | None = None,
) -> Arguments:
    out_dtype = dtype if as_bytes else None
    return gate_up(f, dtype, as_bytes, m), m.scaling(kind), keep, out_dtype, power


def in_blocks(f: int, dtype: torch.dtype, as_bytes: bool, keep: bool, power: bool) -> Any:
    return partial(forward, f, dtype, as_bytes, "none", keep, power=power)


def act_of(operand: Scaled) -> tuple[Tensor, Tensor]:
    """silu(gate) · up in float64, and how many roundings of fp32 are on its way.

    e^−g is off by |g| ulp, from rounding its argument; a product, a sum, a quotient and the scales take one each.
    """
    gate, up = (t.double() for t in halves(operand))
    return gate * torch.sigmoid(gate) * up, 2 * (4 + gate.abs())


def bound(call: Call) -> Iterator[Checked]:
    """act: one rounding at the store and those of `act_of`; a8 and the amax bit for bit, given act."""
    yield from _of_act(call, call.before[0], call.results)


def _of_act(call: Call, operand: Scaled, results: tuple[Tensor, ...]) -> Iterator[Checked]:
    (_, before, keep, *_, power), after = call.before, call.after[1]
    act, *found = results
    exact, roundings = act_of(operand)
    if keep:
        more = rounded_again(call, act.dtype)
        yield near("act", act, exact, exact.abs() + FLUSHED, roundings, more)
    else:
        yield same("act", act, act.new_empty(0))
    if keep and call.roundings == 1 and power is not None:
        yield from quantized_in_blocks("a8", act, (found[0], found[1]), E4M3, power)
    elif keep and call.roundings == 1:
        yield from quantized("a8", act, (found[0], found[1]), (before, after), E4M3)
    else:
        yield near_fp8("a8", (found[0], found[1]), exact, E4M3)


FLUSHED = (
    2.0**-100
)  # the GPU takes 0 for a σ below 2⁻¹²⁶: with gate and up, far below this times 2⁻²⁴


def pack(
    f: int, dtype: torch.dtype, kind: str, keep: bool, m: Made, power: bool | None = None
) -> Arguments:
    """Blocks whose amaxes differ."""
    plain = gate_up(f, dtype, False, m).data
    plain[:, f // 2 : f] *= 3.0
    plain[:, f:] /= 5.0
    return plain, m.scaling(kind), keep, power


def bound_pack(call: Call) -> Iterator[Checked]:
    """As without bytes. Those are bit for bit by the scale of each block's amax, and within half a step of what it was.

    e4m3 has steps of 2⁻³, 2⁻⁹ at least; a scale_inv is rounded once.
    """
    plain, *of_act, bytes_, scale_inv = call.before[0], *call.results
    yield from _of_act(call, Scaled(plain), tuple(of_act))
    want, want_inv = packed(plain)
    if call.roundings == 1:
        yield same_bytes("gate_up's bytes", bytes_, want, E4M3)
        yield same("gate_up_scale_inv", scale_inv, want_inv)
    if not plain.isfinite().all():
        return
    wide = plain.double()
    least = scale_inv.double().amax(1, keepdim=True) * 2.0**-9
    allowed = wide.abs() * (2.0**-4 + 2.0**-20) + least
    yield Checked("gate_up's bytes", torch.cat(halves(Scaled(bytes_, scale_inv)), 1), wide, allowed)


def backward(
    f: int,
    dtype: torch.dtype,
    as_bytes: bool,
    kind: str,
    fp8: torch.dtype,
    keep: bool,
    m: Made,
    power: bool | None = None,
) -> Arguments:
    operand = gate_up(f, dtype, as_bytes, m)
    multiplier = torch.tensor([0.6, 1.9], device=m.device)
    return m.randn(m.rows, f, dtype=dtype), operand, multiplier, m.scaling(kind), fp8, keep, power


def grad_in_blocks(
    f: int, dtype: torch.dtype, as_bytes: bool, fp8: torch.dtype, keep: bool, power: bool
) -> Any:
    return partial(backward, f, dtype, as_bytes, "none", fp8, keep, power=power)


def bound_backward(call: Call) -> Iterator[Checked]:
    """dgate_up: one rounding at the store; e^−g is off by |g| ulp, and some ten operations take one each.

    d8 and the amax are bit for bit, given dgate_up.
    """
    (dact, operand, multiplier, before, fp8, keep, power), after = call.before, call.after[3]
    found, d8, scale_inv = call.results
    d, (gate, up) = dact.double(), (t.double() for t in halves(operand))
    sigmoid = torch.sigmoid(gate)
    columns = multiplier.double().repeat_interleave(dact.shape[1])
    dgate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    exact = torch.cat((dgate, d * (gate * sigmoid)), 1) * columns
    size = torch.cat((d * up * sigmoid * (1 + gate.abs()), d * gate * sigmoid), 1).abs() * columns
    roundings = 2 * (8 + torch.cat((gate, gate), 1).abs())
    if keep:
        more = rounded_again(call, dact.dtype)
        yield near("dgate_up", found, exact, size + FLUSHED, roundings, more)
    else:
        yield same("dgate_up", found, found.new_empty(0))
    if keep and call.roundings == 1 and power is not None:
        yield from quantized_in_blocks("d8", found, (d8, scale_inv), fp8, power)
    elif keep and call.roundings == 1:
        yield from quantized("d8", found, (d8, scale_inv), (before, after), fp8, tells=True)
    else:
        yield near_fp8("d8", (d8, scale_inv), exact, fp8)


def turned(make: Any, m: Made) -> Arguments:
    """A plain gate_up column by column."""
    return tuple(
        Scaled(a.data.t().contiguous().t()) if isinstance(a, Scaled) else a for a in make(m)
    )


def large(device: torch.device | str) -> Large:
    data = torch.zeros(65536 + 1, 2 * 28672, dtype=BF16, device=device)
    data[-1].normal_()
    made = Made(device, 1)
    calls = ((Scaled(t), made.scaling(), False, None) for t in (data, data[-1:]))
    return Large(*calls)


SIZES = [(1, 8), (3, 257), (300, 640), (33, 2048), (5, 11008)]
FORMATS = {False: "plain", True: "e4m3"}
TURNED = "gate_up must be contiguous"
BYTES = torch.ones(4, 8).byte()
FORWARD = Contract(
    ops.swiglu_quantize,
    {
        "fp8": Case(partial(forward, 12, FP32, False, "kept", True)),
        "bytes, two blocks": Case(partial(forward, 300, BF16, True, "eval", False)),
        "plain": Case(partial(forward, 12, FP16, False, "none", True)),
        "blocks": Case(in_blocks(300, FP32, False, True, False)),
        "blocks of bytes": Case(in_blocks(256, FP16, True, False, True)),
        "column by column": Case(
            partial(turned, partial(forward, 12, FP32, False, "unset", True)), why_not=TURNED, is_traced=True
        ),
    },
    bound,
    {  # every shape, dtype and state; a combination is compiled for itself
        **{
            f"{m}x{f} {FORMATS[b]}": Case(partial(forward, f, BF16, b, "unset", True), m)
            for m, f in SIZES
            for b in FORMATS
        },
        **{
            f"300x640 {dtype} {FORMATS[b]}": Case(partial(forward, 640, dtype, b, "kept", True), 300)
            for dtype in (FP16, FP32)
            for b in FORMATS
        },
        **{f"33x2048 {kind}": Case(partial(forward, 2048, BF16, False, kind, True), 33) for kind in STATES},
        **{
            f"{m}x{f} {FORMATS[b]} in blocks": Case(in_blocks(f, BF16, b, True, b), m)
            for m, f in SIZES
            for b in FORMATS
        },
        "9x1100 in blocks": Case(in_blocks(1100, FP32, False, True, True), 9),
        **{
            f"5x1100 {dtype} {FORMATS[b]} {kind}": Case(partial(forward, 1100, dtype, b, kind, True), 5)
            for dtype, kinds in ((FP32, STATES), (FP16, STATES[:1]))
            for kind in kinds
            for b in FORMATS
        },
    },
    {"gate_up": Scaled(torch.ones(4, 8)), "scaling": None, "keep": True, "out_dtype": None},
    {
        "two recipes": Refusal(
            {"scaling": Made("cpu", 1).scaling(), "power_of_two": True}, ValueError, "scaling must be None with"
        ),
        "odd columns": Refusal(
            {"gate_up": Scaled(torch.ones(4, 7))}, ValueError, "gate_up must have 2 F columns, found 7"
        ),
        "a scale for floats": Refusal(
            {"gate_up": Scaled(torch.ones(4, 8), torch.ones(4, 1))}, TypeError, "gate_up must be uint8, .*float32"
        ),
        "bytes without scales": Refusal(
            {"gate_up": Scaled(BYTES)}, TypeError, "gate_up must be .*, found torch.uint8"
        ),
        "another out_dtype": Refusal(
            {"out_dtype": BF16}, TypeError, "out_dtype must be gate_up's torch.float32, found"
        ),
        "bytes without an out_dtype": Refusal(
            {"gate_up": Scaled(BYTES, torch.ones(4, 1))},
            TypeError,
            "out_dtype must be float32, .* for e4m3 bytes, found None",
        ),
        "scales": Refusal(
            {"gate_up": Scaled(BYTES, torch.ones(2))}, ValueError, r"gate_up_scale_inv must be \[4, 1\]"
        ),
    },
    large,
)  # fmt: skip
PACK = Contract(
    ops.swiglu_quantize_and_pack,
    {
        "fp8": Case(partial(pack, 12, FP32, "kept", True)),
        "bytes only, two blocks": Case(partial(pack, 300, FP16, "none", False)),
        "blocks": Case(partial(pack, 300, FP32, "none", True, power=False)),
    },
    bound_pack,
    {
        f"{m}x{f} {dtype} {kind}": Case(partial(pack, f, dtype, kind, True), m)
        for m, f, dtype, kind in (
            (1, 8, BF16, "unset"),
            (1, 8, FP16, "none"),
            (3, 257, FP16, "kept"),
            (5, 11008, BF16, "kept"),
            (5, 1100, FP32, "unset"),
            (5, 1100, FP16, "kept"),
            (300, 640, FP32, "none"),
            (33, 2048, BF16, "eval"),
        )
    }
    | {f"{m}x{f} in blocks": Case(partial(pack, f, BF16, "none", True, power=True), m) for m, f in SIZES},
    {"gate_up": torch.ones(4, 8), "scaling": None, "keep": True},
    {"odd columns": Refusal({"gate_up": torch.ones(4, 7)}, ValueError, "2 F columns, found 7")},
)  # fmt: skip
BACKWARD = Contract(
    ops.swiglu_quantize_grad,
    {
        "fp8": Case(partial(backward, 12, BF16, False, "kept", E5M2, True)),
        "bytes, two blocks": Case(partial(backward, 300, FP32, True, "eval", E5M2, False)),
        "plain": Case(partial(backward, 12, FP16, False, "none", E5M2, True)),
        "blocks": Case(grad_in_blocks(256, FP32, False, E4M3, True, False)),
        "blocks of bytes": Case(grad_in_blocks(384, FP16, True, E5M2, False, True)),
        "a block of gate and up": Case(grad_in_blocks(200, FP32, False, E5M2, True, True)),
        "column by column": Case(
            partial(turned, partial(backward, 12, FP32, False, "unset", E4M3, True)), why_not=TURNED
        ),
    },
    bound_backward,
    {  # every shape, dtype, format and state; a combination is compiled for itself
        **{
            f"{m}x{f} {FORMATS[b]}": Case(partial(backward, f, BF16, b, "unset", E5M2, True), m)
            for m, f in SIZES
            for b in FORMATS
        },
        **{
            f"300x640 {dtype} {FORMATS[b]}": Case(partial(backward, 640, dtype, b, "kept", E4M3, True), 300)
            for dtype in (FP16, FP32)
            for b in FORMATS
        },
        **{f"33x2048 {kind}": Case(partial(backward, 2048, BF16, False, kind, E5M2, True), 33) for kind in STATES},
        **{
            f"{m}x{f} {FORMATS[b]} in blocks": Case(grad_in_blocks(f, BF16, b, E4M3 if b else E5M2, True, b), m)
            for m, f in SIZES
            for b in FORMATS
        },
        "5x1152 in blocks": Case(grad_in_blocks(1152, FP32, False, E4M3, True, False), 5),
        **{
            f"5x1100 {dtype} {FORMATS[b]} {kind}": Case(partial(backward, 1100, dtype, b, kind, fp8, True), 5)
            for dtype, kind, fp8 in (
                *((FP32, kind, E5M2) for kind in ("kept", "unset")),
                *((FP32, kind, E4M3) for kind in ("eval", "none")),
                (FP16, "kept", E5M2),
            )
            for b in FORMATS
        },
    },
    {
        "dact": torch.ones(4, 4),
        "gate_up": Scaled(torch.ones(4, 8)),
        "multiplier": torch.ones(2),
        "scaling": None,
        "fp8_dtype": E5M2,
        "keep": True,
    },
    {
        "two recipes": Refusal(
            {"scaling": Made("cpu", 1).scaling(), "power_of_two": True}, ValueError, "scaling must be None with"
        ),
        "columns of dact": Refusal({"dact": torch.ones(4, 5)}, ValueError, r"dact must be \(4, 4\) .* found \(4, 5\)"),
        "multiplier": Refusal({"multiplier": torch.ones(3)}, ValueError, r"multiplier must be \[2\] .* found \[3\]"),
        "dtype of multiplier": Refusal(
            {"multiplier": torch.ones(2).half()}, TypeError, "multiplier must be torch.float32"
        ),
        "dtype of dact": Refusal(
            {"dact": torch.ones(4, 4).half()}, TypeError, "dact must be gate_up's torch.float32, found"
        ),
    },
)  # fmt: skip
CONTRACTS = (FORWARD, PACK, BACKWARD)
