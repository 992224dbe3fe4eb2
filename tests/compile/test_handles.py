# SPDX-License-Identifier: Apache-2.0
"""How a compiled layer's ops find its numbers, and what happens when they change."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels import DelayedScaling, FP8State, FrozenFP8Linear, LoRAConfig, LoRALinear
from lorakernels.autograd import compiled_linear, lora_linear
from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec
from lorakernels.state.handles import numbers_of
from lorakernels.values import Weight

pytestmark = pytest.mark.slow

LINEAR_FORWARD = torch.ops.lorakernels.lora_linear_forward.default
LINEAR_BACKWARD = torch.ops.lorakernels.lora_linear_backward.default


def layer(p=0.0, fp8=DelayedScaling(amax_history_len=4), bias=False, **options):  # noqa: B008  (frozen)
    config = LoRAConfig(r=3, lora_dropout=p, fp8=fp8, bias="all" if bias else "none")
    made = LoRALinear(24, 10, bias, config, **options)
    torch.nn.init.normal_(made.lora_B, std=0.2)
    return made


def compiled(module, counter="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(module, backend=counter, fullgraph=True)


def gradients(module, call, x, dy):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    return found | {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("frozen", ["", "lora_A", "lora_B", "both"])
@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
def test_gradients_are_eager_s_bit_for_bit(fp8, frozen):
    """The ops are one graph node each way: what they compute is the eager path's, on windows of odd size too."""
    module = layer(fp8=fp8, bias=True)
    for name in ("lora_A", "lora_B"):
        getattr(module, name).requires_grad_(frozen not in (name, "both"))
    x, dy = torch.randn(2, 7, 48)[..., ::2], torch.randn(2, 7, 10)
    twin = copy.deepcopy(module)
    call = compiled(twin)
    for _ in range(3):  # from the second on, with delayed scales
        assert_equal(gradients(twin, call, x, dy), gradients(module, module, x, dy))
    if fp8 is not None:
        assert torch.equal(twin.fp8_state.forward, module.fp8_state.forward)
        assert torch.equal(twin.fp8_state.backward, module.fp8_state.backward)


def test_a_changed_scaling_needs_no_new_trace_and_autocast_is_eager_s():
    module = layer()
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(module, counter)
    x = torch.randn(5, 24)
    for scaling in (1.0, 3.0, -0.5):
        module.scaling = scaling
        assert torch.equal(call(x), copy.deepcopy(module)(x))
    assert counter.frame_count == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(x)
        assert y.dtype == torch.bfloat16 and torch.equal(y, copy.deepcopy(module)(x))


def test_backward_takes_the_numbers_of_its_forward():
    module = layer()
    x, dy = torch.randn(5, 24), torch.randn(5, 10)
    expected = gradients(copy.deepcopy(module), copy.deepcopy(module), x, dy)["dx"]
    call = compiled(module)
    rows = x.clone().requires_grad_()
    y = call(rows)
    module.scaling *= 100
    y.backward(dy)
    assert torch.equal(rows.grad, expected)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_a_handle_and_a_state_of_its_own(how):
    module = layer()
    twin = how(module)
    assert numbers_of(twin.handle.tensor).state is twin.fp8_state
    assert numbers_of(module.handle.tensor).state is module.fp8_state
    compiled(twin)(torch.randn(5, 24))
    assert twin.fp8_state.forward.any() and not module.fp8_state.forward.any()


def test_a_layer_made_on_meta_gets_its_handle_with_its_memory():
    module = layer(device="meta")
    module = module.to_empty(device="cpu")
    assert module.handle.tensor.device.type == "cpu"
    assert numbers_of(module.handle.tensor).state is module.fp8_state


def test_a_layer_on_meta_that_is_given_its_values_gets_its_handle_with_them():
    other, x = layer(), torch.randn(5, 24)
    with torch.device("meta"):
        made = layer()
    made.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(compiled(made)(x), other(x))


def test_a_saved_handle_may_be_a_copy():
    """`save_on_cpu` and other saved-tensor hooks hand backward a copy, which is read instead of looked up."""
    module = layer()
    twin = copy.deepcopy(module)
    x, dy = torch.randn(5, 24), torch.randn(5, 10)
    call = compiled(twin)
    with save_on_cpu():
        found = gradients(twin, call, x, dy)
    assert_equal(found, gradients(module, module, x, dy))
    assert twin.fp8_state.backward[0].any()


def test_a_handle_of_nobody_is_refused():
    module = layer()
    handle = module.handle.tensor.clone()
    del module
    stranger = layer()
    base = (stranger._parameters["weight"], stranger.weight_scale_inv, None)
    with pytest.raises(RuntimeError, match="no living layer has"):
        compiled_linear(torch.randn(5, 24), base, (None, None), None, handle, True)


