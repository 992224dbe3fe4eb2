# SPDX-License-Identifier: Apache-2.0
"""`_C.limits`: what csrc's kernels take. Python's copies agree with it, and the bindings refuse what is beyond it."""

from __future__ import annotations

import pytest

from lorakernels import _C
from lorakernels.kernels import ladder


def test_python_has_the_same_limits() -> None:
    down, grad, grad_a = (
        _C.limits.quantize_lora_down,
        _C.limits.quantize_grad,
        _C.limits.lora_grad_a,
    )
    assert (down.rank, down.cols_multiple) == (ladder.DOWN_RANK, ladder.DOWN_MULTIPLE)
    assert vars(grad) == {
        "rank": ladder.GRAD_RANK,
        "drawn_rank": ladder.DRAWN_RANK,
        "cols_multiple": ladder.GRAD_MULTIPLE,
        "projections": ladder.GRAD_PROJECTIONS,
        "projection_multiple": ladder.GRAD_PROJECTION_MULTIPLE,
    }
    assert grad_a.rank == ladder.GRAD_A_RANK
    assert {True: grad_a.fp8_cols_multiple, False: grad_a.cols_multiple} == ladder.GRAD_A_MULTIPLE


def test_the_ladder_gives_the_fp8_gemms_nothing_beyond_their_limits() -> None:
    for multiple in vars(_C.limits.fp8_gemm).values():
        assert ladder.FP8_GEMM_MULTIPLE % multiple == 0


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
