# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's decoder layers: te.TransformerLayer with and without LoRA, te.Linear in transformers' layer.

All use DelayedScaling with TE's defaults, HYBRID. All base weights are frozen and cast to FP8 once
(`is_first_microbatch`). te.TransformerLayer keeps q, k and v in one weight, and its adapter is one too, with one A and
one B. MLPerf's Llama-2-70B submission has it so, and it is less work than three. LoRA is in torch ops with bf16
adapters, on the normed x that TE returns if it is asked to. "graphed" is te.make_graphed_callables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.base import Unavailable
from benchmarks.peers.layer_case import ADAPTED, SCALING, LayerCase, LayerPeer
from benchmarks.peers.layers import EPS, THETA, hf_model, linear_of, parent_of, rotary
from benchmarks.peers.te import autocast, frozen_linear, te_or_unavailable


class Adapter(nn.Module):
    """scaling · B(between(A(dropout(x)))) in x's dtype; `between` exchanges rows of split layers."""

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        p: float,
        dtype: torch.dtype,
        between: Callable[[Tensor], Tensor] = lambda s: s,
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(a.to(dtype)), nn.Parameter(b.to(dtype))
        self.dropout = nn.Dropout(p)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        s = self.between(F.linear(self.dropout(x), self.lora_A))
        return F.linear(s, self.lora_B) * SCALING


class WithAdapter(nn.Module):
    """A TE module, one of whose results is [y, …] of x, or of the normed x that it returns last."""

    def __init__(self, base: nn.Module, adapter: Adapter, normed: bool) -> None:
        super().__init__()
        self.base, self.adapter, self.normed = base, adapter, normed
        if normed:
            base.return_layernorm_output = True  # type: ignore[assignment]

    def forward(self, x: Tensor, **options: Any) -> Any:
        found = self.base(x, **options)
        if self.normed:
            y, normed = found
            return y + self.adapter(normed)
        y, *rest = found if isinstance(found, tuple) else (found,)
        y = y + self.adapter(x)
        return (y, *rest) if rest else y


LLAMA: dict[str, Any] = {  # what te.TransformerLayer takes for a layer of Llama
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "self_attn_mask_type": "causal",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": False,
    "fuse_qkv_params": True,
    "qkv_weight_interleaved": False,
}


class TePeer(LayerPeer):
    """`self.module(x, is_first_microbatch=…)` under TE's autocast."""

    module: Any

    def __init__(self, case: LayerCase) -> None:
        self.te = te_or_unavailable()
        if case.device.type != "cuda":
            raise Unavailable("needs a GPU")
        super().__init__(case)
        self.first = True
        self.module = self.make()

    def make(self) -> nn.Module:
        raise NotImplementedError

    def layer(self, x: Tensor) -> Tensor:
        with autocast(self.te):
            return self.module(x, is_first_microbatch=self.first)

    def warm_up(self) -> None:
        self.first = True  # a weight's scale comes from the amax of the casts before
        super().warm_up()
        self.first = False
        super().warm_up()

    def graphed(self) -> LayerPeer:
        from transformer_engine.common.recipe import DelayedScaling

        self.module = self.te.make_graphed_callables(
            self.module,
            (self.x,),
            enabled=True,
            recipe=DelayedScaling(),
            cache_quantized_params=True,
        )
        self.warm_up()
        return self


