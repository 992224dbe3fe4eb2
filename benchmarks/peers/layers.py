# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of one size with the same weights and adapters, behind one interface; TE's are in te_layers.py.

    y = h + MLP(norm(h))      h = x + o(attention(rope(q, k), v))      q, k, v of norm(x)      causal, grouped queries

x, y and dy are [1, T, H]. LoRA with R = 16 and alpha = 32 is on q, k, v and o. All compute the same layer: q, k and v
have equal As, each a copy of its own, but in TE's fused projection, which has one A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lorakernels.graphs import CudaBackend
from lorakernels.graphs.device.backend import CudaGraph
from torch import Tensor, nn

from benchmarks.peers.base import Unavailable, relative_error
from benchmarks.peers.fp8_models import adapt_in_fp8
from benchmarks.peers.layer_case import (
    ADAPTED,
    ALPHA,
    RANK,
    SCALING,
    LayerCase,
    LayerPeer,
    TwoGraphs,
)
from benchmarks.peers.plain import PlainLora
from lorakernels import BlockScaling, LoRAConfig, PhiloxState, apply_lora, fuse

EPS, THETA = 1e-5, 10000.0
# Rounding to FP8 errs by about 0.04 a product (e4m3) and 0.06 (e5m2), and four products follow each other in a layer
FP8_TOLERANCE = 0.2
PLAIN_TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}


def transformers_or_unavailable() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Unavailable(f"transformers is not installed ({error})") from error
    return transformers


def hf_model(case: LayerCase) -> Any:
    """A frozen LlamaForCausalLM whose only layer holds the case's weights, not copied."""
    transformers = transformers_or_unavailable()
    size = case.size
    config = transformers.LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        num_hidden_layers=1,
        vocab_size=64,
        max_position_embeddings=max(size.tokens, 64),
        rms_norm_eps=EPS,
        rope_theta=THETA,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    layer = model.model.layers[0]
    for name, weight in case.weights.items():
        linear_of(layer, name).weight = nn.Parameter(weight, requires_grad=False)
    for name, weight in case.norms.items():
        getattr(layer, name).weight = nn.Parameter(weight, requires_grad=False)
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        module.to_empty(device=case.device).to(case.x.dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(case.device)
    return model.requires_grad_(False).train()


def parent_of(layer: nn.Module, name: str) -> Any:
    return layer.self_attn if name in ADAPTED else layer.mlp


def linear_of(layer: nn.Module, name: str) -> Any:
    return getattr(parent_of(layer, name), name)


def rotary(model: Any, case: LayerCase) -> tuple[Tensor, Tensor]:
    positions = torch.arange(case.size.tokens, device=case.device)[None]
    cos, sin = model.model.rotary_emb(case.x, positions)
    return cos.detach(), sin.detach()


class HfLayer(LayerPeer):
    """transformers' own layer through SDPA, as `adapt` changes it."""

    fp8 = False

    def __init__(self, case: LayerCase) -> None:
        super().__init__(case)
        model = hf_model(case)
        self.embeddings = rotary(model, case)
        self.module: Any = model.model.layers[0]
        self.adapt(model)

    def adapt(self, model: Any) -> None:
        """Put the adapters in, and into `self.adapters`."""

    def layer(self, x: Tensor) -> Tensor:
        y = self.module(x, attention_mask=None, position_embeddings=self.embeddings)
        return y[0] if isinstance(y, tuple) else y

    def adopt(self, name: str, a: Tensor, b: Tensor) -> None:
        """Give the adapter of a projection the case's values."""
        with torch.no_grad():
            a.copy_(self.case.A[name])
            b.copy_(self.case.B[name])
        self.adapters[f"{name}.A"], self.adapters[f"{name}.B"] = a, b


class HfPlain(HfLayer):
    lora = False


class HfPeft(HfLayer):
    """PEFT's adapters in the base's dtype (its fp32 default is slower)."""

    def adapt(self, model: Any) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise Unavailable(f"peft is not installed ({error})") from error
        config = LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=self.case.p, target_modules=list(ADAPTED)
        )
        inject_adapter_in_model(config, model).train()
        for name in ADAPTED:
            linear = linear_of(self.module, name).to(self.case.x.dtype)
            a, b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
            self.adopt(name, a, b)


class HfPeftCompiled(HfPeft):
    def adapt(self, model: Any) -> None:
        if self.case.device.type != "cuda":
            raise Unavailable("needs a GPU")
        super().adapt(model)
        self.module.compile(dynamic=False)


