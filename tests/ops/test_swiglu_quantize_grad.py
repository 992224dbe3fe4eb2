# SPDX-License-Identifier: Apache-2.0
"""swiglu_quantize_grad: dgate_up against autograd in float64, d8 and the amax given dgate_up bit for bit."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._pytree import tree_map_only

from lorakernels import ops
from lorakernels.kernels import tune_layer
from lorakernels.kernels.triton import swiglu
from lorakernels.numerics.fp8 import E4M3, quantize
from lorakernels.ops import Scaled
from tests.exact import EPS as ULP
from tests.kernels.by_triton import STATES, interpret, same_bytes, scaling_of, spills
from tests.ops import test_swiglu_quantize as forward

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = {"e4m3": E4M3, "e5m2": torch.float8_e5m2}
CASES = [  # every shape, dtype, format and state; a combination is compiled for itself
    *((m, f, BF16, b, "e5m2", "unset") for m, f in forward.SHAPES for b in (False, True)),
    *((300, 640, dtype, b, "e4m3", "kept") for dtype in (FP16, FP32) for b in (False, True)),
    *((33, 2048, BF16, False, "e5m2", kind) for kind in STATES if kind != "unset"),
]
KINDS = (("kept", "e5m2"), ("unset", "e5m2"), ("eval", "e4m3"), ("none", "e4m3"))
INTERPRETED = [  # every state of each shape, and every dtype of the larger
    (m, f, dtype, kind, as_bytes, fmt)
    for m, f, dtype, kinds in (
        (1, 8, FP16, KINDS),
        (5, 1100, FP32, KINDS),
        (5, 1100, FP16, KINDS[:1]),
    )
    for kind, fmt in kinds
    for as_bytes in (False, True)
]


def inputs(m, f, dtype, as_bytes, device):
    """dact, gate_up, multiplier; and gate_up in float64."""
    gate_up, wide = forward.inputs(m, f, dtype, as_bytes, device)
    generator = torch.Generator().manual_seed(f)
    dact = torch.randn(m, f, generator=generator).to(dtype).to(device)
    return (dact, gate_up, torch.tensor([0.6, 1.9], device=device)), wide


def assert_right(arguments, wide, fmt, keep, before, scaling, results, dgate_up):
    """`before`: the scaling as it was."""
    dact, _, multiplier = arguments
    wide = wide.clone().requires_grad_()
    gate, up = wide.chunk(2, 1)
    (torch.nn.functional.silu(gate) * up).backward(dact.double())
    columns = multiplier.double().repeat_interleave(dact.shape[1])
    exact = wide.grad * columns
    gate, up, d = gate.detach(), up.detach(), dact.double().abs()
    sigmoid = torch.sigmoid(gate)
    size = torch.cat((d * up.abs() * sigmoid * (1 + gate.abs()), d * gate.abs() * sigmoid), 1)
    # one rounding at the store; e^−g is off by |g| ulp of fp32, from rounding its argument
    ulps = 8 + torch.cat((gate, gate), 1).abs()
    bound = 0.5 * ULP[dact.dtype] * exact.abs() + ulps * 2.0**-23 * size * columns + 2.0**-25
    assert dgate_up.dtype == dact.dtype
    assert bool(((dgate_up.double() - exact).abs() <= bound).all())
    found, d8, scale_inv = results
    assert torch.equal(found, dgate_up) if keep else found.numel() == 0
    want8, want_inv = quantize(dgate_up, before, FORMATS[fmt])
    assert same_bytes(d8, want8) and torch.equal(scale_inv, want_inv)
    same = before is None or torch.equal(scaling.state, before.state)
    assert same, "amax in row 0 of its column, nothing else"


@pytest.mark.parametrize(("m", "f", "dtype", "as_bytes", "fmt", "kind"), CASES, ids=str)
def test_is_the_derivative(m, f, dtype, as_bytes, fmt, kind, device):
    arguments, wide = inputs(m, f, dtype, as_bytes, device)
    dgate_up = None
    for keep in (True, False) if f == 2048 else (True,):
        before, scaling = scaling_of(kind, device), scaling_of(kind, device)
        results = ops.swiglu_quantize_grad(*arguments, scaling, FORMATS[fmt], keep)
        dgate_up = results[0] if keep else dgate_up
        assert_right(arguments, wide, fmt, keep, before, scaling, results, dgate_up)


def run_interpreted(m, f, dtype, kind, as_bytes, fmt):
    arguments, _ = inputs(m, f, dtype, as_bytes, "cpu")
    scaling = scaling_of(kind, "cpu")
    return swiglu.swiglu_quantize_grad(*arguments, scaling, FORMATS[fmt], True), scaling


def test_interpreted(tmp_path):
    found = interpret(__file__, tmp_path / "dgate_up.pt")
    for case in INTERPRETED:
        m, f, dtype, kind, as_bytes, fmt = case
        results, scaling = found[str(case)]
        arguments, wide = inputs(m, f, dtype, as_bytes, "cpu")
        before = scaling_of(kind, "cpu")
        assert_right(arguments, wide, fmt, True, before, scaling, results, results[0])


@pytest.mark.parametrize("kind", ["kept", "unset"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_nan_and_inf_reach_the_amax(half, bad, kind, device):
    """A NaN in dact is in both halves; up's inf makes dgate inf and leaves dup alone."""
    gate_up = torch.ones(70, 2 * 2100, dtype=BF16, device=device)
    dact = torch.ones(70, 2100, dtype=BF16, device=device)
    gate_up[60, 2000 + 2100 * half] = bad
    scaling = scaling_of(kind, device)
    multiplier = torch.ones(2, device=device)
    results = ops.swiglu_quantize_grad(
        dact, Scaled(gate_up), multiplier, scaling, torch.float8_e5m2, True
    )
    amax = float(scaling.state[0, 1])
    assert amax == torch.inf if half and bad == torch.inf else amax != amax
    expected = quantize(results[0], scaling_of(kind, device), torch.float8_e5m2)
    assert same_bytes(results[1], expected[0]) and torch.equal(results[2], expected[1])


