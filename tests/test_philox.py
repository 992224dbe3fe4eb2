# SPDX-License-Identifier: Apache-2.0
"""Philox: known answers, the mask's statistics and its independence of tiling, slots and states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels import LoRAConfig, LoRALinear, PhiloxState, PhiloxStates, reference


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(counter, key, expected, device):
    """Random123's kat_vectors for philox4x32-10."""
    to = [torch.tensor(v, device=device) for v in (*counter, *key)]
    assert [int(w) for w in reference.philox4x32_10(to[:4], tuple(to[4:]))] == expected


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 70),
    data=st.data(),
    key=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(-(2**63), 2**63 - 1),
)
def test_a_window_is_that_part_of_the_full_mask(rows, cols, data, key, offset):
    slot = torch.tensor([key, offset])
    full = reference.dropout_keep(slot, 0.4, 3, rows, cols)
    r0, c0 = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    part = reference.dropout_keep(slot, 0.4, 3, rows - r0, cols - c0, r0, c0)
    assert torch.equal(part, full[r0:, c0:])


@pytest.mark.parametrize("p", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9])
def test_keep_rate_and_mean(p):
    """2²² draws. Bounds: 5 sigma of the binomial around 1 − p′, p′ = round(65536 p) / 65536; the mean of D(1) is 1."""
    n = 2**22
    keep = reference.dropout_keep(torch.tensor([11, 5]), p, 1, 2048, n // 2048)
    exact = reference.dropout_threshold(p) / 65536
    sigma = math.sqrt(exact * (1 - exact) / n)
    rate = keep.double().mean().item()
    assert abs(rate - (1 - exact)) < 5 * sigma
    assert abs(rate * reference.keep_scale(p) - 1) < 5 * sigma / (1 - exact)
    assert abs(exact - p) <= 0.5 / 65536 + 1e-12


def test_probabilities_that_16_bits_round_away():
    assert reference.dropout_threshold(0.0) == 0 and reference.keep_scale(0.0) == 1.0
    assert reference.dropout_threshold(1e-6) == 0
    assert reference.dropout_threshold(0.999999) == 65535


def test_sites_slots_and_lanes_are_independent():
    """Correlation of two independent masks of n draws is normal with sigma 1/√n; 5 sigma would also catch a
    reused counter, whose correlation is 1."""

    def mask(key=1, offset=2, site=3, row0=0):
        m = reference.dropout_keep(torch.tensor([key, offset]), 0.5, site, 256, 1024, row0)
        return m.double().flatten() * 2 - 1

    base = mask()
    others = [mask(key=2), mask(offset=3), mask(site=4), mask(row0=256), mask(key=1 + 2**32)]
    lanes = base.view(256, 1024)
    pairs = [(base, o) for o in others]
    pairs += [
        (lanes[:, i::8].flatten(), lanes[:, j::8].flatten()) for i, j in ((0, 1), (0, 2), (6, 7))
    ]
    for a, b in pairs:
        assert abs((a * b).mean().item()) < 5 / math.sqrt(a.numel())


def masks(layer, steps=2):
    """The mask each training forward applies: dx of a layer whose base is zero and whose A, B are all ones,
    ÷ keep_scale."""
    found = []
    for _ in range(steps):
        x = torch.ones(8, 64, requires_grad=True)
        layer(x).sum().backward()
        found.append(x.grad != 0)
    return found


def unit_layer(rng_state=None, site=0, p=0.5):
    layer = LoRALinear(64, 1, False, LoRAConfig(r=1, lora_alpha=1, lora_dropout=p, fp8=None))
    with torch.no_grad():
        layer.weight.zero_()
        layer.lora_A.fill_(1)
        layer.lora_B.fill_(1)
    layer.rng_state, layer.site = rng_state, site
    return layer


@pytest.mark.parametrize("explicit", [False, True], ids=["torch's generator", "PhiloxState"])
def test_manual_seed_reproduces_and_steps_differ(explicit):
    def draw(seed):
        torch.manual_seed(seed)
        return masks(unit_layer(PhiloxState(3) if explicit else None))

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


def test_backward_sees_the_forwards_mask_with_microbatches_in_flight():
    layer = unit_layer()
    xs = [torch.rand(8, 64, requires_grad=True) for _ in range(3)]
    ys = [layer(x) for x in xs]
    for x, y in reversed(list(zip(xs, ys, strict=True))):
        y.sum().backward()
        expected = (torch.where(x.grad != 0, x, 0.0) * reference.keep_scale(0.5)).sum(
            1, keepdim=True
        )
        torch.testing.assert_close(y, expected)
    assert not torch.equal(xs[0].grad, xs[1].grad)


def test_two_seeds_and_an_advanced_state_differ():
    def draw(seed, advance):
        torch.manual_seed(0)
        state = PhiloxState(seed)
        state.advance(advance)
        return masks(unit_layer(state), 1)[0]

    assert torch.equal(draw(1, 0), draw(1, 0))
    assert not torch.equal(draw(1, 0), draw(2, 0)) and not torch.equal(draw(1, 0), draw(1, 1))


def test_state_round_trip_in_place():
    state = PhiloxState(5)
    state.advance(3)
    saved, address = state.state_dict(), state.tensor.data_ptr()
    state.advance()
    state.load_state_dict(saved)
    assert state.tensor.tolist() == [5, 3] and state.tensor.data_ptr() == address
    with pytest.raises(ValueError, match=r"int64 \[2\]"):
        state.load_state_dict({"philox": torch.zeros(2)})


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**63], ids=str)
def test_bad_seed(seed):
    with pytest.raises(ValueError, match="seed must be an integer"):
        PhiloxState(seed)


