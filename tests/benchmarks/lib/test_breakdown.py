# SPDX-License-Identifier: Apache-2.0
"""breakdown.py: floors count bytes and operations, kernels add up to their step."""

from __future__ import annotations

import math

import pytest
import torch

import lorakernels.ops  # noqa: F401  (registers them)
from benchmarks.lib import breakdown

CPU = torch.device("cpu")


def test_floors_count_bytes_once_and_operations_by_format() -> None:
    m, n, k, r = 32, 64, 128, 16
    x8, w8 = (torch.zeros(s, k, dtype=torch.uint8) for s in (m, n))
    one, s, b = torch.ones(1), torch.zeros(m, r), torch.zeros(n, r)
    a, c = torch.zeros(m, n), torch.zeros(n, k)
    recorder = breakdown.Recorder()
    with recorder:
        ops = torch.ops.lorakernels
        ops.fp8_linear_lora(x8, one, w8, one, None, s, b, 2.0, torch.float32)
        a @ c
        a.add_(1.0)
        state = torch.zeros(1025, 4)
        ops.quantize_lora_down(torch.ones(m, k), None, state, 0, True, None, 0.0, 0)
    gemm, mm, add, quantize = (
        next(call for call in recorder.calls if call.name == f"{name}")
        for name in ("lorakernels.fp8_linear_lora", "aten.mm", "aten.add_.Tensor",
                     "lorakernels.quantize_lora_down")
    )  # fmt: skip
    assert gemm.operations == {"fp8": 2 * m * n * k, "bf16": 2 * m * n * r}
    # the two scales are one tensor here, and so counted once
    assert gemm.bytes == m * k + n * k + 4 + 4 * (m * r + n * r) + 4 * m * n
    assert mm.operations == {"bf16": 2 * m * n * k} and add.operations == {}
    assert add.bytes == 2 * 4 * m * n, "read and written"
    assert quantize.bytes == 4 * m * k + m * k + 4, "the state is not read as a whole"
    call = breakdown.Call("x", [], 4000, {"fp8": int(breakdown.PEAKS["fp8"])})
    assert breakdown.floor(call, 1e3) == (4.0, "bytes")
    assert breakdown.floor(call, 1e4) == (1.0, "operations")


def test_kernels_follow_the_step_and_their_sum_is_the_step() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    calls, split = breakdown.record(
        lambda: (x @ x).sum(), lambda y: torch.autograd.grad(y, x), CPU, steps=2
    )
    rows = breakdown.rows(calls, split, 1e9)
    assert [r["op"] for r in rows[:2]] == ["aten.mm", "aten.sum"]
    assert [r["op"] for r in rows if r["pass"] == "backward"].count("aten.mm") == 2
    *ops, total = rows
    assert math.isclose(sum(r["µs"] for r in ops), total["µs"], rel_tol=0.01)
    assert math.isclose(sum(r["floor µs"] for r in ops), total["floor µs"], rel_tol=0.05)


def test_a_kernel_that_waits_for_another_has_only_what_it_adds() -> None:
    """By starts: one kernel, one launched early that outlasts it, one inside of that, one after a gap."""
    spans = [(10, 110), (90, 150), (100, 120), (160, 170)]
    assert list(breakdown.own_times(spans)) == [100, 40, 0, 10]


@pytest.mark.gpu
def test_the_kernels_of_a_step_do_not_overlap() -> None:
    """Their sum is not above the time that the step takes on the device."""
    x = torch.randn(4096, 4096, device="cuda")
    calls, _ = breakdown.record(lambda: (x @ x).relu(), lambda y: y.sum(), torch.device("cuda"))
    kernels = [kernel for call in calls for kernel in call.kernels]
    assert len(kernels) >= 3 and all(call.seconds > 0 for call in calls if call.kernels)
    assert not [name for name in kernels if name.startswith(breakdown.MARK)]


@pytest.mark.parametrize(
    ("name", "short"),
    [("void lk::(anonymous namespace)::gemm_kernel<(lk::(anonymous namespace)::Product)0, f>(P)",
      "gemm_kernel"),
     ("cudnn_generated_fprop_kernel0_0", "cudnn_generated_fprop_kernel0_0"),
     ("lk::(anonymous namespace)::sum_kernel(lk::Params, int)", "sum_kernel"),
     ("Memset (Device)", "Memset ")],
    ids=["template", "plain", "parameters", "memset"],
)  # fmt: skip
def test_a_kernels_name_is_short(name: str, short: str) -> None:
    assert breakdown._short(name) == short
