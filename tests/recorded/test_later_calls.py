# SPDX-License-Identifier: Apache-2.0
"""A call like one before asks and checks nothing again. Whatever a recording depends on is seen when it changes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lorakernels.autograd.linear import recorded as linear_recorded
from lorakernels.modules.linear import calls as calls_module
from lorakernels.recorded import forms, node
from lorakernels.recorded.routing import without_recordings
from tests.dry_cuda import dry_cuda
from tests.recorded.recorded_layers import (
    BF16,
    FP16,
    K,
    M,
    N,
    frozen,
    launches,
    layer,
    name_tensors,
    step,
)


def test_a_rank_that_is_cut_by_data_is_seen() -> None:
    """The addresses stay."""
    module, x = layer(r=32), torch.randn(M, K, dtype=BF16)
    with dry_cuda() as recorded:
        module(x)
        module.lora_A.data = module.lora_A.data[:8]
        module.lora_B.data = module.lora_B.data[:, :8].contiguous()
        recorded.calls.clear()
        module(x)
        assert [c.arguments["rank"] for c in recorded.calls if "rank" in c.arguments] == [8, 8]


def test_parameters_at_other_addresses_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP2 frees a parameter's storage after a forward, and allocates it anew before the next."""
    module, x = layer(lora_dropout=0.0), torch.randn(M, K, dtype=BF16)
    asked: list[Any] = []
    ask = linear_recorded._kind_of
    monkeypatch.setattr(linear_recorded, "_kind_of", lambda *args: asked.append(args) or ask(*args))
    with dry_cuda() as recorded:
        for _ in range(3):
            for name in ("weight", "lora_A", "lora_B"):
                p = module._parameters[name]
                storage, values = p.untyped_storage(), p.detach().clone()
                before, size = p.data_ptr(), storage.nbytes()
                held = []
                while (
                    p.data_ptr() == before
                ):  # what is held keeps the allocator from giving it again
                    storage.resize_(0)
                    held.append(torch.empty(size, dtype=torch.uint8))
                    storage.resize_(size)
                p.data.copy_(values)
            module(x)
        assert len(asked) == 1 and recorded.runs == 3


def test_the_last_calls_of_a_layer_hold_no_tensor_and_no_address() -> None:
    """So that threads share nothing that a call changes, and a recording takes what a parameter is at that call."""
    module, x = layer(lora_dropout=0.0), torch.randn(M, K, dtype=BF16)
    with dry_cuda():
        module(x)
        (spec,) = module._numbers.specs.values()
        calls = spec.memo["linear"]
    own = {t.data_ptr() for t in (x, *module.parameters(), module.fp8_state.forward)}
    waiting, seen = [vars(calls)], []
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, tuple | list):
            waiting += value
        else:
            seen.append(value)
    assert seen and not any(isinstance(v, Tensor) or (type(v) is int and v in own) for v in seen)


@pytest.mark.parametrize("name", ["lora_A", "lora_B", "bias"])
def test_a_parameter_that_does_not_fit_is_refused(name: str) -> None:
    """A kernel would read beyond its end."""
    module, x = layer(base_bias=True), torch.randn(M, K, dtype=BF16)
    with dry_cuda():
        module(x)
        parameter = getattr(module, name)
        parameter.data = parameter.data[..., :-8].contiguous()
        with pytest.raises(ValueError, match=rf"{name} must be "):
            module(x)


