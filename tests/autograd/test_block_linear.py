# SPDX-License-Identifier: Apache-2.0
"""A linear layer under BlockScaling: its op in a trace, captures, what is saved, and what it leaves alone.

tests/autograd/test_lora_linear.py compares its numbers with float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from lorakernels import BlockScaling, LoRAConfig, apply_lora
from lorakernels.autograd.linear.numbers import Numbers
from lorakernels.autograd.linear.values import LoRASpec
from lorakernels.modules.linear.weights import quantize_weight
from lorakernels.state.handles import Handle


def net(p: float = 0.0, device: torch.device | str = "cpu") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(200, 200), nn.GELU(), nn.Linear(200, 200)).to(device)
    config = LoRAConfig(r=3, lora_dropout=p, target_modules=["0", "2"], fp8=BlockScaling())
    apply_lora(model, config)
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.lora_B, std=0.2)
    return model


def arguments(drops: bool, adapted: bool) -> tuple:
    weight, scales = quantize_weight(torch.randn(131, 200), BlockScaling())
    factors = (torch.randn(3, 200), torch.randn(131, 3)) if adapted else (None, None)
    tensors = [torch.randn(7, 200), torch.randn(131), *factors]
    x, bias, lora_A, lora_B = (None if t is None else t.requires_grad_() for t in tensors)
    slot = torch.tensor([3, 5]) if drops else None
    return x, weight, scales, bias, lora_A, lora_B, slot


@pytest.mark.parametrize(("drops", "adapted"), [(True, True), (False, True), (False, False)])
def test_opcheck(drops, adapted):
    recipe = BlockScaling("HYBRID")
    spec = LoRASpec(scaling=2.0, p=0.3 if drops else 0.0, site=1)
    handle = Handle(Numbers("it", recipe, None, 0, spec), drops, torch.device("cpu"))
    op = torch.ops.lorakernels.lora_linear_forward.default
    torch.library.opcheck(op, (*arguments(drops, adapted), handle.tensor, True))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_compiled_as_one_graph_it_gives_the_same_bits(p, device):
    torch._dynamo.reset()
    model = net(p, device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 200, device=device, requires_grad=True)
    found = []
    for run in (model, compiled):
        model.zero_grad()
        torch.manual_seed(3)
        y = run(x)
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        y.sum().backward()
        found.append([y, dx, *(w.grad for w in model.parameters() if w.requires_grad)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_layers_that_are_compiled_one_by_one_share_a_trace(p):
    torch._dynamo.reset()
    model, counted = net(p), CompileCounter()
    for layer in (model[0], model[2]):
        torch.compile(layer, fullgraph=True, backend=counted, dynamic=False)(torch.randn(4, 200))
    assert counted.frame_count == 1


def test_nothing_is_mutated():
    model = net(0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(4, 200, requires_grad=True)
    model(x).sum().backward()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k].float(), after[k].float()) for k in before)


def test_only_what_gradients_need_is_saved():
    """Over a frozen adapter without an input that needs a gradient, nothing; x8 for dA alone."""
    layer, x = net()[0], torch.randn(4, 200)
    layer.lora_A.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert not [t for t in saved if t.dtype == torch.uint8]
    layer.lora_A.requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert [t.shape for t in saved if t.dtype == torch.uint8] == [(4, 200)]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
def test_an_overflow_reaches_the_gradients(bad):
    """FP8 alone would saturate. torch's GradScaler looks for inf and NaN."""
    layer = net()[0]
    x = torch.randn(4, 200, requires_grad=True)
    dy = torch.randn(4, 200)
    dy[1, 3] = bad
    layer(x).backward(dy)
    assert not x.grad[1].isfinite().any() and x.grad[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_it_computes_in_the_autocast_dtype(dtype):
    layer = net()[0]
    x = torch.randn(2, 3, 200)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    assert y.dtype == dtype and torch.equal(y, layer(x.to(dtype)))


@pytest.mark.gpu
def test_captured_it_reads_the_new_input_and_gradient():
    """Forward and backward in one graph. A replay has the bits of an eager call with the same input."""
    model = net(device="cuda").bfloat16()
    trained = [p for p in model.parameters() if p.requires_grad]
    x = torch.randn(64, 200, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> list[torch.Tensor]:
        y = model(x)
        return [y, *torch.autograd.grad(y, [x, *trained], dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        dy.copy_(torch.randn_like(x))
    graph.replay()
    assert all(map(torch.equal, found, step()))
