# SPDX-License-Identifier: Apache-2.0
"""fp8_linear_lora's kernels: against float64 on the GPU; Triton's also interpreted on the CPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy
import pytest
import torch
import triton
from torch import Tensor

from lorakernels import ops
from lorakernels.kernels import tune
from lorakernels.kernels.csrc import fp8_linear_lora as csrc
from lorakernels.kernels.triton import fp8_linear_lora as kernel
from lorakernels.numerics.fp8 import E4M3
from lorakernels.ops.fp8_linear_lora import (
    by_cublaslt,
    why_not_csrc_kernel,
    why_not_triton_kernel,
)
from lorakernels.values import Scaled, Up, Weight

ROOT = Path(__file__).parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = (9, 0)
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
SMALL = tune.KernelConfig(32, 32, 32, num_warps=4, num_stages=2, group=2)


def version(module: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


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


class Operands(NamedTuple):
    """Arguments of the op."""

    x: Scaled
    weight: Weight
    bias: Tensor | None
    up: Up | None
    out_dtype: torch.dtype


def operands(case: Case, device: str) -> Operands:
    """y's entries are of order 1 to 10, its three parts of like size."""
    m, n, k, rank = case[:4]
    generator = torch.Generator(device).manual_seed(m + n + k + rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, w = (
        (20 * normal(*shape)).clamp(-448, 448).to(E4M3).view(torch.uint8)
        for shape in ((m, k), (n, k))
    )
    scales = [torch.full((1,), v, device=device) for v in (0.05, 0.05 / k**0.5)]
    bias = None if case.bias is None else normal(n).to(case.bias)
    up = None
    if rank:
        s = normal(m, rank).to(case.out)
        up = Up((normal(n, rank) / rank**0.5).to(case.b), s, case.scaling)
    return Operands(Scaled(x, scales[0]), Weight(w, scales[1]), bias, up, case.out)


def exact(
    x: Scaled, weight: Weight, bias: Tensor | None, up: Up | None, out_dtype: torch.dtype
) -> Tensor:
    """fp8_linear_lora in float64, unrounded; B rounded to s's dtype, as the contract says."""
    product = x.data.view(E4M3).double() @ weight.data.view(E4M3).double().t()
    y = product * x.scale_inv.double() * weight.scale_inv.double()
    if up is not None:
        y += up.scaling * (up.s.double() @ up.lora_B.to(up.s.dtype).double().t())
    return y if bias is None else y + bias.double()


def guarded(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """(buffer, y inside of it), all NaN."""
    n = case.m * case.n
    buffer = torch.full((n + 2 * GUARD,), float("nan"), dtype=case.out, device=device)
    return buffer, buffer[GUARD : GUARD + n].view(case.m, case.n)


def run(case: Case, device: str, config: tune.KernelConfig, programs: int) -> Tensor:
    """y between its guards."""
    buffer, y = guarded(case, device)
    kernel.launch(y, *operands(case, device)[:-1], config, programs)
    return buffer


def run_with_residual(
    case: Case, device: str, config: tune.KernelConfig, programs: int
) -> tuple[Tensor, Tensor]:
    """(y between its guards, what it must be) for a scale for each row of W, and a residual."""
    buffer, y = guarded(case, device)
    args = operands(case, device)
    generator = torch.Generator(device).manual_seed(case.m)
    residual = torch.randn(y.shape, generator=generator, device=device).to(case.out)
    by_row = torch.rand(case.n, generator=generator, device=device) + 0.5
    weight = args.weight._replace(scale_inv=args.weight.scale_inv * by_row)
    args = args._replace(weight=weight)
    kernel.launch(y, *args[:-1], config, programs, residual)
    return buffer, exact(*args) + residual.double()


def assert_guards_hold(buffer: Tensor) -> None:
    assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """The interpreter must be chosen before triton is first imported: one run of this file as a program."""
    if version(triton) < (3, 7) and version(numpy) >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 takes no loop bounds with NumPy 2.4 or later")
    path = tmp_path_factory.mktemp("interpreted") / "y.pt"
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": search}
    result = subprocess.run(
        [sys.executable, __file__, str(path)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return torch.load(path)


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_kernel_computes_the_reference(interpreted, case):
    buffer = interpreted[str(case)]
    assert_guards_hold(buffer)
    y = buffer[GUARD:-GUARD].view(case.m, case.n).double()
    expected = exact(*operands(case, "cpu"))
    # the interpreter cuts B and y off at bf16's last bit (2⁻⁸ at most, each); its FP8 products are right to 3e-3
    assert (y - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_kernel_adds_a_residual_and_scales_by_row(interpreted, case):
    buffer, expected = interpreted["with residual"][str(case)]
    assert_guards_hold(buffer)
    y = buffer[GUARD:-GUARD].view(case.m, case.n).double()
    assert (y - expected).norm() < 1e-2 * expected.norm()


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
    args = operands(case, "cuda")
    problem = tune.Problem(case.m, case.n, case.k, case.rank)
    config = tune.choose(problem, HOPPER, 132)
    programs = tune.programs(config, problem, 132)
    buffer = run(case, "cuda", config, programs)
    assert_guards_hold(buffer)
    y = buffer[GUARD:-GUARD].view(case.m, case.n)
    expected = exact(*args)
    # cuBLASLt, then the bias, then LoRA: rounded up to three times
    peer = by_cublaslt(*args)
    # twice what PyTorch gets, and one rounding for where it happens to be exact
    allowed = 2 * (peer.double() - expected).norm() + torch.finfo(case.out).eps * expected.norm()
    assert (y.double() - expected).norm() <= allowed
    assert torch.equal(run(case, "cuda", config, programs)[GUARD:-GUARD], buffer[GUARD:-GUARD])
    assert why_not_triton_kernel(*args) is None
    buffer, expected = run_with_residual(case, "cuda", config, programs)
    assert_guards_hold(buffer)
    error = (buffer[GUARD:-GUARD].view(case.m, case.n).double() - expected).norm()
    # a rounding to y's dtype (2⁻⁹ for bf16), and fast accumulation's 14 bits
    assert error < 4e-3 * expected.norm()


class Columns(NamedTuple):
    """What csrc's kernel adds beyond Triton's."""

    by_column: bool = False
    residual: bool = False
    split: bool = False


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [Columns(), Columns(True, True), Columns(residual=True, split=True), Columns(True, split=True)],
    ids=str,
)
@pytest.mark.parametrize("case", sweep(), ids=str)
def test_csrc_s_kernel_like_float64_and_the_same_twice(case: Case, more: Columns) -> None:
    """Every tile shape, ragged in every direction; guards around y stay as they were."""
    args = operands(case, "cuda")
    columns = torch.rand(case.n, device="cuda") + 0.5
    residual = torch.randn(case.m, case.n, device="cuda").to(case.out) if more.residual else None
    expected = exact(*args)
    if more.by_column:
        weight = args.weight
        low = exact(*args._replace(weight=weight._replace(data=torch.zeros_like(weight.data))))
        expected = (expected - low) * columns.double() + low
        args = args._replace(weight=weight._replace(scale_inv=weight.scale_inv * columns))
    if residual is not None:
        expected = expected + residual.double()
    assert why_not_csrc_kernel(*args, more.split, residual) is None
    for shape in (None, *tune.CSRC_TILES["split" if more.split else "fast"]):
        with pytest.MonkeyPatch.context() as patch:
            if shape is not None:
                patch.setattr(tune, "csrc_tile", lambda *_, shape=shape: (shape, 1.0))
            buffer, y = guarded(case, "cuda")
            csrc.launch(y, *args[:-1], more.split, residual)
            again = torch.empty_like(y)
            csrc.launch(again, *args[:-1], more.split, residual)
        assert_guards_hold(buffer)
        assert torch.equal(y, again)
        # a rounding to the output's dtype (2⁻⁹ for bf16), and fast accumulation's 14 bits
        assert (y.double() - expected).norm() < 4e-3 * expected.norm()
    assert torch.equal(
        ops.fp8_linear_lora(*args, more.split, residual), _csrc(case, args, more, residual)
    )


def _csrc(case: Case, args: Operands, more: Columns, residual: Tensor | None) -> Tensor:
    y = torch.empty(case.m, case.n, dtype=case.out, device="cuda")
    csrc.launch(y, *args[:-1], more.split, residual)
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("config", tune.TILES[HOPPER] + tune.DEFAULT, ids=str)
def test_every_configuration_any_number_of_programs(config):
    """Fewer programs than tiles walk over several, and the result does not know it."""
    case = Case(333, 16 * 41, 16 * 21, 24, FP32, FP32, BF16, 1.5)
    few, many = (run(case, "cuda", config, programs)[GUARD:-GUARD] for programs in (2, 7))
    assert torch.equal(few, many)
    expected = exact(*operands(case, "cuda"))
    # a rounding to bf16 and FP8 sums with 14 bits: measured 1.7e-3
    assert (few.view(case.m, case.n).double() - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.gpu
def test_captured_replayed_with_other_values():
    case = Case(200, 512, 768, 16, BF16, FP32, BF16, 2.0)
    args = operands(case, "cuda")
    ops.fp8_linear_lora(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fp8_linear_lora(*args)
    for seed in range(3):
        torch.manual_seed(seed)
        x8 = (20 * torch.randn(200, 768, device="cuda")).to(E4M3).view(torch.uint8)
        args.x.data.copy_(x8)
        args.x.scale_inv.fill_(0.01 * (seed + 1))
        args.up.s.normal_()
        args.up.lora_B.normal_()
        graph.replay()
        assert torch.equal(y, ops.fp8_linear_lora(*args))


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
def test_what_it_cannot_take_is_named_and_right(change, reason):
    case = Case(40, 64, 96, 4, BF16, FP32, BF16, 2.0)._replace(**change)
    args = operands(case, "cuda")
    assert reason in why_not_triton_kernel(*args)
    expected = exact(*args)
    y = ops.fp8_linear_lora(*args).double()
    # three roundings to bf16 and fast accumulation
    assert (y - expected).norm() <= 1e-2 * expected.norm()


if __name__ == "__main__":
    results: dict[str, object] = {str(case): run(case, "cpu", SMALL, 2) for case in INTERPRETED}
    with_residual = {str(case): run_with_residual(case, "cpu", SMALL, 2) for case in INTERPRETED}
    torch.save({**results, "with residual": with_residual}, sys.argv[1])
