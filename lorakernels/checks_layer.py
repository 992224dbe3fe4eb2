# SPDX-License-Identifier: Apache-2.0
"""What the decoder layer's ops take, asked before anything is changed: TypeError or ValueError naming the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.checks import COMPUTE_DTYPES

PACKED_COLUMNS = 256  # of a row of gate and of up that share a scale in e4m3: a warp's, 8 a thread


def rms_norm(x: Tensor, weight: Tensor, state: Tensor | None) -> None:
    """x [M, K] and weight [K] of a compute dtype on one device; state float32 there."""
    _matrix("x", x)
    _floats("x", x)
    _vector("weight", weight, x.shape[1], x.device)
    _state("state", state, x.device)


def rms_norm_backward(
    dnormed: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dresidual: Tensor | None
) -> None:
    """dnormed, dresidual like x [M, K]; weight [K]; rstd float32 [M]."""
    rms_norm(x, weight, None)
    for name, tensor in (("dnormed", dnormed), ("dresidual", dresidual)):
        if tensor is not None:
            _like(name, tensor, "x", x)
    _vector("rstd", rstd, x.shape[0], x.device, torch.float32)


def swiglu(
    gate_up: Tensor,
    gate_up_scale_inv: Tensor | None,
    state: Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    """gate_up [M, 2F] of a compute dtype, or e4m3 bytes with their scales and an out_dtype. The dtype of the result."""
    _matrix("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have 2 F columns, found {gate_up.shape[1]}")
    _state("state", state, gate_up.device)
    if gate_up_scale_inv is None:
        _floats("gate_up", gate_up)
        if out_dtype not in (None, gate_up.dtype):
            raise TypeError(f"out_dtype must be gate_up's {gate_up.dtype}, found {out_dtype}")
        return gate_up.dtype
    if gate_up.dtype != torch.uint8:
        raise TypeError(
            f"gate_up must be uint8, e4m3 bytes, where it has a scale_inv, found {gate_up.dtype}"
        )
    _packed_scales(gate_up_scale_inv, gate_up)
    if out_dtype is None or out_dtype not in COMPUTE_DTYPES:
        raise TypeError(
            f"out_dtype must be float32, bfloat16 or float16 for e4m3 bytes, found {out_dtype}"
        )
    return out_dtype


def swiglu_grad(
    dact: Tensor,
    gate_up: Tensor,
    gate_up_scale_inv: Tensor | None,
    multiplier: Tensor,
    state_dy: Tensor | None,
) -> None:
    """dact [M, F] beside what `swiglu` takes; multiplier float32 [2]."""
    _floats("dact", dact)
    if gate_up_scale_inv is None and dact.dtype != gate_up.dtype:
        raise TypeError(f"dact must be gate_up's {gate_up.dtype}, found {dact.dtype}")
    swiglu(gate_up, gate_up_scale_inv, None, dact.dtype)
    expected = (gate_up.shape[0], gate_up.shape[1] // 2)
    if dact.shape != expected or dact.device != gate_up.device:
        raise ValueError(
            f"dact must be {expected} on {gate_up.device}, found {tuple(dact.shape)} on {dact.device}"
        )
    _vector("multiplier", multiplier, 2, dact.device, torch.float32)
    _state("state_dy", state_dy, dact.device)


def packed_scales(rows: int, cols: int) -> tuple[int, int]:
    """Shape of the scale_inv of gate_up's bytes [M, 2F]: one for 256 columns of a row of gate and those of up."""
    return rows, -(-(cols // 2) // PACKED_COLUMNS)


def _packed_scales(scale_inv: Tensor, gate_up: Tensor) -> None:
    expected = packed_scales(*gate_up.shape)
    if scale_inv.shape != expected or scale_inv.device != gate_up.device:
        raise ValueError(
            f"gate_up_scale_inv must be {list(expected)} on {gate_up.device}, "
            f"found {list(scale_inv.shape)} on {scale_inv.device}"
        )
    if scale_inv.dtype != torch.float32:
        raise TypeError(f"gate_up_scale_inv must be torch.float32, found {scale_inv.dtype}")


def _matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be a matrix, found {tuple(tensor.shape)}")


def _floats(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in COMPUTE_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, found {tensor.dtype}")


def _vector(
    name: str,
    tensor: Tensor,
    length: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    if tensor.shape != (length,) or tensor.device != device:
        raise ValueError(
            f"{name} must be [{length}] on {device}, found {list(tensor.shape)} on {tensor.device}"
        )
    if dtype is None:
        _floats(name, tensor)
    elif tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, found {tensor.dtype}")


def _like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    found = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if found != (tuple(other.shape), other.dtype, other.device):
        raise ValueError(
            f"{name} must be like {other_name}, {tuple(other.shape)} {other.dtype} on {other.device}, "
            f"found {found[0]} {found[1]} on {found[2]}"
        )


def _state(name: str, state: Tensor | None, device: torch.device) -> None:
    if state is not None and (
        state.dim() != 2 or state.dtype != torch.float32 or state.device != device
    ):
        raise ValueError(
            f"{name} must be float32 [history length + 1, tensors] on {device}, "
            f"found {state.dtype} {tuple(state.shape)} on {state.device}"
        )
