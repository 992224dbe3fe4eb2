# SPDX-License-Identifier: Apache-2.0
"""A decoder layer as three autograd nodes around scaled dot product attention, in evaluation order:

    norm_qkv     x8 = RMSNorm(h)                   qkv = RoPE([q, k, v](x8))                → q, k, v: views of qkv; h
    (attention)                                                                             → out
    output       h2 = h + o(out)
    mlp          x8 = RMSNorm(h2)   g, u = [gate, up](x8)   a8 = act(g) ⊙ u                 → h2 + down(a8)

    mlp'         da = down'(dy)     dg, du = act'(da)        dh2 = dy + RMSNorm'([gate, up]'(dg, du))
    output'      dout = o'(dh2)     the residual's gradient is dh2
    norm_qkv'    dqkv = RoPE'(dq, dk, dv)                     dh = dh2 + RMSNorm'([q, k, v]'(dqkv))

`norm_qkv` also returns h, to which `output` adds. So h's gradient arrives at `norm_qkv`, and RMSNorm's backward adds it
there. `linear` computes the projections with their adapters. A frozen projection without adapters keeps no
activation. Without a norm, x8 is h, or h2, quantized. act is silu in ops/swiglu.py, or gelu in geglu.py.

Kept for backward: h, h2, gate, up and a rstd per norm; attention keeps qkv, out and its logsumexp. Adapters add s of
each adapted input, and two matrices of stacked B's: q, k, v have one, gate and up another.

    "full"       also keeps x8 of each adapted input
    "recompute"  computes these inputs again, unquantized, from h, out, h2, gate and up; dA alone reads them,
                 and RMSNorm's may differ in the last bit from what forward quantized (ops/rms_norm.py)
    "fp8"        as "recompute", with gate and up in e4m3, which SwiGLU writes: one scale for 256 columns of a row

FP8 attention (attention/fp8.py) keeps q, k, v and out as bytes. `output` keeps the same bytes in place of out or x8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.decoder.geglu import geglu, geglu_backward
from lorakernels.autograd.decoder.node import (
    Trained,
    Wanted,
    adapter_tensors,
    adapters,
    flat,
    no_gradients,
    rms_norm,
    rms_norm_backward,
    weights,
)
from lorakernels.autograd.linear.linear import (
    bias_gradients,
    gradients,
    lora_down,
    projected,
    quantize_down,
    stack_B,
)
from lorakernels.autograd.linear.projections import Projections
from lorakernels.autograd.linear.saved import ByName, keep, kept
from lorakernels.numerics.gate_up import packed
from lorakernels.recorded.once import once_differentiable
from lorakernels.values import Scaled


class Away(Protocol):
    def bring(self) -> Tensor:
        """The tensor that was kept, on its device."""


class Keeper(Protocol):
    def keep(self, x: Tensor) -> Away:
        """Keep `x` for backward."""


@dataclass(frozen=True)
class QKVCall:
    """The arguments of `norm_qkv` except autograd's tensors. cos and sin are [T, D]; T divides the number of tokens.

    `whole` is (B, T) of all ranks' tokens if ranks share rows. h has the tokens of this rank.
    """

    to: Projections
    eps: float
    heads: int
    kv_heads: int
    cos: Tensor
    sin: Tensor
    save: str
    whole: tuple[int, int] | None = None


@dataclass(frozen=True)
class OutputCall:
    """The arguments of `output` except autograd's tensors.

    With `adds=False` its result is o(out), without the residual.
    `bytes_`, if given, are out [M, H D] in e4m3. An FP8 base multiplies them, and backward reads them instead of out.
    """

    to: Projections
    save: str
    adds: bool = True
    bytes_: Scaled | None = None


@dataclass(frozen=True)
class MLPCall:
    """The arguments of `mlp` except autograd's tensors. With `output=False` its result, which is not read, has no
    meaningful values.

    `away`, if given, keeps gate and up for backward.
    With `adds=False` the result is down(a8), without the residual.
    `act` is "silu" or "gelu_tanh".
    """

    gate_up: Projections
    down: Projections
    eps: float
    save: str
    output: bool = True
    away: Keeper | None = None
    adds: bool = True
    act: str = "silu"


class NormQKVNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        norm: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        call: QKVCall,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        to, trained, rows = call.to, Trained.of(call.to, params), flat(h)
        operand, s, rstd = _normed_input(rows, norm, call.eps, to)
        B, B_back = stack_B(to, trained.B)
        qkv, s = projected(operand, s, to, B, h.dtype)
        heads = _norm_heads_(qkv, call, q_norm, k_norm)
        ops.rope_qkv_(qkv, call.cos, call.sin, call.heads, call.kv_heads)
        need_x = any(ctx.needs_input_grad[:2])
        need_norm = need_x and norm is not None
        wanted = Wanted.of(need_x, ctx.needs_input_grad[5:], trained)
        again = wanted.needs.A and call.save != "full"
        ctx.call, ctx.wanted, ctx.shape = call, wanted, h.shape
        keep(
            ctx,
            h=rows if need_norm or again else None,
            norm=norm,
            rstd=rstd if need_norm else None,
            **adapter_tensors("", trained, s, operand if call.save == "full" else None, wanted),
            B=B_back if wanted else None,
            **weights("", to, wanted),
            **heads if wanted or any(ctx.needs_input_grad[2:4]) else {},
        )
        return *_heads(qkv, call.whole or h.shape[:-1], call), h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dh: Tensor) -> tuple[Any, ...]:
        call, saved, need = ctx.call, kept(ctx), ctx.needs_input_grad
        dqkv, d8, dnorms = _heads_backward(call, saved, need[2:4], dq, dk, dv)

        def operand() -> Scaled:
            if call.save == "full":
                return Scaled(saved["x8"], saved["x_scale_inv"])
            return Scaled(_normed(saved, call.eps))

        grads, dbias = no_gradients(call.to)
        if ctx.wanted:
            tensors = adapters("", saved, call.to, saved["B"])
            grads = gradients(call.to, dqkv, d8, operand, tensors, ctx.wanted.needs)
            dbias = bias_gradients(call.to, dqkv, ctx.wanted.bias)
        dx, dweight = rms_norm_backward(saved, grads.x, flat(dh), need[1])
        return (
            dx.view(ctx.shape) if need[0] and dx is not None else None,
            dweight,
            *dnorms,
            None,
            *grads.A,
            *grads.B,
            *dbias,
        )


def _normed_input(
    rows: Tensor, norm: Tensor | None, eps: float, to: Projections
) -> tuple[Scaled, Tensor | None, Tensor | None]:
    """(the projections' operand, s, rstd or None) of RMSNorm(rows), or of the rows as they are."""
    to = to.placed(rows.shape[0])
    if norm is None:
        return *quantize_down(rows, to), None
    scaling = to.scaling_ahead()
    apart = to.quantized and scaling is None  # the scale comes from the normed rows of all ranks
    unquantized = apart or to.adapted or not to.in_fp8
    power = to.spec.power_of_two
    normed, *x8, rstd = ops.rms_norm_quantize(rows, norm, eps, scaling, unquantized, power)
    if apart:
        return *quantize_down(normed, to), rstd
    return Scaled(*x8) if to.in_fp8 else Scaled(normed), lora_down(normed, to), rstd


def _normed(saved: ByName, eps: float) -> Tensor:
    """The input of the projections, unquantized, from the kept `h` and `norm`."""
    h: Tensor = saved["h"]
    return h if saved["norm"] is None else rms_norm(h, saved["norm"], eps)


def _heads(qkv: Tensor, tokens: tuple[int, ...], call: QKVCall) -> tuple[Tensor, ...]:
    """q [B, H, T, D], k and v [B, Hk, T, D]: views of qkv [M, (H + 2 Hk) D]. `tokens`: (B, T)."""
    counts = [call.heads, call.kv_heads, call.kv_heads]
    split = qkv.view(*tokens, sum(counts), qkv.shape[1] // sum(counts))
    return tuple(part.transpose(1, 2) for part in split.split(counts, 2))


def _columns(qkv: Tensor, call: QKVCall) -> tuple[Tensor, ...]:
    """q's, k's and v's columns of qkv [M, (H + 2 Hk) D]. One projection may have made all of them."""
    counts = (call.heads, call.kv_heads, call.kv_heads)
    dim = qkv.shape[1] // sum(counts)
    return qkv.split([count * dim for count in counts], 1)


def _normed_heads(
    qkv: Tensor, call: QKVCall, q_norm: Tensor | None, k_norm: Tensor | None
) -> list[tuple[str, Tensor, Tensor]]:
    """(name, weight, columns of qkv) for q and k, if they have an RMSNorm: of each head [D], or of all together."""
    parts = zip(("q", "k"), (q_norm, k_norm), _columns(qkv, call)[:2], strict=True)
    return [(name, weight, part) for name, weight, part in parts if weight is not None]


def _norm_heads_(
    qkv: Tensor, call: QKVCall, q_norm: Tensor | None, k_norm: Tensor | None
) -> dict[str, Tensor]:
    """Norm q and k in place, if they have norms. Returns what backward needs, by name."""
    saved: dict[str, Tensor] = {}
    for name, weight, columns in _normed_heads(qkv, call, q_norm, k_norm):
        # a copy: it is kept, and its place in qkv is overwritten
        x = columns.clone(memory_format=torch.contiguous_format).view(-1, weight.shape[0])
        normed, _, _, rstd = ops.rms_norm_quantize(x, weight, call.eps, None, True)
        columns.copy_(normed.view_as(columns))
        saved |= {f"{name}_h": x, f"{name}_norm": weight, f"{name}_rstd": rstd}
    return saved


def _heads_backward(
    call: QKVCall, saved: ByName, need: tuple[bool, ...], *grads: Tensor
) -> tuple[Tensor, Scaled | None, list[Tensor | None]]:
    """Backward of RoPE and of the heads' norms.

    Returns (dqkv [M, ΣN] times the multiplier, its bytes where RoPE has made them, [dq_norm, dk_norm]).
    """
    dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in grads)
    norms = (saved.get("q_norm"), saved.get("k_norm"))
    multiplier, dnorms, spec = call.to.multiplier, [None, None], call.to.spec
    assert multiplier is not None
    if norms == (None, None) and spec.power_of_two is not None:
        how = spec.backward_dtype, spec.power_of_two
        dqkv, *d8 = ops.rope_qkv_backward_quantize(dq, dk, dv, call.cos, call.sin, multiplier, *how)
        return dqkv, Scaled(*d8), [*dnorms]
    if norms == (None, None):
        dqkv = ops.rope_qkv_backward(dq, dk, dv, call.cos, call.sin, multiplier)
        return dqkv, None, [*dnorms]
    ones = torch.ones_like(multiplier)
    dqkv = ops.rope_qkv_backward(dq, dk, dv, call.cos, call.sin, ones)
    dnorm_of: dict[str, Tensor] = {}
    for name, weight, columns in _normed_heads(dqkv, call, *norms):
        d = columns.reshape(-1, weight.shape[0]).contiguous()
        x, rstd = saved[f"{name}_h"], saved[f"{name}_rstd"]
        dx, dweight = ops.rms_norm_backward(d, x, weight, rstd, None, need["qk".index(name)])
        columns.copy_(dx.view_as(columns))
        dnorm_of[name] = dweight.to(weight.dtype)
    for part, factor in zip(_columns(dqkv, call), multiplier, strict=True):
        part.mul_(factor)
    wanted = zip("qk", need, strict=True)
    return dqkv, None, [dnorm_of[name] if flag else None for name, flag in wanted]


class OutputNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, residual: Tensor, call: OutputCall, *params: Tensor | None
    ) -> Tensor:
        to, trained = call.to, Trained.of(call.to, params)
        joined = _joined(out)
        operand, s = quantize_down(joined, to.placed(joined.shape[0]))
        bytes_ = call.bytes_
        if bytes_ is not None and to.quantized:
            operand = bytes_  # x8 would round them a second time
        added = flat(residual) if call.adds else None
        y, s = projected(operand, s, to, stack_B(to, trained.B)[0], residual.dtype, added)
        wanted = Wanted.of(ctx.needs_input_grad[0], ctx.needs_input_grad[3:], trained)
        if bytes_ is None and call.save == "full" and to.quantized:
            bytes_ = operand  # over a plain base x8 would be out itself
        full = bytes_ is not None
        ctx.call, ctx.wanted, ctx.full = replace(call, bytes_=None), wanted, full
        ctx.tokens, ctx.heads = (out.shape[0], out.shape[2]), (out.shape[1], out.shape[3])
        keep(
            ctx,
            out=out if wanted.needs.A and not full else None,
            **adapter_tensors("", trained, s, bytes_, wanted),
            **weights("", to, wanted),
        )
        return y.view(residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Any, ...]:
        call, saved = ctx.call, kept(ctx)

        def operand() -> Scaled:
            if ctx.full:
                return Scaled(saved["x8"], saved["x_scale_inv"])
            return Scaled(_joined(saved["out"]))

        grads, dbias = no_gradients(call.to)
        if ctx.wanted:
            dy, tensors = flat(dh), adapters("", saved, call.to)
            grads = gradients(call.to, dy, None, operand, tensors, ctx.wanted.needs)
            dbias = bias_gradients(call.to, dy, ctx.wanted.bias)
        dx = grads.x
        if dx is not None:
            dx = dx.view(*ctx.tokens, *ctx.heads).transpose(1, 2)
        return dx, dh if call.adds else None, None, *grads.A, *grads.B, *dbias


