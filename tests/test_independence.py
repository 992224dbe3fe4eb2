# SPDX-License-Identifier: Apache-2.0
"""The masks' statistics: rates, and the independence of sites, calls, steps, seeds, ranks, rows, columns and lanes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lorakernels import PhiloxState, model_parallel_states
from lorakernels.numerics.dropout import drawn_mask, dropout_threshold, keep_scale
from lorakernels.state.philox import default_slot
from lorakernels.values import Dropout

# Rates


@pytest.mark.parametrize("p", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9])
def test_keep_rate_and_mean(p):
    """2²² draws. Bounds: 5 sigma of the binomial around 1 − p′, p′ = round(65536 p) / 65536; the mean of D(1) is 1."""
    n = 2**22
    keep = drawn_mask(Dropout(torch.tensor([11, 5]), p, 1), 2048, n // 2048)
    exact = dropout_threshold(p) / 65536
    sigma = math.sqrt(exact * (1 - exact) / n)
    rate = keep.double().mean().item()
    assert abs(rate - (1 - exact)) < 5 * sigma
    assert abs(rate * keep_scale(p) - 1) < 5 * sigma / (1 - exact)
    assert abs(exact - p) <= 0.5 / 65536 + 1e-12


# Independence: every pair of streams, at every shift that a wrong counter is likely to make

SHIFTS = [(0, d) for d in range(-8, 9)] + [(-1, 0), (1, 0)]  # rows, columns; one group is 8 columns
ALPHA = 1e-6  # of a false alarm, over all comparisons of one test (Bonferroni)


def stream(slot, site=0, rows=256, cols=256):
    """int64 [rows, cols]: the four highest bits of each element's 16-bit lane, read off 15 masks."""
    masks = (drawn_mask(Dropout(slot, k / 16, site), rows, cols) for k in range(1, 16))
    return sum(mask.long() for mask in masks)


def overlap(a, b, rows, cols):
    """a[i, j] beside b[i + rows, j + cols], where both exist."""
    for dim, by in ((0, rows), (1, cols)):
        n = a.shape[dim] - abs(by)
        a, b = a.narrow(dim, max(0, -by), n), b.narrow(dim, max(0, by), n)
    return a, b


def p_values(a, b):
    """How likely independent, uniform a and b in 0…15 are to look like these: by chi-square over their 16 × 16 joint
    counts (255 degrees of freedom), and by correlation, which is normal with sigma 1/√n."""
    n = a.numel()
    counts = torch.bincount((a * 16 + b).flatten(), minlength=256).double()
    chi2 = ((counts - n / 256) ** 2).sum() / (n / 256)
    centred = torch.arange(16, dtype=torch.float64) - 7.5
    products = counts.view(16, 16) * centred[:, None] * centred[None, :]
    correlation = products.sum() / n / centred.square().mean()
    p_chi2 = torch.special.gammaincc(torch.tensor(255 / 2, dtype=torch.float64), chi2 / 2)
    return p_chi2.item(), math.erfc(abs(correlation.item()) * math.sqrt(n / 2))


def least_likely(pairs):
    """(smallest chi-square p, smallest correlation p, comparisons) over all pairs and shifts."""
    found = [p_values(*overlap(a, b, *s)) for a, b in pairs for s in SHIFTS if a is not b or any(s)]
    return min(p for p, _ in found), min(p for _, p in found), 2 * len(found)


def slot_of(state, seed=0):
    """A slot with the same nonce at each call, as in a replayed graph and on ranks whose generators agree."""
    torch.manual_seed(seed)
    return state.slot()


def of_sites():
    slot = torch.tensor([1, 2])
    return [stream(slot, site) for site in (0, 1, 2, 3, 2**16, 2**31, 2**32 - 1)]


def of_successive_calls():
    state = PhiloxState(1)
    explicit = [stream(state.slot()) for _ in range(4)]
    return explicit + [stream(default_slot(torch.device("cpu"))) for _ in range(4)]


def of_steps():
    state, found = PhiloxState(1), []
    for _ in range(7):
        found.append(stream(slot_of(state)))
        state.advance()
    return found


def of_seeds():
    return [stream(slot_of(PhiloxState(seed))) for seed in (0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1)]


def of_ranks():
    """A tensor 2 × data 2 × pipeline 2 grid: 8 model-parallel streams and 4 data-parallel ones."""
    found = []
    for tp, dp, pp in itertools.product(range(2), repeat=3):
        states = model_parallel_states(
            7, tensor_parallel_rank=tp, data_parallel_rank=dp, pipeline_parallel_rank=pp
        ).get_states()
        found.append(stream(slot_of(states["model-parallel-rng"])))
        whole = stream(slot_of(states["data-parallel-rng"]))
        if tp == 0:
            found.append(whole)
        else:
            assert any(torch.equal(whole, other) for other in found)
    assert len(found) == 12
    return found


@pytest.mark.parametrize(
    "streams",
    [of_sites, of_successive_calls, of_steps, of_seeds, of_ranks],
    ids=lambda f: f.__name__,
)
def test_streams_are_independent(streams):
    """Each of 6 … 12 streams against each other and, for its neighbouring rows, columns and lanes, against itself."""
    pairs = itertools.combinations_with_replacement(streams(), 2)
    chi2, correlation, comparisons = least_likely(pairs)
    assert chi2 > ALPHA / comparisons and correlation > ALPHA / comparisons


def fresh(key=99, rows=256, cols=256):
    return stream(torch.tensor([key, 0]), 0, rows, cols)


def one_lane_of_eight(a):
    b = fresh(98)
    b[:, ::8] = a[:, ::8]
    return b


@pytest.mark.parametrize(
    "reuse",
    [
        lambda a: a.clone(),
        lambda a: fresh(cols=257)[:, 1:],
        lambda a: fresh(cols=264)[:, 8:],
        lambda a: fresh(rows=257)[1:],
        lambda a: 15 - a,
        one_lane_of_eight,
    ],
    ids=[
        "the same slot twice",
        "one lane off",
        "one group off",
        "one row off",
        "negated",
        "1 lane of 8",
    ],
)
def test_both_tests_catch_a_reused_counter(reuse):
    a = fresh()
    chi2, correlation, comparisons = least_likely([(a, reuse(a))])
    assert chi2 < ALPHA / comparisons and correlation < ALPHA / comparisons