def test_named_states():
    states = PhiloxStates()
    states.add("model-parallel-rng", 1)
    with pytest.raises(ValueError, match="seed 1 is already used by state 'model-parallel-rng'"):
        states.add("other", 1)
    with pytest.raises(ValueError, match="name 'model-parallel-rng' is taken"):
        states.add("model-parallel-rng", 2)
    states.add("data-parallel-rng", 2)
    with pytest.raises(KeyError, match="no state named 'nope'"), states.fork("nope"):
        pass
    layer = unit_layer(states)

    def draw(name):
        torch.manual_seed(0)
        with states.fork(name):
            return masks(layer, 1)[0]

    assert not torch.equal(draw("model-parallel-rng"), draw("data-parallel-rng"))
    assert torch.equal(draw("model-parallel-rng"), draw("model-parallel-rng"))
    kept = states.get_states()
    snapshot = states.state_dict()
    kept["data-parallel-rng"].advance()
    states.load_state_dict(snapshot)
    assert kept["data-parallel-rng"].tensor.tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"state names \[\] must be"):
        states.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"outside of PhiloxStates.fork\(name\); states"):
        layer(torch.ones(8, 64))
    with pytest.raises(RuntimeError, match="inside fork"), states.fork("data-parallel-rng"):
        states.reset()
    states.reset()
    assert states.get_states() == {}
    states.set_states(kept)
    assert set(states.get_states()) == {"model-parallel-rng", "data-parallel-rng"}
    with pytest.raises(TypeError, match="must be a PhiloxState"):
        states.set_states({"x": 3})


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 20),
    cols=st.integers(1, 40),
    key=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(-(2**63), 2**63 - 1),
    site=st.integers(0, 2**32 - 1),
    p=st.sampled_from([0.001, 0.1, 0.5, 0.999999]),
)
def test_csrc_draws_the_same_mask(rows, cols, key, offset, site, p):
    slot = torch.tensor([key, offset])
    expected = reference.dropout_keep(slot, p, site, rows, cols)
    assert torch.equal(reference.drawn_mask(slot, p, site, rows, cols), expected)
