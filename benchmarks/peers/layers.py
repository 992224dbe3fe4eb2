# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of one size with the same weights and adapters, behind one interface; TE's are in te_layers.py.

    y = h + MLP(norm(h))      h = x + o(attention(rope(q, k), v))      q, k, v of norm(x)      causal, grouped queries

x, y, dy [1, T, H]. LoRA, R = 16 and alpha = 32, is on q, k, v and o. One A serves q, k and v in all of them, each
having a copy of its own but for TE's fused projection, so that all compute the same layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.base import Unavailable, relative_error
from benchmarks.peers.fp8_models import adapt_in_fp8
from benchmarks.peers.plain import PlainLora
from lorakernels import PhiloxState, fuse

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK, ALPHA, P = 16, 32, 0.1
SCALING = ALPHA // RANK
EPS, THETA = 1e-5, 10000.0
CHECKED_TOKENS = 256
# Rounding to FP8 errs by about 0.04 a product (e4m3) and 0.06 (e5m2), and four products follow each other in a layer
FP8_TOLERANCE = 0.2
PLAIN_TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}


@dataclass(frozen=True)
class Size:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tokens: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Projection → [N, K]."""
        q, kv = self.hidden, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.ffn, self.hidden),
            "up_proj": (self.ffn, self.hidden),
            "down_proj": (self.hidden, self.ffn),
        }

    def flops(self, lora: bool) -> int:
        """Of forward and backward; frozen weights have no gradient, and attention is causal."""
        t, shapes = self.tokens, self.linears
        base = sum(4 * t * n * k for n, k in shapes.values())
        adapters = sum(6 * t * RANK * sum(shapes[name]) for name in ADAPTED) if lora else 0
        return base + adapters + 6 * t * t * self.hidden


SIZES = {
    "tiny": Size(64, 128, 4, 2, 32),
    "small": Size(2048, 8192, 32, 8, 1024),
    "medium": Size(4096, 14336, 32, 8, 2048),
    "large": Size(8192, 28672, 64, 8, 8192),
}


@dataclass(frozen=True)
class LayerCase:
    """Everything a peer is given; A [R, K] and B [N, R] are fp32 with values that bf16 holds exactly."""

    size: Size
    p: float
    x: Tensor
    dy: Tensor
    weights: dict[str, Tensor]
    norms: dict[str, Tensor]
    A: dict[str, Tensor]
    B: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        return self.x.device

    def to_check(self) -> LayerCase:
        """The same layer without dropout, for its first tokens."""
        tokens = min(CHECKED_TOKENS, self.size.tokens)
        x, dy = self.x[:, :tokens].clone(), self.dy[:, :tokens].clone()
        return replace(self, size=replace(self.size, tokens=tokens), p=0.0, x=x, dy=dy)

    def in_fp32(self) -> LayerCase:
        weights = {name: w.float() for name, w in self.weights.items()}
        norms = {name: w.float() for name, w in self.norms.items()}
        return replace(self, x=self.x.float(), dy=self.dy.float(), weights=weights, norms=norms)


def make_layer_case(size: Size, p: float, device: torch.device) -> LayerCase:
    """Base and adapter contribute alike to each projection; bf16 on a GPU, fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    normal = functools.partial(
        torch.randn, generator=torch.Generator(device).manual_seed(0), device=device
    )
    shape, shapes = (1, size.tokens, size.hidden), size.linears
    down = (normal(RANK, size.hidden) / size.hidden**0.5).bfloat16().float()
    o_down = (normal(RANK, size.hidden) / size.hidden**0.5).bfloat16().float()
    return LayerCase(
        size=size,
        p=p,
        x=normal(*shape).to(dtype),
        dy=normal(*shape).to(dtype),
        weights={name: (normal(n, k) / k**0.5).to(dtype) for name, (n, k) in shapes.items()},
        norms={
            name: (1 + 0.1 * normal(size.hidden)).to(dtype)
            for name in ("input_layernorm", "post_attention_layernorm")
        },
        A={name: o_down if name == "o_proj" else down for name in ADAPTED},
        B={
            name: (normal(shapes[name][0], RANK) / (SCALING * RANK**0.5)).bfloat16().float()
            for name in ADAPTED
        },
    )


class LayerPeer:
    """A layer with its own x; only adapters are trained.

    Attributes: `lora`; `fp8`, whether operands are rounded to FP8; `adapters`, the tensors that `backward`
    differentiates by besides x; `after`, what belongs to a step besides its gradients; `predicted_bytes`, what the
    peer says that a forward keeps, if it says so.
    """

    lora = True
    fp8 = True
    predicted_bytes: int | None = None

    def __init__(self, case: LayerCase) -> None:
        self.case = case
        self.x = case.x.clone().requires_grad_()
        self.dy = case.dy
        self.adapters: dict[str, Tensor] = {}
        self.after: Callable[[], object] = lambda: None

    def layer(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self) -> Tensor:
        return self.layer(self.x)

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        """(dx, then the gradients of `adapters`)."""
        grads = torch.autograd.grad(y, (self.x, *self.adapters.values()), self.dy)
        self.after()
        return grads

    def warm_up(self) -> None:
        """So often that delayed scales are those of the data."""
        for _ in range(3):
            self.backward(self.forward())

    def graphed(self) -> LayerPeer:
        """This layer with its forward and its backward in graphs; it is not used otherwise from then on."""
        return TwoGraphs(self)


class TwoGraphs(LayerPeer):
    """Forward and backward, each a CUDA graph by torch.cuda.graph, in one pool."""

    def __init__(self, of: LayerPeer) -> None:
        if not of.x.is_cuda:
            raise Unavailable("needs a GPU")
        self.of, self.case, self.x, self.dy = of, of.case, of.x, of.dy
        self.lora, self.fp8, self.adapters = of.lora, of.fp8, of.adapters
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            of.warm_up()
        torch.cuda.current_stream().wait_stream(side)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward):
            y = of.forward()
        with torch.cuda.graph(self._backward, pool=self._forward.pool()):
            self._grads = of.backward(y)
        self._y = y.detach()

    def forward(self) -> Tensor:
        self._forward.replay()
        return self._y

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        self._backward.replay()
        return self._grads


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

    def __init__(
        self, case: LayerCase, save: str | None = None, weight_layout: str = "single"
    ) -> None:
        self.save, self.weight_layout = save, weight_layout
        super().__init__(case)

    def adapt(self, model: Any) -> None:
        rng = PhiloxState(1, self.case.device)  # as `lorakernels finetune` has it
        report = adapt_in_fp8(
            model, ADAPTED, p=self.case.p, weight_layout=self.weight_layout, rng_state=rng
        )
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
