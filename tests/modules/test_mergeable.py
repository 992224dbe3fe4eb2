# SPDX-License-Identifier: Apache-2.0
"""MergeableLinear: a layer whose weight contains adapters keeps its base, wherever the layer goes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import (
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    training_state_dict,
)
from lorakernels.modules.linear.mergeable import MergeableLinear, mergeable

FP8 = DelayedScaling()
KINDS = pytest.mark.parametrize("kind", ["lora", "frozen"])
RECIPES = pytest.mark.parametrize("fp8", [None, FP8], ids=["plain", "fp8"])


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def values(state: dict[str, Tensor]) -> dict[str, list[int]]:
    return {key: raw(value).flatten().tolist() for key, value in state.items()}


def make(kind: str, fp8: DelayedScaling | None) -> MergeableLinear:
    if kind == "frozen":
        return mergeable(FrozenFP8Linear(24, 10, fp8=fp8))
    layer = LoRALinear(24, 10, config=LoRAConfig(r=4, fp8=fp8))
    nn.init.normal_(layer.lora_B, std=0.3)
    return layer


def merged(kind: str, fp8: DelayedScaling | None) -> tuple[MergeableLinear, Tensor, dict[str, Any]]:
    """A merged layer, its base weight, and its state_dict before the merge."""
    layer = make(kind, fp8)
    base, before = layer.base_weight(), copy.deepcopy(layer.state_dict())
    layer.put_merged(base + 0.125)
    return layer, base, before


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@KINDS
@RECIPES
def test_a_copy_of_a_merged_layer_unmerges_to_the_same_base(
    kind: str, fp8: DelayedScaling | None, copied: Callable[[Any], Any]
) -> None:
    layer, base, _ = merged(kind, fp8)
    twin = copied(layer)
    assert type(twin) is type(layer) and twin.merged
    assert torch.equal(raw(twin.stored), raw(layer.stored))
    twin.unmerge()
    assert torch.equal(twin.base_weight(), base) and torch.equal(twin.dequantized_weight(), base)
    assert layer.merged and not torch.equal(layer.dequantized_weight(), base)


@KINDS
@RECIPES
def test_a_merged_layer_moves_with_its_base(kind: str, fp8: DelayedScaling | None) -> None:
    layer, base, _ = merged(kind, fp8)
    layer.to(torch.bfloat16)
    expected = base if fp8 is not None else base.bfloat16().float()
    assert torch.equal(layer.base_weight(), expected)
    layer.unmerge()
    assert torch.equal(layer.dequantized_weight(), expected)
    layer, _, _ = merged(kind, fp8)
    layer.to("meta")
    assert layer.base_weight().is_meta


@KINDS
@RECIPES
def test_what_a_merged_layer_saves(kind: str, fp8: DelayedScaling | None) -> None:
    layer, _, before = merged(kind, fp8)
    parts = training_state_dict(layer)
    assert list(parts) == list(before) and values(parts) == values(before)
    whole = layer.state_dict()
    assert set(before) - set(whole) == {k for k in before if k.startswith("lora_")}
    assert torch.equal(raw(whole["weight"]), raw(layer.weight))


@KINDS
@RECIPES
def test_a_merged_layer_loads_nothing(kind: str, fp8: DelayedScaling | None) -> None:
    layer, base, before = merged(kind, fp8)
    held = values(layer.state_dict())
    with pytest.raises(RuntimeError, match="unmerge the adapter before loading"):
        layer.load_state_dict({**before, "bias": before["bias"] + 1})
    assert values(layer.state_dict()) == held
    layer.unmerge()
    layer.load_state_dict(before)
    assert torch.equal(layer.dequantized_weight(), base)


@KINDS
@RECIPES
def test_what_is_loaded_after_an_unmerge_is_the_base_of_the_next_merge(
    kind: str, fp8: DelayedScaling | None
) -> None:
    layer, _, _ = merged(kind, fp8)
    for _ in range(2):
        other = make(kind, fp8)
        layer.unmerge()
        layer.load_state_dict(other.state_dict())
        base = other.base_weight()
        assert torch.equal(layer.base_weight(), base)
        for added in (0.25, -0.5):  # the second over the first
            layer.put_merged(layer.base_weight() + added)
            assert torch.equal(layer.base_weight(), base)
            assert (
                float((layer.dequantized_weight() - base).mean() / added) > 0.9
            )  # e4m3's rounding
    layer.unmerge()
    assert torch.equal(layer.dequantized_weight(), base)


@pytest.mark.parametrize("times", [1, 2], ids=["the first merge", "a second merge"])
@RECIPES
def test_a_merge_that_fails_leaves_the_weight_of_before(
    fp8: DelayedScaling | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make("frozen", fp8)
    base = layer.base_weight()
    if times == 2:
        layer.put_merged(base + 0.125)
    before, write = raw(layer.stored).clone(), layer._write_weight
    calls: list[int] = []

    def failing(*values: Any) -> None:
        write(*values)
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(layer, "_write_weight", failing)
        layer.put_merged(base - 0.5)
    assert torch.equal(raw(layer.stored), before) and layer.merged == (times == 2)
    assert torch.equal(layer.base_weight(), base)


@RECIPES
def test_a_sum_that_is_not_finite_is_refused(fp8: DelayedScaling | None) -> None:
    layer = make("frozen", fp8)
    before = values(layer.state_dict())
    with pytest.raises(ValueError, match="finite"):
        layer.put_merged(torch.full((10, 24), torch.inf))
    assert not layer.merged and values(layer.state_dict()) == before


def test_a_frozen_layer_knows_nothing_of_merging() -> None:
    layer = FrozenFP8Linear(24, 10)
    assert not {"merged", "_base"} & (set(vars(layer)) | set(dir(FrozenFP8Linear)))
    held = layer.stored
    assert mergeable(layer) is layer and mergeable(layer) is layer and layer.stored is held
    assert not layer.merged  # type: ignore[attr-defined]


def test_a_subclass_of_another_kind_is_not_merged_into() -> None:
    class Other(FrozenFP8Linear):
        pass

    layer = Other(24, 10)
    with pytest.raises(TypeError, match="cannot merge into a Other"):
        mergeable(layer)
    assert type(layer) is Other
