# SPDX-License-Identifier: Apache-2.0
"""Experts that run as one stack compute what they do one by one: on a CPU by references, on a GPU by kernels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, apply_lora, attach  # noqa: E402
from lorakernels.loops.parts import why_no_graphs  # noqa: E402
from lorakernels.modules.experts.layer import LoRAExperts  # noqa: E402
from lorakernels.modules.linear.lora import LoRALinear  # noqa: E402
from lorakernels.recipes import MMParams  # noqa: E402
from tests.fusion.fused_models import difference  # noqa: E402
from tests.modules.test_experts import BOTH  # noqa: E402

gpu = pytest.mark.gpu
HIDDEN, FFN, EXPERTS, TOKENS = 128, 64, 6, 300


def model_of(layers: int = 1, **options: Any) -> Any:
    """A bf16 Mixtral of `EXPERTS` experts with adapters on them, whose Bs are not zero."""
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    given: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_parameters": BOTH, **options}
    report = apply_lora(model, LoRAConfig(**given))
    for layer in (m for m in model.modules() if isinstance(m, LoRALinear)):
        nn.init.normal_(layer.lora_B, std=0.1)
    model.state = report.fp8_state
    return model.train()


class Tokens:
    """x [T, H], two experts of each token and their weights, and dy; expert 1 has none, and some have no expert."""

    def __init__(self, seed: int, device: str = "cpu", tokens: int = TOKENS) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(tokens, EXPERTS + 1, generator=generator)
        drawn[:, 1] = -1.0
        self.index = drawn.topk(2).indices.to(device)
        x, dy = torch.randn(2, tokens, HIDDEN, generator=generator).bfloat16().to(device)
        self.x, self.dy = x.requires_grad_(), dy
        weights = torch.rand(tokens, 2, generator=generator)
        self.weights = weights.to(device).requires_grad_()

    def run(self, experts: nn.Module) -> list[Tensor]:
        """y and all gradients."""
        trained = [p for p in experts.parameters() if p.requires_grad]
        y = experts(self.x, self.index, self.weights)
        given = (self.x, self.weights, *trained)
        grads = torch.autograd.grad(y, given, self.dy, allow_unused=True)
        return [
            y.detach(),
            *(torch.zeros_like(t) if g is None else g for t, g in zip(given, grads, strict=True)),
        ]


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoRAExperts, "why_not_stacked", lambda *_: "asked for")


def as_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoRAExperts, "why_not_stacked", lambda *_: None)


def steps(model: Any, device: str = "cpu", count: int = 3) -> list[list[Tensor]]:
    experts = model.model.layers[0].mlp.experts
    found = []
    for seed in range(count):
        found.append(Tokens(seed, device).run(experts))
        model.state.reduce_and_update()
    return found


MODES: dict[str, Any] = {
    "adapted": {},
    "merged": {},
    "disabled": {},
    "evaluated": {},
    "down alone": {"target_parameters": ["experts.down_proj"]},
}


def prepared(mode: str) -> Any:
    model = model_of(**MODES[mode])
    for layer in (m for m in model.modules() if isinstance(m, LoRALinear)):
        if mode == "merged":
            layer.merge()
        layer.disable_adapters = mode == "disabled"
    return model.eval() if mode == "evaluated" else model


@pytest.mark.parametrize("mode", [m for m in MODES if m != "down alone"])
def test_a_stack_is_its_layers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of both ways round at the same places, and each expert has its own scales in both.

    Where products of a stack add in another order, few roundings turn: to bf16, by 2^-7 of an element, and to FP8, by
    2^-3. A token's two experts are summed in either order, one in the weights' dtype, of 2^-7 of themselves again.
    """
    found = []
    for choose in (one_by_one, as_a_stack):
        choose(monkeypatch)
        model = prepared(mode)
        found.append((steps(model), model.state.forward.clone(), model.state.backward.clone()))
    (each, *states), (stack, *stacked_states) = found
    for a, b in zip(each, stack, strict=True):
        assert max(map(difference, b, a)) <= 2.0**-6
    for a, b in zip(states, stacked_states, strict=True):
        torch.testing.assert_close(b, a, rtol=2.0**-7, atol=0)


