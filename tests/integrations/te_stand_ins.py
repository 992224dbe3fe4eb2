# SPDX-License-Identifier: Apache-2.0
"""Classes that say they are Transformer Engine's, with the attributes that matter here, for machines without it."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.modules.linear.frozen import quantize_weight

MODULES = "transformer_engine.pytorch.module"


def stand_in(name: str, where: str, *bases: type, **members: Any) -> type:
    """A class that says it is TE's `name`."""
    return type(name, bases or (nn.Module,), {"__module__": where, **members})


Format = enum.Enum("Format", {"E4M3": (448, 448), "HYBRID": (448, 57344)})
Float8Tensor = stand_in(
    "Float8Tensor", "transformer_engine.pytorch.tensor.float8_tensor", types.SimpleNamespace
)
MXFP8Tensor = stand_in(
    "MXFP8Tensor", "transformer_engine.pytorch.tensor.mxfp8_tensor", types.SimpleNamespace
)
TELinear = stand_in("Linear", f"{MODULES}.linear", forward=lambda self, x: x)


def te_linear(rows: int = 6, columns: int = 8, bias: bool = True, fp8: bool = True, **changes):
    """The attributes of te.Linear in TE 2.12 that matter here; an absent bias is an empty tensor there."""
    module = TELinear()
    weight = torch.randn(rows, columns)
    module.weight = nn.Parameter(weight)
    if fp8:
        raw, scale_inv = quantize_weight(weight)
        del module.weight
        module.weight = float8(raw, scale_inv)
    module.bias = nn.Parameter(torch.randn(rows)) if bias else torch.empty(0)
    facts = {
        "tp_size": 1,
        "parallel_mode": None,
        "sequence_parallel": False,
        "weight_names": ["weight"],
        "return_bias": False,
        "fsdp_wrapped": False,
        "fp8_meta": {"fp8_checkpoint": False, "fp8_group": None},
    }
    for name, value in (facts | changes).items():
        setattr(module, name, value)
    return module


def float8(raw: Tensor, scale_inv: Tensor, dtype: str = "kFloat8E4M3", **changes: Any) -> Any:
    return Float8Tensor(
        **{
            "_data": raw,
            "_scale_inv": scale_inv,
            "_fp8_dtype": types.SimpleNamespace(name=dtype),
            "_transpose": torch.full_like(raw.t(), 255),  # stale: NaN everywhere
            "_transpose_invalid": True,
        }
        | changes
    )


def te_meta(length: int = 3, scales: tuple[float, float] = (1.0, 1.0), gemms: int = 1, **recipe):
    """fp8_meta after `scales` of x and dy and histories to match; scale 1 is a state never used."""
    values = {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": length,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
    }
    meta = {"recipe": types.SimpleNamespace(**(values | recipe))}
    for key, tensors, scale in (("scaling_fwd", 3, scales[0]), ("scaling_bwd", 2, scales[1])):
        history = torch.zeros(length, tensors * gemms)
        if scale != 1:
            history[1:] = torch.arange(1.0, length)[:, None] + torch.arange(tensors * gemms) * 10
        column = torch.full((tensors * gemms,), 7.0)
        column[0] = scale
        meta[key] = types.SimpleNamespace(amax_history=history, scale=column)
    return meta
