# SPDX-License-Identifier: Apache-2.0
"""apply_lora and the linear layers that get no adapter: held in FP8, or left, and on the model's one FP8State."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from lorakernels import DelayedScaling, FrozenFP8Linear, LoRAConfig, LoRALinear, apply_lora
from lorakernels.modules.linear.frozen import quantize_weight
from lorakernels.modules.model.undo import all_or_nothing

RECIPE = DelayedScaling(amax_history_len=3)


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.gate_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(3))
        self.gate, self.shared_expert_gate = nn.Linear(16, 4), nn.Linear(16, 1)
        self.own, self.hooked, self.patched = Own(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.hooked.register_forward_hook(lambda module, args, out: 2 * out)
        self.patched.forward = lambda x: 2 * x
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 12, bias=False)
        self.embed, self.tied = nn.Embedding(12, 16), nn.Linear(16, 12, bias=False)
        self.tied.weight = self.embed.weight
        self.score = nn.ModuleDict({"dense": nn.Linear(16, 2)})

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def config(**options) -> LoRAConfig:
    return LoRAConfig(r=2, target_modules=["q_proj"], **{"fp8": RECIPE, **options})


def test_the_report_says_what_stays_and_why() -> None:
    model = Block()
    report = apply_lora(model, config(modules_to_save=["score.dense"], bias="all"), frozen="fp8")
    reasons = {row.name: row.reason for row in report.modules}
    plain = "not a target, stays plain: "
    assert {name: reason.removeprefix(plain) for name, reason in reasons.items()} == {
        "q_proj": "matches target_modules",
        "gate_proj": "not a target, held in FP8",
        "o_proj": "not a target, held in FP8",
        "gate": "router",
        "shared_expert_gate": "router",
        "own": "not a plain nn.Linear but a Own",
        "hooked": "hooks, or a forward of its own",
        "patched": "hooks, or a forward of its own",
        "norm": "trained: bias",
        "head": "head",
        "embed": "not a target",
        "tied": "its weight is tied to another module's",
        "score.dense": "in modules_to_save",
    }
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert [n for n, kind in kinds.items() if kind is FrozenFP8Linear] == ["gate_proj", "o_proj"]
    assert report.fp8_state.names == ("q_proj", "gate_proj", "o_proj")
    assert model.gate_proj.fp8_state is model.o_proj.fp8_state is report.fp8_state
    assert model.gate_proj.bias.requires_grad and model.o_proj.training


def test_everything_below_a_saved_module_stays() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(16, 16), "score": nn.Sequential(nn.Linear(16, 2))})
    report = apply_lora(model, config(modules_to_save=["score"]), frozen="fp8")
    assert type(model["score"][0]) is nn.Linear and model["score"][0].weight.requires_grad
    (row,) = (row for row in report.modules if row.name == "score.0")
    assert row.reason.endswith("trained, in modules_to_save")


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_frozen_fp8_is_what_load_quantized_gives(kind: str, tmp_path: Path) -> None:
    checkpoints = pytest.importorskip("tests.small_checkpoints")
    changes = {"tie_word_embeddings": kind == "Qwen2"}
    checkpoints.write_checkpoint(tmp_path, checkpoints.config(kind, **changes))
    lora = LoRAConfig(r=4, target_modules=["q_proj", "down_proj"])
    loaded = checkpoints.ours(tmp_path, lora=lora)
    model = checkpoints.theirs(tmp_path, None)
    torch.manual_seed(5)
    report = apply_lora(model, lora, frozen="fp8")
    assert report.fp8_state.names == loaded.fp8_state.names and len(report.fp8_state.names) == 14
    for path, module in model.named_modules():
        if isinstance(module, FrozenFP8Linear):
            assert module.name == path
            assert module.column == loaded.model.get_submodule(path).column
    checkpoints.assert_equal(model, loaded.model)
    reasons = {row.name: row.reason for row in loaded.report.modules}
    assert reasons["lm_head"] == "not a target, stays plain: head"


@pytest.mark.parametrize(
    ("options", "frozen", "message"),
    [
        ({}, "bf16", 'frozen must be "plain" or "fp8", found \'bf16\''),
        (
            {"fp8": None},
            "fp8",
            'frozen="fp8" needs a DelayedScaling or a BlockScaling in config.fp8',
        ),
    ],
    ids=["another word", "no recipe"],
)
def test_refused(options, frozen: str, message: str) -> None:
    model = Block()
    with pytest.raises(ValueError, match=message):
        apply_lora(model, config(**options), frozen=frozen)
    assert all(p.requires_grad for p in model.parameters())


def test_weights_that_fp8_cannot_hold_are_refused_before_any_change() -> None:
    model = Block()
    model.o_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"^o_proj\.weight must be finite to be held in FP8"):
        apply_lora(model, config(), frozen="fp8")
    assert type(model.q_proj) is nn.Linear and model.q_proj.weight.requires_grad
    apply_lora(model, config())
    model = Block()
    model.o_proj.to("meta")
    with pytest.raises(ValueError, match=r"must be on one device, found \['cpu', 'meta'\]"):
        apply_lora(model, config(), frozen="fp8")


def _with_fp8_layers(*recipes: DelayedScaling) -> nn.Module:
    """q_proj plain, and before it FP8 layers with states of their own."""
    model = nn.ModuleDict()
    for i, recipe in enumerate(recipes):
        model[f"old{i}"] = FrozenFP8Linear.from_linear(nn.Linear(16, 16), recipe)
        model[f"old{i}"].fp8_state.forward.uniform_()
    model["q_proj"] = nn.Linear(16, 16)
    return model


def test_fp8_layers_that_were_there_join_the_state_with_their_histories() -> None:
    model = _with_fp8_layers(RECIPE, RECIPE)
    model["old1"].fp8_state.reduce_and_update()
    scales = [model[name].fp8_scale.clone() for name in ("old0", "old1")]
    history = model["old0"].fp8_amax_history.clone()
    report = apply_lora(model, config())
    assert report.fp8_state.names == ("q_proj", "old0", "old1")
    assert all(m.fp8_state is report.fp8_state for m in model.values())
    assert [model[name].name for name in ("old0", "old1")] == ["old0", "old1"]
    assert torch.equal(model["old0"].fp8_amax_history, history)
    for name, scale in zip(("old0", "old1"), scales, strict=True):
        assert torch.equal(model[name].fp8_scale, scale)
    assert report.scales_in_charge == "explicit"
    x = torch.randn(3, 16, requires_grad=True)
    model["q_proj"](model["old1"](model["old0"](x))).sum().backward()
    report.fp8_state.reduce_and_update()
    assert not torch.equal(model["old0"].fp8_scale, scales[0])


@pytest.mark.parametrize("same", [True, False], ids=["one recipe", "two recipes"])
def test_an_fp8_layer_that_is_adapted_hands_over_what_its_recipe_means(same: bool) -> None:
    model = _with_fp8_layers(RECIPE if same else DelayedScaling(amax_history_len=3, margin=1))
    old = model["old0"].eval()
    old.fp8_state.reduce_and_update()
    values, bits = old.fp8_state.values(0), old.weight.view(torch.uint8).clone()
    report = apply_lora(model, LoRAConfig(r=2, target_modules=["old0", "q_proj"], fp8=RECIPE))
    new = model["old0"]
    assert isinstance(new, LoRALinear) and not new.training and model["q_proj"].training
    assert torch.equal(new.weight.view(torch.uint8), bits)
    found = report.fp8_state.values(new.column)
    assert torch.equal(found, values if same else torch.zeros_like(values))
    assert report.scales_in_charge == ("explicit" if same else "auto")
    reason = next(row.reason for row in report.modules if row.name == "old0")
    assert ("scales kept" if same else "scales dropped") in reason


def test_fp8_layers_of_another_recipe_or_device_keep_their_state() -> None:
    model = _with_fp8_layers(RECIPE, DelayedScaling(amax_history_len=7))
    own = model["old1"].fp8_state
    report = apply_lora(model, config())
    assert report.fp8_state.names == ("q_proj", "old0") and model["old1"].fp8_state is own
    model = _with_fp8_layers(RECIPE)
    own = model["old0"].to("meta").fp8_state
    assert apply_lora(model, config()).fp8_state.names == ("q_proj",)
    assert model["old0"].fp8_state is own
    model = _with_fp8_layers(RECIPE)
    assert apply_lora(model, config(fp8=None)).fp8_state is None


def test_fp8_layers_that_a_graph_reads_are_refused() -> None:
    model = _with_fp8_layers(RECIPE)
    model["old0"].fp8_state.pin("a graph")
    with pytest.raises(RuntimeError, match=r"^old0 would leave its FP8State.*pinned by a graph"):
        apply_lora(model, config())
    assert type(model["q_proj"]) is nn.Linear and model["q_proj"].weight.requires_grad
    with pytest.raises(RuntimeError, match=r"^old0 would leave"):
        apply_lora(model, LoRAConfig(target_modules=["q_proj"], fp8=RECIPE))
    model["old0"].fp8_state.unpin()
    apply_lora(model, config())


@pytest.mark.parametrize("fp8", [None, RECIPE], ids=["plain", "fp8"])
def test_a_weight_is_held_contiguous(fp8: DelayedScaling | None) -> None:
    """Kernels read rows that follow each other."""
    linear = nn.Linear(16, 24, bias=False)
    linear.weight.data = linear.weight.data.t().contiguous().t()
    new = FrozenFP8Linear.from_linear(linear, fp8)
    assert not linear.weight.is_contiguous() and new.stored.is_contiguous()
    expected = FrozenFP8Linear.from_linear(copy.deepcopy(linear).requires_grad_(False), fp8)
    assert torch.equal(new.weight.view(torch.uint8), expected.weight.view(torch.uint8))


def test_what_an_exception_interrupts_is_put_back() -> None:
    """Containers and attributes, those of others too; what came in the meantime goes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.names, model.note = ["a"], "before"
    first, other = model[0], type("Config", (), {})()
    other.value = 1
    with pytest.raises(KeyboardInterrupt), all_or_nothing(model, [other]):
        model._modules["0"], model._modules["2"] = nn.Linear(3, 3), nn.Linear(2, 2)
        model[1].__class__ = nn.Bilinear
        model.names.append("b")
        model.note, model.more, other.value, other.more = "then", 1, 2, 3
        first.weight.requires_grad_(False)
        raise KeyboardInterrupt
    assert list(model._modules) == ["0", "1"] and model[0] is first
    assert type(model[1]) is nn.Linear and model.names == ["a"] and model.note == "before"
    assert not hasattr(model, "more") and vars(other) == {"value": 1}
    assert first.weight.requires_grad


