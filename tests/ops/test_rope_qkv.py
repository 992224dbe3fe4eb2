# SPDX-License-Identifier: Apache-2.0
"""rope_qkv_ and rope_qkv_backward against the formula in float64, for every way attention may leave its gradients."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
import torch

from lorakernels import ops
from lorakernels.kernels import tune_layer
from lorakernels.kernels.triton import rope_qkv
from tests.exact import EPS as ULP
from tests.kernels.by_triton import interpret, sm90, spills

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    per_token: bool = False  # angles for every token of the batch, not for T positions

    def __str__(self) -> str:
        b, t, h, hk, d, own = self
        return f"B{b} T{t} H{h} Hk{hk} D{d}{' own angles' if own else ''}"


CASES = [
    Case(1, 1, 1, 1, 2),
    Case(2, 7, 5, 2, 24),
    Case(3, 33, 32, 8, 128),
    Case(2, 65, 64, 8, 128, True),
    Case(1, 19, 24, 24, 96),
    Case(2, 16, 9, 3, 256),
]
DTYPES = [  # of qkv and the angles, for each case; a combination is compiled for itself
    *((case, BF16, BF16) for case in CASES),
    *((CASES[1], *dtypes) for dtypes in ((BF16, FP32), (FP16, FP16), (FP32, FP32))),
]
INTERPRETED = [(case, dtype) for case in CASES[:2] for dtype in (FP16, FP32)]
LAYOUTS = {
    "tokens outside": lambda d: d.transpose(1, 2).contiguous().transpose(1, 2),
    "heads outside": lambda d: d.contiguous(),
    "one of three": lambda d: torch.stack((d, d, d), 3)[:, :, :, 1],
    "padded": lambda d: torch.nn.functional.pad(d, (1, 8))[..., 1:-8],
}


def angles(case, dtype, device):
    rows = case.tokens * (case.batch if case.per_token else 1)
    generator = torch.Generator().manual_seed(rows)
    angle = 6.3 * torch.rand(rows, case.dim, generator=generator)  # the halves differ, as they may
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def turned(x, cos, sin):
    """(value, size) in float64 of x [M, heads, D], turned as Transformers' apply_rotary_pos_emb does."""
    row = torch.arange(len(x), device=x.device) % len(cos)
    c, s = (t.double()[row].unsqueeze(1) for t in (cos, sin))
    x1, x2 = x.double().chunk(2, -1)
    straight, across = x.double() * c, torch.cat((-x2, x1), -1) * s
    return straight + across, straight.abs() + across.abs()


def turned_back(d, cos, sin):
    """`turned`'s transpose."""
    row = torch.arange(len(d), device=d.device) % len(cos)
    c, s = (t.double()[row].unsqueeze(1) for t in (cos, sin))
    y1, y2 = (d.double() * s).chunk(2, -1)
    straight, across = d.double() * c, torch.cat((y2, -y1), -1)
    return straight + across, straight.abs() + across.abs()


def assert_close(found, exact, size):
    """One rounding at the store and fp32's on the way."""
    bound = 0.5 * ULP[found.dtype] * exact.abs() + 2.0**-22 * size + 2.0**-25
    assert bool(((found.double() - exact).abs() <= bound).all())


def forward_inputs(case, dtype, device):
    generator = torch.Generator().manual_seed(case.tokens)
    width = (case.heads + 2 * case.kv_heads) * case.dim
    qkv = torch.randn(case.batch * case.tokens, width, generator=generator).to(dtype).to(device)
    return qkv, *angles(case, dtype, device)


def assert_forward(case, before, cos, sin, after):
    count = case.heads + case.kv_heads
    split = (len(before), count + case.kv_heads, case.dim)
    old, new = before.view(split), after.view(split)
    assert torch.equal(new[:, count:], old[:, count:]), "v stays"
    assert_close(new[:, :count], *turned(old[:, :count], cos, sin))


def backward_inputs(case, dtype, layout, device):
    generator = torch.Generator().manual_seed(case.tokens)
    heads = (case.heads, case.kv_heads, case.kv_heads)
    parts = [
        LAYOUTS[layout](
            torch.randn(case.batch, count, case.tokens, case.dim, generator=generator).to(dtype)
        ).to(device)
        for count in heads
    ]
    multiplier = torch.tensor([1.0, 0.37, 2.5], device=device)
    return *parts, *angles(case, dtype, device), multiplier


def assert_backward(case, dq, dk, dv, cos, sin, multiplier, dqkv):
    rows = case.batch * case.tokens
    flat = [d.transpose(1, 2).reshape(rows, -1, case.dim) for d in (dq, dk, dv)]
    exact = [turned_back(flat[0], cos, sin), turned_back(flat[1], cos, sin)]
    exact.append((flat[2].double(), flat[2].double().abs()))
    value, size = (
        torch.cat([part[i] * m for part, m in zip(exact, multiplier.double(), strict=True)], 1)
        for i in range(2)
    )
    assert dqkv.shape == (rows, (case.heads + 2 * case.kv_heads) * case.dim)
    assert_close(dqkv.view(value.shape), value, size)


@pytest.mark.parametrize(("case", "dtype", "angle_dtype"), DTYPES, ids=str)
def test_turns_q_and_k_in_place(case, dtype, angle_dtype, device):
    qkv, *_ = forward_inputs(case, dtype, device)
    cos, sin = angles(case, angle_dtype, device)
    before = qkv.clone()
    assert ops.rope_qkv_(qkv, cos, sin, case.heads, case.kv_heads) is None
    assert_forward(case, before, cos, sin, qkv)


