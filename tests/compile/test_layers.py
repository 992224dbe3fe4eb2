# SPDX-License-Identifier: Apache-2.0
"""torch.compile as people use it: layer by layer, and the whole model."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lorakernels import LoRAConfig, LoRALinear
from tests.compile.models import FP8_ROUNDING, HISTORY, ROUNDING, llama, train


def compile_layers(model, backend="aot_eager", **options):
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, dynamic=False, fullgraph=True, **options)


def same_training(eager, compiled, explicit=False):
    """Both from the same start on the same batches and masks; the losses of the second."""
    losses, states = [], []
    for model, state in (eager, compiled):
        kept = {}

        def keep(step, state=state, kept=kept):
            kept[step] = None if state is None else (state.forward.clone(), state.backward.clone())

        losses.append(train(model, state, explicit, after=keep))
        states.append(kept)
    expected, found = losses
    (_, state), (_, other) = eager, compiled
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=ROUNDING)
    bound = ROUNDING if state is None else FP8_ROUNDING
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    if state is None:
        return
    assert other.in_charge == state.in_charge and other._leader == state._leader
    for step, pair in states[0].items():
        for own, others in zip(pair, states[1][step], strict=True):
            assert torch.equal(own == 0, others == 0)  # as many rolls, in the same columns
            if step <= 2:  # where a rounding turns, an amax moves by 1/16; AdamW lets that grow
                torch.testing.assert_close(others, own, rtol=1 / 16, atol=0)


CASES = {
    "automatic": ({}, False),
    "dropout, explicit": ({"p": 0.1}, True),
    "dropout, checkpointed": ({"p": 0.1, "checkpointing": True}, False),
    "plain base, dropout": ({"p": 0.1, "fp8": None}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True], ids=["adapted", "merged"])
def test_backward_of_a_compiled_layer_in_eval_leaves_the_state(merged):
    """dy is scaled by its own amax, though the state has a scale: 2⁻³⁰ of it would underflow."""
    torch.manual_seed(0)
    layer = LoRALinear(32, 16, config=LoRAConfig(r=4, fp8=HISTORY, init_lora_weights=False))
    layer(torch.randn(8, 32)).sum().backward()
    state = layer.fp8_state
    state.reduce_and_update()
    if merged:
        layer.merge()
    twin, found = copy.deepcopy(layer).eval(), []
    layer.eval()
    torch._dynamo.reset()
    layer.compile(backend="aot_eager", fullgraph=True)
    dy, x = torch.randn(8, 16) * 2.0**-30, torch.randn(8, 32)
    before = state.save()
    for module in (twin, layer):
        given = x.clone().requires_grad_()
        module(given).backward(dy)
        found.append(given.grad)
    assert torch.equal(*found) and bool(found[0].any())
    assert torch.equal(state.forward, before.forward)
    assert torch.equal(state.backward, before.backward)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_layers_compiled_one_by_one_train_as_eager(case):
    """The masks are eager's: aot_eager draws slots in the order of the calls, from the same generator."""
    options, explicit = CASES[case]
    compiled = llama(**options)
    compile_layers(compiled[0])
    same_training(llama(**options), compiled, explicit)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.1], ids=["no dropout", "dropout"])
def test_a_model_compiled_whole_trains_as_eager(p):
    compiled = llama(p=p)
    torch._dynamo.reset()
    compiled[0].compile(backend="aot_eager", fullgraph=True)
    same_training(llama(p=p), compiled)


@pytest.mark.slow
def test_one_compilation_serves_every_layer(caplog):
    """Layers differ in site, FP8 column, name and scaling. The first one's input needs no gradient: two traces."""
    compilations = {}
    for layers in (2, 4, 8):
        model, state = llama(layers, p=0.1)
        counter = CompileCounterWithBackend("aot_eager")
        compile_layers(model, counter)
        with caplog.at_level(logging.WARNING, logger="torch._dynamo"):
            train(model, state, steps=2)
        compilations[layers] = counter.frame_count
    assert compilations == {2: 2, 4: 2, 8: 2}
    assert "recompile" not in caplog.text


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("case", ["automatic", "explicit", "plain base"])
def test_inductor_trains_as_eager_on_a_gpu(mode, case):
    """fp32 throughout; Triton's exp and reductions differ from ATen's by an ulp, which ROUNDING allows."""
    fp8 = None if case == "plain base" else HISTORY
    compiled = llama(fp8=fp8, device="cuda")
    compile_layers(compiled[0], "inductor", mode=mode)
    same_training(llama(fp8=fp8, device="cuda"), compiled, case == "explicit")
    captured = fp8 is not None and mode == "reduce-overhead"
    assert (compiled[1] is not None and compiled[1].pinned_by is not None) == captured


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_draws_new_masks_on_a_gpu(mode):
    """They differ call by call, in replays of CUDA graphs too."""
    model, _ = llama(p=0.5, device="cuda")
    compile_layers(model, "inductor", mode=mode)
    ids = torch.randint(0, 64, (2, 12), device="cuda")
    losses = set()
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.add(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()
        model.zero_grad()  # a gradient is the graph's own memory, which its next replay writes
    assert len(losses) == 6