def arguments():
    torch.manual_seed(3)
    plain, own = layer(0.1, fp8=None, bias=True), layer(0.1, bias=True)
    frozen = FrozenFP8Linear(24, 10, False)
    x, slot, dy = torch.randn(7, 24), torch.tensor([5, 9]), torch.randn(7, 10)
    for module in (plain, own):
        module.bias.requires_grad_()

    def forward(m, x=x, adapters=True, slot=slot):
        parts = (m.stored, m.weight_scale_inv, m.bias)
        pair = (m.lora_A, m.lora_B) if adapters else (None, None)
        return (x, *parts, *pair, slot, m.handle.tensor, True)

    _, x8, scale_inv, _ = LINEAR_FORWARD(*forward(own))
    backward = (
        dy, own.stored, own.weight_scale_inv, own.lora_A.detach(), own.lora_B.detach(), slot,
        x8, scale_inv, torch.randn(7, 3), own.bias.detach(), own.handle.tensor,
    )  # fmt: skip
    # kept alive: a handle without a layer is refused
    return (plain, own, frozen), {
        "lora_linear_forward-fp8": (LINEAR_FORWARD, forward(own)),
        "lora_linear_forward-x needs a gradient": (
            LINEAR_FORWARD,
            forward(own, x.clone().requires_grad_()),
        ),
        "lora_linear_forward-plain": (LINEAR_FORWARD, forward(plain)),
        "lora_linear_forward-base only": (
            LINEAR_FORWARD,
            forward(frozen, adapters=False, slot=None),
        ),
        "lora_linear_forward-scaling and p given": (
            LINEAR_FORWARD,
            (*forward(own), 0.5, 0.3),
        ),
        "lora_linear_backward-all": (LINEAR_BACKWARD, (*backward, [True] * 4, True)),
        "lora_linear_backward-B": (
            LINEAR_BACKWARD,
            (*backward, [False, False, True, False], False, 2.0, 0.1),
        ),
    }


@pytest.mark.parametrize("case", list(arguments()[1]))
def test_opcheck(case):
    """Schema, fakes, autograd registration and AOT dispatch; calls that repeat record the same amaxes."""
    _layers, cases = arguments()
    op, given = cases[case]
    torch.library.opcheck(op, given)


class Seen(TorchDispatchMode):
    """The names of the ops that a mode is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["lora_linear_forward-fp8", "lora_linear_backward-all"])
def test_without_gradients_only_a_mode_is_asked(case, monkeypatch):
    """Compiled code calls the ops so; then no kernel of a lower key is called, if nobody has to see it."""
    _layers, cases = arguments()
    op, given = cases[case]
    ways = []
    redispatch = type(op).redispatch
    monkeypatch.setattr(
        type(op), "redispatch", lambda *a, **k: ways.append(a[0]) or redispatch(*a, **k)
    )
    with torch.no_grad():
        found = op(*given)
        assert op not in ways or not hasattr(torch.library, "get_kernel")  # torch 2.8
        with Seen() as seen:
            again = op(*given)
    assert op in seen.names
    assert all(map(torch.equal, found, again))
    assert not any(t.requires_grad for t in found)


def test_under_autocast_an_op_computes_in_its_own_dtypes():
    _layers, cases = arguments()
    op, given = cases["lora_linear_forward-plain"]
    with torch.no_grad():
        expected = op(*given)
        with torch.autocast("cpu", torch.bfloat16):
            found = op(*given)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_an_exported_layer_holds_no_handle(strict):
    """It may be loaded by another process, where no layer has it."""
    module, x = layer(bias=True).eval(), torch.randn(5, 24)
    program = torch.export.export(module, (x,), strict=strict)
    assert LINEAR_FORWARD not in {node.target for node in program.graph.nodes}
    assert torch.equal(program.module()(x), module(x))


def test_second_derivatives_are_refused():
    module = layer()
    x = torch.randn(5, 24, requires_grad=True)
    base = (module._parameters["weight"], module.weight_scale_inv, None)
    adapter = (module.lora_A, module.lora_B)
    y = compiled_linear(x, base, adapter, None, module.handle.tensor, True)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()


def test_a_state_in_use_on_another_device_is_refused():
    """Moved, it would take the other layers' scales along, and their backward would write to memory of nobody."""
    config = LoRAConfig(r=2)
    state = FP8State(["a", "b"], config.fp8)
    module = LoRALinear(8, 8, config=config, fp8_state=state, name="a")
    before = state.forward
    module._parameters["weight"] = torch.nn.Parameter(module.stored.to("meta"), requires_grad=False)
    with pytest.raises(ValueError, match=r"FP8State is on cpu, x on meta: .* one device"):
        module(torch.randn(3, 8, device="meta"))
    assert state.forward is before and state.device.type == "cpu"


def test_a_state_without_values_follows_its_layer():
    state = FP8State(["a"], DelayedScaling(), "meta")
    state.begin(torch.device("cpu"), 0, training=True)
    assert state.device.type == "cpu"


def test_a_window_of_x_has_a_window_of_the_mask():
    """Rows and columns of x at (row0, col0): y's, dx's and dA's masks are those of the whole x there."""
    m, k, n, r, p = 13, 40, 6, 3, 0.4
    x, a, b = torch.randn(m, k), torch.randn(r, k), torch.randn(n, r)
    weight, slot = torch.zeros(n, k), torch.tensor([5, 9])

    def run(rows, cols):
        part = x[rows, cols].clone().requires_grad_()
        down = a[:, cols].clone().requires_grad_()
        spec = LoRASpec(2.0, p, 7, row0=rows.start, col0=cols.start)
        y = lora_linear(part, Weight(weight[:, cols]), None, Adapter(down, b), Call(spec, slot))
        y.sum().backward()
        return y.detach(), part.grad, down.grad

    y, dx, dA = run(slice(0, m), slice(0, k))
    parts = {
        (i, j): run(slice(*rows), slice(*cols))
        for i, rows in enumerate(((0, 4), (4, m)))
        for j, cols in enumerate(((0, 19), (19, k)))
    }
    close = {"rtol": 1e-5, "atol": 1e-5}  # sums of 40 fp32 products in two parts
    for i, rows in enumerate((slice(0, 4), slice(4, m))):
        torch.testing.assert_close(parts[i, 0][0] + parts[i, 1][0], y[rows], **close)
        for j, cols in enumerate((slice(0, 19), slice(19, k))):
            torch.testing.assert_close(parts[i, j][1], dx[rows, cols], **close)
    for j, cols in enumerate((slice(0, 19), slice(19, k))):
        torch.testing.assert_close(parts[0, j][2] + parts[1, j][2], dA[:, cols], **close)
