# SPDX-License-Identifier: Apache-2.0
"""Which attention backend is taken, and that each computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lorakernels.autograd.attention import choose as attention
from lorakernels.autograd.attention import graphed as graphed_attention
from lorakernels.device import cudnn_folders

BF16 = torch.bfloat16


def heads(device, dtype=torch.float32, batch=2, tokens=64, q_heads=4, kv_heads=2, dim=64):
    """q, k, v as views of one qkv, as a fused layer has them."""
    counts = [q_heads, kv_heads, kv_heads]
    qkv = torch.randn(batch, tokens, sum(counts), dim, device=device, dtype=dtype)
    return [t.transpose(1, 2).requires_grad_() for t in qkv.split(counts, 2)]


def test_the_table() -> None:
    assert attention.preference((9, 0), False)[:3] == ("cudnn", "cudnn_graph", "flash")
    assert attention.preference((8, 0), False)[0] == "flash"
    assert attention.preference((9, 0), True)[0] == "efficient"
    assert attention.preference(None, False) == ("torch",)


MAPS = """7f0a r-xp 00000000 08:01 11   /venv/nvidia/cudnn/lib/libcudnn.so.9
7f0b r--p 00000000 08:01 11   /venv/nvidia/cudnn/lib/libcudnn.so.9
7f0c r-xp 00000000 08:01 12   /venv/nvidia/cudnn/lib/libcudnn_graph.so.9
7f0d r-xp 00000000 08:01 13   /venv/lib/libcudart.so.13
7f0e rw-p 00000000 00:00 0    [heap]
"""


@pytest.mark.parametrize("others", ["", "7f0f r-xp 0 08:01 21   /usr/lib/libcudnn.so.9.1.0\n"])
def test_parts_of_a_second_cudnn_rule_cudnn_out(others: str, tmp_path: Path, monkeypatch) -> None:
    """As Transformer Engine may bring them: torch's attention then computed NaN, or wrote where it must not."""
    maps = tmp_path / "maps"
    maps.write_text(MAPS + others)
    folders = cudnn_folders(maps)
    assert folders == (["/usr/lib"] if others else []) + ["/venv/nvidia/cudnn/lib"]
    monkeypatch.setattr(attention, "cudnn_folders", lambda: folders)
    monkeypatch.setattr(attention, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(attention, "_takes", lambda _: lambda _: True)
    monkeypatch.setattr(graphed_attention, "why_not_here", lambda _: "not asked here")
    with FakeTensorMode():
        tensors = heads("cuda", BF16)
        assert attention.choose("flash", *tensors, None, True) == "flash"
        if others:
            found = r"cuDNN from /usr/lib and .*CUDNN_HOME and LD_LIBRARY_PATH"
            with pytest.warns(RuntimeWarning, match=f"attention without cuDNN: .*{found}"):
                assert attention.choose("auto", *tensors, None, True) == "flash"
            with pytest.raises(RuntimeError, match=f'attention="cudnn": .*{found}'):
                attention.choose("cudnn", *tensors, None, True)
        else:
            assert attention.choose("auto", *tensors, None, True) == "cudnn"
            assert attention.choose("cudnn", *tensors, None, True) == "cudnn"
    assert cudnn_folders(tmp_path / "no such file") == []


def test_refused_by_name() -> None:
    with pytest.raises(ValueError, match="attention must be one of"):
        attention.choose("quick", *heads("cpu"), None, True)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_math_and_the_default_agree(masked: bool) -> None:
    q, k, v = heads("cpu")
    mask = torch.ones(64, 64, dtype=torch.bool).tril()[None, None] if masked else None
    found = [attention.attend(name, q, k, v, mask, not masked, 0.125) for name in ("torch", "math")]
    # fp32 sums of 64 products in another order
    assert (found[0] - found[1]).norm() < 2.0**-18 * found[1].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("name", ["auto", *attention.BACKENDS])
def test_backends_agree_with_float64(name: str, masked: bool) -> None:
    """Forward and backward in bf16: within 2^-6 of float64's math, P and dP being rounded to bf16 in every backend."""
    q, k, v = heads("cuda", BF16)
    mask = None
    if masked:
        mask = torch.ones(2, 1, 64, 64, dtype=torch.bool, device="cuda").tril()
        mask[1, :, :, :5] = False
        mask |= torch.eye(64, dtype=torch.bool, device="cuda")
    try:
        taken = attention.choose(name, q, k, v, mask, not masked)
    except (ValueError, RuntimeError) as why:
        # "fp8" takes heads of 128 columns alone
        assert (masked and name == "flash") or name in ("cudnn", "cudnn_graph", "fp8")
        pytest.skip(str(why))
    print(name, taken)
    dout = torch.randn(2, 4, 64, 64, device="cuda", dtype=BF16)
    out = attention.attend(taken, q, k, v, mask, not masked, 0.125)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = [attention.attend("math", *wide, mask, not masked, 0.125)]
    expected += torch.autograd.grad(expected[0], wide, dout.double())
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() < 2.0**-6 * b.norm()


@pytest.mark.parametrize("name", attention.BACKENDS)
def test_on_a_cpu_a_backend_is_refused_or_runs(name: str) -> None:
    """torch's own refusal would come in the first forward."""
    q = torch.randn(1, 2, 8, 16)
    if name in ("flash", "math"):
        assert attention.choose(name, q, q, q, None, True) == name
        attention.attend(name, q, q, q, None, True, 0.25)
        return
    with pytest.raises(ValueError, match=f"attention='{name}' (is for a GPU|does not take)"):
        attention.choose(name, q, q, q, None, True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "efficient", "math"])
