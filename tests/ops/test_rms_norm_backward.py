# SPDX-License-Identifier: Apache-2.0
"""rms_norm_backward against autograd of RMSNorm's formula in float64."""

from __future__ import annotations

import sys

import pytest
import torch

from lorakernels import ops
from lorakernels.kernels import tune_layer
from lorakernels.kernels.triton import rms_norm
from tests.exact import EPS as ULP
from tests.kernels.by_triton import interpret, sm90, spills

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
SHAPES = [(1, 8), (3, 257), (300, 640), (1000, 2048), (5, 5120), (2, 16384), (3, 20000)]
CASES = [
    *((m, k, BF16, BF16) for m, k in SHAPES),
    *((300, 640, *dtypes) for dtypes in ((BF16, FP32), (FP16, FP16), (FP32, BF16))),
]
INTERPRETED = [
    (m, k, dtype, has) for m, k in ((1, 8), (37, 300)) for dtype in (FP16, FP32) for has in (0, 1)
]


def inputs(m, k, dtype, weight_dtype, has_residual, device):
    """dnormed, x, weight, rstd, dresidual."""
    generator = torch.Generator().manual_seed(m + k)
    dnormed, x, residual = (
        torch.randn(m, k, generator=generator).to(dtype).to(device) for _ in range(3)
    )
    weight = (0.5 + torch.rand(k, generator=generator)).to(weight_dtype).to(device)
    rstd = (x.double().square().mean(1) + EPS).rsqrt().float()
    return dnormed, x, weight, rstd, residual if has_residual else None


def assert_right(dnormed, x, weight, rstd, dresidual, dx, dweight):
    wide, w = x.double().requires_grad_(), weight.double().requires_grad_()
    h = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt()
    (w * h).backward(dnormed.double())
    r, g, h = rstd.double().view(-1, 1), (dnormed.double() * w).detach(), h.detach()
    size = r * (g.abs() + h.abs() * (g * h).abs().mean(1, keepdim=True))
    exact = wide.grad
    if dresidual is not None:
        exact, size = exact + dresidual.double(), size + dresidual.double().abs()
    # one rounding at the store; fp32's in rstd, two products and a sum of K terms
    bound = 0.5 * ULP[x.dtype] * exact.abs() + 2.0**-20 * size + 2.0**-24
    assert dx.dtype == x.dtype and bool(((dx.double() - exact).abs() <= bound).all())
    if dweight.numel():
        terms = (dnormed.double() * h).abs().sum(0)
        assert dweight.dtype == FP32
        assert bool(((dweight.double() - w.grad).abs() <= 2.0**-20 * terms).all())


@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize(("m", "k", "dtype", "weight_dtype"), CASES, ids=str)
def test_is_the_derivative(m, k, dtype, weight_dtype, has_residual, device):
    arguments = inputs(m, k, dtype, weight_dtype, has_residual, device)
    dx, dweight = ops.rms_norm_backward(*arguments, True)
    assert_right(*arguments, dx, dweight)
    again, nothing = ops.rms_norm_backward(*arguments, False)
    assert torch.equal(dx, again) and nothing.numel() == 0
    assert torch.equal(dweight, ops.rms_norm_backward(*arguments, True)[1]), "the same every run"


def run_interpreted(m, k, dtype, has_residual):
    arguments = inputs(m, k, dtype, dtype, has_residual, "cpu")
    return rms_norm.rms_norm_backward(*arguments, True)


def test_interpreted(tmp_path):
    found = interpret(__file__, tmp_path / "dx.pt")
    for case in INTERPRETED:
        m, k, dtype, has_residual = case
        assert_right(*inputs(m, k, dtype, dtype, has_residual, "cpu"), *found[str(case)])


def test_what_no_kernel_takes_is_right_all_the_same(device):
    for m, k in ((0, 8), (2, tune_layer.MAX_NORM_COLUMNS + 1)):
        arguments = inputs(m, k, FP32, FP32, True, device)
        assert_right(*arguments, *ops.rms_norm_backward(*arguments, True))
    dnormed, x, *others = inputs(6, 40, FP32, FP32, False, device)
    turned = dnormed.t().contiguous().t()
    assert_right(turned, x, *others, *ops.rms_norm_backward(turned, x, *others, True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dresidual": torch.ones(6)}, ValueError, r"dresidual must be like x, \(4, 6\)"),
        ({"dnormed": torch.ones(4, 6).half()}, ValueError, "found .* torch.float16"),
        ({"rstd": torch.ones(6)}, ValueError, r"rstd must be \[4\] .* found \[6\]"),
        ({"rstd": torch.ones(4).half()}, TypeError, "rstd must be torch.float32, found .*float16"),
    ],
    ids=lambda v: str(v)[:30] if isinstance(v, str) else None,
)
def test_refuses(change, error, message, device):
    ones = torch.ones(4, 6)
    arguments = {"dnormed": ones, "x": ones, "weight": ones[0], "rstd": torch.ones(4)}
    arguments |= {"dresidual": ones, **change}
    with pytest.raises(error, match=message):
        ops.rms_norm_backward(**{k: v.to(device) for k, v in arguments.items()}, weight_grad=True)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("k", [2048, 4096, 8192, 16384])
def test_hopper_s_code(k, tmp_path):
    """16 bytes a load, nothing spilled."""
    config = tune_layer.norm_backward_config(k)
    constants = {"HAS_RESIDUAL": True, "BLOCK": k, "PREFETCH": config.prefetch}
    types = dict.fromkeys(("dx", "dnormed", "x", "weight", "dresidual"), "*bf16")
    types |= {"rstd": "*fp32", "M": "i32", "K": "i32"}
    kernel = rms_norm._rms_norm_backward_kernel
    found = sm90(kernel, types, constants, config.num_warps, tmp_path)
    assert not spills(found)
    assert found["LDG.E.128"] * 8 * 32 * config.num_warps >= 4 * k


if __name__ == "__main__":
    torch.save({str(case): run_interpreted(*case) for case in INTERPRETED}, sys.argv[1])