@pytest.mark.gpu
def test_replaced_weights_go_to_the_host_where_memory_ends(monkeypatch) -> None:
    """FP8 beside all weights that it replaces does not fit; those that would be put back wait on the host."""
    layers, size = 32, 2048
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))
    model = model.to("cuda", torch.bfloat16)
    before = [layer.weight.detach().cpu() for layer in model]
    lora = LoRAConfig(r=2, target_modules="all-linear")
    torch.cuda.empty_cache()
    room = (
        torch.cuda.memory_reserved() + 6 * size * size * 4
    )  # some matrices in fp32, less than all in FP8
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr("lorakernels.modules.model.undo.Before._make_room", lambda self: False)
            apply_lora(model, lora)
        gc.collect()  # what the traceback held
        assert all(type(layer) is nn.Linear for layer in model)
        found = [layer.weight.detach().cpu() for layer in model]
        assert all(torch.equal(*pair) for pair in zip(found, before, strict=True))
        apply_lora(model, lora)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(isinstance(layer, LoRALinear) and layer.lora_A.is_cuda for layer in model)
    for layer, weight in zip(model, before, strict=True):
        raw, _ = quantize_weight(weight.cuda())
        assert torch.equal(layer.weight.view(torch.uint8), raw)


@pytest.mark.gpu
def test_what_went_to_the_host_comes_back() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail() -> None:
        assert str(first.weight.device) == "cuda:0" or made
        made.append(1)
        raise torch.OutOfMemoryError

    made: list[int] = []
    first = model[0]
    with pytest.raises(torch.OutOfMemoryError), all_or_nothing(model) as undo:
        model[0] = FrozenFP8Linear.from_linear(first, RECIPE)
        undo.patiently(fail)
    assert len(made) == 2 and model[0] is first
    assert all(value.is_cuda for value in model.state_dict().values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
