# SPDX-License-Identifier: Apache-2.0
"""block_diagonal's Triton kernel equals the reference bit for bit: on the GPU, and interpreted on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lorakernels import ops
from lorakernels.kernels.triton.block_diagonal import TILE, _block_diagonal_kernel
from lorakernels.ops import SideBySide
from lorakernels.ops.block_diagonal import by_triton, by_triton_parts
from tests.kernels.by_triton import sm90, spills

ROOT = Path(__file__).parents[2]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CASES = [  # rows, ranks: one block, gaps, rows that end inside of a tile
    ([33], [7]),
    ([70, 70], [16, 16]),
    ([100, 30, 70], [3, 0, 5]),
    ([70, 10, 3], [0, 4, 0]),
    ([5, 6, 7, 8], [1, 2, 3, 4]),
    ([40, 20, 9], [16, 0, 16]),
    ([3, 2, 1, 2, 4], [1, 1, 1, 0, 2]),  # more blocks than the kernel takes
]


def blocks_of(rows, ranks, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(sum(rows))
    blocks = [
        torch.randn(n, r, generator=generator).to(device, dtype)
        for n, r in zip(rows, ranks, strict=True)
        if r
    ]
    return blocks, (torch.rand(2, len(rows), generator=generator) + 0.5).to(device)


def check(stack, part, rows, ranks, dtype, device) -> None:
    blocks, factors = blocks_of(rows, ranks, dtype, device)
    side = SideBySide(rows, ranks)
    for compact in [False, True] if len({*ranks} - {0}) == 1 else [False]:
        expected = ops.block_diagonal.reference(blocks, side, factors, compact)
        found = stack(blocks, side, factors, compact)
        assert all(map(torch.equal, found, expected)) and not torch.equal(*found)
        parts = part(found[compact], side, factors[1], compact)
        check_parts(parts, blocks, side, factors, compact)


def check_parts(parts, blocks, side, factors, compact) -> None:
    second = ops.block_diagonal.reference(blocks, side, factors, compact)[compact]
    theirs = ops.block_diagonal_parts.reference(second, side, factors[1], compact)
    assert len(parts) == len(blocks)
    for part, other in zip(parts, theirs, strict=True):
        assert part.is_contiguous() and torch.equal(part, other)


@pytest.mark.parametrize(("rows", "ranks"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_op_equals_reference(rows, ranks, dtype, device) -> None:
    check(ops.block_diagonal, ops.block_diagonal_parts, rows, ranks, dtype, device)


def test_interpreted_kernel_equals_reference() -> None:
    """The interpreter must be chosen before triton is first imported; its bf16 casts cut bits off, so not with bf16."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("split", "compact"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_hopper_s_code(split, compact, tmp_path) -> None:
    """It starts early (by_triton.sm90); nothing spilled."""
    types = dict.fromkeys(("out", "out2", "b0", "b1", "b2", "b3", "factors"), "*fp32")
    types |= dict.fromkeys(("n1", "n2", "n3", "n4", "r1", "r2", "r3", "r4", "compact_rank"), "i32")
    constants = {"COUNT": 3, "COLUMNS": 64, "TILE": TILE, "SPLIT": split}
    constants["COMPACT"] = compact
    assert not spills(sm90(_block_diagonal_kernel, types, constants, 4, tmp_path))


def test_what_does_not_fit_is_refused() -> None:
    blocks, factors = blocks_of([4, 4], [2, 2], FP32)
    side = SideBySide([4, 4], [2, 2])
    with pytest.raises(ValueError, match=r"blocks must be \[\(4, 2\), \(5, 2\)\]"):
        ops.block_diagonal(blocks, SideBySide([4, 5], [2, 2]), factors)
    with pytest.raises(TypeError, match="one dtype"):
        ops.block_diagonal([blocks[0], blocks[1].half()], side, factors)
    with pytest.raises(ValueError, match=r"factors must be float32 \[2, 2\]"):
        ops.block_diagonal(blocks, side, factors[:1])
    with pytest.raises(ValueError, match=r"one rank R, or 0, to be compact, found \[2, 1\]"):
        ops.block_diagonal([blocks[0], blocks[1][:, :1]], SideBySide([4, 4], [2, 1]), factors, True)
    matrix = torch.ones(8, 4)
    with pytest.raises(ValueError, match=r"matrix \(8, 5\) does not fit rows \[4, 4\]"):
        ops.block_diagonal_parts(torch.ones(8, 5), side, factors[0])
    for wrong in (factors, factors[0].half(), factors[0].double()):
        with pytest.raises(ValueError, match=r"factors must be float32 \[2\], found torch\.float"):
            ops.block_diagonal_parts(matrix, side, wrong)
    for wrong in (([8], [2, 2]), ([4, 4], [4]), ([9, -1], [2, 2]), ([4, 4], [5, -1])):
        match = re.escape(f"none negative, found {wrong[0]} and {wrong[1]}")
        with pytest.raises(ValueError, match=match):
            ops.block_diagonal_parts(matrix, SideBySide(*wrong), factors[0])
        with pytest.raises(ValueError, match=match):
            ops.block_diagonal(blocks, SideBySide(*wrong), factors)
    elsewhere = factors.to("meta")
    with pytest.raises(ValueError, match="factors must be on cpu, found meta"):
        ops.block_diagonal.reference(blocks, side, elsewhere)
    with pytest.raises(ValueError, match="factors must be on cpu, found meta"):
        ops.block_diagonal_parts.reference(matrix, side, elsewhere[0])
    with pytest.raises(TypeError, match=r"floating dtype, found torch\.int32"):
        ops.block_diagonal_parts(matrix.int(), side, factors[0])


if __name__ == "__main__":
    for rows, ranks in CASES[:-1]:
        for dtype in (FP32, FP16):
            check(by_triton, by_triton_parts, rows, ranks, dtype, "cpu")
