# SPDX-License-Identifier: Apache-2.0
"""Every class of experts of transformers is computed as it computes itself, or refused by its name."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations.moe import (  # noqa: E402
    ALL_EXPERTS_FUNCTIONS,
    use_experts_implementation,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

from lorakernels import LoRAConfig, apply_lora, load_quantized  # noqa: E402
from lorakernels.modules.experts.layer import LoRAExperts  # noqa: E402

HIDDEN, FFN, EXPERTS, TOKENS = 16, 24, 4, 11
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
# Those of transformers 5.23 with a gate, a forward or a layout of their own
REFUSED = {
    "AriaExperts",
    "BeamExperts",
    "DeepseekV4Experts",
    "Glm5NextTextExperts",
    "GptOssExperts",
    "HYV4Experts",
    "Inkling2Experts",
    "InklingSharedExperts",
    "Llama4TextExperts",
    "LongcatFlashExperts",
    "MiniMaxM3VLExperts",
    "MuseSparkExperts",
    "NemotronHExperts",
    "OpenAIPrivacyFilterExperts",
    "Step3p7Experts",
}
# A class with stacked projections from its decorator to the next statement of the file
CLASS = re.compile(
    r"^(?:@use_experts_implementation[^\n]*\n)?class (\w+)\(nn\.Module\):\n(?:[ \n].*\n?)+", re.M
)

IMPORTS = """from __future__ import annotations
import torch
import torch.nn.functional as F
from torch import nn
"""  # as in transformers' files: Python's instructions for torch.zeros_like depend on them


class Config:
    """Answers whatever a class of experts asks of its config."""

    _experts_implementation = "eager"
    hidden_act = hidden_activation = expert_hidden_act = mlp_hidden_act = "silu"
    hidden_size = moe_hidden_size = HIDDEN
    moe_latent_size = None
    swiglu_limit, swiglu_alpha, mlp_gate_softcap, rms_norm_eps = 1.0, 1.7, 2.0, 1e-5

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return FFN if "intermediate" in name or "ffn" in name else EXPERTS


def sources() -> dict[str, str]:
    """{name of a class with stacked projections: its code in transformers}."""
    classes = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for match in CLASS.finditer(path.read_text(encoding="utf-8")):
            if re.search(r"self\.(gate_up_proj|down_proj) = nn\.Parameter", match[0]):
                classes[match[1]] = match[0]
    return classes


SOURCES = sources()


def made(name: str) -> nn.Module:
    """An instance of a class, compiled alone: 69 modeling files take half a minute to import."""
    scope: dict[str, Any] = {
        "ACT2FN": ACT2FN,
        "use_experts_implementation": use_experts_implementation,
        **dict.fromkeys(re.findall(r"\w+RMSNorm", SOURCES[name]), nn.RMSNorm),
        **dict.fromkeys(re.findall(r"\w+SwiGLU", SOURCES[name]), nn.Identity),
    }
    exec(compile(IMPORTS + SOURCES[name], name, "exec"), scope)
    return random(scope[name](Config()))


def random(experts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.6)
    return experts


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """x, two experts for each token and their weights; the last token's second choice is no expert."""
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    index[-1, 1] = EXPERTS
    return torch.randn(TOKENS, HIDDEN), index, torch.rand(TOKENS, 2)


def off(experts: nn.Module, ours: nn.Module) -> float:
    """The relative difference of outputs and of the input's gradients."""
    results = []
    for module in (experts, ours):
        x, index, weights = tokens()
        y = module(x.requires_grad_(), index, weights)
        results.append(torch.cat([y, *torch.autograd.grad(y.square().sum(), x)]).detach())
    return float((results[0] - results[1]).norm() / results[0].norm())


def test_the_classes_are_found() -> None:
    assert SOURCES.keys() > REFUSED and len(SOURCES) >= 69


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_class_is_computed_as_it_computes_itself_or_refused(name: str) -> None:
    experts = made(name)
    try:
        ours = LoRAExperts(experts)
    except TypeError as error:
        assert name in REFUSED and name in str(error)
        return
    assert name not in REFUSED
    for act_fn in (experts.act_fn, nn.GELU()):
        experts.act_fn = ours.act_fn = act_fn
        assert off(experts, ours) < 1e-5  # fp32 in another order: about 1e-7


