# SPDX-License-Identifier: Apache-2.0
"""rms_norm_quantize: rstd against float64, and the rest bit for bit: normed given rstd, x8 and amax given normed."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._pytree import tree_map_only

from lorakernels import ops
from lorakernels.kernels import tune_layer
from lorakernels.kernels.triton import rms_norm
from lorakernels.kernels.triton.quantize import quantized
from lorakernels.numerics.fp8 import E4M3, quantize
from lorakernels.ops import Scaling
from tests.kernels.by_triton import STATES, interpret, same_bytes, scaling_of, sm90, spills

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
SHAPES = [(1, 8), (3, 257), (300, 640), (33, 2048), (5, 5120), (2, 16384), (3, 20000)]
CASES = [  # every shape, every mix of dtypes, every state; a combination is compiled for itself
    *((m, k, BF16, BF16, "unset") for m, k in SHAPES),
    *((300, 640, *dtypes, "kept") for dtypes in ((BF16, FP32), (FP16, FP16), (FP32, BF16))),
    *((33, 2048, BF16, BF16, kind) for kind in STATES if kind != "unset"),
]
INTERPRETED = [
    (m, k, dtype, kind) for m, k in ((1, 8), (9, 300)) for dtype in (FP16, FP32) for kind in STATES
]


def inputs(m, k, dtype, weight_dtype, device):
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator).to(dtype)
    weight = (0.5 + torch.rand(k, generator=generator)).to(weight_dtype)
    return x.to(device), weight.to(device)


def assert_right(x, weight, keep, before, scaling, results):
    """`before`: the scaling as it was."""
    normed, x8, scale_inv, rstd = results
    exact = (x.double().square().mean(1) + EPS).rsqrt()
    # an approximate rsqrt (2⁻²²) and fp32 sums of K squares, all positive
    assert rstd.dtype == FP32 and bool(((rstd.double() - exact).abs() <= 1e-6 * exact).all())
    h = (x.float() * rstd.view(-1, 1)).to(x.dtype)
    expected = (weight.float() * h.float()).to(x.dtype)
    if keep:
        assert torch.equal(normed, expected)
    else:
        assert normed.numel() == 0 and normed.dtype == x.dtype
    want8, want_inv = quantize(expected, before, E4M3)
    assert same_bytes(x8, want8) and torch.equal(scale_inv, want_inv)
    same = before is None or torch.equal(scaling.state, before.state)
    assert same, "amax in row 0 of its column, nothing else"


@pytest.mark.parametrize(("m", "k", "dtype", "weight_dtype", "kind"), CASES, ids=str)
def test_equals_its_definition(m, k, dtype, weight_dtype, kind, device):
    x, weight = inputs(m, k, dtype, weight_dtype, device)
    for keep in (True, False) if k == 2048 else (True,):
        before, scaling = scaling_of(kind, device), scaling_of(kind, device)
        results = ops.rms_norm_quantize(x, weight, EPS, scaling, keep)
        assert_right(x, weight, keep, before, scaling, results)


def run_interpreted(m, k, dtype, kind):
    x, weight = inputs(m, k, dtype, dtype, "cpu")
    scaling = scaling_of(kind, "cpu")
    return rms_norm.rms_norm_quantize(x, weight, EPS, scaling, True), scaling


def test_interpreted(tmp_path):
    found = interpret(__file__, tmp_path / "normed.pt")
    for case in INTERPRETED:
        m, k, dtype, kind = case
        results, scaling = found[str(case)]
        x, weight = inputs(m, k, dtype, dtype, "cpu")
        assert_right(x, weight, True, scaling_of(kind, "cpu"), scaling, results)


@pytest.mark.parametrize("kind", ["kept", "unset"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_nan_and_inf_reach_the_amax(bad, kind, device):
    """An inf makes its row's rstd 0, and itself NaN."""
    x, weight = inputs(200, 264, BF16, BF16, device)
    x[137, 200] = bad
    scaling = scaling_of(kind, device)
    normed, x8, scale_inv, _ = ops.rms_norm_quantize(x, weight, EPS, scaling, True)
    assert scaling.state[0].isnan().tolist() == [False, True, False]
    expected = quantize(normed, scaling_of(kind, device), E4M3)
    assert same_bytes(x8, expected[0]) and torch.equal(scale_inv, expected[1])
    assert x8[137, 200] & 0x7F == 0x7F and not bool((x8[:137] & 0x7F == 0x7F).any())


def test_what_no_kernel_takes_is_right_all_the_same(device):
    """Strides, no rows, and rows too long for registers: PyTorch's kernels."""
    for x in (
        torch.randn(6, 40, device=device).t(),
        torch.randn(0, 8, device=device),
        torch.randn(2, tune_layer.MAX_NORM_COLUMNS + 1, device=device),
    ):
        weight = torch.rand(x.shape[1], device=device)
        before, scaling = scaling_of("unset", device), scaling_of("unset", device)
        results = ops.rms_norm_quantize(x, weight, EPS, scaling, True)
        assert_right(x, weight, True, before, scaling, results)


