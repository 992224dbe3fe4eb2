# SPDX-License-Identifier: Apache-2.0
"""What `attach` refuses, says and leaves behind: nothing after detach, nothing after an exception."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from lorakernels.graphs import GraphManager, GraphOptions
from torch import nn

from lorakernels import DelayedScaling, FP8State, LoRAConfig, LoRALinear, apply_lora, attach
from lorakernels.loops.layer_graphs import LayerGraphs
from tests.graphs.fake import FakeBackend
from tests.loops.written_loops import (
    adamw,
    attached_to,
    llama,
    loss_of,
    no_layers,
    run,
    state_of,
    trained,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("math_attention")


def compiled(model: Any) -> Any:
    model.model.layers[1].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (None, {}, "the model is on cpu: CUDA graphs need a GPU"),
        (None, {"graphs": False}, "graphs=False"),
        (no_layers, {"backend": FakeBackend}, "LlamaForCausalLM has no list of layers"),
        (compiled, {"backend": FakeBackend}, "layer 1 is compiled"),
        (torch.compile, {"backend": FakeBackend}, "the model is compiled"),
    ],
    ids=["cpu", "not wanted", "no list", "a compiled layer", "a compiled model"],
)
def test_why_nothing_is_replayed(change: Any, options: Any, reason: str) -> None:
    model = llama(fused=False)
    inner, model = model, model if change is None else change(model)
    with attached_to(model, **options) as (attached, _):
        assert reason in attached.why_not and reason in str(attached)
        assert inner.config.use_cache and attached.manager is None


def test_the_signature_is_readable() -> None:
    """What `help` and editors show; options of graphs have the defaults of theirs, but those that a loop needs."""
    given = inspect.signature(attach).parameters
    assert all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given.values())
    defaults = {name: parameter.default for name, parameter in given.items()}
    assert defaults["grads"] == inspect.signature(GraphManager).parameters["grads"].default
    theirs = inspect.signature(GraphOptions).parameters
    assert {n for n in theirs if n in given} == theirs.keys() - {"together"}
    differ = {n: defaults[n] for n in theirs if n in given and defaults[n] != theirs[n].default}
    assert differ == {"on_new_shape": "capture", "max_shapes": 4}


def test_detach_leaves_the_model_as_it_was() -> None:
    model = llama(dropout=0.1, fused=False)
    optimizer = adamw(model)
    attached = attach(model, optimizer, backend=FakeBackend)
    run("plain", model, optimizer)
    assert attached.replaying and not model.config.use_cache
    assert state_of(model).in_charge == "explicit"
    attached.detach()
    attached.detach()
    assert state_of(model).in_charge == "auto" and model.config.use_cache
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    assert all(m.rng_state is None for m in model.modules() if isinstance(m, LoRALinear))
    assert state_of(model).pinned_by is None
    run("plain", model, optimizer)
    attach(model, optimizer, backend=FakeBackend).detach()


@pytest.mark.parametrize("fails", ["attach", "detach"])
def test_an_exception_leaves_nothing_attached(fails: str, monkeypatch: Any) -> None:
    """The update that takes charge fails in attach, the end of the graphs in detach."""
    model = llama(dropout=0.1, fused=False)
    optimizer = adamw(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("NaN")

    attached = None
    if fails == "detach":
        attached = attach(model, optimizer, backend=FakeBackend)
        monkeypatch.setattr(LayerGraphs, "close", fail)
    else:
        monkeypatch.setattr(FP8State, "reduce_and_update", fail)
    with pytest.raises(RuntimeError, match="NaN"):
        attached.detach() if attached else attach(
            model, optimizer, backend=FakeBackend, warmup_steps=1
        )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    assert state_of(model).in_charge == "auto" and model.config.use_cache
    assert all(m.rng_state is None for m in model.modules() if isinstance(m, LoRALinear))


def test_a_model_without_a_list_of_layers_is_attached_once() -> None:
    """A second one would update its scales twice a step."""
    model = no_layers(llama(fused=False))
    optimizer = adamw(model)
    attached = attach(model, optimizer)
    with pytest.raises(ValueError, match="attached already"):
        attach(model, optimizer)
    attached.detach()
    attach(model, optimizer).detach()
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_step_that_raises_is_one_that_was_left_out() -> None:
    """Such as an optimizer whose states do not fit on the GPU."""
    model = llama()

    class Full(torch.optim.SGD):
        full = False

        def step(self, closure: Any = None) -> Any:
            if self.full:
                raise torch.OutOfMemoryError("full")
            return super().step(closure)

    optimizer = Full(trained(model), lr=1e-3)
    attached = attach(model, optimizer)
    for step in range(5):
        optimizer.full = step == 2
        loss_of(model).backward()
        with contextlib.suppress(torch.OutOfMemoryError):
            optimizer.step()
        optimizer.zero_grad()
    assert (attached.steps, attached.skipped, attached.microbatches) == (4, 1, 5)


def amaxes_after_a_step_that_was_left_out(listed: bool) -> tuple[Any, torch.Tensor]:
    """What `attach` counted and the FP8 history, where the second of three steps has large inputs and is left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))  # no ModuleList
    apply_lora(model, LoRAConfig(r=2, target_modules=["0", "2"], fp8=DelayedScaling()))
    optimizer = torch.optim.SGD(trained(model), lr=1e-3)
    attached = attach(model, optimizer, graphs=False, layers=[*model] if listed else None)
    assert bool(attached.layers) == listed
    for step in range(3):
        x = torch.ones(4, 16) * (100.0 if step == 1 else 1.0)
        model(x).square().mean().backward()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    (state,) = attached.fp8_states
    attached.detach()
    return (attached.steps, attached.skipped, attached.microbatches), state.forward.clone()


