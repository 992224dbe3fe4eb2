# SPDX-License-Identifier: Apache-2.0
"""fp8_linear_lora and fp8_grad_input into rows of a tensor that is there: the op's bits, and nothing beside them."""

from __future__ import annotations

import sys

import pytest
import torch

from lorakernels import ops
from lorakernels.ops.fp8_grad_input import fp8_grad_input_into
from lorakernels.ops.fp8_linear_lora import fp8_linear_lora_into
from tests.ops.cases.fp8_grad_input import Grad
from tests.ops.cases.fp8_linear_lora import Linear
from tests.ops.contract import BF16, FP32, Made

BEFORE, BEHIND = 3, 5  # rows of the tensor around those that are written
SIZES = ((200, 256, 512, 16), (70, 144, 80, 0), (33, 40, 24, 3))  # rows, N, K, rank: csrc takes two


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_forward_product(
    size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    rows, n, k, rank = size
    x, weight, bias, up, *_ = Linear(n, k, rank, out=dtype)(Made(device.type, rows))
    whole = torch.full((BEFORE + rows + BEHIND, n), 7.0, device=device, dtype=dtype)
    operands = ops.fp8_linear_lora.arguments(x, weight, bias, up, dtype)
    fp8_linear_lora_into(whole[BEFORE:-BEHIND], operands)
    assert whole[BEFORE:-BEHIND].equal(ops.fp8_linear_lora(*operands))
    assert bool((whole[:BEFORE] == 7).all() and (whole[-BEHIND:] == 7).all())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_backward_product(
    size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    rows, n, k, rank = size
    dy, fp8, weight, ds, lora_A, dropout, _, split = Grad(k, n, rank, dtype=dtype)(
        Made(device.type, rows)
    )
    moved = None if dropout is None else dropout._replace(row0=1000)
    whole = torch.full((BEFORE + rows + BEHIND, k), 7.0, device=device, dtype=dtype)
    operands = ops.fp8_grad_input.arguments(dy, fp8, weight, ds, lora_A, moved, dtype, split)
    fp8_grad_input_into(whole[BEFORE:-BEHIND], operands)
    assert whole[BEFORE:-BEHIND].equal(ops.fp8_grad_input(*operands))
    assert bool((whole[:BEFORE] == 7).all() and (whole[-BEHIND:] == 7).all())


@pytest.mark.gpu
def test_csrc_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy, from the sizes that its kernels take."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("csrc's FP8 GEMMs run on Hopper")
    rows, n, k, rank = SIZES[0]
    forward = ops.fp8_linear_lora.arguments(*Linear(n, k, rank, out=BF16)(Made("cuda", rows)))
    backward = ops.fp8_grad_input.arguments(*Grad(k, n, rank)(Made("cuda", rows)))
    y, dx = (torch.empty(rows, cols, device="cuda", dtype=BF16) for cols in (n, k))
    for name in ("fp8_linear_lora", "fp8_grad_input"):
        module = sys.modules[f"lorakernels.ops.{name}"]
        monkeypatch.setattr(module, name, None)  # what a copy would come from
    fp8_linear_lora_into(y, forward)
    fp8_grad_input_into(dx, backward)
