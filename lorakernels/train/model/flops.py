# SPDX-License-Identifier: Apache-2.0
"""Achieved TFLOP/s and MFU: model FLOPs per second, relative to a named peak.

P is the number of weights of frozen linear layers, P_t the number of trained weights (adapters, or a whole base).
There are L layers of attention width d, and T tokens per sequence. FLOPs per token:

    forward   2 P + 2 P_t + 4 L T d          backward   2 P + 4 P_t + 8 L T d

The source is PaLM's 6 N + 12 L H Q T (arXiv:2204.02311, appendix B). A frozen base has no weight gradients, which
saves 2 P. Recomputation under gradient checkpointing is not counted, so it lowers MFU, as in PaLM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lorakernels import TensorParallel

# Dense tensor-core peaks in TFLOP/s, (bf16, fp8), from NVIDIA's data sheets. The first row whose pattern occurs in
# torch's device name as whole words applies, so GH200 does not match H200.
PEAKS: tuple[tuple[str, str, float, float | None], ...] = (
    ("H200 NVL", "H200 NVL", 835.0, 1671.0),
    ("H200", "H200 SXM", 989.4, 1978.9),
    ("H100 PCIe", "H100 PCIe", 756.0, 1513.0),
    ("H100 NVL", "H100 NVL", 835.0, 1671.0),
    ("H100 80GB HBM3", "H100 SXM", 989.4, 1978.9),
    ("GH200", "GH200", 989.4, 1978.9),
    ("A100", "A100", 312.0, None),
    ("L40S", "L40S", 362.0, 733.0),
)


@dataclass(frozen=True)
class Peak:
    """The highest dense rate of a device in one format, in TFLOP/s."""

    name: str
    tflops: float


@dataclass(frozen=True)
class ModelCounts:
    """How many parameters a whole model trains, how many it has, and the FLOPs of a token."""

    trained: int
    total: int
    flops: float

    @classmethod
    def of(cls, model: Any, seq_len: int) -> ModelCounts:
        whole = TensorParallel.whole_numel(model)
        counts = [(whole(p), p.requires_grad) for p in model.parameters()]
        flops = flops_per_token(model, model.config.get_text_config(), seq_len)
        return cls(sum(n for n, trains in counts if trains), sum(n for n, _ in counts), flops)


def find_peak(device: torch.device, dtype: torch.dtype, fp8: bool) -> Peak | str:
    """The peak that MFU is relative to, or a sentence that says why there is none; "" if there is no need for one."""
    if device.type != "cuda":
        return ""
    if dtype != torch.bfloat16:
        return f"no MFU: no peak is kept for {dtype}"
    name = torch.cuda.get_device_name(device)
    for pattern, label, bf16_peak, fp8_peak in PEAKS:
        if re.search(rf"\b{pattern}\b", name):
            if fp8 and fp8_peak is not None:
                return Peak(f"{label}, dense FP8", fp8_peak)
            return Peak(f"{label}, dense bf16", bf16_peak)
    return f"no MFU: no peak is known for {name}"


def flops_per_token(model: Any, config: Any, seq_len: int) -> float:
    """Model FLOPs of forward and backward for one token. ``config`` is the model's transformers config."""
    frozen = trained = 0
    whole = TensorParallel.whole_numel(model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    if hasattr(model, "get_input_embeddings"):
        embeddings.add(id(model.get_input_embeddings().weight))  # no nn.Embedding if ranks split it
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parameter in model.parameters():
        tied = head is not None and parameter is getattr(head, "weight", None)
        if parameter.ndim < 2 or (id(parameter) in embeddings and not tied):
            continue
        if parameter.requires_grad:
            trained += whole(parameter)
        else:
            frozen += whole(parameter)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return float(4 * frozen + 6 * trained + 12 * config.num_hidden_layers * seq_len * width)
