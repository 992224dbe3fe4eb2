# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers with adapters, and what they compute in float64, for the tests of `fuse`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import (
    DelayedScaling,
    FP8State,
    FrozenFP8Linear,
    FuseReport,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    fuse,
)
from lorakernels.fusion import families
from lorakernels.fusion.describe import describe_layers
from lorakernels.fusion.find import decoder_layers
from lorakernels.fusion.memory import LayerSize

transformers = pytest.importorskip("transformers")

FAMILIES = tuple(spec.family for spec in families.FAMILIES)
GEMMAS = ("Gemma2", "Gemma3")  # their norms multiply by 1 + w
PACKINGS = ("Llama", "Phi3")  # projections one by one; q, k, v in one and gate, up in another
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
VOCABULARY = 64
# Two orders of fp32 sums, some twenty roundings along a layer and each at most 2^-24 of what is added up
FP32 = 64 * 2.0**-24
# Norms behind projections divide by the size of small results, and so by that of their roundings: transformers' own
# layers are up to 3e-6 from float64 over draws of weights, and gradients that nearly cancel ten times as far
BEHIND = ("Olmo2", "Gemma2", "Gemma3")
FP32_BEHIND = 16 * FP32
# e4m3 rounds gate and up to 2^-4 of themselves at most; SwiGLU's derivative reads both
E4M3_GATE_UP = 2 * 2.0**-4


def named(targets: Sequence[str], family: str) -> tuple[str, ...]:
    """Llama's names of projections as `family` calls what computes the same: q_proj is a part of Phi-3's qkv_proj."""
    llama, own = families.LLAMA, {spec.family: spec for spec in families.FAMILIES}[family]
    groups = zip(llama.groups, own.groups, strict=True)
    pairs = (zip(a, b if len(a) == len(b) else b * len(a), strict=True) for a, b in groups)
    names = {a.rpartition(".")[2]: b.rpartition(".")[2] for group in pairs for a, b in group}
    return tuple(dict.fromkeys(names[target] for target in targets))


def an_adapter(model: nn.Module) -> LoRALinear:
    return next(m for m in model.modules() if isinstance(m, LoRALinear))


def fp8_state(model: nn.Module) -> FP8State:
    """The one that all adapters share."""
    found = an_adapter(model).fp8_state
    assert found is not None
    return found


def fp32_bound(family: str) -> float:
    return FP32_BEHIND if family in BEHIND else FP32


def tokens(batch: int = 2, length: int = 12, device: torch.device | str = "cpu") -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), device=device)


def fused_copy(model: nn.Module, **options: Any) -> tuple[nn.Module, FuseReport]:
    twin = copy.deepcopy(model)
    return twin, fuse(twin, **options)


def model_of(family: str, **options: Any) -> nn.Module:
    """Two layers, grouped key heads, biases and norms that are not zero and one."""
    if family == "Qwen3":
        options.setdefault("head_dim", 8)
    if family == "Granite":  # factors of the layer, the scores, the embedding and the logits
        factors = {"residual_multiplier": 0.6, "attention_multiplier": 0.3}
        options = {**factors, "embedding_multiplier": 3.0, "logits_scaling": 2.0, **options}
    if family == "SmolLM3":
        options.setdefault("no_rope_layers", [1, 0])
    if family in GEMMAS:
        if int(transformers.__version__.partition(".")[0]) < 5:
            pytest.skip("needs transformers 5: older layers return a tuple")
        gemma = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 64}
        caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
        kinds = {"layer_types": ["sliding_attention", "full_attention"] * 4}
        kinds["layer_types"] = kinds["layer_types"][: options.get("num_hidden_layers", 2)]
        capped = {**caps, "attn_implementation": "eager"} if family == "Gemma2" else {}
        options = {**gemma, **kinds, **capped, **options}
    if family in ("Phi3", "SmolLM3"):
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        options = {**special, **options}  # its own ones lie outside of the vocabulary
    kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "attn_implementation": "sdpa",
            "sliding_window": None,
            **options,
        }
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, float("norm" in name and family not in GEMMAS), std=0.1)
    return model.train()


def adapted(
    family: str = "Llama",
    targets: Sequence[str] = ATTENTION,
    *,
    model: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> nn.Module:
    """With adapters on `targets`, in Llama's names, whose B is not zero."""
    plain = model_of(family, **(model or {})).to(device, dtype)
    options = {"r": 4, "lora_alpha": 8, "fp8": None, **options}
    adapter_dtype = options.pop("adapter_dtype", torch.float32)
    rng_state = options.pop("rng_state", None)
    config = LoRAConfig(target_modules=[*named(targets, family)], **options)
    apply_lora(plain, config, adapter_dtype=adapter_dtype, rng_state=rng_state)
    for module in plain.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.lora_B, std=0.1)
    return plain


def fused_in_bf16(
    targets: Sequence[str], save: str, device: torch.device
) -> tuple[Any, tuple[LayerSize, ...]]:
    """(a Llama over FP8 whose fused layers keep `save`, the sizes of these layers)."""
    torch.manual_seed(0)
    model: Any = adapted(
        "Llama", targets, device=device, dtype=torch.bfloat16, fp8=DelayedScaling()
    )
    fuse(model, save=save)
    layers = describe_layers(decoder_layers(model, fused=True))
    return model, tuple(LayerSize.of(layer, True) for layer in layers)


def run(model: nn.Module, tokens: Tensor, **options: Any) -> dict[str, Tensor]:
    """{name: value} of the logits, the embedded input's gradient and every trained parameter's, of one backward."""
    model.zero_grad()
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    labels = options.pop("labels", tokens)
    found = model(inputs_embeds=embedded, labels=labels, use_cache=False, **options)
    found.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": found.logits.detach(), "dx": embedded.grad, **grads}


def difference(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ ÷ ‖exact‖."""
    assert found.shape == exact.shape
    exact = exact.detach().double().cpu()
    return float((found.detach().double().cpu() - exact).norm() / exact.norm().clamp(min=1e-30))


def same_within(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> float:
    """The largest difference, which must not exceed `bound`."""
    assert found.keys() == expected.keys()
    errors = {name: difference(found[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= bound, (worst, errors[worst], bound)
    return errors[worst]


class _Exact(nn.Module):
    """A projection in float64: the weight as it is held, no dropout."""

    def __init__(self, module: FrozenFP8Linear) -> None:
        super().__init__()
        self.weight = module.dequantized_weight().double()
        bias = module.bias
        self.bias = (
            None if bias is None else nn.Parameter(bias.detach().double(), bias.requires_grad)
        )
        self.scaling = getattr(module, "scaling", 0.0)
        for name in ("lora_A", "lora_B"):
            if hasattr(module, name):
                setattr(self, name, nn.Parameter(getattr(module, name).detach().double()))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        if self.scaling:
            y = y + self.scaling * (x @ self.lora_A.t()) @ self.lora_B.t()
        return y


def exact(model: nn.Module) -> nn.Module:
    """The same model in float64; it must not be fused."""
    double = copy.deepcopy(model).cpu()
    for module in list(double.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, FrozenFP8Linear):
                module._modules[name] = _Exact(child)
    return double.double()
