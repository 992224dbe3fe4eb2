# SPDX-License-Identifier: Apache-2.0
"""What a decoder layer is given (`LayerCase`), what it must offer (`LayerPeer`), and any of them in two graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.peers.base import Unavailable

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK, ALPHA, P = 16, 32, 0.1
SCALING = ALPHA // RANK
CHECKED_TOKENS = 256


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
        self.capture(of)

    def capture(self, of: LayerPeer) -> None:
        """Set `y`, `grads`, and what replays both."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            of.warm_up()
        torch.cuda.current_stream().wait_stream(side)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward):
            y = of.forward()
        with torch.cuda.graph(backward, pool=forward.pool()):
            self.grads = of.backward(y)
        self.y = y.detach()
        self.replay_forward: Callable[[], object] = forward.replay
        self.replay_backward: Callable[[], object] = backward.replay

    def forward(self) -> Tensor:
        self.replay_forward()
        return self.y

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        self.replay_backward()
        return self.grads
