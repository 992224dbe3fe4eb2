# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with the quantization of its result, and its gradient with the quantization of that.

    act = silu(gate) ⊙ up          silu(g) = g σ(g)          a8 = sat(act · scale)
    dup = dact ⊙ silu(gate)        dgate = dact ⊙ up ⊙ σ (1 + gate (1 − σ))
    dgate_up = dgate · m₀ | dup · m₁          d8 = sat(dgate_up · scale)

gate_up = gate | up and dgate_up are [M, 2F], act and dact [M, F]. a8 [M, F] is e4m3 bytes, d8 [M, 2F] bytes, m fp32
[2]. gate_up is in bf16, fp16 or fp32, or in e4m3 with scales of its own (numerics/gate_up.py). The arithmetic is
fp32's, with one rounding when a result is stored. The quantized values are those of the result as stored, kept or
not.

Each way is one kernel (kernels/triton/swiglu.py), which reads its operands once and writes the requested results.
Forward in bf16 moves 5MF bytes for a8 alone, 7MF with gate_up's own bytes as well and 3MF from such bytes. An
activation, a product and a quantization apart move 13MF. Backward moves 8MF bytes for d8 alone, 6MF from bytes. A
second kernel in front takes the amax where the state has no scale yet, and in evaluation. Blocks of 128 get their
scales in the same pass. Blocks of the gradient need a pass of their own unless F is a multiple of 128.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.numerics.blocks import BLOCK, quantize_by
from lorakernels.numerics.fp8 import E4M3, scale_that_tells
from lorakernels.numerics.gate_up import halves, packed, packed_scales
from lorakernels.ops import checks
from lorakernels.ops.hardware import FLOATS, chosen_layer_kernel, why_not_layer_kernel
from lorakernels.ops.quantize_blocks import QuantizeBlocks
from lorakernels.ops.quantize_blocks import by_triton as quantize_blocks
from lorakernels.ops.register import Implementation, Op, define, empty, fake_quantized
from lorakernels.values import Scaled, Scaling

Results = tuple[Tensor, Tensor, Tensor]
Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Swiglu(NamedTuple):
    """gate_up is [M, 2F], plain, or the bytes that `swiglu_quantize_and_pack` returns, whose act is in `out_dtype`.

    `keep`: act is a result, too. `power_of_two`, given without a scaling, has scale_inv [⌈F/128⌉, M] for each 1 × 128
    of act, as `quantize_blocks` has it.
    """

    gate_up: Scaled
    scaling: Scaling | None
    keep: bool
    out_dtype: torch.dtype | None = None
    power_of_two: bool | None = None


def reference(a: Swiglu) -> Results:
    """(act [M, F] or empty unless `keep`, a8 [M, F] and scale_inv [1] or empty without a scaling).

    act is in the dtype of a plain gate_up.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    gate, up = halves(a.gate_up)
    dtype = _dtype_of_act(a.gate_up, a.out_dtype)
    act = (torch.nn.functional.silu(gate) * up).to(dtype).contiguous()
    a8, scale_inv = quantize_by(act, a.scaling, E4M3, a.power_of_two)
    return act if a.keep else act.new_empty(0), a8, scale_inv


def _dtype_of_act(gate_up: Scaled, out_dtype: torch.dtype | None) -> torch.dtype:
    if gate_up.scale_inv is None:
        return gate_up.data.dtype
    assert out_dtype is not None
    return out_dtype


def fake(a: Swiglu) -> Results:
    gate_up = a.gate_up
    rows, cols = gate_up.data.shape
    act = empty(gate_up.data, rows, cols // 2, dtype=_dtype_of_act(gate_up, a.out_dtype))
    return act if a.keep else empty(act, 0), *fake_quantized(act, a.scaling, a.power_of_two)


def check(a: Swiglu) -> None:
    """TypeError or ValueError unless gate_up is [M, 2F], plain, or e4m3 bytes with their scales and an out_dtype."""
    gate_up = a.gate_up
    _check_columns(gate_up.data)
    checks.state(a.scaling, gate_up.data.device)
    checks.one_recipe(a.scaling, a.power_of_two)
    _check_dtypes(gate_up, a.out_dtype)


def _check_columns(gate_up: Tensor) -> None:
    checks.matrix("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have 2 F columns, found {gate_up.shape[1]}")


def _check_dtypes(gate_up: Scaled, out_dtype: torch.dtype | None) -> None:
    data, scale_inv = gate_up
    if scale_inv is None:
        checks.floats("gate_up", data)
        if out_dtype not in (None, data.dtype):
            raise TypeError(f"out_dtype must be gate_up's {data.dtype}, found {out_dtype}")
        return
    if data.dtype != torch.uint8:
        raise TypeError(
            f"gate_up must be uint8, e4m3 bytes, where it has a scale_inv, found {data.dtype}"
        )
    _check_scales(scale_inv, data)
    if out_dtype not in FLOATS:
        raise TypeError(
            f"out_dtype must be float32, bfloat16 or float16 for e4m3 bytes, found {out_dtype}"
        )


def _check_scales(scale_inv: Tensor, gate_up: Tensor) -> None:
    expected = packed_scales(*gate_up.shape)
    if scale_inv.shape != expected or scale_inv.device != gate_up.device:
        raise ValueError(
            f"gate_up_scale_inv must be {list(expected)} on {gate_up.device}, "
            f"found {list(scale_inv.shape)} on {scale_inv.device}"
        )
    if scale_inv.dtype != torch.float32:
        raise TypeError(f"gate_up_scale_inv must be torch.float32, found {scale_inv.dtype}")


def why_not_triton(a: Swiglu) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_layer_kernel(gate_up=a.gate_up.data, gate_up_scale_inv=a.gate_up.scale_inv)


def by_triton(a: Swiglu) -> Results:
    """One read of gate_up. act is within fp32's rounding of the reference's; a8 is act's, bit for bit."""
    from lorakernels.kernels.triton import swiglu

    with torch.cuda.device(a.gate_up.data.device):
        dtype = _dtype_of_act(a.gate_up, a.out_dtype)
        return swiglu.swiglu_quantize(a.gate_up, a.scaling, a.keep, dtype, a.power_of_two)


