# SPDX-License-Identifier: Apache-2.0
"""Philox in PyTorch and csrc, and the states to draw from. Promises: test_independence.py, test_randomness.py."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels import (
    _C,
    LoRAConfig,
    LoRALinear,
    PhiloxState,
    PhiloxStates,
    model_parallel_states,
)
from lorakernels.numerics.dropout import (
    drawn_mask,
    dropout_keep,
    dropout_threshold,
    keep_scale,
    philox4x32_10,
)
from lorakernels.values import Dropout


def test_the_reference_draws_csrcs_words(device):
    """csrc's are Random123's known answers (tests/csrc); the first inputs here are theirs."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    inputs = torch.cat(
        (torch.tensor([[0] * 6, [0xFFFFFFFF] * 6, pi]), torch.randint(2**32, (61, 6)))
    )
    c0, c1, c2, c3, k0, k1 = inputs.to(device).unbind(1)
    words = torch.stack(philox4x32_10([c0, c1, c2, c3], (k0, k1)), dim=1)
    assert words.tolist() == [_C.philox4x32_10(v[:4], v[4:]) for v in inputs.tolist()]


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
    full = dropout_keep(Dropout(slot, 0.4, 3), rows, cols)
    r0, c0 = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    part = dropout_keep(Dropout(slot, 0.4, 3, r0, c0), rows - r0, cols - c0)
    assert torch.equal(part, full[r0:, c0:])


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
    expected = dropout_keep(Dropout(slot, p, site), rows, cols)
    assert torch.equal(drawn_mask(Dropout(slot, p, site), rows, cols), expected)


def test_probabilities_that_16_bits_round_away():
    assert dropout_threshold(0.0) == 0 and keep_scale(0.0) == 1.0
    assert dropout_threshold(1e-6) == 0
    assert dropout_threshold(0.999999) == 65535


def advanced(seed=5, steps=3):
    state = PhiloxState(seed)
    state.advance(steps)
    return state


def slot_of(state, seed=0):
    torch.manual_seed(seed)
    return state.slot().tolist()


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**63, None, torch.tensor(3)], ids=str)
def test_bad_seed(seed):
    for make in (PhiloxState, lambda s: PhiloxStates().add("x", s), model_parallel_states):
        with pytest.raises(ValueError, match=r"seed must be an integer in \[0, 2\*\*63\), found"):
            make(seed)


def test_seeds_of_any_integer_type():
    numpy = pytest.importorskip("numpy")
    state = PhiloxState(numpy.int64(1234 + 2718))
    assert state.tensor.tolist() == [3952, 0] and type(state.seed) is int


def test_a_slot_is_seed_plus_nonce_and_offset():
    state = advanced()
    torch.manual_seed(1)
    nonce = int(torch.randint(2**63 - 1, ()))
    key = (5 + nonce + 2**63) % 2**64 - 2**63  # int64 wraps
    assert slot_of(state, 1) == [key, 3]
    assert state.tensor.tolist() == [5, 3]


def test_round_trip_in_place():
    state = advanced()
    saved, address = state.state_dict(), state.tensor.data_ptr()
    state.advance()
    state.load_state_dict(saved)
    assert state.tensor.tolist() == [5, 3] and state.tensor.data_ptr() == address
    other = PhiloxState(1)
    other.load_state_dict(saved)
    assert other.seed == 5 and slot_of(other) == slot_of(state)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: torch.load(_saved(x), weights_only=False),
}


def _saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_independent_and_draw_the_same(how):
    states = PhiloxStates()
    state = states.add("a", 5)
    state.advance(3)
    with states.fork("a"):
        one, many = COPIES[how](state), COPIES[how](states)
    with pytest.raises(RuntimeError, match=r"outside of PhiloxStates\.fork"):
        many.current()
    for made in (one, many.get_states()["a"]):
        assert made.seed == 5 and slot_of(made) == slot_of(state)
        made.advance()
        assert slot_of(made) != slot_of(state)


