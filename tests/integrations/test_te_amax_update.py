# SPDX-License-Identifier: Apache-2.0
"""FP8State's update against Transformer Engine's, bit for bit, and against a rule in plain Python.

Two departures, under "max": TE freezes the scale while an inf is anywhere in the window, and looks past a NaN to the
older amaxes; ours keeps the scale for the one iteration whose amax is inf or NaN, and skips both in the history.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels import DelayedScaling
from lorakernels.state.fp8 import FP8State

FLT_MAX = torch.finfo(torch.float32).max
FINITE = [0.0, 1e-45, 1e-38, 2e-37, 1e-3, 1.0, 448.0, 6e4, 3e38]
# By history length: long enough for the first amaxes to drop out of the window.
STEPS = {1: 40, 4: 80, 31: 160, 1024: 1100}
UPDATES = [
    pytest.param(length, algorithm, odd, id=f"{length}-{algorithm}-{odd or 'finite'}")
    for length in STEPS
    for algorithm in ("max", "most_recent")
    for odd in (None, math.inf, math.nan)
]
update_cases = pytest.mark.parametrize("length, algorithm, odd", UPDATES)
margins = pytest.mark.parametrize("margin", [0, 2])


@cache
def amaxes(length: int, odd: float | None) -> Tensor:
    """fp32 [steps, columns] on the CPU: column c draws from the first values of FINITE, from fewer as time goes on.

    Every third column takes them as they are, the others times a random factor in [½, 1).
    """
    generator = torch.Generator().manual_seed(length)
    steps, columns = STEPS[length], 40 if length < 1000 else 12
    reach = 2 + torch.arange(columns) % (len(FINITE) - 1)
    reach = torch.where(torch.arange(steps)[:, None] < steps // 8, reach, (reach + 1) // 2)
    index = (torch.rand(steps, columns, generator=generator) * reach).long()
    mantissa = torch.rand(steps, columns, generator=generator) / 2 + 0.5
    drawn = torch.tensor(FINITE)[index] * torch.where(torch.arange(columns) % 3 == 0, 1.0, mantissa)
    if odd is not None:
        often = torch.rand(steps, columns, generator=generator) < 0.1
        once = torch.arange(steps)[:, None] == 3 + torch.arange(columns)
        drawn[torch.where(torch.arange(columns) % 2 == 0, once, often)] = odd
    return drawn


@cache
def rule(length: int, algorithm: str, odd: float | None, te: bool) -> tuple[Tensor, Tensor]:
    """The amax each scale is computed from (0: the scale stays), and whether the window held finite amaxes only."""
    values = amaxes(length, odd)
    top, clean = torch.zeros_like(values), torch.ones_like(values, dtype=torch.bool)
    for c, column in enumerate(values.t().tolist()):
        window: deque[float] = deque(maxlen=length)
        for t, amax in enumerate(column):
            if amax != 0:
                window.append(amax)
            usable = [a for a in window if math.isfinite(a)]
            clean[t, c] = len(usable) == len(window)
            keeps = not math.isfinite(amax)
            if te and algorithm == "max":
                keeps = math.inf in window
            if amax == 0 or keeps:
                continue
            top[t, c] = amax if algorithm == "most_recent" else max(usable, default=0.0)
    return top, clean


def scales_of(top: Tensor, scaled_max: float) -> Tensor:
    """fp32 [steps, columns]: 1 at first, as TE starts; FLT_MAX where the quotient overflows."""
    fresh = (torch.full_like(top, scaled_max) / top).clamp(max=FLT_MAX)
    scale, scales = torch.ones_like(top[0]), []
    for step, amax in zip(fresh, top, strict=True):
        scale = torch.where(amax > 0, step, scale)
        scales.append(scale)
    return torch.stack(scales)


def same(a: Tensor, b: Tensor) -> Tensor:
    """0-dim bool: equal bits, or NaN in both."""
    bits = a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)
    return (bits | (a.isnan() & b.isnan())).all()


class Ours:
    def __init__(self, columns: int, recipe: DelayedScaling, device: Any) -> None:
        self.state = FP8State([f"layer{i}" for i in range(columns)], recipe, device)
        for rows in self.rows():
            rows[-1].fill_(1.0)

    def rows(self) -> tuple[Tensor, Tensor]:
        return self.state.forward, self.state.backward

    def update(self, amax: Tensor) -> None:
        for rows in self.rows():
            rows[0].copy_(amax)
        self.state.reduce_and_update()

    def scales(self) -> Tensor:
        return torch.stack([rows[-1] for rows in self.rows()])

    def histories(self) -> Tensor:
        return torch.stack([rows[:-1] for rows in self.rows()])


class Theirs:
    """TE's fused update over three modules, as FP8GlobalStateManager.reduce_and_update_fp8_tensors calls it."""

    def __init__(self, columns: int, recipe: DelayedScaling) -> None:
        import transformer_engine_torch as tex

        self.update_ = tex.fused_amax_and_scale_update_after_reduction
        self.dtypes = (tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2)
        self.recipe, self.sizes = recipe, (3, 2, columns - 5)
        shape, on = recipe.amax_history_len, {"device": "cuda"}
        self.history = [[torch.zeros(shape, n, **on) for n in self.sizes] for _ in self.dtypes]
        self.scale = [[torch.ones(n, **on) for n in self.sizes] for _ in self.dtypes]

    def update(self, amax: Tensor) -> None:
        algorithm, margin = self.recipe.amax_compute_algo, self.recipe.margin
        for dtype, histories, scales in zip(self.dtypes, self.history, self.scale, strict=True):
            for history, part in zip(histories, amax.split(self.sizes), strict=True):
                history[0].copy_(part)
            buffer = torch.cat([history[0] for history in histories])
            self.update_(buffer, histories, scales, algorithm, dtype, margin)

    def scales(self) -> Tensor:
        return torch.stack([torch.cat(scales) for scales in self.scale])

    def histories(self) -> Tensor:
        return torch.stack([torch.cat(histories, 1) for histories in self.history])


