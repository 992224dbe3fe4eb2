# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism in a transformers model: between split layers, each rank has M/T of the M = batch · length rows.

Before the first decoder layer a rank takes its rows [M/T, 1, H], and after the last norm it gathers all [B, S, H].
An attention module reads the shape of its input, and hands the input on to q, k and v. So it gets a stand-in of the
whole shape, which carries the rank's rows to those layers. Its values are NaN, which shows if code reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakernels.fusion.layer import FusedDecoderLayer
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.layers import OWN_ROWS


class _TakeRows(torch.autograd.Function):
    """This rank's rows [M/T, H] of x [M, H]. Its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x[ranks.share(x.shape[0])].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.rows.gather(dx)[0], None


class _GatherRows(torch.autograd.Function):
    """All rows [M, H] of every rank's x [M/T, H]. All ranks have one gradient; each takes its rows of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.rows.gather(x)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx[ctx.ranks.share(dx.shape[0])].clone(), None


class Rows:
    """Hooks that split the rows of one model."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._shape = torch.Size()

    def attach(self, layers: list[nn.Module], attention: str, last_norm: nn.Module) -> None:
        """Hook decoder layers, their modules at the place `attention`, and the norm after the last layer.

        A fused layer runs without its modules, and knows the shape of all rows.
        """
        layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        for layer in layers:
            if not isinstance(layer, FusedDecoderLayer):
                module = layer.get_submodule(attention)
                module.register_forward_pre_hook(self._stand_in, with_kwargs=True)
        last_norm.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        rows = x.shape[:-1].numel()
        if rows % self.ranks.size or rows == 0:
            raise ValueError(
                f"sequence parallelism: batch · length must be a positive multiple of the {self.ranks.size} ranks, "
                f"found {rows} of an input {tuple(x.shape)}; pad the batch"
            )
        self._shape = x.shape
        part = _TakeRows.apply(x.reshape(rows, -1), self.ranks).unsqueeze(1)
        return ((part, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": part})

    def _stand_in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        length = kwargs["position_embeddings"][0].shape[-2]
        rows = x.shape[0] * self.ranks.size
        whole = x.detach().new_full((), torch.nan).expand(rows // length, length, x.shape[-1])
        setattr(whole, OWN_ROWS, x)
        return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": whole})

    def _leave(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        whole: Tensor = _GatherRows.apply(y.reshape(-1, y.shape[-1]), self.ranks)
        return whole.view(*self._shape[:-1], -1)
