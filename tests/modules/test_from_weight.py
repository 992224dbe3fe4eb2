# SPDX-License-Identifier: Apache-2.0
"""FrozenFP8Linear.from_weight and LoRALinear.from_weight: a layer over given parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import DelayedScaling, FrozenFP8Linear, LoRAConfig, LoRALinear
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.linear.weights import quantize_weight
from lorakernels.state.fp8 import FP8State
from lorakernels.values import Weight

FP8 = DelayedScaling()
E4M3 = torch.float8_e4m3fn


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, E4M3], ids=["uint8", "e4m3"])
@pytest.mark.parametrize("kind", [FrozenFP8Linear, LoRALinear], ids=["frozen", "lora"])
def test_bytes_and_their_scale_are_taken_as_they_are(kind: Any, dtype: torch.dtype) -> None:
    data, scale_inv = quantize_weight(torch.randn(10, 24))
    spec: Any = FrozenSpec(FP8) if kind is FrozenFP8Linear else LoRAConfig(r=4, fp8=FP8)
    layer = kind.from_weight(Weight(data.view(dtype), scale_inv), torch.ones(10), spec)
    assert type(layer) is kind and layer.training and layer.bias.tolist() == [1.0] * 10
    assert layer.stored.data_ptr() == data.data_ptr() and layer.weight_scale_inv is scale_inv
    assert layer(torch.randn(3, 24)).shape == (3, 10)


@pytest.mark.parametrize("fp8", [None, FP8], ids=["plain", "fp8"])
def test_a_plain_weight_gives_what_from_linear_gives(fp8: DelayedScaling | None) -> None:
    linear = nn.Linear(24, 10).eval()
    state = None if fp8 is None else FP8State(["other", "mine"], fp8)
    names = {"fp8_state": state, "name": "mine"}
    expected = FrozenFP8Linear.from_linear(linear, fp8, **names)
    spec = FrozenSpec(fp8, **names)
    found = FrozenFP8Linear.from_weight(Weight(linear.weight.detach()), linear.bias, spec)
    assert found.training and not expected.training and found.column == expected.column
    assert found.fp8_state is state and found.name == "mine" and found.column == (fp8 is not None)
    for key, value in expected.state_dict().items():
        assert torch.equal(raw(found.state_dict()[key]), raw(value)), key


BYTES = quantize_weight(torch.ones(10, 24))
STATE = FP8State(["known"], FP8)
REFUSED = {
    "a vector": (Weight(torch.ones(10)), None, FrozenSpec(FP8), ValueError, r"\[N, K\].*\(10,\)"),
    "bias of K": (
        Weight(torch.ones(10, 24)),
        torch.ones(24),
        FrozenSpec(FP8, name="q"),
        ValueError,
        r"q: bias must be \[N\], found \(24,\)",
    ),
    "scale without bytes": (
        Weight(torch.ones(10, 24), torch.ones(1)),
        None,
        FrozenSpec(FP8),
        TypeError,
        "float32",
    ),
    "a scale a row": (
        Weight(BYTES[0], torch.ones(10)),
        None,
        FrozenSpec(FP8),
        ValueError,
        r"\[1\], found \(10,\)",
    ),
    "bytes without a recipe": (Weight(*BYTES), None, FrozenSpec(None), ValueError, "found None"),
    "another recipe": (
        Weight(*BYTES),
        None,
        FrozenSpec(DelayedScaling(margin=1), fp8_state=STATE, name="known"),
        ValueError,
        "known: fp8_state follows",
    ),
    "another device": (
        Weight(torch.empty(10, 24, device="meta")),
        None,
        FrozenSpec(FP8, fp8_state=STATE, name="known"),
        ValueError,
        "weight on meta",
    ),
    "an unknown name": (
        Weight(*BYTES),
        None,
        FrozenSpec(FP8, fp8_state=STATE, name="new"),
        KeyError,
        "new",
    ),
    "NaN": (
        Weight(torch.full((10, 24), torch.nan)),
        None,
        FrozenSpec(FP8),
        ValueError,
        "finite",
    ),
}


@pytest.mark.parametrize(
    ("weight", "bias", "spec", "error", "message"), REFUSED.values(), ids=REFUSED
)
def test_parts_that_make_no_layer_are_refused(
    weight: Weight, bias: Any, spec: FrozenSpec, error: Any, message: str
) -> None:
    before = STATE.state_dict()
    with pytest.raises(error, match=message):
        FrozenFP8Linear.from_weight(weight, bias, spec)
    after = STATE.state_dict()
    assert after["names"] == before["names"] and torch.equal(after["forward"], before["forward"])


@pytest.mark.parametrize(
    ("adapter_dtype", "bias", "expected"),
    [
        (torch.float16, torch.bfloat16, torch.float16),
        (None, torch.bfloat16, torch.bfloat16),
        (None, None, torch.float32),
    ],
    ids=["given", "the bias's", "the default"],
)
def test_the_adapter_over_bytes_has_the_dtype(adapter_dtype: Any, bias: Any, expected: Any) -> None:
    held = None if bias is None else torch.ones(10, dtype=bias)
    layer = LoRALinear.from_weight(
        Weight(*BYTES), held, LoRAConfig(r=4, bias="all"), adapter_dtype=adapter_dtype, name="q"
    )
    assert layer.lora_A.dtype == layer.lora_B.dtype == expected and layer.name == "q"
    assert held is None or layer.bias.requires_grad


def test_a_layer_moves_to_another_state_with_its_values() -> None:
    old, new = FP8State(["a", "b"], FP8), FP8State(["b", "c"], FP8)
    spec = FrozenSpec(FP8, fp8_state=old, name="b")
    layer = FrozenFP8Linear.from_weight(Weight(*BYTES), None, spec)
    layer(torch.full((3, 24), 2.0))
    before, handle = old.values(1), layer.handle
    old.joint.add(1)
    layer.move_state(new, "c")
    assert (layer.fp8_state, layer.column, layer.name) == (new, 1, "c")
    assert bool(before.any()) and torch.equal(new.values(1), before) and new.joint == {1}
    assert layer.handle is not handle
    layer.move_state(new, "d")
    assert new.names == ("b", "c", "d") and layer.column == 2 and torch.equal(new.values(2), before)


def test_a_plain_layer_has_no_state_to_move() -> None:
    layer = FrozenFP8Linear(4, 4, fp8=None)
    state = FP8State([], FP8)
    with pytest.raises(ValueError, match="no state to move"):
        layer.move_state(state, "x")
    assert state.names == ()
