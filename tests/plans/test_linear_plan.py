# SPDX-License-Identifier: Apache-2.0
"""A linear layer by its plan launches what its ops launch."""

from __future__ import annotations

import gc
import itertools
import re
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import lorakernels
from lorakernels import (
    _C,
    BlockScaling,
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    batch_adapters,
)
from lorakernels.autograd import linear_plan
from lorakernels.autograd.linear_plan import PLANS
from lorakernels.modules import frozen as frozen_module
from lorakernels.modules import lora as lora_module
from lorakernels.plans import forms, node
from lorakernels.plans.routing import without_plans
from tests.dry_cuda import dry_cuda
from tests.recorded_calls import Call, Recorded

UNNAMED = re.compile(r"m\d+\+\d+ =[0-9a-f]*")
K, N, M = 256, 384, 96
BF16, FP16 = torch.bfloat16, torch.float16


def layer(**options: Any) -> LoRALinear:
    config = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1} | options
    base = nn.Linear(K, N, bias=config.pop("base_bias", False), dtype=BF16)
    made = LoRALinear.from_linear(base, LoRAConfig(**config))
    made.site = 3
    return made


def frozen(**options: Any) -> FrozenFP8Linear:
    return FrozenFP8Linear.from_linear(nn.Linear(K, N, bias=False, dtype=BF16), **options)


def batched(**options: Any) -> LoRALinear:
    """With two adapters, each on a half of the rows."""
    made = layer(lora_dropout=0.0, **options)
    batch_adapters(nn.ModuleDict({"only": made}), ["fr", "de"])
    nn.init.normal_(made.lora_B)
    return made


def input_of(module: nn.Module, needs_dx: bool = True, device: str = "cpu") -> Tensor:
    """[2, T, K]. csrc multiplies 128 rows of each adapter of a batch."""
    lora_A = getattr(module, "lora_A", None)
    tokens = M // 2 if lora_A is None or lora_A.dim() == 2 else 128
    return torch.randn(2, tokens, K, dtype=BF16, device=device).requires_grad_(needs_dx)


def with_parameters(
    make: Callable[[], nn.Module], change: Callable[[Any], Any]
) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module = make()
        change(module)
        return module

    return made


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dropout": layer,
    "no dropout": lambda: layer(lora_dropout=0.0),
    "bias": lambda: layer(base_bias=True),
    "trained bias": lambda: layer(base_bias=True, bias="all"),
    "both layouts": lambda: layer(weight_layout="both"),
    "rank 64": lambda: layer(r=64),
    "rank 128": lambda: layer(r=128),
    "eval": lambda: layer().eval(),
    "bf16 adapter": lambda: layer().to(BF16),
    "only A trained": with_parameters(layer, lambda m: m.lora_B.requires_grad_(False)),
    "only B trained": with_parameters(layer, lambda m: m.lora_A.requires_grad_(False)),
    "e4m3 dy": lambda: layer(fp8=DelayedScaling(fp8_format="E4M3")),
    "frozen": frozen,
    "blocks": lambda: layer(fp8=BlockScaling()),
    "blocks without dropout": lambda: layer(fp8=BlockScaling(), lora_dropout=0.0, base_bias=True),
    "blocks, e5m2 dy, eval": lambda: layer(fp8=BlockScaling("HYBRID", power_2_scale=True)).eval(),
    "blocks, only A trained": with_parameters(
        lambda: layer(fp8=BlockScaling()), lambda m: m.lora_B.requires_grad_(False)
    ),
    "blocks, only B trained": with_parameters(
        lambda: layer(fp8=BlockScaling()), lambda m: m.lora_A.requires_grad_(False)
    ),
    "blocks, trained bias": lambda: layer(fp8=BlockScaling(), base_bias=True, bias="all"),
    "blocks, frozen": lambda: frozen(fp8=BlockScaling()),
    "two adapters in one batch": lambda: batched(base_bias=True),
    "two adapters, e4m3 dy, both layouts": lambda: batched(
        fp8=DelayedScaling(fp8_format="E4M3"), weight_layout="both", r=64
    ),
    "two adapters, eval, only B trained": with_parameters(
        lambda: batched().eval(), lambda m: m.lora_A.requires_grad_(False)
    ),
}


BACKWARD_BY_OPS = {"trained bias", "blocks, trained bias"}  # its gradient is a sum of torch's


def has_backward(module: nn.Module, x: Tensor) -> bool:
    return x.requires_grad or any(p.requires_grad for p in module.parameters())


def step(module: nn.Module, x: Tensor) -> None:
    y = module(x)
    if has_backward(module, x):
        y.backward(torch.ones_like(y))