chosen = partial(chosen_layer_kernel, "one read")

swiglu_quantize = define(
    Op(
        "swiglu_quantize",
        Swiglu,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        chosen,
    ),
    "(Tensor gate_up, Tensor? gate_up_scale_inv, Tensor(a2!)? state, SymInt column, bool delayed, bool keep,"
    " ScalarType? out_dtype=None, bool? power_of_two=None) -> (Tensor, Tensor, Tensor)",
)


class SwigluAndPack(NamedTuple):
    """gate_up is [M, 2F], plain; the rest as in `Swiglu`."""

    gate_up: Tensor
    scaling: Scaling | None
    keep: bool
    power_of_two: bool | None = None


def reference_and_pack(a: SwigluAndPack) -> Packed:
    """What `swiglu_quantize` returns of a plain gate_up, and gate_up in e4m3: bytes [M, 2F] and their scale_inv.

    scale_inv is fp32 [M, ⌈F / 256⌉]: one for 256 columns of a row of gate and of up.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    return *reference(_alone(a)), *packed(a.gate_up)


def _alone(a: SwigluAndPack) -> Swiglu:
    return Swiglu(Scaled(a.gate_up), a.scaling, a.keep, None, a.power_of_two)


def fake_and_pack(a: SwigluAndPack) -> Packed:
    gate_up = a.gate_up
    bytes_ = empty(gate_up, *gate_up.shape, dtype=torch.uint8)
    scale_inv = empty(gate_up, *packed_scales(*gate_up.shape), dtype=torch.float32)
    return *fake(_alone(a)), bytes_, scale_inv


def check_and_pack(a: SwigluAndPack) -> None:
    """TypeError or ValueError unless gate_up is a plain [M, 2F]."""
    check(_alone(a))


def why_not_triton_and_pack(a: SwigluAndPack) -> str | None:
    """None if Triton's kernel takes this tensor; otherwise the reason why not."""
    return why_not_layer_kernel(gate_up=a.gate_up)


def by_triton_and_pack(a: SwigluAndPack) -> Packed:
    """As `by_triton`; gate_up's bytes are the reference's, bit for bit."""
    from lorakernels.kernels.triton import swiglu

    with torch.cuda.device(a.gate_up.device):
        return swiglu.swiglu_quantize_and_pack(*a)