def test_layers_of_a_copied_model_share_the_copied_state():
    def layer(state):
        made = LoRALinear(8, 8, False, LoRAConfig(r=1, fp8=None))
        made.rng_state = state
        return made

    state = PhiloxState(1)
    first, second = copy.deepcopy(torch.nn.ModuleList([layer(state), layer(state)]))
    assert first.rng_state is second.rng_state and first.rng_state is not state


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.zeros(2), r"int64 \[2\], to be copied to cpu; found float32 \[2\] on cpu"),
        (torch.zeros(3, dtype=torch.int64), r"int64 \[2\].*found int64 \[3\] on cpu"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), r"to cpu; found int64 \[2\] on meta"),
        ([5, 3], r"a tensor int64 \[2\], found list"),
        (torch.tensor([-1, 0]), r"holds seed -1, which must be in \[0, 2\*\*63\)"),
    ],
    ids=["dtype", "shape", "device", "no tensor", "seed"],
)
def test_a_refused_load_names_both_sides_and_changes_nothing(found, message):
    state = advanced()
    with pytest.raises(ValueError, match=r"state\['philox'\] .*" + message):
        state.load_state_dict({"philox": found})
    states = PhiloxStates()
    states.set_states({"good": PhiloxState(1), "bad": state})
    with pytest.raises(ValueError, match=r"state\['bad'\] .*" + message):
        states.load_state_dict({"good": torch.tensor([9, 9]), "bad": found})
    assert states.state_dict()["good"].tolist() == [1, 0]
    assert state.tensor.tolist() == [5, 3] and state.seed == 5


@pytest.mark.parametrize("names", [[], ["philox", "x"], ["x"]], ids=str)
def test_a_load_of_other_names(names):
    saved = {name: torch.zeros(2, dtype=torch.int64) for name in names}
    with pytest.raises(ValueError, match="the one name 'philox', found"):
        PhiloxState(1).load_state_dict(saved)


def two_states():
    states = PhiloxStates()
    return states, states.add("model-parallel-rng", 1), states.add("data-parallel-rng", 2)


def test_names_and_seeds_are_taken_once():
    states, _, _ = two_states()
    with pytest.raises(ValueError, match="seed 1 is already used by state 'model-parallel-rng'"):
        states.add("other", 1)
    with pytest.raises(ValueError, match="name 'model-parallel-rng' is taken; states: "):
        states.add("model-parallel-rng", 3)
    assert sorted(states.get_states()) == ["data-parallel-rng", "model-parallel-rng"]
    states.load_state_dict({n: torch.tensor([7 + i, 0]) for i, n in enumerate(states.get_states())})
    states.add("other", 1)  # free again: a load brings its own seeds
    with pytest.raises(ValueError, match="seed 7 is already used"):
        states.add("one more", 7)
    states.reset()
    assert states.get_states() == {}
    states.add("model-parallel-rng", 1)


def test_add_does_not_read_the_device():
    states = PhiloxStates()
    states.add("a", 1, "meta")
    states.add("b", 2, "meta")  # a meta tensor has no value to read
    with pytest.raises(ValueError, match="seed 2 is already used by state 'b'"):
        states.add("c", 2, "meta")


def test_fork_nests_and_ends_by_an_exception_too():
    states, tp, dp = two_states()
    with states.fork() as forked, states.fork("data-parallel-rng"):
        assert forked is tp and states.current() is dp
        with pytest.raises(ZeroDivisionError), states.fork():
            raise ZeroDivisionError
        assert states.current() is dp
    with pytest.raises(KeyError, match=r"no state named 'nope'; states: \['data"):
        states.fork("nope").__enter__()
    with pytest.raises(RuntimeError, match=r"outside of PhiloxStates.fork\(name\); states"):
        states.current()


def test_nothing_is_replaced_inside_a_fork():
    states, tp, dp = two_states()
    with states.fork():
        with pytest.raises(RuntimeError, match=r"reset\(\) inside fork"):
            states.reset()
        with pytest.raises(RuntimeError, match=r"set_states\(\) inside fork"):
            states.set_states({})
    assert list(states.get_states().values()) == [tp, dp]


