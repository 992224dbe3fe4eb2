# SPDX-License-Identifier: Apache-2.0
"""Parts: how a fused decoder layer runs, as `fuse` and what comes after it decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from lorakernels.autograd.attention.choose import GRAPH
from lorakernels.fusion.families.spec import Heads, LayerSpec, scale
from lorakernels.fusion.group import FusedGroup
from lorakernels.fusion.offload import ActivationOffload
from lorakernels.fusion.over_ranks import Context, Over

MOST_CHOSEN = 1024  # backends that a layer remembers, by shapes


@dataclass(eq=False)
class Parts:
    """How one layer runs.

    Attributes:
        spec: the layer's family.
        qkv, o, gate_up, down: the projections.
        norms: of attention's and of the MLP's input, or None where it is not normed.
        head_norms: of q and of k, or None twice.
        post_norms: of attention's and of the MLP's result, or None twice.
        places: (path, the owner's modules, name, module) of every module inside the layer, as `fuse` found it.
        heads: H, Hk and the factor of q kᵀ.
        eps: ε of all norms in the layer.
        turns: whether RoPE turns the heads.
        factor: multiplies attention's and the MLP's result before they are added to the residual.
        cap: the bound of attention's scores, or None.
        save: the activations that are kept for backward: "full", "recompute", "fp8" or "checkpoint".
        offload: the host memory in which gate and up, or the layer's input, wait for backward. None keeps them on the
            device.
        attention: the backend that `fuse` was called with.
        chosen: the backend that is used, by shapes, dtype and kind of mask.
        context: attention over the ranks that share rows, in place of the backend. None if no ranks do.
        checks_longest: whether each call compares `max_length_q` with the documents.
    """

    spec: LayerSpec
    qkv: FusedGroup
    o: FusedGroup
    gate_up: FusedGroup
    down: FusedGroup
    norms: tuple[nn.Module | None, nn.Module | None]
    head_norms: tuple[nn.Module | None, nn.Module | None]
    post_norms: tuple[nn.Module | None, nn.Module | None]
    places: list[tuple[str, dict[str, nn.Module | None], str, nn.Module]]
    heads: Heads
    eps: float
    turns: bool
    factor: float
    cap: float | None
    save: str
    attention: str
    offload: ActivationOffload | None
    chosen: dict[tuple[Any, ...], str] = field(default_factory=dict)
    context: Context | None = None
    checks_longest: bool = True

    @property
    def over(self) -> Over | None:
        """How ranks share the layer's weights. None if they do not."""
        return cast("Over | None", self.qkv.over)

    @property
    def spread(self) -> int:
        return 1 if self.over is None else self.over.spread

    @property
    def flat(self) -> bool:
        return self.over is not None and self.over.flat

    def choose(self, key: tuple[Any, ...], name: str) -> str:
        """Keep the backend `name` in `chosen`, which forgets when it has `MOST_CHOSEN`.

        Entries that use cuDNN's graphs go last. A process may build a limited number of graphs, and a forgotten shape
        might not get its existing graph back.
        """
        if len(self.chosen) >= MOST_CHOSEN:
            without_graph = [k for k, backend in self.chosen.items() if backend != GRAPH]
            for old in without_graph or [*self.chosen]:
                del self.chosen[old]
        self.chosen[key] = name
        return name

    @property
    def groups(self) -> tuple[FusedGroup, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def adds(self) -> bool:
        """Whether the GEMMs of o and down add the residual."""
        return self.factor == 1.0 and self.post_norms == (None, None)

    def tokens(self, h: Tensor) -> int:
        """How many tokens h has on all ranks that share its rows."""
        ranks = 1 if self.context is None else self.context.size
        return h.shape[:2].numel() * self.spread * ranks

    def scale(self, norm: nn.Module | None) -> Tensor | None:
        """The factor [K] of a norm, or None without a norm."""
        return None if norm is None else scale(norm, self.spec.norms_add_one)