swiglu_quantize_and_pack = define(
    Op(
        "swiglu_quantize_and_pack",
        SwigluAndPack,
        reference_and_pack,
        fake_and_pack,
        check_and_pack,
        (
            Implementation("triton", by_triton_and_pack, why_not_triton_and_pack),
            Implementation("torch", reference_and_pack),
        ),
    ),
    "(Tensor gate_up, Tensor(a1!)? state, SymInt column, bool delayed, bool keep, bool? power_of_two=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


class SwigluGrad(NamedTuple):
    """dact is [M, F], gate_up as in `Swiglu`, multiplier fp32 [2]. `keep`: dgate_up is a result, too.

    `power_of_two`, given without a scaling, has scale_inv [⌈2F/128⌉, M] for each 1 × 128.
    """

    dact: Tensor
    gate_up: Scaled
    multiplier: Tensor
    scaling: Scaling | None
    fp8_dtype: torch.dtype
    keep: bool
    power_of_two: bool | None = None


def reference_grad(a: SwigluGrad) -> Results:
    """(dgate_up [M, 2F] or empty unless `keep`, d8 [M, 2F] and scale_inv [1] or empty without a scaling).

    dgate_up is in dact's dtype.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check_grad(a)
    dact = a.dact
    gate, up = halves(a.gate_up)
    wide, sigmoid = dact.float(), torch.sigmoid(gate)
    dgate = wide * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = wide * (gate * sigmoid)
    dgate_up = torch.cat((dgate * a.multiplier[0], dup * a.multiplier[1]), 1).to(dact.dtype)
    d8, scale_inv = quantize_by(dgate_up, a.scaling, a.fp8_dtype, a.power_of_two)
    if a.power_of_two is None:  # else each block shows it by itself
        scale_inv = scale_that_tells(dgate_up, scale_inv)
    return dgate_up if a.keep else dact.new_empty(0), d8, scale_inv


def fake_grad(a: SwigluGrad) -> Results:
    dgate_up = empty(a.dact, *a.gate_up.data.shape)
    quantized = fake_quantized(dgate_up, a.scaling, a.power_of_two)
    return dgate_up if a.keep else empty(a.dact, 0), *quantized


def check_grad(a: SwigluGrad) -> None:
    """TypeError or ValueError unless dact is [M, F], gate_up as `check` takes it, and multiplier float32 [2]."""
    dact, gate_up = a.dact, a.gate_up
    checks.floats("dact", dact)
    data = gate_up.data
    if gate_up.scale_inv is None and dact.dtype != data.dtype:
        raise TypeError(f"dact must be gate_up's {data.dtype}, found {dact.dtype}")
    _check_columns(data)
    _check_dtypes(gate_up, dact.dtype)
    expected = (data.shape[0], data.shape[1] // 2)
    if dact.shape != expected or dact.device != data.device:
        raise ValueError(
            f"dact must be {expected} on {data.device}, found {tuple(dact.shape)} on {dact.device}"
        )
    checks.vector("multiplier", a.multiplier, 2, dact.device, torch.float32)
    checks.state(a.scaling, dact.device, "state_dy")
    checks.one_recipe(a.scaling, a.power_of_two)


def why_not_triton_grad(a: SwigluGrad) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    data, scale_inv = a.gate_up
    return why_not_layer_kernel(
        dact=a.dact, gate_up=data, gate_up_scale_inv=scale_inv, multiplier=a.multiplier
    )


def by_triton_grad(a: SwigluGrad) -> Results:
    """One read of each. dgate_up is within fp32's rounding of the reference's; d8 is dgate_up's, bit for bit."""
    from lorakernels.kernels.triton import swiglu

    dact, power_of_two = a.dact, a.power_of_two
    across = power_of_two is not None and dact.shape[1] % BLOCK > 0  # gate and up share a block
    with torch.cuda.device(dact.device):
        if not across:
            return swiglu.swiglu_quantize_grad(*a)
        d, *_ = swiglu.swiglu_quantize_grad(*a._replace(keep=True, power_of_two=None))
    blocks = QuantizeBlocks(d, a.fp8_dtype, bool(power_of_two))
    return d if a.keep else dact.new_empty(0), *quantize_blocks(blocks)


swiglu_quantize_grad = define(
    Op(
        "swiglu_quantize_grad",
        SwigluGrad,
        reference_grad,
        fake_grad,
        check_grad,
        (
            Implementation("triton", by_triton_grad, why_not_triton_grad),
            Implementation("torch", reference_grad),
        ),
        chosen,
    ),
    "(Tensor dact, Tensor gate_up, Tensor? gate_up_scale_inv, Tensor multiplier, Tensor(a4!)? state_dy, SymInt column,"
    " bool delayed, ScalarType fp8_dtype, bool keep, bool? power_of_two=None) -> (Tensor, Tensor, Tensor)",
    names={"state": "state_dy"},
)
