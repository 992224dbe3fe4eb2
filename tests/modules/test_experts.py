# SPDX-License-Identifier: Apache-2.0
"""Adapters on the stacked experts of Mixtral and Qwen3-MoE: equal to PEFT's, in its files, in FP8 and back."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from lorakernels import (  # noqa: E402
    BlockScaling,
    DelayedScaling,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    load_adapter,
    merge_and_unload,
    merge_lora,
    save_adapter,
    unload,
    unmerge_lora,
)
from lorakernels.loops.parts import why_no_graphs  # noqa: E402
from lorakernels.modules.experts.layer import LoRAExperts  # noqa: E402

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
IDS = torch.arange(24).view(2, 12)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=4)
    return _made(transformers.MixtralForCausalLM, config)


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=8,
        head_dim=8,
        norm_topk_prob=True,
    )
    return _made(transformers.Qwen3MoeForCausalLM, config)


def _made(kind: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():  # large enough that experts differ
        if "experts" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


FAMILIES = {"Mixtral": mixtral, "Qwen3-MoE": qwen3_moe}


def with_peft(model: nn.Module, **options: Any) -> Any:
    """PEFT's model, all values of its adapters random."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_parameters": BOTH, **options})
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return adapted


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    given = {"r": 4, "lora_alpha": 8, "target_parameters": BOTH, "fp8": None, **options}
    apply_lora(model, LoRAConfig(**given))
    torch.manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.lora_A.normal_(std=0.1)
                module.lora_B.normal_(std=0.1)
    return model


def near(a: torch.Tensor, b: torch.Tensor, bound: float = 1e-5) -> bool:
    """fp32's sums of some hundred products in another order are off by about 1e-6 of the norm; ten times that."""
    return bool((a - b).norm() <= bound * b.norm())


