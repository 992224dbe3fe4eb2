# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels import LoRAConfig, apply_lora
from lorakernels.train.model.flops import Peak, find_peak, flops_per_token
from lorakernels.train.model.model import load_model


def test_flops_of_a_known_model(model_dir: Path) -> None:
    """Hidden 32, ffn 48, 2 heads of 16 and 1 of keys, 2 layers, 264 words; rank 4; 100 tokens."""
    model: Any = load_model(model_dir, torch.float32, torch.device("cpu"))
    shapes = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    linear = 2 * sum(n * k for n, k in shapes)
    head, attention = 264 * 32, 12 * 2 * 100 * 32
    assert flops_per_token(model, model.config, 100) == 6 * (linear + head) + attention
    apply_lora(model, LoRAConfig(r=4, target_modules="all-linear"))
    adapters = 2 * sum(4 * (n + k) for n, k in shapes)
    assert (
        flops_per_token(model, model.config, 100) == 4 * (linear + head) + 6 * adapters + attention
    )


@pytest.mark.parametrize(
    ("name", "fp8", "expected"),
    [
        ("NVIDIA H200", True, Peak("H200 SXM, dense FP8", 1978.9)),
        ("NVIDIA H200", False, Peak("H200 SXM, dense bf16", 989.4)),
        ("NVIDIA H200 NVL", True, Peak("H200 NVL, dense FP8", 1671.0)),
        ("NVIDIA GH200 480GB", True, Peak("GH200, dense FP8", 1978.9)),
        ("NVIDIA H100 80GB HBM3", True, Peak("H100 SXM, dense FP8", 1978.9)),
        ("NVIDIA H100 NVL", False, Peak("H100 NVL, dense bf16", 835.0)),
        ("NVIDIA A100-SXM4-80GB", True, Peak("A100, dense bf16", 312.0)),
        ("NVIDIA L40S", True, Peak("L40S, dense FP8", 733.0)),
        ("NVIDIA Z9000", True, "no MFU: no peak is known for NVIDIA Z9000"),
    ],
)
def test_peak_is_named_or_left_out(
    monkeypatch: pytest.MonkeyPatch, name: str, fp8: bool, expected: Peak | str
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert find_peak(gpu, torch.bfloat16, fp8) == expected


def test_no_peak_without_a_gpu_or_in_fp32() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert find_peak(gpu, torch.float32, True) == "no MFU: no peak is kept for torch.float32"
    assert find_peak(cpu, torch.bfloat16, True) == ""
