# SPDX-License-Identifier: Apache-2.0
"""Models with adapters, ours and PEFT's, and the files they save."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lorakernels import DelayedScaling, LoRAConfig, apply_lora

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

CASES = {
    "plain": {"target_modules": ["q", "v"], "r": 3, "lora_alpha": 7},
    "rank and alpha patterns": {
        "target_modules": ["q", "v"],
        "rank_pattern": {"layers.0.q": 5, "^layers.1.v": 1},
        "alpha_pattern": {"v": 11},
    },
    "rslora": {"target_modules": ["q"], "use_rslora": True, "r": 5, "rank_pattern": {"1.q": 2}},
    "scaled": {"target_modules": ["v"], "modules_to_save": ["head", "norm"], "lora_alpha": 16},
    "saved modules": {"target_modules": ["v"], "modules_to_save": ["head", "norm"]},
    "every bias": {"target_modules": ["q", "v"], "bias": "all"},
    "every bias and a saved module": {
        "target_modules": ["q"],
        "bias": "all",
        "modules_to_save": ["head"],
    },
    "adapted biases": {"target_modules": ["q", "v"], "bias": "lora_only"},
    "regex": {"target_modules": r"layers\.\d\.[qv]", "exclude_modules": r".*\.0\.v"},
    "layers": {"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "all-linear": {"target_modules": "all-linear"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(12, 20), nn.Linear(20, 12, bias=False)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.v(torch.tanh(self.q(x))))


class Model(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def randomize(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)


def adapted(base: nn.Module, case: str = "plain", fp8: DelayedScaling | None = None) -> nn.Module:
    model = copy.deepcopy(base)
    apply_lora(model, LoRAConfig(**CASES[case], fp8=fp8))
    randomize(model)
    return model.eval()


def peft_adapted(base: nn.Module, **kwargs) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**kwargs))
    randomize(model)
    return model.eval()


def peft_load(base: nn.Module, folder: Path) -> nn.Module:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing key is only a warning there
        warnings.simplefilter("ignore", FutureWarning)  # transformers', of itself
        warnings.filterwarnings("ignore", ".*but no modules were excluded")
        return peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)


def tensor_bytes(folder: Path) -> dict[str, tuple]:
    tensors = load_file(folder / WEIGHTS)
    return {
        key: (value.dtype, tuple(value.shape), value.view(torch.uint8).numpy().tobytes())
        for key, value in tensors.items()
        if "original_module" not in key and "modules_to_save" not in key
    }


def assert_same_outputs(first: nn.Module, second: nn.Module, fp8: bool = False) -> None:
    x = torch.randn(2, 5, 12)
    # fp32: another order of the same sums; with FP8 both run the same code on the same bytes
    tolerance = {"rtol": 0, "atol": 0} if fp8 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(first(x), second(x), **tolerance)
