# SPDX-License-Identifier: Apache-2.0
"""Count the bytes that a fused layer keeps for backward, and choose what each layer keeps within a budget.

    M tokens   e bytes per element   H query and Hk key heads of D   K hidden   F ffn   ΣR ranks of an input's adapters

    all        h, h2: 2 M K e        q, k, v: M (H + 2 Hk) D e      out: M H D e      logsumexp: 4 M H      2 rstd: 8 M
               s of each adapted input: M ΣR e       if q and k have norms, their input and rstd: M (H + Hk) (D e + 4)
    full       + gate, up: 2 M F e     + x8 of each adapted input: M K_in (plain base: M K_in e, and none for out)
    recompute  + gate, up: 2 M F e
    fp8        + gate, up: 2 M F       + their scales: 4 M ⌈F / 256⌉
    checkpoint   h alone: M K e

The norms may be behind attention and the MLP instead of before them. Then h and h2 are kept for adapted inputs alone,
and not with "full". Norms behind them keep their inputs and rstd: 2 M K e + 8 M. Norms of all heads of q, or k,
together have one rstd a token. Attention with capped scores keeps no logsumexp. It keeps out only for an adapted o,
and only if x8 is not kept.

FP8 attention keeps a byte for each element of q, k, v and out. An adapted o reads out's bytes and has no x8 of its own.

With `offload_activations`, gate and up of "fp8" and h of "checkpoint" lie in host memory, except for two layers:
"fp8-offload" and "checkpoint-offload" count what stays on the device.

Over a base in blocks (BlockScaling), an x8 of "full" has a scale for each 128 columns: 4 M ⌈K_in / 128⌉ bytes more.
out has no x8 there, as over a plain base.

Except with "checkpoint", the B's of q, k, v are also kept as one matrix [ΣN, ΣR], and the B's of gate, up as another.
Their size does not depend on M. Not counted are cos and sin (one pair for all layers), 16-byte slots and 4-byte scales.
A layer without adapters keeps only what attention, the norms and SwiGLU need.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lorakernels.fusion.describe import LayerDescription
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.numerics.blocks import blocks_of
from lorakernels.numerics.gate_up import packed_scales

SAVE = ("full", "recompute", "fp8", "checkpoint")  # from the fastest to the slowest
AWAY = "-offload"  # the end of a form's name in which a part of it lies in host memory
OFFLOADED = ("full", "recompute", "fp8", "fp8-offload", "checkpoint", "checkpoint-offload")


@dataclass(frozen=True)
class LayerSize:
    """The sizes that decide how much a layer keeps.

    `ranks` are ΣR of q, k, v; of o; of gate, up; and of down. `stacked` is the bytes of the stacked B's.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    ranks: tuple[int, int, int, int]
    fp8: bool
    normed_heads: bool
    stacked: int = 0
    pre_norms: bool = True
    post_norms: bool = False
    heads_together: bool = False
    capped: bool = False
    fp8_attention: bool = False
    blocks: bool = False

    @classmethod
    def of(
        cls,
        layer: LayerDescription,
        fp8: bool,
        fp8_attention: bool = False,
        blocks: bool = False,
    ) -> LayerSize:
        """The sizes of a decoder layer, fused or not. `fp8`: whether its base will be FP8 with one scale; `blocks`:
        with one for each block."""
        spec, heads = layer.spec, layer.heads
        groups = [[p.linear for p in group] for group in layer.groups]
        qkv, o, gate_up, down = (sum(getattr(m, "r", 0) for m in group) for group in groups)
        last = groups[-1][0]
        return cls(
            last.out_features,
            last.in_features,
            heads.query,
            heads.key,
            heads.dim,
            (qkv, o, gate_up, down),
            fp8,
            bool(spec.head_norms),
            sum(map(_stacked, groups)),
            spec.norms != (None, None),
            bool(spec.post_norms),
            spec.norms_whole(layer.module),
            spec.cap_of(layer.module) is not None,
            fp8_attention,
            blocks,
        )

    def saved_bytes(self, save: str, tokens: int, element: int = 2) -> int:
        """Bytes kept on the device from forward to backward of `tokens` tokens, with `element` bytes per number.

        What is in host memory does not count; `kept_bytes` counts the two layers that have it on the device.
        """
        if save == "checkpoint-offload":
            return 0
        if save == "fp8-offload":
            return self.saved_bytes("fp8", tokens, element) - tokens * 2 * self.ffn
        k, f, d, h, hk = self.hidden, self.ffn, self.head_dim, self.heads, self.kv_heads
        if save == "checkpoint":
            return tokens * k * element
        row = (2 * h + 2 * hk) * d * (1 if self.fp8_attention else element)
        row += sum(self.ranks) * element + self._norms(save, element)
        if not self.capped:
            row += 4 * h
        elif not self.ranks[1] or (save == "full" and self.fp8):
            row -= h * d * element
        if self.normed_heads:
            row += (h + hk) * d * element + 4 * (2 if self.heads_together else h + hk)
        row += 2 * f + 4 * packed_scales(1, 2 * f)[1] if save == "fp8" else 2 * f * element
        if save == "full":
            inputs = (k, h * d if self.fp8 and not self.fp8_attention else 0, k, f)
            adapted = [n for n, rank in zip(inputs, self.ranks, strict=True) if rank]
            row += sum(adapted) * (1 if self.fp8 or self.blocks else element)
            row += 4 * sum(map(blocks_of, adapted)) if self.blocks else 0
        return tokens * row + self.stacked

    def _norms(self, save: str, element: int) -> int:
        """Bytes a token of h and h2, of the inputs of norms behind them, and of the rstd."""
        k = self.hidden * element
        behind = 2 * k + 8 if self.post_norms else 0
        if self.pre_norms:
            return 2 * k + 8 + behind
        adapted = sum(1 for rank in (self.ranks[0], self.ranks[2]) if rank)
        return behind if save == "full" else adapted * k + behind