def test_the_weights_move_together_once_and_stay_the_layers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_a_stack(monkeypatch)
    model = model_of()
    layers = model.model.layers[0].mlp.experts.gate_up_proj
    before = [layer.stored.clone() for layer in layers]
    parameters = [layer._parameters["weight"] for layer in layers]
    steps(model, count=1)
    places = [layer.stored.data_ptr() for layer in layers]
    assert places == [places[0] + i * 2 * FFN * HIDDEN for i in range(EXPERTS)]
    assert all(torch.equal(a, layer.stored) for a, layer in zip(before, layers, strict=True))
    assert all(
        layer._parameters["weight"] is p for p, layer in zip(parameters, layers, strict=True)
    )
    steps(model, count=1)
    assert [layer.stored.data_ptr() for layer in layers] == places
    copied = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(copied)
    assert [layer.stored.data_ptr() for layer in layers] == places


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "a plain base": ({"fp8": None}, "not held in FP8"),
    "blocks": ({"fp8": BlockScaling()}, "not held in FP8 with one scale each"),
    "split sums": (
        {"fp8": DelayedScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))},
        "use_split_accumulator",
    ),
    "a rank of 129": ({"r": 129}, "a rank of 129 is above 128"),
    "one of two parameters": ({"target_parameters": ["experts.down_proj"]}, "not FP8 layers"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_does_not_run_as_a_stack_says_why(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, reason = REASONS[case]
    monkeypatch.setattr("lorakernels.modules.experts.stack.why_not_place", lambda layer: None)
    experts = model_of(**options).model.layers[0].mlp.experts
    assert reason in str(experts.why_not_stacked())


def test_an_expert_that_differs_keeps_the_stack_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakernels.modules.experts.stack.why_not_place", lambda layer: None)
    experts = model_of().model.layers[0].mlp.experts
    assert experts.why_not_stacked() is None
    experts.down_proj[3].scaling = 5.0
    assert "differ in their adapters" in str(experts.why_not_stacked())
    experts.down_proj[3].scaling = experts.down_proj[0].scaling
    experts.gate_up_proj[2].merge()
    assert "differ in their adapters" in str(experts.why_not_stacked())
    assert "torch.float16, not bfloat16" in str(experts.why_not_stacked(torch.float16))


def test_dropout_that_is_set_later_keeps_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration has none with target_parameters, but the attribute may be set."""
    monkeypatch.setattr("lorakernels.modules.experts.stack.why_not_place", lambda layer: None)
    experts = model_of().model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        for layer in getattr(experts, name):
            layer.lora_dropout = 0.5
    assert "adapters have lora_dropout=0.5" in str(experts.why_not_stacked())
    given = Tokens(0)
    once, again = (experts(given.x, given.index, given.weights) for _ in range(2))
    assert not torch.equal(once, again)
    assert experts.eval().why_not_stacked() is None


@pytest.mark.parametrize("choose", [one_by_one, as_a_stack], ids=["one by one", "a stack"])
def test_a_compiled_model_gives_the_same(choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph breaks at the experts, which run as they do without torch.compile, also for other numbers of tokens."""
    choose(monkeypatch)
    torch._dynamo.reset()
    experts = model_of().eval().model.layers[0].mlp.experts
    compiled = torch.compile(lambda *given: 2 * experts(*given), backend="eager")
    for tokens in (5, 40):
        given = Tokens(tokens, tokens=tokens)
        with torch.no_grad():
            args = (given.x, given.index, given.weights)
            assert torch.equal(compiled(*args), 2 * experts(*args))


def test_a_copy_and_a_file_of_stacked_experts_are_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each layer's weight is a part of one piece of memory, which a copy has anew and safetensors writes by parts."""
    as_a_stack(monkeypatch)
    model = model_of().eval()
    experts = model.model.layers[0].mlp.experts
    given = Tokens(1)
    args = (given.x, given.index, given.weights)
    with torch.no_grad():
        expected = experts(*args)
        state = {
            k: v.view(torch.uint8) if v.element_size() == 1 else v
            for k, v in experts.state_dict().items()
        }
        safetensors_torch.save_file(state, tmp_path / "experts.safetensors")
        again = safetensors_torch.load_file(tmp_path / "experts.safetensors")
        assert all(torch.equal(again[k], v) for k, v in state.items())
        twin = copy.deepcopy(experts)
        assert torch.equal(twin(*args), expected)
        for layer in twin.gate_up_proj:
            layer.stored.zero_()
        assert torch.equal(experts(*args), expected) and not torch.equal(twin(*args), expected)


def test_on_a_cpu_graphs_are_refused_with_the_reason() -> None:
    assert "LoRAExperts, which run one by one" in str(why_no_graphs(model_of().model.layers, False))


@gpu
@pytest.mark.parametrize("mode", [m for m in MODES if m != "down alone"])
def test_kernels_compute_what_the_layers_do_one_by_one(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 rounds h, act, y and dx at 2⁻⁸ in other places; FP8 turns a rounding into a step of 2⁻³ now and then."""
    found = []
    for choose in (one_by_one, None):
        with monkeypatch.context() as patch:
            if choose is not None:
                choose(patch)
            model = prepared(mode).cuda()
            assert (model.model.layers[0].mlp.experts.why_not_stacked() is None) == (choose is None)
            found.append(steps(model, "cuda"))
    for each, stack in zip(*found, strict=True):
        for a, b in zip(each, stack, strict=True):
            assert (a.float() - b.float()).norm() <= 0.02 * a.float().norm()


@gpu
def test_a_captured_stack_follows_other_choices() -> None:
    """Forward and backward in one graph, replayed for tokens that go to other experts, are eager's bits."""
    model = model_of().cuda()
    experts = model.model.layers[0].mlp.experts
    model.state.in_charge = "explicit"
    static = Tokens(0, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        static.run(experts)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = static.run(experts)
    for seed in (1, 2):
        other = Tokens(seed, "cuda")
        expected = other.run(experts)
        with torch.no_grad():
            for name in ("x", "dy", "index", "weights"):
                getattr(static, name).copy_(getattr(other, name))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@gpu
def test_attach_replays_layers_of_experts() -> None:
    """The same losses with graphs and without, over changing tokens."""
    losses = []
    for graphs in (False, True):
        model = model_of(layers=2).cuda()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05)
        attached = attach(model, optimizer, graphs=graphs)
        torch.manual_seed(1)
        found = []
        for _ in range(8):
            ids = torch.randint(0, 64, (2, 40), device="cuda")
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        if graphs:
            assert "replay" in str(attached) and attached.replaying, str(attached)
        attached.detach()
        losses.append(found)
    assert losses[0] == losses[1]


class Half(nn.SiLU):
    """Another activation, of which an `isinstance` would not know."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def hooked() -> nn.Module:
    act_fn = nn.SiLU()
    act_fn.register_forward_hook(lambda module, x, y: y / 2)
    return act_fn


@pytest.mark.parametrize("make", [Half, hooked], ids=["a subclass", "a hook"])
def test_a_stack_asks_an_activation_that_is_not_silu_itself(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for choose in (one_by_one, as_a_stack):
        choose(monkeypatch)
        model = model_of()
        model.model.layers[0].mlp.experts.act_fn = make()
        found.append(Tokens(0).run(model.model.layers[0].mlp.experts)[0])
    # both sum a token's two experts, one in the weights' dtype
    assert torch.allclose(*found, rtol=2**-7, atol=1e-6)
