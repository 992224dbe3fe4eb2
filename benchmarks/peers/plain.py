# SPDX-License-Identifier: Apache-2.0
"""Peers over a base that is not FP8: nn.Linear alone, PEFT's own layer (bf16 adapters), hand-written autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.base import Case, Peer, Unavailable, need_gpu


class FrozenLinear(Peer):
    has_lora = False
    fp8 = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.linear = case.linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class PeftLora(Peer):
    """`peft.tuners.lora.Linear`, adapters in the base's dtype (PEFT's fp32 default is slower)."""

    fp8 = False

    def __init__(self, case: Case) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise Unavailable(f"peft is not installed ({error})") from error
        super().__init__(case)
        config = LoraConfig(
            r=case.rank,
            lora_alpha=case.scaling * case.rank,
            lora_dropout=case.p,
            target_modules=["linear"],
        )
        holder = inject_adapter_in_model(config, nn.ModuleDict({"linear": case.linear()}))
        layer: Any = holder["linear"]
        self.layer = layer.to(case.x.dtype).train()
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        with torch.no_grad():
            a.copy_(case.lora_A)
            b.copy_(case.lora_B)
        self.adapters = (a, b)
        self.call = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class PeftCompiled(PeftLora):
    def __init__(self, case: Case) -> None:
        need_gpu(case)
        super().__init__(case)
        self.call = torch.compile(self.layer, dynamic=False)


class HandAutograd(Peer):
    """Forward and backward written by hand over cuBLAS, as unsloth's LoRA_W does, with the dropout it lacks."""

    fp8 = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        dtype = case.x.dtype
        a, b = (t.to(dtype, copy=True).requires_grad_() for t in (case.lora_A, case.lora_B))
        self.adapters = (a, b)

    def forward(self, x: Tensor) -> Tensor:
        case = self.case
        return _HandLora.apply(x, case.weight, case.bias, *self.adapters, case.scaling, case.p)


class _HandLora(torch.autograd.Function):
    """Saves x and the mask; s and D(x) are computed again in backward, dx is accumulated in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor, a: Tensor, b: Tensor, scaling: float, p: float
    ) -> Tensor:
        dropped, mask = torch.native_dropout(x, p, True) if p > 0 else (x, None)
        y = F.linear(x, w, bias)
        y.addmm_(dropped @ a.t(), b.t(), alpha=scaling)
        ctx.save_for_backward(x, w, a, b, mask)
        ctx.scaling, ctx.p = scaling, p
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, a, b, mask = ctx.saved_tensors
        dropped = (
            x if mask is None else torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - ctx.p))
        )
        ds = (dy @ b).mul_(ctx.scaling)
        da, db = ds.t() @ dropped, (dy.t() @ (dropped @ a.t())).mul_(ctx.scaling)
        dx = dy @ w
        if mask is None:
            dx.addmm_(ds, a)
        else:
            dx.add_(torch.ops.aten.native_dropout_backward(ds @ a, mask, 1 / (1 - ctx.p)))
        return dx, None, None, da, db, None, None


class PlainLora(nn.Module):
    """base(x) + scaling · B(A(dropout(x))), the adapter in the compute dtype of x, its parameters in fp32."""

    def __init__(
        self, base: nn.Module, lora_A: Tensor, lora_B: Tensor, scaling: float, p: float
    ) -> None:
        super().__init__()
        self.base, self.scaling, self.dropout = base, scaling, nn.Dropout(p)
        self.lora_A, self.lora_B = nn.Parameter(lora_A.clone()), nn.Parameter(lora_B.clone())

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        s = F.linear(self.dropout(x), self.lora_A.to(x.dtype))
        return self.base(x, **options) + F.linear(s, self.lora_B.to(x.dtype)) * self.scaling
