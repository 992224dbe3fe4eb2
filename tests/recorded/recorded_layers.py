# SPDX-License-Identifier: Apache-2.0
"""Linear layers in each of the forms that have recordings, a step of one, and what its launches were."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    batch_adapters,
)
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
    "two adapters, e4m3 dy": lambda: batched(fp8=DelayedScaling(fp8_format="E4M3"), r=64),
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