def test_is_transformers_llama_rms_norm():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, weight = inputs(17, 264, BF16, BF16, "cpu")
    norm = modeling.LlamaRMSNorm(264, eps=EPS).to(BF16)
    norm.weight.data = weight
    assert torch.equal(ops.rms_norm_quantize(x, weight, EPS, None, True)[0], norm(x))


@pytest.mark.gpu
def test_one_graph_serves_an_unset_and_a_set_scale():
    x, weight = inputs(300, 640, BF16, BF16, "cuda")
    scaling = scaling_of("unset", "cuda")
    ops.rms_norm_quantize(x, weight, EPS, scaling, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ops.rms_norm_quantize(x, weight, EPS, scaling, True)
    for scale in (0.0, 30.0, 0.0):
        x.normal_()
        scaling.state[0], scaling.state[-1] = 0.0, scale
        before = scaling._replace(state=scaling.state.clone())
        graph.replay()
        assert_right(x, weight, True, before, scaling, results)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    x = torch.zeros(2**17 + 1, 2**14, dtype=FP16, device="cuda")
    x[-1] = torch.randn(2**14, device="cuda").half()
    weight = torch.ones(2**14, dtype=FP16, device="cuda")
    scaling = scaling_of("kept", "cuda")
    _, x8, _, rstd = ops.rms_norm_quantize(x, weight, EPS, scaling, False)
    normed, few8, _, few = ops.rms_norm_quantize(x[-1:], weight, EPS, scaling, True)
    assert torch.equal(x8[-1:], few8) and torch.equal(rstd[-1:], few)
    assert scaling.state[0, 1] == normed.abs().max().float() and not x8[:-1].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(6)}, ValueError, r"x must be a matrix, found \(6,\)"),
        ({"x": torch.ones(4, 6, dtype=torch.int32)}, TypeError, "x must be .* found torch.int32"),
        ({"weight": torch.ones(5)}, ValueError, r"weight must be \[6\] .* found \[5\]"),
        (
            {"scaling": Scaling(torch.ones(4), 0, True)},
            ValueError,
            r"state must be float32 \[history length \+ 1",
        ),
    ],
    ids=lambda v: str(v)[:30] if isinstance(v, str) else None,
)
def test_refuses(change, error, message, device):
    arguments = {"x": torch.ones(4, 6), "weight": torch.ones(6), "eps": EPS, "scaling": None}
    arguments |= {"keep": True, **change}
    arguments = tree_map_only(torch.Tensor, lambda t: t.to(device), arguments)
    with pytest.raises(error, match=message):
        ops.rms_norm_quantize(**arguments)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("k", [2048, 4096, 8192, 16384])
@pytest.mark.parametrize("keep", [True, False])
def test_hopper_s_code(k, keep, tmp_path):
    """16 bytes a load, FP8 by instructions, one reduction to the amax, no spills, no detour over shared memory."""
    config, found = tune_layer.norm_config(k), hopper_s_code(k, keep, False, tmp_path)
    assert not spills(found)
    assert found["LDG.E.128"] * 8 * 32 * config.num_warps >= 2 * k  # x's and the weight's, 8 each
    assert found["F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"] * 2 * 32 * config.num_warps == k
    assert sum(n for name, n in found.items() if name.startswith("REDG")) == 1
    assert not any(name.startswith(("STS.128", "STS.64")) for name in found)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_hopper_s_code_that_measures(tmp_path):
    """One number a program is all that it stores."""
    found = hopper_s_code(2048, False, True, tmp_path)
    assert not spills(found)
    assert sum(n for name, n in found.items() if name.startswith(("STG", "REDG"))) == 1


def hopper_s_code(k, keep, measure, tmp_path):
    config = tune_layer.norm_config(k)
    scaling = Scaling(torch.ones(2, 2), 0, True)
    constants = {
        **quantized((1, 1), torch.empty(0), scaling, E4M3).constants,
        "NATIVE": True,
        "MEASURE": measure,
        "KEEP": keep,
        "BLOCK": k,
        "PREFETCH": config.prefetch,
    }
    types = dict.fromkeys(("normed", "x", "weight"), "*bf16") | {"x8": "*u8", "partials": "*i32"}
    types |= dict.fromkeys(("scale_inv", "rstd", "state"), "*fp32") | {"eps": "fp32"}
    types |= dict.fromkeys(("M", "K", "amax_at", "kept_at", "measured"), "i32")
    kernel = rms_norm._rms_norm_quantize_kernel
    return sm90(kernel, types, constants, config.num_warps, tmp_path)


if __name__ == "__main__":
    torch.save({str(case): run_interpreted(*case) for case in INTERPRETED}, sys.argv[1])