def test_amaxes_of_a_step_that_was_left_out_are_no_other_steps_without_a_list_of_layers() -> None:
    with_list, without = map(amaxes_after_a_step_that_was_left_out, (True, False))
    assert with_list[0] == without[0] == (2, 1, 3)
    torch.testing.assert_close(without[1], with_list[1], rtol=0, atol=0)


def test_a_loop_without_model_train_is_said_once() -> None:
    """from_pretrained returns a model in eval mode, in which nothing of attach is done."""
    model = llama().eval()
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        with pytest.warns(
            RuntimeWarning, match=r"AdamW stepped after .* Call model\.train"
        ) as said:
            for _ in range(3):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(said) == 1 and attached.steps == 0
        model.train()
        loss_of(model).backward()
        with torch.no_grad():
            loss_of(model.eval())
        optimizer.step()
        assert attached.steps == 1


def test_a_copy_of_the_model_is_not_attached() -> None:
    model = llama()
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        run("plain", model, optimizer)
        steps, microbatches = attached.steps, attached.microbatches
        again = copy.deepcopy(model)
        loss_of(again).backward()
        attached_to(again).__enter__()[0].detach()
        assert (attached.steps, attached.microbatches) == (steps, microbatches)
        assert attached._forwards == 0


def test_what_is_dropped_is_freed() -> None:
    model = llama()
    attach(model, adamw(model), backend=FakeBackend)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_refused_before_anything_is_changed() -> None:
    model = llama()
    optimizer = adamw(model)
    before = {name: dict(m._forward_pre_hooks) for name, m in model.named_modules()}
    wrong = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    plain = transformers.LlamaForCausalLM(model.config)
    for arguments, options, error, message in (
        ((plain, adamw(plain)), {}, ValueError, "has no LoRALinear: call apply_lora first"),
        ((model, wrong), {}, ValueError, "SGD has none of the model's 42 trained parameters"),
        ((model, []), {}, ValueError, "optimizer must be one optimizer or several"),
        ((model, 3), {}, TypeError, "optimizer must be a torch.optim.Optimizer, found int"),
        ((model, optimizer), {"warmup_steps": 0}, ValueError, "warmup_steps must be .* found 0"),
        ((model, optimizer), {"rng_state": 3}, TypeError, "rng_state must be a PhiloxState"),
        (
            (model, optimizer),
            {"backend": FakeBackend, "grads": "x"},
            ValueError,
            "grads must be one",
        ),
        ((model, optimizer), {"x": 1}, TypeError, "unexpected keyword argument 'x'"),
        ((model, optimizer), {"graphs": False, "mode": "x"}, ValueError, "mode must be one of"),
        ((model, optimizer), {"graphs": False, "max_shapes": 0}, ValueError, "max_shapes must be"),
        ((model, optimizer), {"layers": [3]}, TypeError, r"layers\[0\] must be a module"),
        ((model, optimizer), {"layers": "model"}, TypeError, "layers must be a list"),
        ((model, optimizer), {"layers": []}, TypeError, "layers must be a list"),
        ((model, optimizer), {"layers": [nn.Linear(2, 2)]}, ValueError, "is not the model's"),
    ):
        with pytest.raises(error, match=message):
            attach(*arguments, **options)
    assert before == {name: dict(m._forward_pre_hooks) for name, m in model.named_modules()}
    assert state_of(model).in_charge == "auto" and not optimizer._optimizer_step_post_hooks
    attached = attach(model, optimizer)
    with pytest.raises(ValueError, match=r"attached already.*detach"):
        attach(model, optimizer)
    attached.detach()
