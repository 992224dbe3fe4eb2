# SPDX-License-Identifier: Apache-2.0
"""The scales that ranks share live as long as the layers that use them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from lorakernels import DelayedScaling, FP8State
from lorakernels.parallel.tensor_ranks import shared


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