def name_tensors(recorded: Recorded, module: nn.Module, x: Tensor) -> None:
    state = module.fp8_state
    if state is not None:
        recorded.name(state_x=state.forward, state_dy=state.backward)
    recorded.name(x=x, **module._buffers)
    recorded.name(**{name: p.data for name, p in module._parameters.items() if p is not None})


def launches(calls: list[Call]) -> list[tuple[str, dict[str, Any]]]:
    """Each call with its addresses in the layer's own tensors. Of other memory only that there is an address."""
    return [(c.name, {k: plain(v) for k, v in c.arguments.items()}) for c in calls]


def plain(value: Any) -> Any:
    return UNNAMED.sub("there", value) if isinstance(value, str) else value


@pytest.mark.parametrize("needs_dx", [True, False], ids=["dx", "no dx"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_plan_launches_what_the_ops_launch(name: str, needs_dx: bool) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]()
    x = input_of(module, needs_dx)
    with dry_cuda() as recorded:
        name_tensors(recorded, module, x)
        with without_plans():
            step(module, x)
        by_ops = launches(recorded.calls)
        assert not recorded.runs
        for _ in range(2):  # the second by the plan that is there then
            recorded.calls.clear()
            step(module, x)
            assert launches(recorded.calls) == by_ops
            assert len(PLANS) == 1
        planned = 1 if name in BACKWARD_BY_OPS or not has_backward(module, x) else 2
        assert recorded.runs == 2 * planned


@pytest.mark.parametrize("name", LAYERS)
def test_the_ops_take_what_a_planned_forward_kept(name: str) -> None:
    """A profiler may begin between forward and backward."""
    module = LAYERS[name]()
    x = input_of(module)
    with dry_cuda() as recorded:
        name_tensors(recorded, module, x)
        with without_plans():
            step(module, x)
        by_ops = launches(recorded.calls)
        recorded.calls.clear()
        y = module(x)
        with without_plans():
            y.backward(torch.ones_like(y))
        assert launches(recorded.calls) == by_ops
        assert recorded.runs == 1


def test_the_report_says_what_ran_by_plans_and_why_the_rest_did_not() -> None:
    model = nn.ModuleDict({name: nn.Linear(K, N, dtype=BF16) for name in ("a", "b", "c", "d")})
    config = LoRAConfig(r=16, rank_pattern={"b": 12}, target_modules=["a", "b", "c", "d"])
    report, x = apply_lora(model, config), torch.randn(M, K, dtype=BF16)
    assert report.eager_forwards == "none yet"
    with dry_cuda():
        for name in "ab":
            model[name](x)
        with torch.autograd.graph.save_on_cpu():
            model["c"](x)
        found = "1 by plans, 1 by the ops (no plan holds torch.pad), 1 by the ops (on a CPU, or watched by a mode"
        assert report.eager_forwards.startswith(found)
        assert str(report).splitlines()[1].endswith(f"eager forwards: {report.eager_forwards}")
        model["b"].scaling = 3.0  # not called since
        assert report.eager_forwards.startswith("1 by plans, 1 by the ops (on a CPU")


def test_blocks_that_csrc_does_not_take_say_why_they_have_no_plan() -> None:
    model = nn.ModuleDict({"a": nn.Linear(K, N, dtype=BF16), "b": nn.Linear(K, N + 8, dtype=BF16)})
    report = apply_lora(model, LoRAConfig(r=16, target_modules=["a", "b"], fp8=BlockScaling()))
    x = torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        step(model["a"], x)
        assert recorded.runs == 2
        step(model["b"], x)
        assert recorded.runs == 2
        assert report.eager_forwards.startswith("1 by plans, 1 by the ops (no plan holds ")


def test_named_rows_share_a_plan_for_evaluation_and_train_by_the_ops() -> None:
    """`AdapterBatch.rows` gathers A and B anew for each call, and has hooks of saved tensors where there is a graph."""
    module = layer(lora_dropout=0.0)
    batch = batch_adapters(nn.ModuleDict({"only": module}), ["fr", "de", "it"])
    x = torch.randn(2, 128, K, dtype=BF16)
    with dry_cuda() as recorded:
        name_tensors(recorded, module, x)
        for named in (["de", "fr"], ["it", "__base__"]):
            with torch.no_grad(), batch.rows(named):
                recorded.calls.clear()
                with without_plans():
                    module(x)
                by_ops = launches(recorded.calls)
                recorded.calls.clear()
                module(x)
                assert by_ops and launches(recorded.calls) == by_ops
        assert recorded.runs == 2 and len(PLANS) == 1
        with batch.rows(["de", "fr"]):
            step(module, x)
        assert recorded.runs == 2


def test_adapters_in_one_batch_over_blocks_say_why_they_have_no_plan() -> None:
    model = nn.ModuleDict({"a": nn.Linear(K, N, dtype=BF16)})
    config = LoRAConfig(r=16, target_modules=["a"], fp8=BlockScaling())
    report = apply_lora(model, config)
    batch_adapters(model, ["fr", "de"])
    with dry_cuda() as recorded:
        step(model["a"], torch.randn(2, 128, K, dtype=BF16, requires_grad=True))
        assert recorded.calls and not recorded.runs
        assert report.eager_forwards == "1 by the ops (no plan holds Tensor.to)"


def test_a_mask_that_csrc_draws_for_torch_has_no_plan() -> None:
    """The rest of `quantize_lora_down` in fp32 is torch's. A launch list cannot hold a real tensor's address."""
    model = nn.ModuleDict({"a": nn.Linear(K, N)})
    config = LoRAConfig(r=16, lora_dropout=0.1, target_modules=["a"], fp8=BlockScaling())
    report = apply_lora(model, config)
    with dry_cuda():
        step(model["a"], torch.randn(M, K, requires_grad=True))
        assert report.eager_forwards == "1 by the ops (no plan holds torch.where)"


def test_two_layers_in_blocks_share_a_plan_and_recipes_do_not() -> None:
    x = torch.randn(M, K, dtype=BF16, requires_grad=True)
    recipes = (BlockScaling(), BlockScaling(), BlockScaling("HYBRID"), DelayedScaling())
    layers = [layer(fp8=recipe) for recipe in recipes]
    with dry_cuda() as recorded:
        for module, plans in zip(layers, (1, 1, 2, 3), strict=True):
            module.site = plans + 7
            recorded.calls.clear()
            step(module, x)
            sites = {c.arguments["site"] for c in recorded.calls if c.arguments.get("slot")}
            assert len(PLANS) == plans and sites == {plans + 7}


def outcome(module: nn.Module, x: Tensor) -> list[Tensor]:
    """y and all gradients of two steps from one random state."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        module.zero_grad()
        x = x.detach().requires_grad_(x.requires_grad)
        y = module(x)
        found.append(y.detach())
        if has_backward(module, x):
            y.backward(torch.cos(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype))
            found += [p.grad for p in (x, *module.parameters()) if p.grad is not None]
    return found


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
    ask = linear_plan._ask
    monkeypatch.setattr(linear_plan, "_ask", lambda *args: asked.append(args) or ask(*args))
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


def test_what_is_known_of_a_layer_holds_no_tensor_and_no_address() -> None:
    """So that threads share nothing that a call changes, and a plan takes what a parameter is at that call."""
    module, x = layer(lora_dropout=0.0), torch.randn(M, K, dtype=BF16)
    with dry_cuda():
        module(x)
        (spec,) = module._specs.values()
        known = spec.memo["linear"]
    own = {t.data_ptr() for t in (x, *module.parameters(), module.fp8_state.forward)}
    waiting, seen = [vars(known)], []
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


def test_a_transposed_weight_that_is_given_up_is_seen() -> None:
    """It is freed, and what referred to it weakly then refers to None as well."""
    module, x = layer(weight_layout="both"), torch.randn(M, K, dtype=BF16)
    with dry_cuda() as recorded:
        module(x)
        recorded.memory.storages.clear()  # which keeps what it has seen alive
        recorded.memory.begins.clear()
        module.weight_t = None
        gc.collect()
        module(x)
        assert recorded.runs == 2


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


def test_one_node_takes_x_of_three_dimensions() -> None:
    module, x = layer(), torch.randn(2, M // 2, K, dtype=BF16, requires_grad=True)
    with dry_cuda():
        y = module(x)
    assert y.shape == (2, M // 2, N) and not y._is_view()
    assert y.grad_fn is not None and type(y.grad_fn).__name__ == "PlannedNodeBackward"
    variables = [getattr(node, "variable", None) for node, _ in y.grad_fn.next_functions]
    assert variables[0] is x


def test_with_hooks_of_saved_tensors_the_ops_run() -> None:
    """A hook may keep a tensor with other strides, or on the CPU."""
    module, x = layer(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        step(module, x)
        assert recorded.calls and not recorded.runs


def test_gradients_with_many_kinds_of_gaps_run_by_one_plan() -> None:
    module, x = layer(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        for more in range(12):
            y = module(x)
            y.backward(torch.ones(M, N + more, dtype=BF16)[:, :N])
        assert recorded.runs == 2 * 12
        (plan,) = PLANS.values()
        assert len(plan._backwards) <= 8


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
        for file in (frozen_module, lora_module):
            monkeypatch.setattr(file, "check_input", None)
        monkeypatch.setattr(frozen_module, "lora_linear", None)
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


def test_each_combination_of_gradients_has_its_own_plan() -> None:
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
        with without_plans():
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


def test_a_subclass_with_its_own_with_adapter_runs_it_at_each_call() -> None:
    ran = []

    class Own(LoRALinear):
        def with_adapter(self, *args: Any) -> Tensor:
            ran.append(args)
            return super().with_adapter(*args)

    base = nn.Linear(K, N, bias=False, dtype=BF16)
    module, x = Own.from_linear(base, LoRAConfig(r=16)), torch.randn(M, K, dtype=BF16)
    with dry_cuda() as recorded:
        for _ in range(3):
            module(x)
        assert len(ran) == 3 and recorded.runs == 3


def test_without_dynamos_function_forms_are_compared_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forms, "_Guards", None)
    test_each_combination_of_gradients_has_its_own_plan()
    test_a_rank_that_is_cut_by_data_is_seen()
    test_a_call_like_one_before_asks_and_checks_nothing_again(layer, monkeypatch)


@pytest.mark.parametrize("own", [True, False], ids=["dynamo", "python"])
def test_forms_differ_in_everything_that_a_plan_depends_on(
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


def test_scratch_lies_in_a_result_that_is_written_later() -> None:
    """A forward asks for y and what it keeps, a backward for three gradients and its scratch."""
    module, x = layer(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda():
        step(module, x)
        (plan,) = PLANS.values()
        (backward,) = plan._backwards.values()
    assert len(plan.forward.forms) == 2 and len(backward.forms) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("needs_dx", [True, False], ids=["dx", "no dx"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_plan_computes_what_the_ops_compute(name: str, needs_dx: bool) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]().to("cuda")
    x = input_of(module, needs_dx, "cuda")
    state = module.fp8_state
    before = None if state is None else state.save()
    with without_plans():
        by_ops = outcome(module, x)
    after = None if state is None else state.save()
    if state is not None:
        state.restore(before)
    planned = outcome(module, x)
    assert len(planned) == len(by_ops)
    assert all(map(torch.equal, planned, by_ops))
    if state is not None:
        assert torch.equal(state.forward, after.forward)
        assert torch.equal(state.backward, after.backward)


@pytest.mark.gpu
def test_an_address_of_another_shape_stream_and_weight() -> None:
    """csrc remembers tensor maps by address and sizes."""
    memory, side = torch.randn(2 * M * K, dtype=BF16, device="cuda"), torch.cuda.Stream()
    made = [nn.Linear(k, N, bias=False, dtype=BF16, device="cuda") for k in (K, 2 * K, K)]
    layers = [LoRALinear.from_linear(base, LoRAConfig(r=16)).eval() for base in made]
    for module in (*layers, *layers):
        x = memory.view(-1, module.in_features)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = module(x)
        torch.cuda.synchronize()
        assert torch.equal(found, module(x.clone()))
    x = memory.view(-1, K)
    layers[0].load_state_dict(layers[2].state_dict(), assign=True)
    assert torch.equal(layers[0](x), layers[2](x))


@pytest.mark.gpu
def test_plans_in_a_captured_graph() -> None:
    torch.manual_seed(0)
    module = layer(lora_dropout=0.0).to("cuda").eval()
    given = torch.randn(M, K, dtype=BF16, device="cuda")

    def run() -> list[Tensor]:
        x = given.detach().requires_grad_()
        y = module(x)
        return [y, *torch.autograd.grad(y, (x, module.lora_A, module.lora_B), torch.ones_like(y))]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [t.detach().clone() for t in run()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [t.detach() for t in run()]
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert all(map(torch.equal, captured, expected))


@pytest.mark.parametrize("op", ["quantize_lora_down", "fp8_linear_lora"])
def test_x_passes_the_files_that_the_architecture_page_names(op: str) -> None:
    """Those on the stack when csrc is called, without what stands between an op's name and its implementation."""
    home = Path(lorakernels.__file__).parent
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    named = page.split("## The way of x")[1].split("In `csrc")[0]
    passed: list[str] = []

    def launch(*arguments: Any) -> None:
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        inside = [f.relative_to(home).as_posix() for f in files if f.is_relative_to(home)]
        passed.extend(dict.fromkeys(f for f in inside if f != "ops/register.py"))

    module, x = layer(), torch.randn(M, K, dtype=BF16)
    with dry_cuda(), without_plans(), mock.patch.object(_C, op, launch):
        module(x)
    assert len(passed) == 6 and all(f"`{file}`" in named for file in passed), passed