def expected(length: int, algorithm: str, odd: float | None, te: bool, margin: int) -> Tensor:
    """fp32 [steps, 2, columns]: scales of e4m3 and e5m2."""
    top, _ = rule(length, algorithm, odd, te)
    return torch.stack([scales_of(top, fp8_max * 2.0**-margin) for fp8_max in (448, 57344)], 1)


def scaling(length: int, algorithm: Any, margin: int) -> DelayedScaling:
    return DelayedScaling(margin, "HYBRID", length, algorithm)


@margins
@update_cases
def test_update_follows_the_rule(length, algorithm, odd, margin, device):
    if device.type == "cpu" and length == 1024 and (margin or odd is math.inf):
        pytest.skip("the long window once per algorithm is enough for the CPU's path")
    values = amaxes(length, odd)
    ours = Ours(values.shape[1], scaling(length, algorithm, margin), device)
    found = []
    for amax in values.to(device):
        ours.update(amax)
        found.append(ours.scales())
    assert same(torch.stack(found).cpu(), expected(length, algorithm, odd, False, margin))


@pytest.fixture
def te() -> Iterator[Any]:
    te = pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    yield te
    FP8GlobalStateManager.reset()


@pytest.mark.gpu
@margins
@update_cases
def test_update_equals_te(te, length, algorithm, odd, margin):
    values = amaxes(length, odd)
    recipe = scaling(length, algorithm, margin)
    ours = Ours(values.shape[1], recipe, "cuda")
    theirs = Theirs(values.shape[1], recipe)
    found, peer, same_history = [], [], []
    for amax in values.cuda():
        ours.update(amax)
        theirs.update(amax)
        found.append(ours.scales())
        peer.append(theirs.scales())
        same_history.append(same(ours.histories(), theirs.histories()))
    assert torch.stack(same_history).all()  # every amax, inf and NaN too, is in both histories
    ours_scales, te_scales = torch.stack(found).cpu(), torch.stack(peer).cpu()
    _, clean = rule(length, algorithm, odd, False)
    equal = (ours_scales.view(torch.int32) == te_scales.view(torch.int32)).all(1)
    assert equal[clean | torch.tensor(algorithm == "most_recent")].all()
    assert same(te_scales, expected(length, algorithm, odd, True, margin))
    assert same(ours_scales, expected(length, algorithm, odd, False, margin))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "length, sequence, theirs_e4m3, ours_e4m3",
    [
        (4, [1, math.inf, 4, 16, 2, 2], [448, 448, 448, 448, 448, 28], [448, 448, 112, 28, 28, 28]),
        (2, [8, 1, math.nan, 1], [56, 56, 448, 448], [56, 56, 56, 448]),
    ],
    ids=["one inf freezes TE's scale for a whole history", "TE looks past a NaN, ours keeps"],
)
def test_where_we_depart_from_te(te, length, sequence, theirs_e4m3, ours_e4m3):
    recipe = scaling(length, "max", 0)
    ours, theirs = Ours(8, recipe, "cuda"), Theirs(8, recipe)
    for amax, peer, own in zip(sequence, theirs_e4m3, ours_e4m3, strict=True):
        for side, scale in ((ours, own), (theirs, peer)):
            side.update(torch.full((8,), float(amax), device="cuda"))
            assert side.scales()[0].tolist() == [float(scale)] * 8


@pytest.mark.gpu
@margins
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 4, 31])
def test_update_equals_te_unfused(te, length, algorithm, margin):
    """TE's PyTorch form, for the finite, nonzero amaxes that it treats as its kernel does."""
    from transformer_engine.pytorch.quantization import _amax_and_scale_update

    recipe = scaling(length, algorithm, margin)
    ours, peer = Ours(6, recipe, "cuda"), recipe.to_te()
    history, scale = torch.zeros(length, 6, device="cuda"), torch.ones(6, device="cuda")
    for amax in torch.rand(50, 6, device="cuda") * 100 + 0.01:
        ours.update(amax)
        history[0].copy_(amax)
        _amax_and_scale_update(history, scale, 448.0, peer)
        assert same(ours.histories()[0], history)
        # TE compiles this form, and Triton's fp32 division is off by up to 2 ulp (2⁻²³ each).
        torch.testing.assert_close(ours.scales()[0], scale, rtol=2**-21, atol=0)
