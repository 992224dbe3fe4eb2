# SPDX-License-Identifier: Apache-2.0
"""gemm_depths.py fits a line to what ncu counted; that it can be counted is seen on a GPU only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.lib import ncu
from benchmarks.ops import gemm_depths

NAMES = ("forward", "cublaslt, forward")
KERNELS = {"forward": "void lorakernels::fp8_gemm_kernel<0, 3>(long)", NAMES[1]: "nvjet_sm90_x"}


def kernel(name: str, cycles: float) -> ncu.Kernel:
    values = {"Kernel Name": name, ncu.DURATION: "80.5", gemm_depths.TENSOR: "91.26"}
    values[gemm_depths.CYCLES] = f"{cycles:,.2f}"
    return ncu.Kernel(values, {ncu.DURATION: "us"})


def counted(depths: tuple[int, ...]) -> list[ncu.Kernel]:
    """Ours takes 1060 cycles for 128 of depth and 1300 beside, cuBLASLt's 1050 and 2000; sixteen tiles of each."""
    found = []
    for depth in depths:
        for name, loop, rest in ((NAMES[0], 1060, 1300), (NAMES[1], 1050, 2000)):
            found.append(kernel("a kernel that fills a scale", 7.0))
            found.append(kernel(KERNELS[name], 16 * (loop * depth / 128 + rest)))
    return found


def test_the_slope_is_the_loop_and_the_rest_the_epilogue() -> None:
    depths = (1024, 4096, 16384)
    points = gemm_depths.points_of(counted(depths), depths, NAMES)
    assert [row["depth"] for row in points] == [1024, 1024, 4096, 4096, 16384, 16384]
    assert points[0]["cycles a tile"] == 1060 * 8 + 1300 and points[0]["tensor %"] == 91.3
    ours, theirs = gemm_depths.fits(points)
    assert (ours["loop, cycles for 128"], ours["epilogue, cycles"]) == (1060.0, 1300)
    assert (theirs["loop, cycles for 128"], theirs["epilogue, cycles"]) == (1050.0, 2000)
    assert ours["of peak"] == round(1024 / 1060, 3) and ours["off"] == "0.0%"


def test_a_line_is_of_one_kernel() -> None:
    """As cuBLASLt has another for short depths; two depths of each are no line."""
    depths = (1024, 2048, 4096, 8192, 16384)
    points = gemm_depths.points_of(counted(depths), depths, NAMES)
    for row in points[:4]:
        if row["product"] == NAMES[1]:
            row |= {"kernel": "nvjet_sm90_y", "cycles a tile": 100}
    _, theirs = gemm_depths.fits(points)
    assert theirs["depths"] == "4096 to 16384" and theirs["kernel"] == "nvjet_sm90_x"
    assert (theirs["loop, cycles for 128"], theirs["off"]) == (1050.0, "0.0%")
    (ours, theirs) = gemm_depths.fits(points[:-4])
    assert ours["off"] == "0.0%" and theirs["off"] == theirs["loop, cycles for 128"] == ""


def test_a_point_off_the_line_is_told() -> None:
    depths, cycles = [1024.0, 2048.0, 4096.0, 8192.0], [9600.0, 18200.0, 35300.0, 69000.0 * 1.1]
    assert gemm_depths.fit(depths, cycles)[2] > 0.02


def test_what_cannot_be_fitted_or_matched_is_named() -> None:
    with pytest.raises(ValueError, match="at least three depths"):
        gemm_depths.fit([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="3 × 2 products"):
        gemm_depths.points_of(counted((1024, 4096)), (1024, 4096, 8192), NAMES)


def test_all_products_are_the_same_but_for_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, small: cuBLASLt's have the values of ours."""
    monkeypatch.setattr(gemm_depths, "ROWS", 32)
    monkeypatch.setattr(gemm_depths, "COLS", 64)
    calls = gemm_depths.products(128, torch.device("cpu"))
    found: dict[str, Any] = {name: call().float() for name, call in calls.items()}
    for direction in ("forward", "backward"):
        ours, theirs = found[direction], found[f"cublaslt, {direction}"]
        assert ours.shape == (32, 64) and (ours - theirs).norm() < 0.01 * theirs.norm()
        assert (found[f"{direction}, R = 16"] - ours).norm() > ours.norm(), "the adapter's term"
