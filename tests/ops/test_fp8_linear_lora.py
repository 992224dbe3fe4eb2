# SPDX-License-Identifier: Apache-2.0
"""fp8_linear_lora's kernels: against float64 on the GPU; Triton's also interpreted on the CPU."""

from __future__ import annotations

import itertools
import random
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.kernels import tune
from lorakernels.kernels.triton import fp8_linear_lora as kernel
from lorakernels.ops.fp8_linear_lora import (
    by_cublaslt,
    launch_csrc,
    why_not_csrc_kernel,
    why_not_triton_kernel,
)
from lorakernels.values import Scaled, Weight
from tests.kernels.by_triton import interpret
from tests.ops.cases.fp8_linear_lora import Linear, bound, diagonal
from tests.ops.contract import BF16, FP16, FP32, Arguments, Call, Made

HOPPER = (9, 0)
operands = ops.fp8_linear_lora.arguments
GUARD = 128  # elements; keeps 16-byte alignment


class Case(NamedTuple):
    m: int
    n: int
    k: int
    rank: int  # 0: no LoRA
    bias: torch.dtype | None
    b: torch.dtype
    out: torch.dtype
    scaling: float

    def __str__(self) -> str:
        bias, b, out = (str(t).removeprefix("torch.") for t in (self.bias, self.b, self.out))
        return (
            f"M{self.m} N{self.n} K{self.k} R{self.rank} bias {bias} B {b} {out} × {self.scaling}"
        )


INTERPRETED = [
    Case(1, 16, 16, 1, BF16, FP32, BF16, 0.5),
    Case(33, 80, 48, 3, None, BF16, BF16, 2.0),
    Case(70, 144, 80, 16, FP32, FP32, FP16, -1.5),
    Case(40, 48, 32, 0, FP16, FP32, BF16, 1.0),
    Case(32, 64, 64, 70, None, FP32, BF16, 2.0),
    Case(17, 32, 64, 8, None, FP32, BF16, 0.0),
]
MORE = {"plain": {}, "scales, residual": {"by_row": True, "residual": True}}
SMALL = tune.KernelConfig(32, 32, 32, num_warps=4, num_stages=2, group=2)


def sweep() -> list[Case]:
    """48 random shapes, the named ones among them: every tile size of the table, ragged in every direction."""
    draw = random.Random(0)
    ms = [1, 17, 64, 65, 300, 1000, 4097]
    ns = [16, 16 * 17, 16 * 65, 1024, 4096, 8208]
    ks = [16, 48, 16 * 33, 1024, 16 * 129]
    ranks = [1, 3, 8, 16, 60, 64, 100, 128, 256, 0]
    return [
        Case(
            ms[i % len(ms)],
            draw.choice(ns),
            draw.choice(ks),
            ranks[i % len(ranks)],
            draw.choice([None, BF16, FP16, FP32]),
            draw.choice([FP32, BF16]),
            draw.choice([BF16, BF16, FP16]),
            draw.choice([0.25, 1.0, 2.0, -3.7]),
        )
        for i in range(48)
    ]


def arguments(case: Case, device: str, **more: bool) -> Arguments:
    m, n, k, rank, bias, b, out, scaling = case
    given = {"bias": bias, "b": b, "out": out, "scaling": scaling}
    return Linear(n, k, rank, **given, **more)(Made(device, m))


def exact(call: Arguments) -> Tensor:
    """In float64, unrounded."""
    return next(bound(Call(call, call, (torch.empty(0),)))).exact


def guarded(call: Arguments) -> tuple[Tensor, Tensor]:
    """(buffer, y inside of it), all NaN."""
    x, weight, *_ = call
    m, n, out = len(x.data), len(weight.data), call[4]
    buffer = torch.full((m * n + 2 * GUARD,), torch.nan, dtype=out, device=x.data.device)
    return buffer, buffer[GUARD:-GUARD].view(m, n)


def run(call: Arguments, config: tune.KernelConfig, programs: int) -> Tensor:
    """y between its guards, by Triton's kernel."""
    buffer, y = guarded(call)
    kernel.launch(y, *call[:4], config, programs, call[6])
    return buffer