@pytest.mark.parametrize(
    ("case", "dtype", "layout"),
    [
        *((case, BF16, layout) for case in CASES[1:3] for layout in LAYOUTS),
        *((case, BF16, "heads outside") for case in (CASES[0], *CASES[3:])),
        *((CASES[1], dtype, "tokens outside") for dtype in (FP16, FP32)),
    ],
    ids=str,
)
def test_turns_the_gradients_back(case, dtype, layout, device):
    arguments = backward_inputs(case, dtype, layout, device)
    assert_backward(case, *arguments, ops.rope_qkv_backward(*arguments))


def test_layouts_may_differ(device):
    case = CASES[2]
    dq, _, _, *others = backward_inputs(case, BF16, "tokens outside", device)
    _, dk, _, *_ = backward_inputs(case, BF16, "heads outside", device)
    _, _, dv, *_ = backward_inputs(case, BF16, "padded", device)
    assert_backward(case, dq, dk, dv, *others, ops.rope_qkv_backward(dq, dk, dv, *others))


def test_is_transformers_rotation():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    case = CASES[2]
    qkv, cos, sin = forward_inputs(case, FP32, "cpu")
    count, d = case.heads, case.dim
    heads = qkv.clone().view(case.batch, case.tokens, -1, d).transpose(1, 2)
    q, k, _ = heads.split((count, case.kv_heads, case.kv_heads), 1)
    expected = modeling.apply_rotary_pos_emb(q, k, cos[None], sin[None])
    ops.rope_qkv_(qkv, cos, sin, count, case.kv_heads)
    found = qkv.view(case.batch, case.tokens, -1, d).transpose(1, 2)
    # sums of two products, each rounded in fp32
    torch.testing.assert_close(found[:, :count], expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(
        found[:, count : count + case.kv_heads], expected[1], rtol=0, atol=2e-6
    )


def run_interpreted(case, dtype):
    qkv, cos, sin = forward_inputs(case, dtype, "cpu")
    rope_qkv.rope_qkv_(qkv, cos, sin, case.heads, case.kv_heads)
    return qkv, rope_qkv.rope_qkv_backward(*backward_inputs(case, dtype, "tokens outside", "cpu"))


def test_interpreted(tmp_path):
    found = interpret(__file__, tmp_path / "qkv.pt")
    for case, dtype in INTERPRETED:
        qkv, dqkv = found[f"{case} {dtype}"]
        assert_forward(case, *forward_inputs(case, dtype, "cpu"), qkv)
        assert_backward(case, *backward_inputs(case, dtype, "tokens outside", "cpu"), dqkv)


def test_no_tokens(device):
    case = Case(0, 7, 4, 2, 8)
    cos = torch.ones(7, 8, device=device)
    ops.rope_qkv_(torch.ones(0, 64, device=device), cos, cos, 4, 2)
    parts = backward_inputs(case, FP32, "heads outside", device)[:3]
    multiplier = torch.ones(3, device=device)
    assert ops.rope_qkv_backward(*parts, cos, cos, multiplier).shape == (0, 64)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    """The last of 2³¹ elements and more."""
    case = Case(1, 2**18, 64, 8, 128)
    qkv = torch.zeros(case.tokens, 80 * 128, dtype=FP16, device="cuda")
    qkv[-1].normal_()
    cos, sin = (t[-1:].contiguous() for t in angles(Case(1, 9, 64, 8, 128), FP16, "cuda"))
    last = qkv[-1:].clone()
    ops.rope_qkv_(qkv, cos, sin, 64, 8)
    ops.rope_qkv_(last, cos, sin, 64, 8)
    assert torch.equal(qkv[-1:], last) and not qkv[:-1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "found 24 for num_heads = 5, num_kv_heads = 1"),
        (
            {"cos": torch.ones(3, 8)},
            r"cos must be \[T, 8\] .* divides the 4 tokens, found \[3, 8\]",
        ),
        ({"sin": torch.ones(1, 8)}, r"sin must be like cos, torch.float32 \(2, 8\)"),
        ({"qkv": torch.ones(4, 9), "cos": torch.ones(2, 3)}, "found|must be even"),
    ],
    ids=str,
)
def test_refuses(change, message, device):
    arguments = {"qkv": torch.ones(4, 24), "cos": torch.ones(2, 8), "sin": torch.ones(2, 8)}
    arguments |= {"num_heads": 1, "num_kv_heads": 1, **change}
    arguments = {k: v.to(device) if torch.is_tensor(v) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        ops.rope_qkv_(**arguments)


def test_backward_refuses_strides_it_would_misread(device):
    d = torch.ones(1, 2, 8, 4, device=device)
    cos, multiplier = torch.ones(4, 8, device=device), torch.ones(3, device=device)
    with pytest.raises(ValueError, match="dk must have a contiguous last dimension"):
        ops.rope_qkv_backward(d.mT.contiguous(), d.mT, d.mT.contiguous(), cos, cos, multiplier)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("half", [32, 64, 128])
def test_hopper_s_code(half, tmp_path):
    """16 bytes a load and a store, nothing spilled."""
    config = tune_layer.rope_config(half, 64)
    constants = {"TURNED": 72, "HALF": half, "BLOCK": half, "HEADS": config.heads}
    types = dict.fromkeys(("qkv", "cos", "sin"), "*bf16") | {"stride": "i32", "T": "i32"}
    found = sm90(rope_qkv._rope_kernel, types, constants, config.num_warps, tmp_path)
    assert not spills(found)
    assert found["STG.E.128"] * 8 * 32 * config.num_warps == config.heads * 2 * half


if __name__ == "__main__":
    torch.save({f"{c} {dtype}": run_interpreted(c, dtype) for c, dtype in INTERPRETED}, sys.argv[1])
