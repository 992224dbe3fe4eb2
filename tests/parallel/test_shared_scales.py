# SPDX-License-Identifier: Apache-2.0
"""The scales that ranks share live as long as the layers that use them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorakernels import DelayedScaling, FP8State
from lorakernels.parallel.ranks.scales import shared


class Group:
    """In the place of a process group."""


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    """Neither its FP8 state nor its process group."""
    group = Group()
    state = FP8State(["x"], DelayedScaling(), "cpu")
    scales = shared(state, SimpleNamespace(group=group))  # type: ignore[arg-type]
    kept = [weakref.ref(x) for x in (state, group, scales)]
    del state, group, scales
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]


def test_all_layers_of_a_state_share_one() -> None:
    ranks: Any = SimpleNamespace(group=object())
    state, other = (FP8State(["x"], DelayedScaling(), "cpu") for _ in range(2))
    first = shared(state, ranks)
    assert first is not None and shared(state, ranks) is first
    assert shared(other, ranks) is not first
    with pytest.raises(ValueError, match="two tensor-parallel groups"):
        shared(state, SimpleNamespace(group=object()))  # type: ignore[arg-type]


EMPTY = FP8State(["x", "y"], DelayedScaling(), "cpu")
REWRITES: dict[str, Callable[[FP8State], Any]] = {
    "reset": FP8State.reset,
    "restore": lambda state: state.restore(EMPTY.save()),
    "load_state_dict": lambda state: state.load_state_dict(EMPTY.state_dict()),
    "set_values": lambda state: [state.set_values(i, EMPTY.values(i)) for i in range(2)],
}


@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
def test_ranks_know_no_scale_that_is_gone(rewrite: Callable[[FP8State], Any]) -> None:
    """All ask each other again then, as often as values are put in place. Each would else take the amax of its part."""
    state = FP8State(["x", "y"], DelayedScaling(), "cpu")
    scales: Any = shared(state, SimpleNamespace(group=object()))  # type: ignore[arg-type]
    state.shared_over = ()  # nobody else is there to update with

    def known() -> list[bool]:
        found = (scales.known(i, True, back) for back in (False, True) for i in range(2))
        return [scaling is not None for scaling in found]

    assert known() == [False] * 4
    for _ in range(2):
        for columns in ([0], [0, 1]):
            for tensor in (state.forward, state.backward):
                tensor[0, columns] = torch.tensor(2.0)
            state.reduce_and_update()
            assert known() == [True, 1 in columns] * 2
        rewrite(state)
        assert known() == [False] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_state_shares_with_nobody(copied: Callable[[Any], Any]) -> None:
    """Its updates would wait for ranks that have no copy."""
    state = FP8State(["x"], DelayedScaling(), "cpu")
    state.shared_over = ("a group",)
    assert copied(state).shared_over == () and state.shared_over == ("a group",)
