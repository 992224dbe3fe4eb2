# SPDX-License-Identifier: Apache-2.0
"""transformers' own `generate`, timed token by token; also by `graphed_generation`."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.lib.timing import synchronize
from lorakernels.integrations.generation import graphed_generation

GREEDY = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
STATIC = {"cache_implementation": "static", "disable_compile": True}
UNTIMED = 3  # forwards of a `graphed_generation`: the prompt's, and two tokens' that warm up and are captured


class Generation(NamedTuple):
    """What `generate` returned, int64 [B, T + new]; ms of the prompt's forward, and of each later token."""

    tokens: Tensor
    first_ms: float
    token_ms: float


class _Marks:
    """A forward that notes when it is called, on the device's stream."""

    def __init__(self, forward: Callable[..., Any], device: torch.device) -> None:
        self.forward, self.device = forward, device
        # `generate` makes masks and positions by it
        self.__signature__ = inspect.signature(forward)
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


@contextlib.contextmanager
def repeatable_attention() -> Iterator[None]:
    """Within, a model's own attention repeats its bits. cuDNN's of one token does not (docs/facts.md, P9)."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@torch.no_grad()
def generation(model: Any, ids: Tensor, new: int, static: bool, graphed: bool) -> Generation:
    """Greedy tokens after `ids` [B, T], more than UNTIMED of them: no token ends a text.

    A token's time is between the beginnings of its forward and of the next one's. With a graph, the captured one and
    those before it are not timed. `static`: transformers' static cache, which a graph needs.
    """
    model.generation_config.eos_token_id = None
    with contextlib.ExitStack() as stack:
        if graphed:
            stack.enter_context(graphed_generation(model))
        before = vars(model).get("forward")
        marked = model.forward = _Marks(model.forward, ids.device)
        try:
            options = {**GREEDY, **STATIC} if static else GREEDY
            tokens = model.generate(ids, max_new_tokens=new, **options)
            marked.mark()
        finally:
            del model.forward
            if before is not None:
                model.forward = before
    synchronize(ids.device)
    begin = UNTIMED if graphed else 1
    return Generation(tokens, marked.ms(0, 1), marked.ms(begin, new) / (new - begin))
