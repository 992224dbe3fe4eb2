# SPDX-License-Identifier: Apache-2.0
"""swiglu_quantize: act against float64, a8 and the amax given act bit for bit."""

from __future__ import annotations

import sys

import pytest
import torch

from lorakernels import ops
from lorakernels.kernels import tune_layer
from lorakernels.kernels.triton import swiglu
from lorakernels.kernels.triton.quantize import quantized
from lorakernels.numerics.fp8 import E4M3, quantize
from lorakernels.numerics.gate_up import PACKED_COLUMNS, halves
from lorakernels.ops import Scaled, Scaling
from tests.exact import EPS as ULP
from tests.kernels.by_triton import STATES, interpret, same_bytes, scaling_of, sm90, spills

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 8), (3, 257), (300, 640), (33, 2048), (5, 11008)]
CASES = [  # every shape, dtype and state; a combination is compiled for itself
    *((m, f, BF16, as_bytes, "unset") for m, f in SHAPES for as_bytes in (False, True)),
    *((300, 640, dtype, as_bytes, "kept") for dtype in (FP16, FP32) for as_bytes in (False, True)),
    *((33, 2048, BF16, False, kind) for kind in STATES if kind != "unset"),
]
INTERPRETED = [  # every state of each shape, and every dtype of the larger
    (m, f, dtype, kind, as_bytes)
    for m, f, dtype, kinds in (
        (1, 8, FP16, STATES),
        (5, 1100, FP32, STATES),
        (5, 1100, FP16, ("kept",)),
    )
    for kind in kinds
    for as_bytes in (False, True)
]


