# SPDX-License-Identifier: Apache-2.0
"""transformers' `generate` with one CUDA graph for a token: the host makes one launch instead of thousands.

    with graphed_generation(model):
        model.generate(ids, max_new_tokens=200, cache_implementation="static")

transformers' static cache keeps keys and values in place, and their number in a tensor. So the forward of a token
differs from the previous one in the values of tensors alone. Each `generate` makes a cache, and has a graph of its
own. The prompt and the first token after it run eagerly, and the second token is captured.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

HOW = 'call generate with cache_implementation="static"'
HOST = "layers of a sliding window, and others, count their tokens on the host: generate without a graph"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_IDLE = (
    "transformers.utils.output_capturing",  # its hooks stay after a call that returned hidden states
    "lorakernels.modules.batch.input",  # they look at a shape, which is the graph's own
)


@contextlib.contextmanager
def graphed_generation(model: Any) -> Iterator[None]:
    """Within, `model.generate` replays a CUDA graph for each token but the first two of a call.

    It takes causal models of transformers on one GPU, with layers of ours or without, also inside of a PeftModel. Other
    calls, without a cache or with gradients, run as before. A graph has the kernels of the same call without it. The
    next token overwrites its result; `generate` keeps copies.

    Args:
        model: a causal model of transformers in evaluation, or PEFT's model around one.

    Raises:
        ValueError: at entry, the model is in training mode, not on a GPU, or a module has a forward hook, which replays
            would not run. In `generate`, the cache is not static, or counts its tokens on the host, or hidden states or
            attentions are requested.
        RuntimeError: in `generate`, a token's call differs from the captured one in more than values, or the cache's
            tensors were replaced, as beam search does.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    _check_model(model)
    before = vars(model).get("forward")
    model.forward = _TokenGraph(model.forward)
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


def _check_model(model: nn.Module) -> None:
    if model.training:
        raise ValueError("model must be in evaluation, found training mode: call model.eval()")
    check_device(next(model.parameters()).device)
    for name, module in model.named_modules():
        installed = [hook for hooks in _HOOKS for hook in getattr(module, hooks).values()]
        if any(getattr(hook, "__module__", None) not in _IDLE for hook in installed):
            raise ValueError(f"{name or 'model'} has a forward hook, which a replay would not run")


def check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"model must be on a GPU, found {device}")


class _TokenGraph:
    """A model's forward, of which later calls for one token of a cache are replayed."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        # `generate` makes masks and positions by it
        self.__signature__ = inspect.signature(forward)
        self._forget()

    def _forget(self, cache: Any = None) -> None:
        self.cache, self.is_warm = cache, False
        self.replay: Callable[[], object] | None = None
        self.tensors: dict[str, Tensor] = {}
        self.others: dict[str, Any] = {}
        self.addresses: list[int] = []
        self.result: Any = None

    # `generate` compiles a forward over a static cache by default
    @torch.compiler.disable
    def __call__(self, *args: Any, **options: Any) -> Any:
        cache, ids = options.get("past_key_values"), options.get("input_ids")
        if args or cache is None or torch.is_grad_enabled():
            return self.forward(*args, **options)
        is_token = ids is not None and ids.shape[1] == 1
        if cache is not self.cache or not is_token:
            # a prompt: adapters may have changed since the last one
            _check_cache(cache)
            self._forget(cache)
        if not is_token or not self.is_warm:
            result = self.forward(**options)
            for name in ("hidden_states", "attentions"):
                if getattr(result, name, None) is not None:
                    raise ValueError(
                        f"{name} must not be requested: each token overwrites the last one's"
                    )
            self.is_warm = is_token
            return result
        tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in options.items() if name not in tensors}
        if self.replay is None:
            self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self.others, self.addresses = others, _addresses(cache)
            whole = {**options, **self.tensors}
            self.replay, self.result = captured(lambda: self.forward(**whole))
        self._check(tensors, others)
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
        self.replay()
        return self.result

    def _check(self, tensors: dict[str, Tensor], others: dict[str, Any]) -> None:
        forms = [
            {name: (tuple(t.shape), t.dtype, t.device) for name, t in of.items()}
            for of in (tensors, self.tensors)
        ]
        if forms[0] != forms[1]:
            raise RuntimeError(f"a token was captured with {forms[1]}, found {forms[0]}")
        if others.keys() != self.others.keys():
            raise RuntimeError(f"a token was captured with {[*self.others]}, found {[*others]}")
        for name, value in others.items():
            if not _is_same(value, self.others[name]):
                raise RuntimeError(f"a token was captured with another {name}, found {value!r}")
        if _addresses(self.cache) != self.addresses:
            raise RuntimeError(
                "the cache's tensors were replaced, as beam search does: generate without a graph"
            )


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) in (int, float, str) and value == other)


def captured(run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """(a function that launches the graph of `run`, the output of `run`).

    Each launch overwrites that output. Nothing is computed here.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result


def _check_cache(cache: Any) -> None:
    """ValueError unless the cache is of transformers' StaticLayers: others count their tokens on the host."""
    from transformers.cache_utils import StaticLayer

    kinds = {type(layer) for layer in getattr(cache, "layers", [])}
    if kinds != {StaticLayer}:
        names = sorted(kind.__name__ for kind in kinds)
        why = HOST if any(issubclass(kind, StaticLayer) for kind in kinds) else HOW
        raise ValueError(
            f"the cache must be of StaticLayers alone, found {type(cache).__name__} of {names}: {why}"
        )


def _addresses(cache: Any) -> list[int]:
    addresses = []
    for layer in cache.layers:
        for name in ("keys", "values", "cumulative_length"):
            tensor = getattr(layer, name, None)
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"the cache must have its {name} in a tensor, found {tensor!r}: no token can be captured with "
                    "the static cache of this transformers"
                )
            addresses.append(tensor.data_ptr())
    return addresses
