# SPDX-License-Identifier: Apache-2.0
"""SwiGLU at the ends of its dtypes' ranges, and its gradient; tests/ops/cases/swiglu.py has the rest."""

from __future__ import annotations

import pytest
import torch

from lorakernels import ops
from lorakernels.ops import Scaled
from tests.ops.contract import E4M3, E5M2, FP16, Made, same_bytes


def test_a_block_that_is_not_finite_keeps_its_bytes(device):
    """Its scale is 1, as of a tensor's amax; the blocks beside it keep theirs."""
    gate_up = torch.randn(2, 2 * 2100, dtype=FP16, device=device)
    gate_up[0, 5], gate_up[0, 2100 + 2060] = torch.inf, torch.nan
    gate_up[1, 2048:2100] = gate_up[1, 4148:] = 0.0
    *_, packed, scale_inv = ops.swiglu_quantize_and_pack(gate_up, None, False)
    assert scale_inv.shape == (2, 9)
    assert (scale_inv == 1.0).nonzero().tolist() == [[0, 0], [0, 8], [1, 8]]
    *_, want, _ = ops.swiglu_quantize_and_pack.by_reference(gate_up, None, False)
    assert same_bytes("packed", packed, want, E4M3).is_right()
    assert packed[0, 5] == 0x7E and packed[0, 4160] & 0x7F == 0x7F


@pytest.mark.parametrize("gate", [-1e4, -100.0, -88.5, 0.0, 100.0, 1e4])
def test_far_gates(gate, device):
    """Where e^−g overflows, silu is −0; already where σ is subnormal, below 2⁻¹²⁶, on the GPU."""
    gate_up = torch.full((1, 16), gate, device=device)
    gate_up[:, 8:] = 2.0
    act = ops.swiglu_quantize(Scaled(gate_up), None, True)[0]
    wide = torch.tensor(gate, dtype=torch.float64)
    expected = 2 * float(wide * torch.sigmoid(wide))
    assert act.tolist() == [pytest.approx([expected] * 8, rel=1e-5, abs=2 * 89 * 2.0**-126)]


@pytest.mark.parametrize("kind", ["kept", "unset"])
def test_fp16_overflows_to_inf_whose_byte_is_the_largest(kind, device):
    gate_up = torch.full((2, 16), 300.0, dtype=FP16, device=device)
    scaling = Made(device, 2).scaling(kind)
    act, a8, _ = ops.swiglu_quantize(Scaled(gate_up), scaling, True)
    assert act.isinf().all() and (a8 == 0x7E).all() and scaling.state[0, 1] == torch.inf
    assert len(scaling.state[0].unique()) == 2, "the other columns keep theirs"


def test_backward_is_the_derivative_in_float64():
    gate_up, dact = torch.randn(5, 80).double().requires_grad_(), torch.randn(5, 40)
    gate, up = gate_up.chunk(2, 1)
    (torch.nn.functional.silu(gate) * up).backward(dact.double())
    operand, ones = Scaled(gate_up.detach().float()), torch.ones(2)
    dgate_up, *_ = ops.swiglu_quantize_grad(dact, operand, ones, None, E5M2, True)
    torch.testing.assert_close(dgate_up.double(), gate_up.grad, rtol=1e-5, atol=1e-5)
