# SPDX-License-Identifier: Apache-2.0
"""The Triton helpers draw the reference's bits: on the GPU, and on the CPU by Triton's interpreter.

The interpreter must be chosen before triton is first imported, so the CPU's draws come from one run of this file as a
program, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorakernels import _C, reference
from lorakernels.kernels.philox import dropout_keep, dropout_words, load_slot, philox4x32_10

ROOT = Path(__file__).parents[2]
BLOCK_ROWS, BLOCK_GROUPS = 16, 4


class Window(NamedTuple):
    rows: int
    cols: int
    row0: int
    col0: int
    key: int
    offset: int
    site: int
    p: float


WINDOWS = {
    "one element": Window(1, 1, 0, 0, 1, 2, 3, 0.5),
    "several tiles, odd": Window(37, 75, 0, 0, 2**63 - 1, 5, 0, 0.3),
    "negative key, offset beyond 32 bits": Window(16, 64, 0, 0, -5, 0x1_2345_6789, 7, 0.1),
    "window in the middle of a group": Window(19, 45, 11, 13, 42, 9, 1, 0.5),
    "last rows, largest site": Window(4, 16, 2**32 - 4, 8, -(2**63), -1, 2**32 - 1, 0.9),
    "threshold 0": Window(3, 9, 0, 0, 1, 1, 1, 0.0),
    "threshold 1, site 1": Window(64, 256, 0, 0, 1, 1, 1, 1 / 65536),
    "a lane equal to the threshold": Window(1, 8, 0, 0, 0, 0, 0, 0xE8D5 / 65536),
    "threshold 65535": Window(64, 256, 5, 7, 1, 1, 1, 0.999999),
}


@triton.jit
def _words_kernel(out, counter_key, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < n
    c0 = tl.load(counter_key + i, inside).to(tl.uint32)
    c1 = tl.load(counter_key + n + i, inside).to(tl.uint32)
    c2 = tl.load(counter_key + 2 * n + i, inside).to(tl.uint32)
    c3 = tl.load(counter_key + 3 * n + i, inside).to(tl.uint32)
    k0 = tl.load(counter_key + 4 * n + i, inside).to(tl.uint32)
    k1 = tl.load(counter_key + 5 * n + i, inside).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32_10(c0, c1, c2, c3, k0, k1)
    tl.store(out + i, w0.to(tl.int64), inside)
    tl.store(out + n + i, w1.to(tl.int64), inside)
    tl.store(out + 2 * n + i, w2.to(tl.int64), inside)
    tl.store(out + 3 * n + i, w3.to(tl.int64), inside)


@triton.jit
def _mask_kernel(
    out, slot, rows, cols, row0, col0, site, threshold, R: tl.constexpr, G: tl.constexpr
):
    local_row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    group = col0 // 8 + tl.program_id(1).to(tl.int64) * G + tl.arange(0, G)
    key0, key1, offset = load_slot(slot)
    w0, w1, w2, w3 = dropout_words(row0 + local_row, group, key0, key1, offset, site)
    keep = dropout_keep(w0, w1, w2, w3, threshold)
    first = (col0 // 8 + tl.program_id(1).to(tl.int64) * G) * 8 - col0
    local_col = first + tl.arange(0, 8 * G)
    inside = (local_row < rows)[:, None] & ((local_col >= 0) & (local_col < cols))[None, :]
    tl.store(out + local_row[:, None] * cols + local_col[None, :], keep.to(tl.uint8), inside)


@triton.jit
def _drop_kernel(out, x, slot, stride, site, threshold, R: tl.constexpr, G: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    group = tl.program_id(1) * G + tl.arange(0, G)
    at = row[:, None] * stride + (tl.program_id(1) * G * 8 + tl.arange(0, 8 * G))[None, :]
    key0, key1, offset = load_slot(slot)
    w0, w1, w2, w3 = dropout_words(row, group, key0, key1, offset, site)
    tl.store(out + at, tl.where(dropout_keep(w0, w1, w2, w3, threshold), tl.load(x + at), 0.0))


def draw_words(counter_key: torch.Tensor) -> torch.Tensor:
    """int64 [6, n], counter over key, → int64 [4, n]."""
    n = counter_key.shape[1]
    out = torch.empty(4, n, dtype=torch.int64, device=counter_key.device)
    _words_kernel[(1,)](out, counter_key, n, BLOCK=triton.next_power_of_2(n))
    return out


def draw_mask(window: Window, device: str) -> torch.Tensor:
    """uint8 [rows, cols], followed by 64 bytes of 7 that nothing may write."""
    rows, cols, row0, col0, key, offset, site, p = window
    out = torch.full((rows * cols + 64,), 7, dtype=torch.uint8, device=device)
    slot = torch.tensor([key, offset], device=device)
    grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(col0 % 8 + cols, 8 * BLOCK_GROUPS))
    threshold = reference.dropout_threshold(p)
    _mask_kernel[grid](
        out, slot, rows, cols, row0, col0, site, threshold, R=BLOCK_ROWS, G=BLOCK_GROUPS
    )
    return out


def counters_and_keys() -> torch.Tensor:
    """Random123's three known answers' inputs, then 61 random ones."""
    known = torch.tensor(
        [
            [0] * 6,
            [0xFFFFFFFF] * 6,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0],
        ]
    )
    generator = torch.Generator().manual_seed(1)
    return torch.cat((known, torch.randint(2**32, (61, 6), generator=generator))).t().contiguous()


def draw_all(device: str) -> dict[str, torch.Tensor]:
    masks = {name: draw_mask(window, device).cpu() for name, window in WINDOWS.items()}
    return masks | {"words": draw_words(counters_and_keys().to(device)).cpu()}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def drawn(request, tmp_path_factory):
    if request.param == "cuda":
        return draw_all("cuda")
    path = tmp_path_factory.mktemp("drawn") / "masks.pt"
    path_to_here = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path_to_here}
    command = [sys.executable, __file__, str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return torch.load(path)


def test_words_equal_random123_and_csrc(drawn):
    words = drawn["words"].t().tolist()
    assert words[:3] == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert words == [_C.philox4x32_10(v[:4], v[4:]) for v in counters_and_keys().t().tolist()]


@pytest.mark.parametrize("name", WINDOWS)
def test_mask_equals_the_reference_and_nothing_else_is_written(drawn, name):
    rows, cols, row0, col0, key, offset, site, p = WINDOWS[name]
    slot = torch.tensor([key, offset])
    expected = reference.dropout_keep(slot, p, site, rows, cols, row0, col0)
    n = rows * cols
    assert torch.equal(drawn[name][:n].view(rows, cols), expected.to(torch.uint8))
    assert bool((drawn[name][n:] == 7).all())


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_compiled_mask_stays_in_registers():
    """For sm_90, no GPU needed: a tile of bf16, 16 bytes per thread, has the mask's layout already."""
    types = {"out": "*bf16", "x": "*bf16", "slot": "*i64", "stride": "i32", "site": "i32"}
    types |= {"threshold": "i32", "R": "constexpr", "G": "constexpr"}
    source = ASTSource(
        fn=_drop_kernel,
        signature=types,
        constexprs={(6,): 32, (7,): 8},
        attrs={(i,): [["tt.divisibility", 16]] for i in (0, 1, 3)},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.metadata.shared == 0


if __name__ == "__main__":
    torch.save(draw_all("cpu"), sys.argv[1])
