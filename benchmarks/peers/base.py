# SPDX-License-Identifier: Apache-2.0
"""What a layer is given (`Case`), what it must offer (`Peer`), and how it is checked against float64 (`fault`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

PLAIN_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
# The coarser operand, dy in e5m2, has 2 bits of mantissa: off by 2^-3 at most, by 0.05 in the root mean square
FP8_TOLERANCE = 0.06
# TE draws 8 bits per element and drops floor(256 p) / 256 of them: up to 1/256 fewer than asked for
KEEP_TOLERANCE = 1 / 256 + 0.002
SCALING = 2


class Unavailable(Exception):
    """The peer cannot be built here; the message says why and becomes the row's check."""


@dataclass(frozen=True)
class Case:
    """y = x Wᵀ + bias + scaling · D(x) Aᵀ Bᵀ.

    x [M, K], W [N, K], bias [N], dy [M, N] in one dtype; A [R, K] and B [N, R] fp32 with values that bf16 holds
    exactly, so that all peers compute with the same adapter.
    """

    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor
    lora_A: Tensor
    lora_B: Tensor
    scaling: int
    p: float

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.x.shape[0], *self.weight.shape  # type: ignore[return-value]

    @property
    def rank(self) -> int:
        return self.lora_A.shape[0]

    def linear(self) -> nn.Linear:
        """A frozen nn.Linear over this weight and bias, not copied."""
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear

    def with_rows(self, m: int) -> Case:
        """The same layer, other x and dy of m rows."""
        generator = torch.Generator(self.x.device).manual_seed(m)
        x, dy = (
            torch.randn(m, size, generator=generator, device=self.x.device).to(self.x.dtype)
            for size in (self.x.shape[1], self.dy.shape[1])
        )
        return replace(self, x=x, dy=dy)

    def without_dropout(self) -> Case:
        return replace(self, p=0.0)

    def without_base(self) -> Case:
        """W = 0: what is left of dx is the adapter's, and its zeros are the dropout mask."""
        return replace(self, weight=torch.zeros_like(self.weight))


def make_case(shape: str, rank: int, p: float, device: torch.device) -> Case:
    """Base and adapter contribute alike to y and to dx; bf16 on a GPU, fp32 on a CPU."""
    m, n, k = map(int, shape.split("x"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    normal = functools.partial(
        torch.randn, generator=torch.Generator(device).manual_seed(0), device=device
    )
    return Case(
        x=normal(m, k).to(dtype),
        dy=normal(m, n).to(dtype),
        weight=(normal(n, k) / k**0.5).to(dtype),
        bias=normal(n).to(dtype),
        lora_A=(normal(rank, k) / k**0.5).bfloat16().float(),
        lora_B=(normal(n, rank) / (SCALING * rank**0.5)).bfloat16().float(),
        scaling=SCALING,
        p=p,
    )


class Peer:
    """A layer with its own x and adapter; its W and bias are frozen.

    Attributes: `has_lora`; `fp8`, whether its operands are rounded to FP8; `eager`, whether its memory is the caching
    allocator's to count; `adapters`, A [R, K] and B [N, R], which `step` differentiates by; `adapter_dtype`.
    """

    has_lora = True
    fp8 = True
    eager = True

    def __init__(self, case: Case) -> None:
        self.case = case
        self.x = case.x.clone().requires_grad_()
        self.dy = case.dy
        self.adapters: tuple[Tensor, ...] = ()

    def take(self, case: Case) -> None:
        """Go on with the x and dy of `case`, which has this layer's weight and adapter."""
        self.case, self.x, self.dy = case, case.x.clone().requires_grad_(), case.dy

    def weight_bytes(self) -> int | None:
        """Of W, in every layout that is kept between steps; None where it is not looked into."""
        return None

    @property
    def adapter_dtype(self) -> str:
        return str(self.adapters[0].dtype).removeprefix("torch.") if self.adapters else ""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_only(self) -> Tensor:
        """y, with everything that backward needs saved."""
        return self.forward(self.x)

    def step(self) -> tuple[Tensor, ...]:
        """(y, dx, dA, dB), without the last two where there is no adapter."""
        y = self.forward(self.x)
        return y.detach(), *torch.autograd.grad(y, (self.x, *self.adapters), self.dy)

    def warm_up(self) -> None:
        """So often that delayed scales are those of the data."""
        for _ in range(3):
            self.step()


def need_gpu(case: Case) -> None:
    if not case.x.is_cuda:
        raise Unavailable("needs a GPU")


def exact(case: Case, lora: bool, keep: Tensor | None = None) -> tuple[Tensor, ...]:
    """float64 (y, dx, dA, dB), or (y, dx); `keep` [M, K] is the dropout mask, None without dropout."""
    x, dy, w = case.x.double(), case.dy.double(), case.weight.double()
    y, dx = x @ w.t() + case.bias.double(), dy @ w
    if not lora:
        return y, dx
    a, b = case.lora_A.double(), case.lora_B.double()
    factor: Tensor | float = 1.0 if keep is None else keep.double() / (1 - case.p)
    dropped = x * factor
    s, ds = dropped @ a.t(), case.scaling * dy @ b
    y += case.scaling * s @ b.t()
    dx += factor * (ds @ a)
    return y, dx, ds.t() @ dropped, case.scaling * dy.t() @ s


def relative_error(result: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm; inf for a result of another shape."""
    if result.shape != expected.shape:
        return float("inf")
    return float((result.double() - expected).norm() / expected.norm())


def fault(peer: Peer, truth: tuple[Tensor, ...]) -> tuple[str, float]:
    """(what of a peer without dropout is wrong, "" if nothing; its largest error against `truth`)."""
    peer.warm_up()
    return _compare(peer, peer.step(), truth)


def dropout_fault(peer: Peer) -> str:
    """What is wrong with a peer over `without_base()`: the mask is read off dx, the rest must be what it implies."""
    peer.warm_up()
    results = peer.step()
    keep = results[1] != 0
    kept = float(keep.double().mean())
    expected, chance = 1 - peer.case.p, (peer.case.p / keep.numel()) ** 0.5
    if abs(kept - expected) > KEEP_TOLERANCE + 4 * chance:
        return f"keeps {kept:.4f} of dx, expected {expected:.4f}"
    return _compare(peer, results, exact(peer.case, True, keep))[0]


def _compare(
    peer: Peer, results: tuple[Tensor, ...], truth: tuple[Tensor, ...]
) -> tuple[str, float]:
    tolerance = FP8_TOLERANCE if peer.fp8 else PLAIN_TOLERANCE[peer.case.x.dtype]
    names = ("y", "dx", "dA", "dB")[: len(truth)]
    if len(results) != len(truth):
        return f"{len(results)} results, expected {', '.join(names)}", float("inf")
    errors = [relative_error(*pair) for pair in zip(results, truth, strict=True)]
    wrong = [f"{n} {e:.1e}" for n, e in zip(names, errors, strict=True) if not e <= tolerance]
    return ", ".join(wrong), max(errors)
