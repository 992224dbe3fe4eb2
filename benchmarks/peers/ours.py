# SPDX-License-Identifier: Apache-2.0
"""LoRALinear over an FP8 and a plain base, and any peer's two calls captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.base import Case, Peer, need_gpu
from lorakernels import DelayedScaling, LoRAConfig, LoRALinear


class Ours(Peer):
    """fp32 adapters, as PEFT keeps them."""

    def __init__(self, case: Case, fp8: bool = True) -> None:
        super().__init__(case)
        config = LoRAConfig(
            r=case.rank,
            lora_alpha=case.scaling * case.rank,
            lora_dropout=case.p,
            fp8=DelayedScaling() if fp8 else None,
        )
        self.layer = LoRALinear.from_linear(case.linear(), config)
        self.fp8 = fp8
        with torch.no_grad():
            self.layer.lora_A.copy_(case.lora_A)
            self.layer.lora_B.copy_(case.lora_B)
        self.adapters = (self.layer.lora_A, self.layer.lora_B)

    def weight_bytes(self) -> int:
        frozen = [*self.layer.parameters(), *self.layer.buffers()]
        found = [t.nbytes for t in frozen if t.numel() == self.case.weight.numel()]
        assert found, "the layer's weight is not where it is looked for"
        return sum(found)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class OursPlainBase(Ours):
    def __init__(self, case: Case) -> None:
        super().__init__(case, fp8=False)


class Graphed(Peer):
    """`of`'s forward, and its forward and backward, each as one graph.

    x and dy are the graphs' own: the layers of a model that share input and output buffers copy neither.
    """

    eager = False

    def __init__(self, case: Case, of: Callable[[Case], Peer]) -> None:
        need_gpu(case)
        self.inner = of(case)
        self.case, self.fp8, self.has_lora = case, self.inner.fp8, self.inner.has_lora
        self.adapters = self.inner.adapters
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.inner.warm_up()
        torch.cuda.current_stream().wait_stream(side)
        self._forward, self._y = _captured(lambda: (self.inner.forward_only().detach(),))
        self._step, self._results = _captured(self.inner.step)

    def take(self, case: Case) -> None:
        raise NotImplementedError("a graph keeps the x and dy that it was captured with")

    def weight_bytes(self) -> int | None:
        return self.inner.weight_bytes()

    def forward_only(self) -> Tensor:
        self._forward.replay()
        return self._y[0]

    def step(self) -> tuple[Tensor, ...]:
        self._step.replay()
        return self._results


def _captured(
    call: Callable[[], tuple[Tensor, ...]],
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results