def _stacked(members: Sequence[Any]) -> int:
    """Bytes of the B's of all adapters, stacked as one matrix [ΣN, ΣR]. One projection's B is not stacked."""
    if len(members) == 1:
        return 0
    factors = [m.lora_B for m in members if isinstance(m, LoRALinear)]
    rows = sum(m.out_features for m in members)
    return rows * sum(b.shape[-1] * b.element_size() for b in factors)


def kept_bytes(sizes: Sequence[LayerSize], forms: Sequence[str], tokens: int, element: int) -> int:
    """Bytes that layers keep on the device together, each in its form: one of OFFLOADED.

    Of the layers with a part in host memory, two at a time have it on the device: one in use, one on its way.
    """
    pairs = zip(sizes, forms, strict=True)
    return _together([_parts(size, form, tokens, element) for size, form in pairs])


def host_bytes(size: LayerSize, form: str, tokens: int, element: int) -> int:
    """Bytes that a layer keeps in host memory."""
    return _parts(size, form, tokens, element)[1]


@lru_cache(maxsize=1024)
def _parts(size: LayerSize, form: str, tokens: int, element: int) -> tuple[int, int]:
    """Bytes (on the device, in host memory) of what a layer keeps."""
    here = size.saved_bytes(form, tokens, element)
    return here, size.saved_bytes(form.removesuffix(AWAY), tokens, element) - here


def _together(parts: Sequence[tuple[int, int]]) -> int:
    return sum(here for here, _ in parts) + sum(heapq.nlargest(2, (away for _, away in parts)))


def mixes(
    sizes: Sequence[LayerSize], tokens: int, element: int, forms: Sequence[str] = SAVE
) -> Iterator[list[str]]:
    """What `fit` chooses from: one of `forms` for each layer, from the fastest mix to the slowest.

    Layers change to the next slower mode one at a time, beginning with the first. Equal layers mix at most two modes.
    """
    mix = [forms[0]] * len(sizes)
    yield [*mix]
    for slower in forms[1:]:
        for i, size in enumerate(sizes):
            here, then = (_parts(size, form, tokens, element)[0] for form in (mix[i], slower))
            if then < here:
                mix[i] = slower
                yield [*mix]


def fit(
    sizes: Sequence[LayerSize], budget: int, tokens: int, element: int, forms: Sequence[str] = SAVE
) -> list[str]:
    """One of `forms` for each layer: the fastest of `mixes` whose bytes sum to at most `budget`.

    Args:
        sizes: of the layers.
        budget: bytes that all layers together may keep.
        tokens: number of tokens in a microbatch.
        element: bytes per number.
        forms: SAVE or OFFLOADED, from the fastest to the slowest.

    Raises:
        ValueError: the layers do not fit even in the slowest form.
    """
    least = 0
    for mix in mixes(sizes, tokens, element, forms):
        least = kept_bytes(sizes, mix, tokens, element)
        if least <= budget:
            return mix
    raise ValueError(
        f"memory_budget = {budget} bytes is too little for {len(sizes)} layers of {tokens} tokens: they keep at "
        f"least {least} bytes together"
    )
