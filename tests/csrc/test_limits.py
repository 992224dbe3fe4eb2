# SPDX-License-Identifier: Apache-2.0
"""`_C.limits`: what csrc's kernels take. The ops' constants agree with it; the bindings refuse what is beyond it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lorakernels import _C
from lorakernels.numerics.groups import GROUP_ROWS
from lorakernels.ops.hardware import FP8_GEMM_MULTIPLE


def op(name: str) -> Any:
    """The module of an op, which the Op itself hides in the package."""
    return sys.modules[f"lorakernels.ops.{name}"]


def test_python_has_the_same_limits() -> None:
    quantize_lora_down, quantize_grad, lora_grad_a = map(
        op, ("quantize_lora_down", "quantize_grad", "lora_grad_a")
    )
    down, grad, grad_a = (
        _C.limits.quantize_lora_down,
        _C.limits.quantize_grad,
        _C.limits.lora_grad_a,
    )
    assert (down.rank, down.cols_multiple) == (
        quantize_lora_down.MAX_RANK,
        quantize_lora_down.MULTIPLE,
    )
    assert vars(grad) == {
        "rank": quantize_grad.MAX_RANK,
        "drawn_rank": quantize_grad.MAX_DRAWN_RANK,
        "cols_multiple": quantize_grad.MULTIPLE,
        "block_cols_multiple": quantize_grad.BLOCK_MULTIPLE,
        "projections": quantize_grad.MAX_PROJECTIONS,
        "projection_multiple": quantize_grad.PROJECTION_MULTIPLE,
    }
    assert grad_a.rank == lora_grad_a.MAX_RANK
    assert {True: grad_a.fp8_cols_multiple, False: grad_a.cols_multiple} == lora_grad_a.MULTIPLE


def test_the_choice_gives_the_fp8_gemms_nothing_beyond_their_limits() -> None:
    limits = dict(vars(_C.limits.fp8_gemm))
    assert limits.pop("group_rows") == GROUP_ROWS
    for multiple in limits.values():
        assert FP8_GEMM_MULTIPLE % multiple == 0


def test_what_is_beyond_a_limit_is_refused() -> None:
    grad, grad_a = _C.limits.quantize_grad, _C.limits.lora_grad_a
    assert _C.quantize_grad_workspace(1, grad.cols_multiple, grad.rank, True, 132) > 0
    assert _C.lora_grad_a_partial(1, grad_a.cols_multiple, grad_a.rank, 132) > 0
    for cols, rank in ((grad.cols_multiple + 1, grad.rank), (grad.cols_multiple, grad.rank + 1)):
        with pytest.raises(
            ValueError, match=f"multiple of {grad.cols_multiple}, rank at most {grad.rank}"
        ):
            _C.quantize_grad_workspace(1, cols, rank, True, 132)
    for cols, rank in (
        (grad_a.cols_multiple + 1, grad_a.rank),
        (grad_a.cols_multiple, grad_a.rank + 1),
    ):
        with pytest.raises(
            ValueError, match=f"multiple of {grad_a.cols_multiple}, rank 1 to {grad_a.rank}"
        ):
            _C.lora_grad_a_partial(1, cols, rank, 132)