def error(buffer: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm, relative; the guards hold."""
    assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all()
    y = buffer[GUARD:-GUARD].view(expected.shape).double()
    return float((y - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return interpret(__file__, tmp_path_factory.mktemp("interpreted") / "y.pt")


@pytest.mark.slow
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_kernel_computes_the_reference(interpreted, case, more):
    call, buffer = interpreted[f"{case} {more}"]
    # the interpreter cuts B and y off at bf16's last bit (2⁻⁸ at most, each); its FP8 products are right to 3e-3
    assert error(buffer, exact(call)) < 1e-2


@pytest.mark.gpu
def test_split_accumulation_keeps_what_fast_accumulation_drops() -> None:
    """At K = 28672, against float64: split is off by one rounding to bf16, fast by more than twice that."""
    x, w = (torch.randn(512, 28672, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(1, device="cuda")
    expected = x.double() @ w.double().t()

    def error(y: Tensor) -> float:
        return float((y.double() - expected).norm() / expected.norm())

    def run(split: bool) -> Tensor:
        operands = Scaled(x.view(torch.uint8), one), Weight(w.view(torch.uint8), one)
        return ops.fp8_linear_lora(*operands, None, None, torch.bfloat16, split)

    assert error(run(True)) < 1.05 * error(expected.bfloat16())
    assert error(run(False)) > 2 * error(run(True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", sweep(), ids=str)
def test_like_float64_and_the_same_twice(case):
    call = arguments(case, "cuda")
    problem = tune.Problem(case.m, case.n, case.k, case.rank)
    config = tune.choose(problem, HOPPER, 132)
    programs = tune.programs(config, problem, 132)
    assert why_not_triton_kernel(operands(*call)) is None
    buffer, expected = run(call, config, programs), exact(call)
    # cuBLASLt, then the bias, then LoRA: rounded up to three times
    peer = float((by_cublaslt(operands(*call)).double() - expected).norm() / expected.norm())
    # twice what PyTorch gets, and one rounding for where it happens to be exact
    assert error(buffer, expected) <= 2 * peer + torch.finfo(case.out).eps
    assert torch.equal(run(call, config, programs)[GUARD:-GUARD], buffer[GUARD:-GUARD])
    call = arguments(case, "cuda", **MORE["scales, residual"])
    # a rounding to y's dtype (2⁻⁹ for bf16), and fast accumulation's 14 bits
    assert error(run(call, config, programs), exact(call)) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"by_row": True, "residual": True},
        {"residual": True, "split": True},
        {"by_row": True, "split": True},
    ],
    ids=lambda more: ", ".join(more) or "plain",
)
@pytest.mark.parametrize("case", sweep(), ids=str)
def test_csrc_s_kernel_like_float64_and_the_same_twice(case: Case, more: dict[str, bool]) -> None:
    """Every tile shape, ragged in every direction; guards around y stay as they were."""
    call = arguments(case, "cuda", **more)
    split = operands(*call).split
    assert why_not_csrc_kernel(operands(*call)) is None
    expected, found = exact(call), ops.fp8_linear_lora(*call)
    for shape in (None, *tune.CSRC_TILES["split" if split else "fast"]):
        with pytest.MonkeyPatch.context() as patch:
            if shape is not None:
                patch.setattr(tune, "csrc_tile", lambda *_, shape=shape: (shape, 1.0))
            buffer, y = guarded(call)
            again = torch.empty_like(y)
            for out in (y, again):
                launch_csrc(out, operands(*call))
        assert torch.equal(y, again) and (shape is not None or torch.equal(y, found))
        # a rounding to the output's dtype (2⁻⁹ for bf16), and fast accumulation's 14 bits
        assert error(buffer, expected) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("config", tune.TILES[HOPPER] + tune.DEFAULT, ids=str)
def test_every_configuration_any_number_of_programs(config):
    """Fewer programs than tiles walk over several, and the result does not know it."""
    call = arguments(Case(333, 16 * 41, 16 * 21, 24, FP32, FP32, BF16, 1.5), "cuda")
    few, many = (run(call, config, programs) for programs in (2, 7))
    assert torch.equal(few[GUARD:-GUARD], many[GUARD:-GUARD])
    # a rounding to bf16 and FP8 sums with 14 bits: measured 1.7e-3
    assert error(few, exact(call)) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 24}, "N = 24"),
        ({"m": 0}, "no rows"),
        ({"out": FP32}, "out_dtype"),
        ({"rank": 300}, "rank 300"),
        ({"scaling": 1e-30}, "scaling"),
    ],
    ids=str,
)
def test_what_triton_s_kernel_cannot_take_is_named_and_right(change, reason):
    call = arguments(Case(40, 64, 96, 4, BF16, FP32, BF16, 2.0)._replace(**change), "cuda")
    assert reason in why_not_triton_kernel(operands(*call))
    expected = exact(call)
    # three roundings to bf16 and fast accumulation
    y = ops.fp8_linear_lora(*call).double()
    assert (y - expected).norm() <= 1e-2 * expected.norm()


if __name__ == "__main__":
    torch.manual_seed(0)
    found = {}
    for case, (name, more) in itertools.product(INTERPRETED, MORE.items()):
        call = arguments(case, "cpu", **more)
        found[f"{case} {name}"] = call, run(call, SMALL, 2)
    torch.save(found, sys.argv[1])


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(128, 128), (128, 256), (192, 128)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize(
    "blocks",
    [((1024, 64), (1024, 64)), ((640, 64), (16, 0), (1392, 72)), ((1000, 200), (1048, 16))],
    ids=["2 x 64", "a gap", "inside of a tile"],
)
def test_zeros_that_are_left_out_change_no_bit(
    blocks: tuple[tuple[int, int], ...], tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are added to an fp32 sum of the tensor cores."""
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    call = diagonal(144, *blocks, split=tile == (192, 128))(Made("cuda", 700))
    assert why_not_csrc_kernel(operands(*call)) is None
    assert torch.equal(ops.fp8_linear_lora(*call), ops.fp8_linear_lora(*call[:-1]))
