# SPDX-License-Identifier: Apache-2.0
"""bias_dropout_add against float64, its kernel against the reference bit for bit, and Megatron's way to call it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels import (
    _C,
    PhiloxState,
    PhiloxStates,
    bias_dropout_add,
    get_bias_dropout_add,
    ops,
)
from lorakernels.numerics.dropout import dropout_keep, keep_scale
from lorakernels.ops import Dropout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one rounding at the store, relative to the result; three in fp32 before it, of values below 16: 2e-6 absolute
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class FixedSlot(PhiloxState):
    """Draws the same mask at every call, so that a test knows it."""

    def slot(self):
        return self.tensor.clone()


def tensors(shape, dtype, device, bias_dtype=None):
    x, residual, dout = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    bias = torch.randn(shape[-1], device=device).to(bias_dtype or dtype)
    return x.requires_grad_(), bias.requires_grad_(), residual.requires_grad_(), dout


def exact(x, bias, residual, dout, p, slot, site=0, row0=0, col0=0):
    """out, dx, dbias, dresidual in float64 with the mask of dropout_keep."""
    dropout = Dropout(slot.cpu(), p, site, row0, col0)
    keep = dropout_keep(dropout, x.shape[:-1].numel(), x.shape[-1])
    leaves = [
        None if t is None else t.detach().cpu().double().requires_grad_()
        for t in (x, bias, residual)
    ]
    mask = keep.double().view(x.shape) * keep_scale(p)
    out = mask * (leaves[0] if bias is None else leaves[0] + leaves[1])
    out = out if residual is None else out + leaves[2]
    out.backward(dout.cpu().double())
    return out.detach(), *(None if t is None else t.grad for t in leaves)


SHAPES = [(1, 1), (5, 8), (33, 18), (3, 7, 264), (130, 513), (1000, 24), (9,), (4, 1, 2056)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_against_float64(shape, p, dtype, device):
    x, bias, residual, dout = tensors(shape, dtype, device)
    state = FixedSlot(7, device)
    out = bias_dropout_add(x, bias, residual, p, True, state, site=3)
    out.backward(dout)
    truths = exact(x, bias, residual, dout, p, state.tensor, 3)
    rows = x.shape[:-1].numel()
    # dbias: fp32 sums of `rows` terms, in any order off by at most rows · 2⁻²⁴ of the sum of magnitudes
    for name, found, truth in zip(
        ("out", "dx", "dbias", "dresidual"),
        (out, x.grad, bias.grad, residual.grad),
        truths,
        strict=True,
    ):
        slack = rows * 2.0**-23 * 5 if name == "dbias" else 0.0
        torch.testing.assert_close(
            found.detach().cpu().double(), truth, rtol=EPS[dtype], atol=2e-6 + slack
        )


@pytest.mark.parametrize("without", ["bias", "residual", "bias and residual"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_without(without, p, device):
    x, bias, residual, dout = tensors((17, 40), torch.bfloat16, device)
    bias = None if "bias" in without else bias
    residual = None if "residual" in without else residual
    state = FixedSlot(3, device)
    out = bias_dropout_add(x, bias, residual, p, True, state)
    out.backward(dout)
    truth, dx, _, dresidual = exact(x, bias, residual, dout, p, state.tensor)
    torch.testing.assert_close(out.detach().cpu().double(), truth, rtol=2.0**-8, atol=2e-6)
    torch.testing.assert_close(x.grad.cpu().double(), dx, rtol=2.0**-8, atol=2e-6)
    if residual is not None:
        assert torch.equal(residual.grad.cpu().double(), dresidual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=["bias as x", "fp32 bias"])
@pytest.mark.parametrize("offset", [0, 1, 3], ids=lambda o: f"{o} elements off 16 bytes")
@pytest.mark.parametrize(
    ("rows", "cols", "row0", "col0"),
    [
        (64, 512, 0, 0),
        (64, 512, 5, 16),
        (64, 512, 0, 3),
        (37, 257, 0, 0),
        (1, 3, 2, 6),
        (2050, 8, 0, 0),
        (513, 16, 1, 7),
    ],
    ids=str,
)
def test_the_kernel_equals_the_reference_and_writes_nothing_else(
    rows, cols, row0, col0, offset, bias_dtype, dtype
):
    """Bit for bit, except dbias (another order of summation); 64 guard elements behind every output."""
    slot = torch.tensor([-5, 0x1_2345_6789], device="cuda")

    def matrix():
        flat = torch.randn(rows * cols + offset + 64, device="cuda").to(dtype)
        return flat, flat[offset : offset + rows * cols].view(rows, cols)

    x, residual, dout = (matrix()[1] for _ in range(3))
    bias = torch.randn(cols, device="cuda").to(bias_dtype or dtype)
    for p in (0.0, 0.3):
        dropout = Dropout(slot, p, 9, row0, col0)
        for b, r in ((bias, residual), (None, residual), (bias, None)):
            found = ops.bias_dropout_add.run(x, b, r, dropout)
            assert torch.equal(found, ops.bias_dropout_add.by_reference(x, b, r, dropout))
        flat, target = matrix()
        before = flat.clone()
        expected = ops.bias_dropout_add.by_reference(x, bias, target, dropout)
        ops.bias_dropout_add_.run(x, bias, target, dropout)
        assert torch.equal(target, expected)
        inside = slice(offset, offset + rows * cols)
        before[inside] = flat[inside]
        assert torch.equal(flat, before), "wrote beside the residual"
        backward = ops.bias_dropout_add_backward
        dx, dbias = backward.run(dout, dropout, bias.dtype)
        dx2, dbias2 = backward.by_reference(dout, dropout, bias.dtype)
        assert torch.equal(dx, dx2)
        eps = EPS[bias.dtype]
        torch.testing.assert_close(
            dbias.float(), dbias2.float(), rtol=2 * eps, atol=rows * 2.0**-22
        )
        again = backward.run(dout, dropout, bias.dtype)[1]
        assert torch.equal(dbias, again), "dbias must not depend on the run"


@pytest.mark.gpu
def test_every_element_is_written():
    """New memory is poisoned: an element that the kernel skips is NaN."""
    slot = torch.tensor([1, 2], device="cuda")
    for rows, cols in ((1, 1), (7, 2048), (4099, 8), (3, 4097)):
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        dropout = Dropout(slot, 0.2, 0)
        assert ops.bias_dropout_add.run(x, None, x, dropout).isfinite().all()
        assert ops.bias_dropout_add_backward.run(x, dropout, None)[0].isfinite().all()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 30),
    cols=st.integers(1, 40),
    p=st.sampled_from([0.0, 0.1, 0.9]),
    cut=st.integers(0, 40),
    along=st.sampled_from([0, 1]),
)
def test_shards_draw_their_parts_of_one_mask(rows, cols, p, cut, along):
    """Cut along rows (sequence parallel) or columns (tensor parallel), anywhere: the parts' results are the whole's."""
    state = FixedSlot(11)
    x, residual = torch.randn(rows, cols), torch.randn(rows, cols)
    cut = min(cut, (rows, cols)[along])
    whole = bias_dropout_add(x, None, residual, p, True, state)
    parts = []
    for part, (a, r) in enumerate(
        zip(x.tensor_split([cut], along), residual.tensor_split([cut], along), strict=True)
    ):
        origin = {("row0", "col0")[along]: cut if part else 0}
        parts.append(bias_dropout_add(a, None, r, p, True, state, **origin))
    assert torch.equal(torch.cat(parts, along), whole)


def test_in_place_over_the_residual(device):
    x, bias, residual, dout = tensors((6, 40), torch.bfloat16, device)
    state = FixedSlot(1, device)
    expected = bias_dropout_add(x, bias, residual, 0.3, True, state)
    grads = torch.autograd.grad(expected, (x, bias, residual), dout)
    owned = residual * 1  # no leaf
    out = bias_dropout_add(x, bias, owned, 0.3, True, state, inplace=True)
    assert out.data_ptr() == owned.data_ptr() and torch.equal(out, expected)
    for found, truth in zip(
        torch.autograd.grad(out, (x, bias, residual), dout), grads, strict=True
    ):
        assert torch.equal(found, truth)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_accumulate_in_tensors_of_their_own(inplace, p):
    """x, residual and dout each keep theirs: two backwards add up, and dout stays as it was."""
    x, residual = (torch.randn(2, 3, 8, requires_grad=True) for _ in range(2))
    dout, state = torch.ones(2, 3, 8), FixedSlot(2)
    for _ in range(2):
        add = residual * 1 if inplace else residual
        bias_dropout_add(x, None, add, p, True, state, inplace=inplace).backward(dout)
    keep = dropout_keep(Dropout(state.tensor, p, 0), 6, 8).view(2, 3, 8)
    torch.testing.assert_close(x.grad, 2 * keep * torch.tensor(keep_scale(p)))
    assert torch.equal(residual.grad, torch.full_like(dout, 2.0))
    assert torch.equal(dout, torch.ones_like(dout))


def test_a_residual_that_backward_still_needs_is_not_lost_silently():
    x = torch.randn(4, 8, requires_grad=True)
    residual = x.exp()  # exp's backward reads its result
    bias_dropout_add(x, None, residual, 0.0, inplace=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bias_dropout_add(x, None, residual, 0.0, inplace=True).sum().backward()


def test_keeps_16_bytes_for_backward(device):
    x, bias, residual, _ = tensors((64, 64), torch.bfloat16, device)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        bias_dropout_add(x, bias, residual, 0.1)
    assert kept == [16]


def test_eval_and_p_zero_add_exactly(device):
    x, bias, residual, _ = tensors((5, 24), torch.float32, device)
    state = PhiloxStates()  # drawing from it outside of a fork would raise
    for out in (
        bias_dropout_add(x, bias, residual, 0.5, False, state),
        bias_dropout_add(x, bias, residual, 0.0, True, state),
        bias_dropout_add(x, bias, residual, 2.0**-18, True, state),  # rounds to no drop at all
    ):
        assert torch.equal(out, x + bias + residual)


def test_masks_follow_the_state_and_manual_seed(device):
    x = torch.ones(64, 64, device=device)

    def draw(state=None):
        torch.manual_seed(5)
        return bias_dropout_add(x, None, None, 0.5, True, state)

    assert torch.equal(draw(), draw())
    assert not torch.equal(draw(), bias_dropout_add(x, None, None, 0.5))
    states = PhiloxStates()
    states.add("a", 1, device)
    with states.fork("a"):
        first = draw(states)
        states.current().advance()
        assert not torch.equal(first, draw(states))
    with pytest.raises(RuntimeError, match="outside of PhiloxStates"):
        draw(states)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_as_megatron_calls_it(fused, training, device):
    """((x, bias), residual, prob), x [s, b, h], bias [h] or expanded, residual fp32 beside bf16 x."""
    x, bias, residual, dout = tensors((6, 2, 32), torch.bfloat16, device)
    state = FixedSlot(4, device)
    bda = get_bias_dropout_add(training, fused, state=state)
    p = 0.25 if training else 0.0
    expected, *grads = exact(x, bias, residual, dout, p, state.tensor)
    for b, r in ((bias, residual), (bias.expand_as(x), residual), (bias, residual.float())):
        out = bda((x, b), r, 0.25)
        assert out.dtype == x.dtype and out.shape == x.shape
        torch.testing.assert_close(out.cpu().double(), expected, rtol=2.0**-8, atol=2e-6)
        for found, truth in zip(
            torch.autograd.grad(out, (x, bias, residual), dout), grads, strict=True
        ):
            # dbias may be summed after dx was rounded: 12 terms, half an ulp of bf16 each
            torch.testing.assert_close(found.cpu().double(), truth, rtol=2.0**-7, atol=0.05)
    assert bda((x, None), residual, 0.25).shape == x.shape


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("form", ["out of place", "in place", "unfused"])
def test_compiles_as_one_graph(form, p, device):
    x, bias, residual, dout = tensors((4, 2, 32), torch.float32, device)
    state = FixedSlot(4, device)

    def call(x, bias, residual):
        if form == "unfused":
            return get_bias_dropout_add(True, False, state=state)((x, bias), residual, p)
        add = residual * 1
        return bias_dropout_add(x, bias, add, p, True, state, inplace=form == "in place")

    results = []
    for f in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = f(x, bias, residual)
        results.append((out, *torch.autograd.grad(out, (x, bias, residual), dout)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_takes_any_strides(device):
    x, residual = torch.randn(2, 12, 9, 10, device=device)
    x, residual = x.transpose(0, 2), residual.permute(2, 1, 0)
    out = bias_dropout_add(x, None, residual, 0.3, True, FixedSlot(2, device))
    assert torch.equal(
        out,
        bias_dropout_add(
            x.contiguous(), None, residual.contiguous(), 0.3, True, FixedSlot(2, device)
        ),
    )


def test_partial_sums_of_any_shape():
    def chunks(rows, cols, first_col=0, multiprocessors=132):
        return _C.bias_grad_chunks(rows, cols, multiprocessors, first_col)

    assert (chunks(0, 8), chunks(3, 0), chunks(1, 1)) == (1, 1, 1)
    # four blocks a multiprocessor, over 32 strips of 256 columns
    assert chunks(8192, 8192) == chunks(8192, 8192, 8) == 16
    assert chunks(8192, 8192, multiprocessors=148) == 18
    assert chunks(10, 2**30) == 1
    # one column group more: blocks of half the rows
    assert chunks(9000, 8) == 9 and chunks(9000, 8, 3) == 18


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5)], ids=str)
def test_empty(shape, device):
    x, bias, residual, dout = tensors(shape, torch.bfloat16, device)
    for b in (bias, bias.expand_as(x)):
        bias_dropout_add(x, b, residual, 0.3).backward(dout)
        assert x.grad.shape == x.shape and bias.grad.abs().sum() == 0


def test_keeps_the_sign_of_zero(device):
    x = torch.tensor([[-0.0, 0.0]], device=device)
    for p in (0.0, 0.001):
        out = bias_dropout_add(x, None, None, p, True, FixedSlot(3, device))
        assert torch.signbit(out).tolist() == [[True, False]], "1 of 1000 dropped would be +0"


@pytest.mark.parametrize(
    "change",
    [
        {"residual": torch.ones(4, 6)},
        {"residual": torch.ones(1, 6, dtype=torch.bfloat16)},
        {"bias": torch.ones(1)},
        {"slot": torch.ones(3, dtype=torch.int64)},
        {"slot": torch.ones(2)},
        {"p": 1.0},
    ],
    ids=lambda c: str({k: getattr(v, "shape", v) for k, v in c.items()}),
)
def test_the_op_itself_refuses_what_its_kernel_would_misread(change, device):
    x = torch.ones(4, 6, device=device, dtype=torch.bfloat16)
    slot = torch.tensor([5, 9])
    arguments = {"x": x, "bias": None, "residual": None, "slot": slot.to(device), "p": 0.1}
    arguments["site"] = 0
    arguments |= {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    if device.type == "cpu" and getattr(change.get("residual"), "shape", None) == (4, 6):
        pytest.skip("the reference adds an fp32 residual, the kernel does not")
    with pytest.raises((TypeError, ValueError)):
        torch.ops.lorakernels.bias_dropout_add(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"x": torch.ones(4, 6, dtype=torch.int32)},
            TypeError,
            "x must be float32, bfloat16 or float16, found torch.int32",
        ),
        ({"bias": torch.ones(5)}, ValueError, r"bias must have shape \[6\], found \(5,\)"),
        (
            {"bias": torch.ones(4, 6)},
            ValueError,
            r"bias must be \[N\] or expanded from it, found \(4, 6\)",
        ),
        (
            {"residual": torch.ones(1, 6)},
            ValueError,
            r"residual must have x's shape \(4, 6\), found \(1, 6\)",
        ),
        ({"p": 1.0}, ValueError, r"p must be in \[0, 1\), found 1.0"),
        ({"p": float("nan")}, ValueError, r"p must be in \[0, 1\), found nan"),
        ({"col0": -1}, ValueError, r"col0 must be in \[0, 2\*\*32\), found -1"),
        ({"site": 2**32}, ValueError, r"site must be in \[0, 2\*\*32\), found 4294967296"),
        ({"col0": 2**32 - 5}, ValueError, r"columns must end below 2\*\*32, .* col0 = 4294967291"),
        (
            {"residual": torch.ones(4, 6, requires_grad=True), "inplace": True},
            ValueError,
            "inplace needs a residual that is no leaf requiring grad",
        ),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have shape \[..., N\], found a scalar"),
        (
            {"residual": None, "inplace": True},
            ValueError,
            "inplace needs a contiguous residual .* found None",
        ),
        (
            {"residual": torch.ones(4, 6).half(), "inplace": True},
            ValueError,
            "inplace needs .* torch.float32, found",
        ),
        (
            {"residual": torch.ones(6, 4).t(), "inplace": True},
            ValueError,
            "inplace needs a contiguous residual",
        ),
        ({"bias": torch.ones(6, device="meta")}, ValueError, "bias is on meta, x on cpu"),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, str) else None,
)
def test_refuses(change, error, message):
    arguments = {
        "x": torch.ones(4, 6),
        "bias": torch.ones(6),
        "residual": torch.ones(4, 6),
        "p": 0.1,
    }
    arguments |= change
    with pytest.raises(error, match=message):
        bias_dropout_add(**arguments)
