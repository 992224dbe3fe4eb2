# SPDX-License-Identifier: Apache-2.0
"""rehearsal: a run goes on as if its train and evaluation steps had not been."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels import PhiloxState, attach, rehearsal
from lorakernels.loops.parts import adapters
from tests.loops.written_loops import adamw, llama


def made() -> tuple[Any, Any, Any]:
    rng_state = PhiloxState(7, "cpu")
    model = llama(dropout=0.1, rng_state=rng_state)
    model.register_buffer("calls", torch.zeros(()))
    return model, adamw(model), rng_state


def step(model: Any, optimizer: Any, rng_state: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (2, 8), generator=generator)
    loss = model(tokens, labels=tokens, use_cache=False).loss + 0.0 * torch.rand(())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.calls += 1
    next(m.fp8_state for m in model.modules() if getattr(m, "fp8_state", None)).reduce_and_update()
    rng_state.advance()
    return loss.detach()


def state(model: Any, optimizer: Any, rng_state: Any) -> dict[str, Any]:
    fp8 = next(m.fp8_state for m in model.modules() if getattr(m, "fp8_state", None))
    found = {n: x.detach().clone() for n, x in model.state_dict().items()}
    found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    found |= {"x": fp8.forward.clone(), "dy": fp8.backward.clone(), "charge": fp8.in_charge}
    found |= {"philox": rng_state.tensor.clone(), "generator": torch.get_rng_state()}
    return copy.deepcopy(found | {"optimizer": optimizer.state_dict(), "mode": model.training})


def addresses_of(optimizer: Any) -> list[int]:
    moments = optimizer.state_dict()["state"].values()
    return [x.data_ptr() for values in moments for x in values.values()]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 2], ids=["at first", "in the middle"])
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_a_run_goes_on_as_without_it(before: int, fails: bool) -> None:
    run = made()
    for seed in range(before):
        step(*run, seed)
    model, optimizer, _ = run
    if before:  # an accumulated gradient
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    found, addresses = state(*run), addresses_of(optimizer)
    grads = [p.grad for p in model.parameters()]
    try:
        with rehearsal(model, optimizer):
            for seed in (50, 51):
                step(*run, seed)
            for group in optimizer.param_groups:
                group["lr"] = 7.0
            model.eval()(torch.arange(8)[None])
            assert not same(state(*run), found)
            if fails:
                raise KeyError("a mistake of the loop's")
    except KeyError:
        assert fails
    assert same(state(*run), found)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert addresses == addresses_of(optimizer)
    torch.manual_seed(3)
    ours = [step(*run, seed) for seed in (10, 11)]
    other = made()
    for seed in range(before):
        step(*other, seed)
    if before:
        other[0](torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    torch.manual_seed(3)
    assert same(ours, [step(*other, seed) for seed in (10, 11)])
    assert same(state(*run), state(*other))


def test_masks_of_peft_s_layers_go_on_as_without_it() -> None:
    peft = pytest.importorskip("peft")
    from lorakernels.integrations.peft import patch

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["0"])
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(16, 16)), config)
    patch(model)
    (layer,) = adapters(model)
    layer.rng_state = PhiloxState(7, "cpu")
    before = layer.rng_state.tensor.clone()
    with rehearsal(model):
        model(torch.randn(2, 16)).sum().backward()
        layer.rng_state.advance()
        assert not torch.equal(layer.rng_state.tensor, before)
    assert torch.equal(layer.rng_state.tensor, before)


def test_what_it_cannot_take_back_is_refused() -> None:
    model, optimizer, _ = made()
    fp8 = next(m.fp8_state for m in model.modules() if getattr(m, "fp8_state", None))
    fp8.pin("a graph")
    with pytest.raises(RuntimeError, match="pinned by a graph"), rehearsal(model):
        pass
    fp8.unpin("a graph")
    attach(model, optimizer)
    with pytest.raises(ValueError, match="rehearse before attach"), rehearsal(model, optimizer):
        pass