class Holder(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.experts(*tensors)


def mixtral(kind: Callable[[Any], nn.Module] = MixtralExperts) -> nn.Module:
    return random(kind(Config()))


class OwnForward(MixtralExperts):
    def forward(self, *tensors: Tensor) -> Tensor:
        return 2 * super().forward(*tensors)


class OwnGate(MixtralExperts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return gate_up.clamp(max=1.0).chunk(2, dim=-1)[0]


class OwnCall(MixtralExperts):
    def __call__(self, *tensors: Tensor) -> Tensor:
        return 2 * super().__call__(*tensors)


@use_experts_implementation
class OwnEager(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        vars(self).update(vars(MixtralExperts(config)))

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return 2 * MixtralExperts.forward.__wrapped__(self, hidden_states, index, weights)


def with_forward() -> nn.Module:
    experts = mixtral()
    before = experts.forward
    experts.forward = lambda *tensors: 2 * before(*tensors)
    return experts


def with_gate() -> nn.Module:
    experts = mixtral()
    experts._apply_gate = types.MethodType(OwnGate._apply_gate, experts)
    return experts


def with_backward_hook() -> nn.Module:
    experts = mixtral()
    experts.register_full_backward_hook(lambda *_: None)
    return experts


def with_norm() -> nn.Module:
    experts = mixtral()
    experts.norm = nn.LayerNorm(HIDDEN)
    return experts


def with_an_implementation(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping, "doubled", lambda *tensors: 2 * tensors[1]
    )
    experts = mixtral()
    experts.config._experts_implementation = "doubled"
    return experts


OWN: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "a forward of the class": (lambda: mixtral(OwnForward), "OwnForward, whose forward is not"),
    "a gate of the class": (lambda: mixtral(OwnGate), "OwnGate, whose _apply_gate is not"),
    "a call of the class": (lambda: mixtral(OwnCall), "OwnCall, whose forward is not"),
    "an eager forward under the decorator": (lambda: mixtral(OwnEager), "OwnEager, whose forward"),
    "a forward of the instance": (with_forward, "MixtralExperts, whose forward was replaced"),
    "a gate of the instance": (with_gate, "MixtralExperts, whose _apply_gate is not"),
    "a backward hook": (with_backward_hook, "MixtralExperts with hooks"),
    "a norm": (with_norm, "MixtralExperts, which also holds norm"),
}


def refuses(experts: nn.Module, message: str) -> None:
    model = Holder(experts)
    with pytest.raises(TypeError, match=f"target_parameters: 'experts.gate_up_proj' .*{message}"):
        apply_lora(model, LoRAConfig(r=2, target_parameters=BOTH, fp8=None))
    assert model.experts is experts and all(p.requires_grad for p in experts.parameters())
    with pytest.raises(TypeError, match=message):
        LoRAExperts(experts)


@pytest.mark.parametrize("case", OWN)
def test_what_a_user_changed_is_refused(case: str) -> None:
    make, message = OWN[case]
    refuses(make(), message)


def test_an_implementation_from_outside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(with_an_implementation(monkeypatch), "experts_implementation='doubled'")


class Renamed(MixtralExperts):
    """Changes nothing."""


@pytest.mark.parametrize("act_fn", [nn.SiLU(), nn.PReLU(), torch.tanh])
def test_what_computes_the_same_is_taken_with_its_activation(act_fn: Any) -> None:
    experts = mixtral(Renamed)
    del experts.act_fn
    experts.act_fn = act_fn
    names = experts.state_dict().keys()
    ours = LoRAExperts(experts)
    assert off(experts, ours) < 1e-5
    del ours.act_fn
    ours.act_fn = nn.GELU()
    again = ours.stacked_again()
    assert type(again) is Renamed and again.act_fn is ours.act_fn
    assert off(again, ours) < 1e-5 and again.state_dict().keys() >= names - {"act_fn.weight"}


def test_a_checkpoint_of_experts_with_a_gate_of_their_own_is_refused_by_name(
    tmp_path: Path,
) -> None:
    """With experts one by one in its files, none of which anything else could read."""
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    for lora in (None, LoRAConfig(r=2, target_parameters=BOTH)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MixtralExperts, "_apply_gate", OwnGate._apply_gate)
            with pytest.raises(
                ValueError, match=r"mlp\.experts.*MixtralExperts, whose _apply_gate"
            ):
                load_quantized(tmp_path, lora=lora, device="cpu", progress=False)