def test_what_no_kernel_takes_is_right_all_the_same(device):
    (dact, gate_up, multiplier), wide = inputs(6, 40, FP32, False, device)
    for rows in (6, 0):
        turned = gate_up.data.t().contiguous().t()[:rows]
        arguments = (dact[:rows], Scaled(turned), multiplier)
        before, scaling = scaling_of("unset", device), scaling_of("unset", device)
        results = ops.swiglu_quantize_grad(*arguments, scaling, E4M3, True)
        checked = ("e4m3", True, before, scaling, results, results[0])
        assert_right(arguments, wide[:rows], *checked)


@pytest.mark.gpu
def test_one_graph_serves_an_unset_and_a_set_scale():
    arguments, _ = inputs(300, 640, BF16, False, "cuda")
    scaling = scaling_of("unset", "cuda")
    quantized_as = (scaling, torch.float8_e5m2, True)
    ops.swiglu_quantize_grad(*arguments, *quantized_as)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ops.swiglu_quantize_grad(*arguments, *quantized_as)
    for scale in (0.0, 30.0, 0.0):
        arguments[0].normal_()
        scaling.state[0], scaling.state[-1] = 0.0, scale
        before = scaling._replace(state=scaling.state.clone())
        graph.replay()
        checked = ("e5m2", True, before, scaling, results, results[0])
        assert_right(arguments, arguments[1].data.double(), *checked)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dact": torch.ones(4, 5)}, ValueError, r"dact must be \(4, 4\) .* found \(4, 5\)"),
        ({"multiplier": torch.ones(3)}, ValueError, r"multiplier must be \[2\] .* found \[3\]"),
        ({"multiplier": torch.ones(2).half()}, TypeError, "multiplier must be torch.float32"),
        (
            {"dact": torch.ones(4, 4).half()},
            TypeError,
            "dact must be gate_up's torch.float32, found",
        ),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, str) else None,
)
def test_refuses(change, error, message, device):
    arguments = {"dact": torch.ones(4, 4), "gate_up": Scaled(torch.ones(4, 8))}
    arguments |= {"multiplier": torch.ones(2), "scaling": None}
    arguments |= {"fp8_dtype": torch.float8_e5m2, "keep": True, **change}
    arguments = tree_map_only(torch.Tensor, lambda t: t.to(device), arguments)
    with pytest.raises(error, match=message):
        ops.swiglu_quantize_grad(**arguments)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("as_bytes", [False, True], ids=["plain", "e4m3"])
@pytest.mark.parametrize(
    "config", [tune_layer.SWIGLU_GRAD, tune_layer.SWIGLU_GRAD_KEPT], ids=["d8", "kept"]
)
def test_hopper_s_code(as_bytes, config, tmp_path):
    """FP8 by instructions, one reduction to the amax, nothing spilled."""
    found = forward.hopper_s_code(True, as_bytes, config, tmp_path)
    assert not spills(found)
    converted = found["F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C"]
    assert converted * 2 * 32 * config.num_warps == 2 * config.block
    assert sum(n for name, n in found.items() if name.startswith("REDG")) == 1


if __name__ == "__main__":
    torch.save({str(case): run_interpreted(*case) for case in INTERPRETED}, sys.argv[1])