def test_get_and_set_states_hand_over_the_states_themselves():
    states, tp, dp = two_states()
    states.get_states().clear()
    kept = states.get_states()
    states.reset()
    assert set(kept) == {"model-parallel-rng", "data-parallel-rng"}
    states.set_states(kept)
    kept.clear()
    assert states.get_states() == {"model-parallel-rng": tp, "data-parallel-rng": dp}
    with pytest.raises(TypeError, match=r"states\['x'\] must be a PhiloxState, found int"):
        states.set_states({"x": 3})
    with pytest.raises(ValueError, match="states 'x' and 'y' have the same seed 4"):
        states.set_states({"x": PhiloxState(4), "y": PhiloxState(4)})
    assert states.get_states() == {"model-parallel-rng": tp, "data-parallel-rng": dp}


def test_named_round_trip_in_place():
    states, tp, dp = two_states()
    snapshot, address = states.state_dict(), dp.tensor.data_ptr()
    dp.advance()
    states.load_state_dict(snapshot)
    assert dp.tensor.tolist() == [2, 0] and dp.tensor.data_ptr() == address
    with pytest.raises(ValueError, match=r"state names \[\] must be \['data"):
        states.load_state_dict({})
    same = {name: torch.tensor([6, 0]) for name in snapshot}
    with pytest.raises(ValueError, match="have the same seed 6"):
        states.load_state_dict(same)
    assert states.to("cpu").state_dict().keys() == snapshot.keys() and tp.seed == 1


def grid(seed, size):
    """(tp, dp, pp) → its two seeds, data-parallel first."""
    found = {}
    for index in range(size**3):
        tp, dp, pp = index // size**2, index // size % size, index % size
        states = model_parallel_states(
            seed, tensor_parallel_rank=tp, data_parallel_rank=dp, pipeline_parallel_rank=pp
        ).get_states()
        found[tp, dp, pp] = (states["data-parallel-rng"].seed, states["model-parallel-rng"].seed)
    return found


def test_model_parallel_seeds_differ_where_they_should():
    size, seeds = 6, set()
    for seed in (1234, 1235, 1234 + 2718):  # sums of ranks would meet here
        table = grid(seed, size)
        for (_, dp, pp), (data, _) in table.items():
            assert data == table[0, dp, pp][0]
        seeds |= {s for pair in table.values() for s in pair}
    assert len(seeds) == 3 * (size**2 + size**3)


def test_model_parallel_seeds_are_philoxs_words():
    """Ranks and seed 0: Random123's known answer for zeros. The rest spells the counter out."""
    zero = model_parallel_states(0).get_states()["data-parallel-rng"]
    assert zero.seed == 0xE169C58D_6627E8D5 & (2**63 - 1)
    seed = 0x1234567_89ABCDEF
    states = model_parallel_states(
        seed, tensor_parallel_rank=3, data_parallel_rank=4, pipeline_parallel_rank=5, device="meta"
    ).get_states()
    for name, counter in (
        ("data-parallel-rng", [0, 4, 5, 0]),
        ("model-parallel-rng", [3, 4, 5, 1]),
    ):
        low, high, *_ = _C.philox4x32_10(counter, [seed % 2**32, seed >> 32])
        assert states[name].seed == (high << 32 | low) % 2**63
        assert states[name].device.type == "meta"


@pytest.mark.parametrize("kind", ["tensor", "data", "pipeline"])
@pytest.mark.parametrize("rank", [-1, 2**32, 0.0, True], ids=str)
def test_a_bad_rank_is_named(kind, rank):
    message = rf"{kind}_parallel_rank must be an integer in \[0, 2\*\*32\), found {rank}"
    with pytest.raises(ValueError, match=message):
        model_parallel_states(1, **{f"{kind}_parallel_rank": rank})


def test_the_nonce_is_drawn_on_the_cpu_whatever_the_default_device_is():
    """On another device it would come from that device's generator, and the host would wait for it."""
    state = PhiloxState(3)
    torch.manual_seed(4)
    expected = state.slot()
    torch.manual_seed(4)
    with torch.device("meta"):
        assert torch.equal(state.slot(), expected)