def _joined(out: Tensor) -> Tensor:
    """[B, H, T, D] → [M, H D], contiguous. This is no copy if attention wrote `out` token by token."""
    joined = out.transpose(1, 2)
    return joined.reshape(joined.shape[:2].numel(), joined.shape[2:].numel()).contiguous()


class MLPNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, norm: Tensor | None, call: MLPCall, *params: Tensor | None
    ) -> Tensor:
        gate_up, down, rows = call.gate_up, call.down, flat(h)
        ours = Trained.of(gate_up, params)
        theirs = Trained.of(down, params[ours.length :])
        x, s, rstd = _normed_input(rows, norm, call.eps, gate_up)
        B, B_back = stack_B(gate_up, ours.B)
        g_u, s = projected(x, s, gate_up, B, h.dtype)
        flags, full = ctx.needs_input_grad, call.save == "full"
        mine = Wanted.of(any(flags[:2]), flags[3:], ours)
        last = Wanted.of(bool(mine), flags[3 + ours.length :], theirs)
        again = mine.needs.A and not full
        needed = bool(mine) or (last.needs.A and not full)
        y, a, s_down, kept_g_u = _down(g_u, rows, call, theirs, needed)
        ctx.call, ctx.wanted, ctx.shape = call, (mine, last), h.shape
        ctx.away = None
        if call.away is not None and kept_g_u[0] is not None:
            ctx.away, kept_g_u = call.away.keep(kept_g_u[0]), (None, kept_g_u[1])
        keep(
            ctx,
            h=rows if (any(flags[:2]) and norm is not None) or again else None,
            norm=norm,
            rstd=rstd if any(flags[:2]) else None,
            gate_up=kept_g_u[0],
            gate_up_scale_inv=kept_g_u[1],
            **adapter_tensors("", ours, s, x if full else None, mine),
            B=B_back if mine else None,
            **adapter_tensors("down_", theirs, s_down, a if full else None, last),
            **weights("", gate_up, mine),
            **weights("down_", down, last),
        )
        return y.view(h.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        call, saved, need = ctx.call, kept(ctx), ctx.needs_input_grad
        gate_up, (mine, last) = call.gate_up, ctx.wanted
        bytes_ = saved["gate_up"] if ctx.away is None else ctx.away.bring()
        g_u, dy = Scaled(bytes_, saved["gate_up_scale_inv"]), flat(dout)

        def act() -> Scaled:
            if call.save == "full":
                return Scaled(saved["down_x8"], saved["down_x_scale_inv"])
            if call.act == "gelu_tanh":
                return Scaled(geglu(g_u, dout.dtype))
            return Scaled(ops.swiglu_quantize(g_u, None, True, dout.dtype)[0])

        def operand() -> Scaled:
            if call.save == "full":
                return Scaled(saved["x8"], saved["x_scale_inv"])
            return Scaled(_normed(saved, call.eps))

        grads_down, dbias_down = no_gradients(call.down)
        if last:
            tensors = adapters("down_", saved, call.down)
            grads_down = gradients(call.down, dy, None, act, tensors, last.needs)
            dbias_down = bias_gradients(call.down, dy, last.bias)
        grads, dbias = no_gradients(gate_up)
        if mine:
            d, d8 = _act_backward(grads_down.x, g_u, call, any(mine.bias))
            grads_down = grads_down._replace(x=None)  # free dact, which is as large as act
            tensors = adapters("", saved, gate_up, saved["B"])
            grads = gradients(gate_up, d, d8, operand, tensors, mine.needs, dout.dtype)
            dbias = bias_gradients(gate_up, d, mine.bias)
        added = dy if call.adds else None
        dx, dweight = rms_norm_backward(saved, grads.x, added, need[1])
        ours = (*grads.A, *grads.B, *dbias, *grads_down.A, *grads_down.B, *dbias_down)
        dh = dx.view(ctx.shape) if need[0] and dx is not None else None
        return dh, dweight, None, *ours


def _down(
    g_u: Tensor, residual: Tensor, call: MLPCall, trained: Trained, needed: bool
) -> tuple[Tensor, Scaled | None, Tensor | None, tuple[Tensor | None, Tensor | None]]:
    """(residual + down(act(gate) ⊙ up), down's operand, its s, (gate and up as kept for backward, their scale_inv)).

    Without `call.output` the result has no meaningful values. gate and up are None unless backward needs them.
    """
    to = call.down
    kept_g_u: tuple[Tensor | None, Tensor | None] = (g_u if needed else None, None)
    if not (call.output or to.adapted):
        return torch.empty_like(residual), None, None, kept_g_u
    pack = needed and call.save == "fp8"
    if call.act == "gelu_tanh":
        operand, s = quantize_down(geglu(Scaled(g_u), g_u.dtype), to.placed(g_u.shape[0]))
        kept_g_u = packed(g_u) if pack else kept_g_u
    else:
        operand, s, bytes_ = _swiglu(g_u, to, pack)
        kept_g_u = bytes_ if pack else kept_g_u
    if not call.output:
        kept_s = s if to.over is None else to.over.kept(s)
        return torch.empty_like(residual), operand, kept_s, kept_g_u
    added = residual if call.adds else None
    y, s = projected(operand, s, to, stack_B(to, trained.B)[0], residual.dtype, added)
    return y, operand, s, kept_g_u


def _swiglu(
    g_u: Tensor, to: Projections, pack: bool
) -> tuple[Scaled, Tensor | None, tuple[Tensor | None, Tensor | None]]:
    """(down's operand, its s, (bytes and scale_inv of gate and up if `pack`))."""
    to = to.placed(g_u.shape[0])
    scaling = to.scaling_ahead()
    apart = to.quantized and scaling is None  # the scale comes from the parts of all ranks
    unquantized, power_of_two = apart or to.adapted or not to.in_fp8, to.spec.power_of_two
    bytes_: tuple[Tensor | None, Tensor | None] = (None, None)
    if pack:
        act, *a8, data, scale_inv = ops.swiglu_quantize_and_pack(
            g_u, scaling, unquantized, power_of_two
        )
        bytes_ = (data, scale_inv)
    else:
        act, *a8 = ops.swiglu_quantize(Scaled(g_u), scaling, unquantized, None, power_of_two)
    if apart:
        return *quantize_down(act, to), bytes_
    return Scaled(*a8) if to.in_fp8 else Scaled(act), lora_down(act, to), bytes_


def _act_backward(
    dact: Tensor | None, g_u: Scaled, call: MLPCall, biases: bool
) -> tuple[Tensor, Scaled | None]:
    """(dgate_up [M, 2F] times the multiplier; its bytes and scale_inv, or None where they are still to be made).

    dgate_up is empty if nothing reads it unquantized.
    """
    to = call.gate_up
    assert dact is not None and to.multiplier is not None
    if call.act == "gelu_tanh":
        return geglu_backward(dact, g_u, to.multiplier), None
    scaling, power, fp8_dtype = (
        to.scaling_ahead(backward=True),
        to.spec.power_of_two,
        to.spec.backward_dtype,
    )
    made = scaling is not None or power is not None
    unquantized = not made or to.adapted or biases
    d, d8, scale_inv = ops.swiglu_quantize_grad(
        dact, g_u, to.multiplier, scaling, fp8_dtype, unquantized, power
    )
    return d, Scaled(d8, scale_inv) if made else None