CHOICES = {
    "both": {},
    "down alone": {"target_parameters": ["experts.down_proj"]},
    "the other order, with modules": {
        "target_parameters": BOTH[::-1],
        "target_modules": ["q_proj"],
    },
    "ranks apart": {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_peft_s_computes_the_same_here(family: str, choice: str, tmp_path: Path) -> None:
    theirs = with_peft(FAMILIES[family](), **CHOICES[choice])
    theirs.save_pretrained(tmp_path)
    model = FAMILIES[family]()
    before = model(IDS).logits.detach()
    load_adapter(model, tmp_path, fp8=None)
    expected = theirs(IDS).logits
    assert near(model(IDS).logits, expected)
    assert not near(before, expected, 1e-3)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_file_of_ours_computes_the_same_in_peft(choice: str, tmp_path: Path) -> None:
    model = adapted(mixtral(), **CHOICES[choice])
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(mixtral(), tmp_path)
    assert near(theirs(IDS).logits, model(IDS).logits)
    again = mixtral()
    load_adapter(again, tmp_path, fp8=None)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


EXCLUSIONS = {
    "an expert's layer": (["gate_up_proj.3"], True),
    "experts by a number": (r".*\.3", True),
    "all experts": (r".*experts.*", True),
    "their owner": (["experts"], False),
    "a layer": (r".*layers\.1\..*", True),
    "a module": (["layers.0.self_attn.q_proj"], False),
}


@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
@pytest.mark.parametrize("case", EXCLUSIONS)
def test_exclude_modules_leaves_experts_to_target_parameters(case: str, tmp_path: Path) -> None:
    """As in PEFT, which has no module for one expert. All is saved, and read by either."""
    exclude, names_experts = EXCLUSIONS[case]
    options = {"target_modules": ["q_proj"], "exclude_modules": exclude}
    theirs = with_peft(mixtral(), **options)
    theirs.save_pretrained(tmp_path / "theirs")
    model = mixtral()
    message = "which target_parameters adapts all the same"
    with pytest.warns(UserWarning, match=message) if names_experts else nullcontext():
        load_adapter(model, tmp_path / "theirs", fp8=None)
    assert near(model(IDS).logits, theirs(IDS).logits)
    save_adapter(model, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(mixtral(), tmp_path / "ours")
    assert near(back(IDS).logits, theirs(IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_peft_s(family: str, tmp_path: Path) -> None:
    theirs = with_peft(FAMILIES[family]())
    theirs.save_pretrained(tmp_path)
    model = FAMILIES[family]()
    load_adapter(model, tmp_path, fp8=None)
    found = {}
    for each in (theirs, model):
        each.train()
        each(input_ids=IDS, labels=IDS).loss.backward()
    save_grads(model, tmp_path / "ours")
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            found[name.replace(".default", "")] = parameter.grad
    ours = grads(tmp_path / "ours")
    assert ours.keys() == found.keys()
    for name, expected in found.items():
        assert near(ours[name], expected, 1e-4), name  # of a small difference of two large sums


def save_grads(model: nn.Module, folder: Path) -> None:
    """The gradients in a file, in the adapter's place: joined as the adapters are."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.lora_A.copy_(module.lora_A.grad)
                module.lora_B.copy_(module.lora_B.grad)
    save_adapter(model, folder)


def grads(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_a_token_without_an_expert_adds_nothing() -> None:
    """transformers pads the choice by num_experts; an expert may have no token at all."""
    model = mixtral()
    stacked = model.model.layers[0].mlp.experts
    ours = LoRAExperts(stacked)
    x = torch.randn(3, 32)
    index = torch.tensor([[0, 4], [4, 4], [0, 2]])
    weights = torch.rand(3, 2)
    stacked.config._experts_implementation = "eager"  # grouped_mm leaves such rows unwritten
    expected = stacked(x, index, weights)
    assert near(ours(x, index, weights), expected)
    assert torch.equal(ours(x, index, weights)[1], torch.zeros(32))


@pytest.mark.parametrize("recipe", [DelayedScaling(), BlockScaling()], ids=["delayed", "blocks"])
def test_fp8_experts_train_and_hold_one_byte_each(recipe: Any) -> None:
    model = mixtral()
    report = apply_lora(model, LoRAConfig(r=4, target_parameters=BOTH, fp8=recipe))
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    assert len(layers) == 2 * 2 * 4 and all(m.holds_fp8 for m in layers)
    assert "target_parameters" in str(report)
    model.train()
    first = model(input_ids=IDS, labels=IDS).loss
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0)
    for _ in range(8):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        if report.fp8_state is not None:
            report.fp8_state.reduce_and_update()
    assert model(input_ids=IDS, labels=IDS).loss < first - 0.05


def test_merge_unmerge_and_unload() -> None:
    model = adapted(mixtral())
    expected = model(IDS).logits.detach()
    plain = mixtral()(IDS).logits.detach()
    merge_lora(model)
    assert near(model(IDS).logits, expected)
    unmerge_lora(model)
    assert torch.equal(model(IDS).logits, expected)
    merge_and_unload(model)
    assert type(model.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    assert near(model(IDS).logits, expected)
    other = unload(adapted(mixtral()))
    assert (
        near(other(IDS).logits, plain)
        and other.state_dict().keys() == mixtral().state_dict().keys()
    )


class Transposed(nn.Module):
    """gpt-oss's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.is_transposed, self.act_fn = True, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 16))
        self.down_proj = nn.Parameter(torch.randn(2, 8, 8))


class Biased(Transposed):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj_bias = nn.Parameter(torch.zeros(2, 8))


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no such parameter": (
        mixtral,
        {"target_parameters": ["experts.w1"]},
        "'experts.w1'.*down_proj",
    ),
    "not experts": (
        mixtral,
        {"target_parameters": ["q_proj.weight"]},
        "expected experts with gate_up_proj",
    ),
    "another layout": (Transposed, {"target_parameters": ["gate_up_proj"]}, "is_transposed=True"),
    "biases": (Biased, {"target_parameters": ["gate_up_proj"]}, "down_proj_bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_adapted_is_refused_and_nothing_changes(case: str) -> None:
    make, options, message = REFUSED[case]
    model = make()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises((ValueError, TypeError), match=message):
        apply_lora(model, LoRAConfig(**options))
    assert [type(m) for m in model.modules()] == kinds


def test_an_error_in_the_middle_restores_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixtral()
    expected = model(IDS).logits
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"experts\.down_proj\.3\.weight must be finite"):
        apply_lora(model, LoRAConfig(target_parameters=BOTH))
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] = 0.0
    assert not any(isinstance(m, LoRAExperts | LoRALinear) for m in model.modules())
    assert model(IDS).logits.shape == expected.shape


def test_bad_options_are_named() -> None:
    with pytest.raises(
        ValueError, match="lora_dropout must be 0 with target_parameters, as in PEFT"
    ):
        LoRAConfig(target_parameters=BOTH, lora_dropout=0.1)
    with pytest.raises(
        TypeError, match="target_parameters must be a list of names, got the string 'x'"
    ):
        LoRAConfig(target_parameters="x")
    with pytest.raises(ValueError, match="'' would match every parameter"):
        LoRAConfig(target_parameters=[""])


def test_a_model_with_experts_of_ours_is_not_saved_under_names_that_nobody_knows(
    tmp_path: Path,
) -> None:
    model = adapted(mixtral())
    with pytest.raises(ValueError, match="call merge_and_unload first"):
        model.save_pretrained(tmp_path)


def test_graphs_are_refused_with_the_reason() -> None:
    layers = adapted(mixtral()).model.layers
    assert "layer 0 has LoRAExperts, which run one by one" in str(
        why_no_graphs(layers, on_gpu=False)
    )


def test_the_file_says_what_peft_would(tmp_path: Path) -> None:
    save_adapter(adapted(mixtral()), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"])[0].endswith("experts.down_proj")
    assert config["target_modules"] == []


@pytest.mark.parametrize("history", [None, 2], ids=["plain", "a history of two"])
def test_an_expert_without_tokens_has_gradients_of_zero_and_keeps_its_scales(
    history: int | None,
) -> None:
    """For more steps than amaxes are kept."""
    recipe = None if history is None else DelayedScaling(amax_history_len=history)
    model = mixtral()
    state = apply_lora(model, LoRAConfig(r=4, target_parameters=BOTH, fp8=recipe)).fp8_state
    experts = model.train().model.layers[0].mlp.experts
    idle = (experts.gate_up_proj[3], experts.down_proj[3])
    x, weights = torch.randn(6, 32), torch.rand(6, 2)

    def train(first: int, second: int) -> None:
        model.zero_grad()
        experts(x, torch.tensor([[first, second]] * 6), weights).square().sum().backward()
        if state is not None:
            state.reduce_and_update()

    def scales() -> list[float]:
        return [] if state is None else [float(state.forward[-1, m.column]) for m in idle]

    train(0, 3)
    before = scales()
    assert all(value > 0 for value in before)
    for _ in range(4):
        train(0, 1)
        assert not any(m.lora_A.grad.any() or m.lora_B.grad.any() for m in idle)
    assert scales() == before
    assert experts(x, torch.tensor([[3, 2]] * 6), weights).isfinite().all()