class TeLayer(TePeer):
    lora = False

    def make(self) -> nn.Module:
        size = self.case.size
        layer = self.te.TransformerLayer(
            size.hidden,
            size.ffn,
            size.heads,
            num_gqa_groups=size.kv_heads,
            layernorm_epsilon=EPS,
            **LLAMA,
            params_dtype=self.case.x.dtype,
            attn_input_format="bshd",
            device=self.case.device,
        )
        self.load(layer)
        layer.requires_grad_(False)
        self.adapt(layer)
        return _Rotated(layer, self.te, size.head_dim, size.tokens)

    @torch.no_grad()
    def load(self, layer: Any) -> None:
        w, norms = self.case.weights, self.case.norms
        attention, mlp = layer.self_attention, layer.layernorm_mlp
        qkv = torch.cat([w[name] for name in ("q_proj", "k_proj", "v_proj")])
        attention.layernorm_qkv.weight.copy_(qkv)
        attention.layernorm_qkv.layer_norm_weight.copy_(norms["input_layernorm"])
        attention.proj.weight.copy_(w["o_proj"])
        mlp.layer_norm_weight.copy_(norms["post_attention_layernorm"])
        mlp.fc1_weight.copy_(torch.cat([w["gate_proj"], w["up_proj"]]))
        mlp.fc2_weight.copy_(w["down_proj"])

    def adapt(self, layer: Any) -> None:
        """Nothing: the layer without LoRA."""


class TeLayerLora(TeLayer):
    lora = True

    def adapt(self, layer: Any) -> None:
        case, attention, dtype = self.case, layer.self_attention, self.case.x.dtype
        b = torch.cat([case.B[name] for name in ("q_proj", "k_proj", "v_proj")])
        qkv = Adapter(case.A["q_proj"], b, case.p, dtype)
        o = Adapter(case.A["o_proj"], case.B["o_proj"], case.p, dtype)
        attention.layernorm_qkv = WithAdapter(attention.layernorm_qkv, qkv, normed=True)
        attention.proj = WithAdapter(attention.proj, o, normed=False)
        self.adapters = {
            "qkv.A": qkv.lora_A,
            "qkv.B": qkv.lora_B,
            "o_proj.A": o.lora_A,
            "o_proj.B": o.lora_B,
        }


class _Rotated(nn.Module):
    """A te.TransformerLayer with tensors as its only arguments, as graphs need it."""

    def __init__(self, layer: nn.Module, te: Any, head_dim: int, tokens: int) -> None:
        super().__init__()
        self.inner = layer
        angles = te.RotaryPositionEmbedding(head_dim, rotary_base=THETA)(tokens)
        self.register_buffer("angles", angles)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return self.inner(x, rotary_pos_emb=self.angles, is_first_microbatch=is_first_microbatch)


class HfTeLora(TePeer):
    """transformers' layer, its linear layers te.Linear, LoRA in torch ops over those adapted."""

    def make(self) -> nn.Module:
        model = hf_model(self.case)
        layer = model.model.layers[0]
        shared = First()
        for name in self.case.weights:
            base: nn.Module = Cached(frozen_linear(self.te, linear_of(layer, name)), shared)
            if name in ADAPTED:
                values = (self.case.A[name], self.case.B[name])
                adapter = Adapter(*values, self.case.p, self.case.x.dtype)
                self.adapters |= {f"{name}.A": adapter.lora_A, f"{name}.B": adapter.lora_B}
                base = WithAdapter(base, adapter, normed=False)
            setattr(parent_of(layer, name), name, base)
        return _Embedded(layer, rotary(model, self.case), shared)


class First:
    """Whether the weights have to be cast, for all layers at once."""

    value: bool | None = True


class Cached(nn.Module):
    """A te.Linear that transformers may call with x alone."""

    def __init__(self, linear: nn.Module, first: First) -> None:
        super().__init__()
        self.linear, self._first = linear, first

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, is_first_microbatch=self._first.value)


class _Embedded(nn.Module):
    def __init__(self, layer: nn.Module, embeddings: tuple[Tensor, Tensor], first: First) -> None:
        super().__init__()
        self.inner, self._first = layer, first
        self.register_buffer("cos", embeddings[0])
        self.register_buffer("sin", embeddings[1])

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        self._first.value = is_first_microbatch
        y = self.inner(x, attention_mask=None, position_embeddings=(self.cos, self.sin))
        return y[0] if isinstance(y, tuple) else y
