# SPDX-License-Identifier: Apache-2.0
"""transformers' own `generate`, timed token by token; also with one CUDA graph for a token's forward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.lib.timing import synchronize

GREEDY = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
STATIC = {"cache_implementation": "static", "disable_compile": True}
EAGER_CALLS = 2  # the prompt's, and a token's that warms up
UNTIMED = EAGER_CALLS + 1  # and the one that is captured


class Generation(NamedTuple):
    """What `generate` returned, int64 [B, T + new]; ms of the prompt's forward, and of each later token."""

    tokens: Tensor
    first_ms: float
    token_ms: float


class TokenGraph:
    """A causal model's forward, of which later calls for one token are replayed from one CUDA graph.

    transformers' static cache keeps keys and values in place, and its length in a tensor, so a call differs from the
    last in its tensors' values alone.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self.called = forward, 0
        self.graph: Any = None
        self.tensors: dict[str, Tensor] = {}
        self.others: dict[str, Any] = {}
        self.result: Any = None

    def __call__(self, **options: Any) -> Any:
        self.called += 1
        if self.called <= EAGER_CALLS:
            return self.forward(**options)
        tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in options.items() if name not in tensors}
        if self.graph is None:
            self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self.others = others
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.forward(**options | self.tensors)
        self._check(tensors, others)
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
        self.graph.replay()
        return self.result

    def _check(self, tensors: dict[str, Tensor], others: dict[str, Any]) -> None:
        """Raise RuntimeError if this call is not the captured one with other values."""
        found, captured = (
            {n: tuple(t.shape) for n, t in of.items()} for of in (tensors, self.tensors)
        )
        same = others.keys() == self.others.keys()
        if not same or any(value is not self.others[name] for name, value in others.items()):
            raise RuntimeError(f"a token was captured with {self.others}, found {others}")
        if found != captured:
            raise RuntimeError(f"a token was captured with tensors {captured}, found {found}")


class _Marks:
    """A forward that notes when it is called, on the device's stream."""

    def __init__(self, forward: Callable[..., Any], device: torch.device) -> None:
        self.forward, self.device = forward, device
        self.marks: list[Any] = []

    def __call__(self, **options: Any) -> Any:
        self.mark()
        return self.forward(**options)

    def mark(self) -> None:
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def ms(self, begin: int, end: int) -> float:
        first, last = self.marks[begin], self.marks[end]
        if self.device.type != "cuda":
            return float(last - first) * 1e3
        return float(first.elapsed_time(last))


@torch.no_grad()
def generation(model: Any, ids: Tensor, new: int, replays: bool = False) -> Generation:
    """Greedy tokens after `ids` [B, T], at least UNTIMED + 1 of them: no token ends a text.

    A token's time is between the beginnings of its forward and of the next one's. With `replays`, the captured one and
    those before it are not timed.
    """
    model.generation_config.eos_token_id = None
    forward = TokenGraph(model.forward) if replays else model.forward
    marked = _Marks(forward, ids.device)
    model.forward = marked
    try:
        tokens = model.generate(ids, max_new_tokens=new, **GREEDY, **STATIC if replays else {})
        marked.mark()
    finally:
        del model.forward
    synchronize(ids.device)
    begin = UNTIMED if replays else 1
    return Generation(tokens, marked.ms(0, 1), marked.ms(begin, new) / (new - begin))