class Ours(HfLayer):
    """`apply_lora`, everything else in FP8 too, then `fuse` with the `save` given; None leaves the layer's code."""

    fp8 = True

    def __init__(self, case: LayerCase, save: str | None = None) -> None:
        self.save = save
        super().__init__(case)

    def adapt(self, model: Any) -> None:
        rng = PhiloxState(1, self.case.device)  # as `lorakernels finetune` has it
        report = adapt_in_fp8(model, ADAPTED, p=self.case.p, rng_state=rng)
        for name in ADAPTED:
            lora = linear_of(self.module, name)
            self.adopt(name, lora.lora_A, lora.lora_B)
        if self.save is not None:
            fused = fuse(model, save=self.save, tokens=self.case.size.tokens)
            self.predicted_bytes = fused.saved_bytes
        report.fp8_state.reduce_and_update()

        def after() -> None:
            report.fp8_state.reduce_and_update()
            rng.advance()

        self.after = after

    def graphed(self) -> LayerPeer:
        return OurGraphs(self)


class OurGraphs(TwoGraphs):
    """Forward and backward, each a graph as `lorakernels.graphs` captures, instantiates and launches it."""

    def capture(self, of: LayerPeer) -> None:
        self.backend = CudaBackend(of.x.device)  # keeps the graphs' memory
        with self.backend.session():
            of.warm_up()
            with self.backend.capture() as forward:
                y = of.forward()
            with self.backend.capture() as backward:
                self.grads = of.backward(y)
        self.y = y.detach()
        self.replay_forward = self._replay(forward.graph)
        self.replay_backward = self._replay(backward.graph)

    def _replay(self, graph: CudaGraph) -> Callable[[], object]:
        return lambda: graph.launch(self.backend.stream())


class OursInBlocks(Ours):
    """The same under BlockScaling, which has no state."""

    def __init__(self, case: LayerCase, save: str) -> None:
        super().__init__(case, save)

    def adapt(self, model: Any) -> None:
        rng = PhiloxState(1, self.case.device)
        config = LoRAConfig(
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=self.case.p,
            target_modules=list(ADAPTED),
            fp8=BlockScaling(),
        )
        apply_lora(model, config, frozen="fp8", rng_state=rng)
        for name in ADAPTED:
            lora = linear_of(self.module, name)
            self.adopt(name, lora.lora_A, lora.lora_B)
        assert self.save is not None
        try:
            fused = fuse(model, save=self.save, tokens=self.case.size.tokens)
        except ValueError as reason:
            raise Unavailable(str(reason)) from reason
        self.predicted_bytes = fused.saved_bytes
        self.after = rng.advance


@dataclass(frozen=True)
class Errors:
    """Relative errors, in the Frobenius norm, of y − x, of dx − dy and of the adapters' gradients."""

    found: dict[str, float]

    @property
    def largest(self) -> float:
        return max(self.found.values())


def truth(case: LayerCase, lora: bool) -> tuple[Tensor, ...]:
    """fp32 (y, dx, gradients) by transformers' layer, LoRA in torch ops."""
    peer = _Fp32(case.in_fp32(), lora)
    y = peer.forward()
    return y.detach(), *peer.backward(y)


class _Fp32(HfLayer):
    def __init__(self, case: LayerCase, lora: bool) -> None:
        self.lora = lora
        super().__init__(case)

    def adapt(self, model: Any) -> None:
        for name in ADAPTED if self.lora else ():
            base, values = linear_of(self.module, name), (self.case.A[name], self.case.B[name])
            new = PlainLora(base, *values, SCALING, 0.0)
            setattr(parent_of(self.module, name), name, new)
            self.adopt(name, new.lora_A, new.lora_B)


def errors(peer: LayerPeer, expected: tuple[Tensor, ...]) -> Errors:
    """Of a peer without dropout, after its warm-up; q, k and v's gradients of A are added, as they have one A."""
    peer.warm_up()
    y = peer.forward()
    dx, *grads = peer.backward(y)
    found = {
        "y": relative_error(y.detach().float() - peer.case.x, expected[0] - peer.case.x),
        "dx": relative_error(dx.float() - peer.case.dy, expected[1] - peer.case.dy),
    }
    ours = _by_name(dict(zip(peer.adapters, grads, strict=True)))
    names = [f"{name}.{kind}" for name in ADAPTED for kind in "AB"]
    theirs = _by_name(dict(zip(names, expected[2:], strict=False)))
    if peer.lora:
        found |= {name: relative_error(ours[name].float(), theirs[name]) for name in theirs}
    return Errors(found)


def _by_name(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the fused q, k, v adapter and of o's, whatever the projections are called."""
    if "qkv.A" in grads or not grads:
        return grads
    qkv = ("q_proj", "k_proj", "v_proj")
    return {
        "qkv.A": sum((grads[f"{name}.A"].float() for name in qkv[1:]), grads["q_proj.A"].float()),
        "qkv.B": torch.cat([grads[f"{name}.B"] for name in qkv]),
        "o_proj.A": grads["o_proj.A"],
        "o_proj.B": grads["o_proj.B"],
    }


def fault(peer: LayerPeer, found: Errors) -> str:
    """What of a peer is wrong, "" if nothing."""
    tolerance = FP8_TOLERANCE if peer.fp8 else PLAIN_TOLERANCE[peer.case.x.dtype]
    wrong = [f"{n} {e:.1e}" for n, e in found.found.items() if not e <= tolerance]
    return ", ".join(wrong)