def inputs(m, f, dtype, as_bytes, device):
    """gate_up, and both halves in float64."""
    generator = torch.Generator().manual_seed(m + f)
    gate_up = (4 * torch.randn(m, 2 * f, generator=generator)).to(dtype)
    if not as_bytes:
        return Scaled(gate_up.to(device)), gate_up.double().to(device)
    blocks = -(-f // PACKED_COLUMNS)
    scale_inv = 0.03 + 0.02 * torch.rand(m, blocks, generator=generator)
    columns = scale_inv.repeat_interleave(PACKED_COLUMNS, 1)[:, :f].repeat(1, 2)
    bytes_ = (gate_up.float() / columns).clamp(-448, 448).to(E4M3)
    wide = bytes_.float() * columns  # in fp32, as the op scales them
    gate_up = Scaled(bytes_.view(torch.uint8).to(device), scale_inv.to(device))
    return gate_up, wide.double().to(device)


def assert_right(wide, dtype, keep, before, scaling, results, act):
    """`before`: the scaling as it was."""
    found, a8, scale_inv = results
    gate, up = wide.chunk(2, 1)
    exact = gate / (1 + (-gate).exp()) * up
    # one rounding at the store; e^−g is off by |g| ulp of fp32, from rounding its argument
    bound = (0.5 * ULP[dtype] + (4 + gate.abs()) * 2.0**-23) * exact.abs() + 2.0**-25
    assert act.dtype == dtype and bool(((act.double() - exact).abs() <= bound).all())
    assert torch.equal(found, act) if keep else found.numel() == 0
    want8, want_inv = quantize(act, before, E4M3)
    assert same_bytes(a8, want8) and torch.equal(scale_inv, want_inv)
    same = before is None or torch.equal(scaling.state, before.state)
    assert same, "amax in row 0 of its column, nothing else"


@pytest.mark.parametrize(("m", "f", "dtype", "as_bytes", "kind"), CASES, ids=str)
def test_equals_its_definition(m, f, dtype, as_bytes, kind, device):
    gate_up, wide = inputs(m, f, dtype, as_bytes, device)
    act = None
    for keep in (True, False) if f == 2048 else (True,):
        before, scaling = scaling_of(kind, device), scaling_of(kind, device)
        out_dtype = dtype if as_bytes else None
        results = ops.swiglu_quantize(gate_up, scaling, keep, out_dtype)
        act = results[0] if keep else act
        assert_right(wide, dtype, keep, before, scaling, results, act)


def assert_packed(gate_up, packed, scale_inv):
    """Each block by the scale of its own amax, bit for bit, and within half a step of e4m3 of what it was."""
    *_, want, want_inv = ops.swiglu_quantize_and_pack.reference(gate_up, None, False)
    assert same_bytes(packed, want) and torch.equal(scale_inv, want_inv)
    gate, up = halves(Scaled(packed, scale_inv))
    error = (torch.cat((gate, up), 1).double() - gate_up.double()).abs()
    smallest = scale_inv.double().amax(1, keepdim=True) * 2.0**-9  # the format's least step
    assert bool((error <= gate_up.double().abs() * (2.0**-4 + 2.0**-20) + smallest).all())


@pytest.mark.parametrize(
    ("m", "f", "dtype", "kind"),
    [(1, 8, BF16, "unset"), (3, 257, FP16, "kept"), (5, 11008, BF16, "kept"),
     (300, 640, FP32, "none"), (33, 2048, BF16, "eval"), (0, 8, BF16, "kept")],
    ids=str,
)  # fmt: skip
def test_packs_what_it_reads(m, f, dtype, kind, device):
    (gate_up, _), wide = inputs(m, f, dtype, False, device)
    gate_up[:, f // 2 : f] *= 30.0  # blocks have scales of their own
    gate_up[:, f:] /= 5.0
    wide.copy_(gate_up.double())
    before, scaling = scaling_of(kind, device), scaling_of(kind, device)
    *results, packed, scale_inv = ops.swiglu_quantize_and_pack(gate_up, scaling, True)
    assert_right(wide, dtype, True, before, scaling, results, results[0])
    if m:
        assert_packed(gate_up, packed, scale_inv)


def test_a_block_that_is_not_finite_keeps_its_bytes(device):
    """Its scale is 1, as of a tensor's amax; the blocks beside it keep theirs."""
    gate_up = torch.randn(2, 2 * 2100, dtype=FP16, device=device)
    gate_up[0, 5], gate_up[0, 2100 + 2060] = torch.inf, torch.nan
    gate_up[1, 2048:2100] = gate_up[1, 4148:] = 0.0
    *_, packed, scale_inv = ops.swiglu_quantize_and_pack(gate_up, None, False)
    assert scale_inv.shape == (2, 9)
    assert (scale_inv == 1.0).nonzero().tolist() == [[0, 0], [0, 8], [1, 8]]
    *_, want, _ = ops.swiglu_quantize_and_pack.reference(gate_up, None, False)
    assert same_bytes(packed, want) and packed[0, 5] == 0x7E and packed[0, 4160] & 0x7F == 0x7F


def run_interpreted(m, f, dtype, kind, as_bytes):
    gate_up, _ = inputs(m, f, dtype, as_bytes, "cpu")
    scaling = scaling_of(kind, "cpu")
    results = swiglu.swiglu_quantize(gate_up, scaling, True, dtype)
    if as_bytes:
        return results, scaling, None
    again = scaling_of(kind, "cpu")
    *same, packed, packed_inv = swiglu.swiglu_quantize_and_pack(gate_up.data, again, True)
    assert all(map(torch.equal, results, same))
    assert scaling is None or torch.equal(scaling.state, again.state)
    return results, scaling, (packed, packed_inv)


def test_interpreted(tmp_path):
    found = interpret(__file__, tmp_path / "act.pt")
    for case in INTERPRETED:
        m, f, dtype, kind, as_bytes = case
        results, scaling, packed = found[str(case)]
        gate_up, wide = inputs(m, f, dtype, as_bytes, "cpu")
        assert_right(wide, dtype, True, scaling_of(kind, "cpu"), scaling, results, results[0])
        if packed is not None:
            assert_packed(gate_up.data, *packed)


@pytest.mark.parametrize("kind", ["kept", "unset"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_nan_and_inf_reach_the_amax(bad, kind, device):
    """silu(−inf) is NaN, as PyTorch's; fp16 overflows to inf, whose byte is the largest number."""
    gate_up = torch.ones(70, 2 * 2100, dtype=FP16, device=device)
    gate_up[60, 2000] = bad
    gate_up[61, 3], gate_up[61, 2103] = 300.0, 300.0
    scaling = scaling_of(kind, device)
    act, a8, scale_inv = ops.swiglu_quantize(Scaled(gate_up), scaling, True)
    assert scaling.state[0, 0] == scaling.state[0, 2] == 0.25
    amax = float(scaling.state[0, 1])
    assert amax == torch.inf if bad == torch.inf else amax != amax
    expected = quantize(act, scaling_of(kind, device), E4M3)
    assert same_bytes(a8, expected[0]) and torch.equal(scale_inv, expected[1])
    assert act[61, 3].isinf() and a8[61, 3] == 0x7E


@pytest.mark.parametrize("gate", [-1e4, -100.0, -88.5, 0.0, 100.0, 1e4])
def test_far_gates(gate, device):
    """Where e^−g overflows, silu is −0; already where σ is subnormal, below 2⁻¹²⁶, on the GPU."""
    gate_up = torch.full((1, 16), gate, device=device)
    gate_up[:, 8:] = 2.0
    act = ops.swiglu_quantize(Scaled(gate_up), None, True)[0]
    wide = torch.tensor(gate, dtype=torch.float64)
    expected = 2 * float(wide * torch.sigmoid(wide))
    assert act.tolist() == [pytest.approx([expected] * 8, rel=1e-5, abs=2 * 89 * 2.0**-126)]


def test_what_no_kernel_takes_is_right_all_the_same(device):
    for gate_up in (torch.randn(12, 6, device=device).t(), torch.randn(0, 8, device=device)):
        before, scaling = scaling_of("unset", device), scaling_of("unset", device)
        results = ops.swiglu_quantize(Scaled(gate_up), scaling, True)
        assert_right(gate_up.double(), FP32, True, before, scaling, results, results[0])


@pytest.mark.gpu
def test_one_graph_serves_an_unset_and_a_set_scale():
    gate_up = torch.randn(300, 1280, dtype=BF16, device="cuda")
    scaling = scaling_of("unset", "cuda")
    ops.swiglu_quantize(Scaled(gate_up), scaling, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ops.swiglu_quantize(Scaled(gate_up), scaling, True)
    for scale in (0.0, 30.0, 0.0):
        gate_up.normal_()
        scaling.state[0], scaling.state[-1] = 0.0, scale
        before = scaling._replace(state=scaling.state.clone())
        graph.replay()
        wide = gate_up.double()
        assert_right(wide, BF16, True, before, scaling, results, results[0])


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    gate_up = torch.zeros(65536 + 1, 2 * 28672, dtype=BF16, device="cuda")
    gate_up[-1].normal_()
    scaling = scaling_of("kept", "cuda")
    _, a8, _ = ops.swiglu_quantize(Scaled(gate_up), scaling, False)
    again = scaling._replace(state=scaling.state.clone())
    act, few8, _ = ops.swiglu_quantize(Scaled(gate_up[-1:]), again, True)
    assert torch.equal(a8[-1:], few8) and not a8[:-1].any()
    assert scaling.state[0, 1] == act.abs().max().float()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": torch.ones(4, 7)}, ValueError, "gate_up must have 2 F columns, found 7"),
        ({"scale_inv": torch.ones(4, 1)}, TypeError, "gate_up must be uint8, .*float32"),
        ({"data": torch.ones(4, 8).byte()}, TypeError, "gate_up must be .*, found torch.uint8"),
        ({"out_dtype": BF16}, TypeError, "out_dtype must be gate_up's torch.float32, found"),
        (
            {"data": torch.ones(4, 8).byte(), "scale_inv": torch.ones(4, 1)},
            TypeError,
            "out_dtype must be float32, .* for e4m3 bytes, found None",
        ),
        (
            {"data": torch.ones(4, 8).byte(), "scale_inv": torch.ones(2)},
            ValueError,
            r"gate_up_scale_inv must be \[4, 1\]",
        ),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, str) else None,
)
def test_refuses(change, error, message, device):
    arguments = {"data": torch.ones(4, 8), "scale_inv": None, "out_dtype": None, **change}
    arguments = {k: v.to(device) if torch.is_tensor(v) else v for k, v in arguments.items()}
    data, scale_inv, out_dtype = arguments.values()
    with pytest.raises(error, match=message):
        ops.swiglu_quantize(Scaled(data, scale_inv), None, True, out_dtype)


def hopper_s_code(grad, as_bytes, config, tmp_path, pack=False):
    import triton.language as tl

    fp8_dtype = torch.float8_e5m2 if grad else E4M3
    scaling = Scaling(torch.ones(2, 2), 0, True)
    target = quantized((1, 1), torch.empty(0), scaling, fp8_dtype)
    constants = {**target.constants, "NATIVE": True, "GRAD": grad, "BYTES": as_bytes}
    constants |= {
        "MEASURE": False,
        "PACK": pack,
        "KEEP": True,
        "DTYPE": tl.bfloat16,
        "BLOCK": config.block,
    }
    constants["PACKED"] = PACKED_COLUMNS
    types = dict.fromkeys(("out", "dact"), "*bf16") | {"out8": "*u8", "partials": "*i32"}
    scales = ("scale_inv", "state", "gate_up_scale_inv", "multiplier", "packed_scale_inv")
    types |= dict.fromkeys(scales, "*fp32") | {"packed": "*u8"}
    types |= {"gate_up": "*u8" if as_bytes else "*bf16"}
    types |= dict.fromkeys(("M", "F", "amax_at", "kept_at", "measured"), "i32")
    return sm90(swiglu._swiglu_kernel, types, constants, config.num_warps, tmp_path)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("as_bytes", [False, True], ids=["plain", "e4m3"])
def test_hopper_s_code(as_bytes, tmp_path):
    """Wide loads, FP8 by instructions, one reduction to the amax, nothing spilled."""
    config = tune_layer.SWIGLU_OF_BYTES if as_bytes else tune_layer.SWIGLU
    found = hopper_s_code(False, as_bytes, config, tmp_path)
    threads = 32 * config.num_warps
    assert not spills(found)
    assert found["F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"] * 2 * threads == config.block
    assert sum(n for name, n in found.items() if name.startswith("REDG")) == 1
    assert not any(name.startswith("F2F.") for name in found), "rounded to bf16 one by one"
    if not as_bytes:
        assert found["LDG.E.128"] * 8 * threads == 2 * config.block


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_hopper_s_code_that_packs(tmp_path):
    """gate_up is read once; a warp finds an amax by itself; nothing spilled."""
    config = tune_layer.SWIGLU_PACK
    found = hopper_s_code(False, False, config, tmp_path, pack=True)
    threads = 32 * config.num_warps
    assert not spills(found) and found["LDG.E.128"] * 8 * threads == 2 * config.block
    shared = sum(n for name, n in found.items() if name.startswith(("STS", "LDS")))
    assert shared <= 6, "only the scales and the amax of all go through shared memory"
    assert found["F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"] * 2 * threads == 3 * config.block


if __name__ == "__main__":
    torch.save({str(case): run_interpreted(*case) for case in INTERPRETED}, sys.argv[1])
