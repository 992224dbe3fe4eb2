# SPDX-License-Identifier: Apache-2.0
"""The decoder layer's ops between its GEMMs, as ops.py's: reference_layer.py on the CPU, kernels/ on CUDA."""

from __future__ import annotations

import torch

from lorakernels import checks_layer as checks
from lorakernels.define import define, empty, fake_quantized

_FP32 = torch.float32


@define("rms_norm_quantize", mutates=("state",))
def rms_norm_quantize(x, weight, eps, state, column, delayed, keep):  # type: ignore[no-untyped-def]
    normed = empty(x, *(x.shape if keep else (0,)))
    rstd = empty(x, x.shape[0], dtype=_FP32)
    return normed, *fake_quantized(x, state), rstd


@define("rms_norm_backward")
def rms_norm_backward(dnormed, x, weight, rstd, dresidual, weight_grad):  # type: ignore[no-untyped-def]
    return empty(x, *x.shape), empty(x, x.shape[1] if weight_grad else 0, dtype=_FP32)


def _swiglu_fake(  # type: ignore[no-untyped-def]
    gate_up, gate_up_scale_inv, state, column, delayed, keep, out_dtype=None
):
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    act = empty(gate_up, *shape, dtype=gate_up.dtype if gate_up_scale_inv is None else out_dtype)
    return act if keep else empty(act, 0), *fake_quantized(act, state)


swiglu_quantize = define("swiglu_quantize", mutates=("state",))(_swiglu_fake)


@define("swiglu_quantize_and_pack", mutates=("state",))
def swiglu_quantize_and_pack(gate_up, state, column, delayed, keep):  # type: ignore[no-untyped-def]
    results = _swiglu_fake(gate_up, None, state, column, delayed, keep)
    scales = checks.packed_scales(*gate_up.shape)
    packed = empty(gate_up, *gate_up.shape, dtype=torch.uint8)
    return *results, packed, empty(gate_up, *scales, dtype=_FP32)


@define("swiglu_quantize_grad", mutates=("state_dy",))
def swiglu_quantize_grad(  # type: ignore[no-untyped-def]
    dact, gate_up, gate_up_scale_inv, multiplier, state_dy, column, delayed, fp8_dtype, keep
):
    dgate_up = empty(dact, *gate_up.shape)
    return dgate_up if keep else empty(dact, 0), *fake_quantized(dgate_up, state_dy)
