# SPDX-License-Identifier: Apache-2.0
"""csrc's transpose_fp8 against torch, byte for byte."""

from __future__ import annotations

import random

import pytest
import torch

from lorakernels import _C, ops
from lorakernels.ops.transpose_fp8 import by_csrc, why_not_csrc_kernel

gpu = pytest.mark.gpu


def random_bytes(n, k):
    return torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda")


def sweep(count):
    draw = random.Random(2)
    for _ in range(count):
        step = draw.choice([1, 16])
        yield step * draw.randrange(1, 700 // step), step * draw.randrange(1, 700 // step)


@gpu
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (1, 1),
        (16, 16),
        (128, 128),
        (144, 272),
        (2048, 16),
        (16, 2064),
        (127, 129),
        (130, 256),
        (256, 130),
        (4096, 8192),
        *sweep(25),
    ],
)
def test_equals_torch(n, k):
    w = random_bytes(n, k)
    assert ops.transpose_fp8.takes(w).name == "csrc"
    found = ops.transpose_fp8.run(w)
    assert found.is_contiguous() and torch.equal(found, w.t())
    assert torch.equal(ops.transpose_fp8(w), found)


@gpu
def test_misaligned_takes_single_bytes():
    whole = random_bytes(1, 64 * 48 + 3)[0]
    w = whole[3:].view(64, 48)
    assert torch.equal(ops.transpose_fp8.run(w), w.t())


@gpu
@pytest.mark.parametrize(("n", "k"), [(0, 16), (16, 0)])
def test_nothing_to_do(n, k):
    assert ops.transpose_fp8.run(random_bytes(n, k)).shape == (k, n)


@gpu
def test_fp8_dtypes_keep_theirs():
    w = random_bytes(32, 48).view(torch.float8_e4m3fn)
    found = ops.transpose_fp8.run(w)
    assert found.dtype == w.dtype
    assert torch.equal(found.view(torch.uint8), w.view(torch.uint8).t())


@gpu
@pytest.mark.parametrize(("n", "k"), [(144, 400), (33, 77)])
def test_writes_nothing_else(n, k, monkeypatch):
    guard = 4096
    whole = torch.full((n * k + 2 * guard,), 0xA5, dtype=torch.uint8, device="cuda")
    w = random_bytes(n, k)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: whole[guard : guard + n * k].view(k, n))
        found = by_csrc(w)
    assert torch.equal(found, w.t())
    assert bool((whole[:guard] == 0xA5).all()) and bool((whole[guard + n * k :] == 0xA5).all())


@gpu
def test_runs_under_capture():
    w = random_bytes(160, 96)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = ops.transpose_fp8.run(w)
    w.copy_(random_bytes(160, 96))
    graph.replay()
    assert torch.equal(found, w.t())


@gpu
def test_strided_goes_through_pytorch():
    w = random_bytes(64, 128)[:, ::2]
    assert ops.transpose_fp8.takes(w).name == "torch"
    assert "must be contiguous" in why_not_csrc_kernel(w)
    found = ops.transpose_fp8.run(w)
    assert found.is_contiguous() and torch.equal(found, w.t())


@pytest.mark.parametrize("shape", [(16,), (2, 16, 16)], ids=str)
def test_what_is_not_a_matrix_is_refused(shape, device):
    weight = torch.zeros(shape, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"weight must be \[N, K\], found \["):
        ops.transpose_fp8(weight)


@pytest.mark.parametrize("size", ["rows", "cols"])
def test_the_binding_refuses_a_negative_size(size):
    sizes = {"rows": 16, "cols": 16, size: -1}
    with pytest.raises(ValueError, match=f"{size} must not be negative, got -1"):
        _C.transpose_fp8(0, 0, **sizes, stream=0, device=-1)


def test_the_binding_refuses_what_no_grid_holds():
    with pytest.raises(ValueError, match="got rows 2147480000, cols 2147480000"):
        _C.transpose_fp8(0, 0, 2147480000, 2147480000, 0, -1)