def test_another_current_gpu_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_empty_strided_cuda` would allocate there."""
    module, x = layer(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        step(module, x)
        expected = launches(recorded.calls)
        recorded.calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(torch._C, "_cuda_getDevice", lambda: 1)
            patched.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
            step(module, x)
        assert launches(recorded.calls) == expected and recorded.runs == 4


def test_a_replaced_weight_is_freed_before_the_layer_runs_again() -> None:
    module, x = layer(), torch.randn(M, K, dtype=BF16)
    with dry_cuda():
        module(x)
    old = weakref.ref(module._parameters["weight"])
    module.load_state_dict(module.state_dict(), assign=True)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("make", [layer, frozen, lambda: layer(base_bias=True, bias="all")])
def test_a_call_like_one_before_asks_and_checks_nothing_again(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = make(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        name_tensors(recorded, module, x)
        step(module, x)
        expected = launches(recorded.calls)
        recorded.calls.clear()
        monkeypatch.setattr(calls_module, "check_input", None)
        monkeypatch.setattr(calls_module, "lora_linear", None)
        step(module, x)
        assert launches(recorded.calls) == expected


@pytest.mark.parametrize(
    "x", [torch.zeros(M, K, dtype=torch.int32), torch.zeros(M, K - 8, dtype=BF16)], ids=str
)
def test_what_does_not_fit_is_refused_after_a_call_as_well(x: Tensor) -> None:
    """Before a slot is drawn, or a scale updated."""
    module = layer()
    with dry_cuda() as recorded:
        module(torch.randn(M, K, dtype=BF16))
        recorded.calls.clear()
        random, updates = torch.get_rng_state(), module.fp8_state.updates
        with pytest.raises((TypeError, ValueError), match="x must "):
            module(x)
        assert torch.equal(torch.get_rng_state(), random)
        assert module.fp8_state.updates == updates and not recorded.calls


def test_what_autocast_casts_is_cast_after_a_call_as_well() -> None:
    module, x = layer(), torch.randn(M, K, dtype=BF16)
    with dry_cuda():
        assert module(x).dtype == BF16
        with torch.autocast("cuda", FP16):
            assert module(x).dtype == FP16
        assert module(x).dtype == BF16


def test_each_combination_of_gradients_has_its_own_recording() -> None:
    module, x = layer(), torch.randn(M, K, dtype=BF16)
    with dry_cuda():
        for _ in range(2):
            for flags in itertools.product((False, True), repeat=3):
                for tensor, flag in zip((x, module.lora_A, module.lora_B), flags, strict=True):
                    tensor.requires_grad_(flag)
                y = module(x)
                assert y.requires_grad == any(flags)
                with torch.no_grad():
                    assert not module(x).requires_grad
                if any(flags):
                    found = torch.autograd.grad(
                        y, [t for t in (x, module.lora_A, module.lora_B) if t.requires_grad], y
                    )
                    assert len(found) == sum(flags)


def test_a_call_without_gradients_goes_past_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer().eval(), torch.randn(1, 1, K, dtype=BF16)
    with dry_cuda() as recorded, torch.no_grad():
        with without_recordings():
            module(x)
        by_ops = launches(recorded.calls)
        recorded.calls.clear()
        refused = mock.Mock(side_effect=AssertionError("autograd was asked"))
        monkeypatch.setattr(node, "_apply", refused)
        y = module(x)
        assert launches(recorded.calls) == by_ops and y.shape == (1, 1, N)
    assert not refused.called


def test_a_tangent_is_autograd_s_business_also_where_no_gradient_is_computed() -> None:
    module, x = layer().eval(), torch.randn(1, 1, K, dtype=BF16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.clone())
        with dry_cuda(), torch.no_grad(), pytest.raises(RuntimeError, match="jvp"):
            module(dual)


def test_without_dynamos_function_forms_are_compared_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forms, "_Guards", None)
    test_each_combination_of_gradients_has_its_own_recording()
    test_a_rank_that_is_cut_by_data_is_seen()
    test_a_call_like_one_before_asks_and_checks_nothing_again(layer, monkeypatch)


@pytest.mark.parametrize("own", [True, False], ids=["dynamo", "python"])
def test_forms_differ_in_everything_that_a_recording_depends_on(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:
        monkeypatch.setattr(forms, "_Guards", None)
    made = torch.zeros(4, 6, dtype=BF16)
    holds_for = forms.forms_of([made])
    assert holds_for(torch.ones(4, 6, dtype=BF16)) and holds_for(made)
    others = {
        "shape": torch.zeros(6, 4, dtype=BF16),
        "rank": torch.zeros(1, 4, 6, dtype=BF16),
        "strides": torch.zeros(6, 4, dtype=BF16).t(),
        "dtype": torch.zeros(4, 6, dtype=FP16),
        "gradient": torch.zeros(4, 6, dtype=BF16, requires_grad=True),
        "class": nn.Parameter(made, requires_grad=False),
        "device": torch.zeros(4, 6, dtype=BF16, device="meta"),
    }
    assert {name for name, other in others.items() if holds_for(other)} == set()
    with torch.inference_mode():
        assert not holds_for(torch.zeros(4, 6, dtype=BF16))