def test_packed_sequences_agree_with_float64(name: str) -> None:
    """Variable lengths, a mask of them, and float64's math: within 2^-6 as above; an empty sequence is none."""
    q, k, v = heads("cuda", BF16)
    starts = torch.tensor([0, 50, 50, 64, 65, 128, 128], dtype=torch.int32, device="cuda")
    taken = attention.choose_packed(name, q, k, v)
    assert taken in (("packed", "cudnn_graph") if name == "auto" else (name,))
    dout = torch.randn(2, 4, 64, 64, device="cuda", dtype=BF16)
    out = attention.attend_packed(taken, q, k, v, starts, 64, 0.125)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = [attention.attend_packed("math", *wide, starts, 64, 0.125)]
    expected += torch.autograd.grad(expected[0], wide, dout.double())
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() < 2.0**-6 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash", "cudnn_graph"])
def test_the_longest_sequence_may_be_said_more_tightly(name: str) -> None:
    """By FlashAttention-2 to the same bits, backward with sums in one order. cuDNN may take other tiles, whose P and dP
    are rounded to bf16: within 2^-7."""
    q, k, v = heads("cuda", BF16, batch=1, tokens=2048)
    lengths = [256, 1, 0, 200, 129, 128, 127, 255, *[56] * 10, 256, 136]
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    assert int(starts[-1]) == 2048 and max(lengths) == 256
    try:
        taken = attention.choose_packed(name, q, k, v)
    except ValueError as why:
        pytest.skip(str(why))
    dout, found = torch.randn(1, 4, 2048, 64, device="cuda", dtype=BF16), []
    torch.use_deterministic_algorithms(name == "flash")
    try:
        for longest in (2048, 256):
            out = attention.attend_packed(taken, q, k, v, starts, longest, 0.125)
            found.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*found, strict=True):
        if name == "flash":
            assert torch.equal(a, b)
        assert (a.double() - b.double()).norm() <= 2.0**-7 * a.double().norm()


def test_starts_become_a_mask() -> None:
    starts = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    expected = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    assert torch.equal(attention.packed_mask(starts, 3)[0, 0], expected)
