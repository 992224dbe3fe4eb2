# SPDX-License-Identifier: Apache-2.0
"""FP8State and CUDA graphs: the update alone, around layer graphs, and inside a graph of the whole iteration.

Each replay is compared bit for bit with an eager twin over several iterations with different data.
"""

from __future__ import annotations

import copy

import pytest
import torch

from lorakernels import DelayedScaling, FP8State, LoRAConfig, LoRALinear, apply_lora

pytestmark = pytest.mark.gpu
STEPS = 5


def tensors(state):
    return torch.stack((state.forward, state.backward)).clone()


def addresses(state):
    return state.forward.data_ptr(), state.backward.data_ptr()


def warmed_up(run, times=3):
    """Run on a side stream, as a capture wants it: libraries choose their kernels and allocate before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_captured_update_is_the_eager_one(algo):
    recipe = DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo=algo)
    names = [f"layer{i}" for i in range(70)]  # more than one block of 32 columns
    state, twin = (FP8State(names, recipe, "cuda") for _ in range(2))
    before, start = addresses(state), state.save()
    warmed_up(state.reduce_and_update)
    state.restore(start)
    assert state.pinned_by is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.reduce_and_update()
    assert state.pinned_by == "a CUDA graph" and not tensors(state).any(), "recorded, not run"
    for step in range(STEPS + 2):
        rows = torch.rand(2, len(names), device="cuda") * (torch.rand(70, device="cuda") > 0.2)
        if step == 2:
            rows[0, 3], rows[1, 64] = torch.nan, torch.inf
        for one in (state, twin):
            one.forward[0], one.backward[0] = rows
        graph.replay()
        twin.reduce_and_update()
        torch.testing.assert_close(tensors(state), tensors(twin), rtol=0, atol=0, equal_nan=True)
    assert addresses(state) == before and (tensors(state)[:, -1] > 0).all()


def test_what_would_move_captured_memory_is_an_error():
    state = FP8State(["a"], DelayedScaling(amax_history_len=4), "cuda")
    warmed_up(state.reduce_and_update)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.reduce_and_update()
    with pytest.raises(RuntimeError, match=r"register 'late'.*pinned by a CUDA graph"):
        state.register("late")
    with pytest.raises(RuntimeError, match=r"from cuda:0 to cpu.*pinned by a CUDA graph"):
        state.to("cpu")
    graph.reset()
    state.unpin()
    assert state.register("late") == 1 and state.to("cpu").device.type == "cpu"


def test_check_nan_is_refused_under_capture():
    state = FP8State(["a"], DelayedScaling(amax_history_len=4), "cuda", check_nan=True)
    warmed_up(state.reduce_and_update)
    graph, nothing = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        nothing.add_(1)  # an empty capture would warn
        with pytest.raises(RuntimeError, match=r"check_nan=True.*under capture"):
            state.reduce_and_update()
    assert state.pinned_by is None
    graph.replay()
    torch.cuda.synchronize()
    assert nothing.item() == 1


def step_of(layer, forward, x, dy, lr=0.1):
    """One iteration around `forward`, with the update outside of it; what it computed."""
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(dy)
    found = [y, x.grad, layer.lora_A.grad, layer.lora_B.grad]
    found = [t.detach().clone() for t in found]
    with torch.no_grad():
        for p in (layer.lora_A, layer.lora_B):
            p -= lr * p.grad
            p.grad = None
    layer.fp8_state.reduce_and_update()
    return [*found, tensors(layer.fp8_state)]


def test_layer_graphs_with_the_update_outside():
    config = LoRAConfig(r=8, fp8=DelayedScaling(amax_history_len=4))
    layer = LoRALinear(64, 48, config=config, device="cuda", dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.lora_B, std=0.1)
    layer.fp8_state.reduce_and_update()  # takes charge: no update inside of the graph
    twin, state = copy.deepcopy(layer), layer.fp8_state
    start, before = state.save(), addresses(state)
    sample = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    assert state.pinned_by == "a CUDA graph" and state.forward[0].all(), "warm-up saw an amax"
    state.restore(start)
    assert not tensors(state).any()
    for step in range(STEPS):
        x = (step + 1) * torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(32, 48, device="cuda", dtype=torch.bfloat16)
        found = step_of(layer, graphed, x, dy)
        expected = step_of(twin, twin, x, dy)
        for name, a, b in zip(("y", "dx", "dA", "dB", "state"), found, expected, strict=True):
            assert torch.equal(a, b), (name, step)
    assert addresses(state) == before and (tensors(state)[:, -1] > 0).all()


def small_model():
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 32)
    ).to("cuda", torch.bfloat16)
    config = LoRAConfig(r=8, target_modules=["0", "2"], fp8=DelayedScaling(amax_history_len=4))
    report = apply_lora(model, config)
    for layer in (model[0], model[2]):
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    return model, report.fp8_state


class Iteration:
    """Two microbatches, loss, backward, SGD and the scales, on inputs that stay where they are."""

    def __init__(self, model, explicit):
        self.model, self.explicit = model, explicit
        self.x = torch.zeros(2, 16, 64, device="cuda", dtype=torch.bfloat16)
        self.target = torch.zeros(2, 16, 32, device="cuda", dtype=torch.bfloat16)
        self.loss = torch.zeros((), device="cuda")
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.5)

    def __call__(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.zero_()
        for x, target in zip(self.x, self.target, strict=True):
            loss = (self.model(x).float() - target.float()).pow(2).mean()
            loss.backward()
            self.loss += loss.detach()
        self.optimizer.step()
        if self.explicit:
            self.model[0].fp8_state.reduce_and_update()

    def load(self, x, target):
        self.x.copy_(x)
        self.target.copy_(target)


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "nobody in charge"])
def test_a_full_iteration_graph(explicit):
    model, state = small_model()
    if explicit:
        state.reduce_and_update()
    twin = copy.deepcopy(model)
    graphed, eager = Iteration(model, explicit), Iteration(twin, explicit)
    start, weights = state.save(), [p.detach().clone() for p in graphed.trained]
    before = addresses(state)
    graphed.load(torch.randn_like(graphed.x), torch.randn_like(graphed.target))
    warmed_up(graphed)
    with torch.no_grad():
        for p, value in zip(graphed.trained, weights, strict=True):
            p.copy_(value)
    graphed.optimizer.zero_grad(set_to_none=True)
    state.restore(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed()
    assert state.pinned_by == "a CUDA graph" and not tensors(state).any()
    losses = []
    for step in range(STEPS):
        x = (step + 1) * torch.randn_like(graphed.x)
        target = torch.randn_like(graphed.target)
        for iteration in (graphed, eager):
            iteration.load(x, target)
        graph.replay()
        eager()
        assert torch.equal(graphed.loss, eager.loss), step
        assert torch.equal(tensors(state), tensors(twin[0].fp8_state)), step
        for ours, theirs in zip(graphed.trained, eager.trained, strict=True):
            assert torch.equal(ours, theirs) and torch.equal(ours.grad, theirs.grad), step
        losses.append(graphed.loss.item())
    assert len(set(losses)) == STEPS and addresses(state) == before
    assert (tensors(state)[:, -1] > 0).all()
