# SPDX-License-Identifier: Apache-2.0
"""cross_entropy_'s Triton kernel: against float64 on the GPU, interpreted on the CPU, and its sm_90 code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorakernels import ops
from lorakernels.kernels.triton import cross_entropy as kernel
from lorakernels.ops import cross_entropy as op_file

ROOT = Path(__file__).parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
IGNORE = -100


class Case(NamedTuple):
    m: int
    v: int
    dtype: torch.dtype
    factor: float | None
    gradient: bool
    block: int

    def __str__(self) -> str:
        how = f"× {self.factor} gradient {self.gradient} blocks of {self.block}"
        return f"M{self.m} V{self.v} {str(self.dtype)[6:]} {how}"


INTERPRETED = [
    Case(5, 1, FP32, None, True, 16),
    Case(6, 75, FP32, 0.25, True, 32),
    Case(7, 64, FP32, None, True, 64),
    Case(9, 130, FP32, None, False, 64),
    Case(8, 50, FP16, 2.0, True, 16),
]
SIZES = [
    Case(m, v, dtype, factor, True, op_file.BLOCK)
    for m, v in ((1, 1), (3, 33), (65, 8192), (17, 8193), (130, 32000), (40, 128256), (5, 262144))
    for dtype, factor in ((BF16, None), (FP16, 3.0), (FP32, 1e-3))
]


def operands(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """logits of order 5, labels: first, last, ignored, out of range both ways, then any; factor."""
    generator = torch.Generator(device).manual_seed(case.m + case.v)
    logits = 5 * torch.randn(case.m, case.v, generator=generator, device=device)
    if case.v > 20:
        logits[0, : case.v // 2] = -float("inf")
    labels = torch.randint(0, case.v, (case.m,), generator=generator, device=device)
    special = [case.v - 1, IGNORE, 0, case.v, -1][: case.m]
    labels[: len(special)] = torch.tensor(special, device=device)
    if case.m > 1:
        logits[1] = float("nan")  # the ignored one
    factor = None if case.factor is None else torch.full((), case.factor, device=device)
    return logits.to(case.dtype), labels, factor


def run(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """(losses, logits) with a guard around each."""
    logits, labels, factor = operands(case, device)
    losses = torch.full((case.m + 2,), 7.0, device=device)
    buffer = torch.full((logits.numel() + 32,), 7.0, dtype=case.dtype, device=device)
    z = buffer[16:-16].view(logits.shape)
    z.copy_(logits)
    sizes = (case.block, op_file.WARPS)  # sums depend on the number of warps
    kernel.launch(losses[1:-1], z, labels, factor, IGNORE, case.gradient, *sizes)
    return losses, buffer


def check(case: Case, device: str, losses: Tensor, buffer: Tensor) -> None:
    assert losses[[0, -1]].eq(7).all() and (buffer[:16] == 7).all() and (buffer[-16:] == 7).all()
    logits, labels, factor = operands(case, device)
    z, wide = buffer[16:-16].view(logits.shape), logits.double()
    wide_factor = None if factor is None else factor.double()
    exact = ops.cross_entropy_.reference(wide, labels, wide_factor, IGNORE, case.gradient)
    # exp and log in fp32, sums of V terms by halves: a few ulps of the largest term, 25 or so
    torch.testing.assert_close(losses[1:-1].double(), exact, rtol=2e-6, atol=1e-5, equal_nan=True)
    if not case.gradient:
        assert torch.equal(z.nan_to_num(), logits.nan_to_num()), "untouched"
        return
    eps, tiny = torch.finfo(case.dtype).eps, torch.finfo(case.dtype).smallest_normal
    torch.testing.assert_close(
        z.double(), wide, rtol=eps + 2e-5, atol=tiny + 1e-7 * (case.factor or 1.0), equal_nan=True
    )


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """The interpreter must be chosen before triton is first imported: one run of this file as a program."""
    versions = [tuple(map(int, m.__version__.split(".")[:2])) for m in (triton, numpy)]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 takes no loop bounds with NumPy 2.4 or later")
    path = tmp_path_factory.mktemp("interpreted") / "z.pt"
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": search}
    result = subprocess.run(
        [sys.executable, __file__, str(path)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return torch.load(path)


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_kernel_computes_the_reference(interpreted, case):
    check(case, "cpu", *interpreted[str(case)])


@pytest.mark.gpu
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_like_float64_and_the_same_twice(case):
    first, second = run(case, "cuda"), run(case, "cuda")
    check(case, "cuda", *first)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.gpu
def test_the_op_takes_the_kernel_and_nothing_else():
    case = Case(33, 5000, BF16, 0.5, True, 8192)
    logits, labels, factor = operands(case, "cuda")
    losses = ops.cross_entropy_(logits, labels, factor, IGNORE, True)
    expected, buffer = run(case, "cuda")
    assert torch.equal(losses.nan_to_num(), expected[1:-1].nan_to_num())
    assert torch.equal(logits.nan_to_num(), buffer[16:-16].view(logits.shape).nan_to_num())
    with pytest.raises(ValueError, match="contiguous"):
        ops.cross_entropy_(logits.t().contiguous().t(), labels, factor, IGNORE, True)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("gradient", [False, True])
def test_sm_90_code_loads_16_bytes_and_spills_nothing(gradient, tmp_path):
    """Rows whose length is a multiple of 8: what a vocabulary padded for tensor cores has."""
    constants = {"GRADIENT": gradient, "HAS_FACTOR": True, "BLOCK": op_file.BLOCK}
    types = {
        "losses": "*fp32",
        "logits": "*bf16",
        "labels": "*i64",
        "factor": "*fp32",
        "ignore_index": "i32",
        "V": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    names = kernel._cross_entropy_kernel.arg_names
    source = ASTSource(
        fn=kernel._cross_entropy_kernel,
        signature={n: types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={
            (names.index(n),): [["tt.divisibility", 16]]
            for n in names
            if types[n].startswith("*") or n == "V"
        },
    )
    code = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": op_file.WARPS}
    )
    ptx = code.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and not re.search(r"\.local", ptx)
    assert bool(re.search(r"st\.global\S*\.v4\.b32", ptx)) == gradient


if __name__ == "__main__":
    torch.save({str(case): run(case, "cpu") for case in INTERPRETED}, sys.argv[1])
