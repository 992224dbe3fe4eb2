# SPDX-License-Identifier: Apache-2.0
"""RMSNorm is Transformers', and its gradient autograd's; tests/ops/cases/rms_norm.py has the rest."""

from __future__ import annotations

import pytest
import torch

from lorakernels import ops

BF16, EPS = torch.bfloat16, 1e-5


def test_is_transformers_llama_rms_norm() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, weight = torch.randn(17, 264).to(BF16), (0.5 + torch.rand(264)).to(BF16)
    norm = modeling.LlamaRMSNorm(264, eps=EPS).to(BF16)
    norm.weight.data = weight
    assert torch.equal(ops.rms_norm_quantize(x, weight, EPS, None, True)[0], norm(x))


def test_backward_is_the_derivative_in_float64() -> None:
    x, weight = torch.randn(17, 264).double(), torch.rand(264).double() + 0.5
    dy, wide, w = torch.randn(17, 264), x.clone().requires_grad_(), weight.requires_grad_()
    rstd = (wide.square().mean(1, keepdim=True) + EPS).rsqrt()
    (w * wide * rstd).backward(dy.double())
    operands = (dy, x.float(), weight.detach().float(), rstd.detach().float().view(-1))
    dx, dweight = ops.rms_norm_backward(*operands, None, True)
    torch.testing.assert_close(dx.double(), wide.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dweight.double(), w.grad, rtol=1e-5, atol=1e-5)
