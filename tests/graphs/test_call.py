# SPDX-License-Identifier: Apache-2.0
"""What csrc/graphs/call.cpp answers in one call, against the Python that it stands for."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lorakernels.graphs.compare.signature import Signature, difference, extension, flatten, typed
from lorakernels.graphs.replay import grads
from torch import Tensor

from tests.graphs.layers import batches, managed, run, same, twins, warm

CPU = torch.device("cpu")
X = torch.zeros(2)
CLASSES = [tuple, list, dict, type, Tensor, int]
CONSTANTS = st.sampled_from([None, 0, 1, 1.0, True, False, "a", -0.0, torch.float16, *CLASSES])
VALUES = st.recursive(
    st.just(X) | CONSTANTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    ),
    max_leaves=4,
)
CALLS = st.tuples(st.lists(VALUES, max_size=2).map(tuple), st.dictionaries(st.just("k"), VALUES))


def matcher(call: Any, **kinds: Any) -> Any:
    empty: dict[str, Any] = {"given": [], "same": [], "like": []}
    cast = (torch.is_autocast_enabled, "cpu", False, torch.get_autocast_dtype, None)
    watch = extension().Watch()
    return extension().matcher(flatten(call)[1], Tensor, *(empty | kinds).values(), cast, watch)


@settings(max_examples=300, deadline=None)
@given(CALLS, CALLS)
def test_a_call_is_matched_where_its_structure_and_constants_are(first: Any, second: Any) -> None:
    tensors, spec = flatten(second)
    found = matcher(first)(*second)
    assert (found is not None) == (typed(spec) == typed(flatten(first)[1]))
    assert found is None or all(a is b for a, b in zip(found, tensors, strict=True))
    assert matcher(second)(*second) is not None, "itself"
    taken_apart = Signature(second)
    assert same_call(taken_apart.rebuild(tensors), second) and taken_apart.unsupported() is None


def same_call(a: Any, b: Any) -> bool:
    """As == has it, but for 1 == 1.0 == True and tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*a] == [*b] and same_call([*a.values()], [*b.values()])
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same_call, a, b))
    return a is b or (not isinstance(a, Tensor) and a == b)


@settings(max_examples=300, deadline=None)
@given(CALLS, CALLS)
def test_calls_that_differ_are_told_apart(first: Any, second: Any) -> None:
    """No two calls are written down alike, and each difference can be shown."""
    spec, other = flatten(first)[1], flatten(second)[1]
    assert (typed(spec) == typed(other)) == same_call(first, second)
    found = difference(spec, other)
    assert (found is None) == same_call(first, second)
    assert found is None or found[0] != found[1]


class Given:
    def __init__(self, x: Tensor) -> None:
        self.ref, self.version = weakref.ref(x), x._version


def test_which_objects_a_call_takes() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    handed = Given(a)
    match = matcher(((a, b), {}), given=[(0, handed)])
    assert match((a, b), {}) is not None and match((b, a), {}) is None
    a.add_(1)
    assert match((a, b), {}) is None, "modified since"
    handed.version = a._version
    assert match((a, b), {}) is not None
    match = matcher(((a, b), {}), same=[(1, 0)], like=[(0, lambda x: x.shape == (2,))])
    assert match((b, b), {}) is not None and match((a, b), {}) is None
    short = torch.zeros(1)
    assert match((short, short), {}) is None
    with pytest.raises(TypeError, match="a tuple of arguments"):
        match([a], {})
    with torch.autocast("cpu"):
        assert match((b, b), {}) is None
    del a, handed.ref
    with pytest.raises(AttributeError):
        matcher(((b,), {}), given=[(0, handed)])((b,), {})


def test_an_iteration_without_gradients_zeroes_their_memory_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And installs them layer by layer, without a look at each."""
    ours, theirs = twins(device, 3)
    manager = managed(ours, device, num_microbatches=2)
    warm(manager, ours, device)
    zeroed = []
    zero = grads.GradSlab.zero
    monkeypatch.setattr(grads.GradSlab, "zero", lambda self: zeroed.append(self) or zero(self))
    monkeypatch.delattr(grads.LayerGrads, "_install_one_by_one")
    monkeypatch.setattr(torch, "_foreach_zero_", None)
    for step in range(3):
        for x in batches(device, 2):
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
        same(ours, theirs, step)
        for p in (*ours.parameters(), *theirs.parameters()):
            p.grad = None
        manager.end_iteration()
    assert len(zeroed) == 3
