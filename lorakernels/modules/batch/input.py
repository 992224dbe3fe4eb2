# SPDX-License-Identifier: Apache-2.0
"""Whether several adapters divide the sequences of a model's batch.

A layer with flat rows [B · T, K], such as OPT's fc1 and a shared expert, does not see where a sequence ends. So a hook
checks the model's input, once a forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo

from lorakernels.modules.linear.calls import rows_of_call
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.numerics.segments import adapters_of, cut_sequence

_REPEATED = (nn.ModuleList, nn.Sequential)  # the modules in them have no hook: the model has


class BatchInput:
    """A hook before the forward of a module that holds layers of one AdapterBatch.

    It looks at the first positional argument, or else at the argument of one of `names`: tokens [B, T], or numbers of
    three dimensions or more. Rows of two dimensions, [M, K], are each a sequence of their own.
    """

    def __init__(self, layer: LoRALinear, names: tuple[str, ...]) -> None:
        """`layer`: one of the batch's. It is not kept: `unload` may replace it, and its memory is then free."""
        self._names, self._calls = names, layer.adapter_rows
        self._adapters = adapters_of(layer.lora_A)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """ValueError if the adapters do not divide the sequences."""
        inputs = args[:1] or [kwargs[n] for n in self._names if kwargs.get(n) is not None]
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or x.dim() < 2 or (x.dim() == 2 and x.is_floating_point()):
            return
        named = self._calls is not None and self._calls.needs_lookup
        if not named and x.shape[0] % self._adapters == 0:
            return
        layer = self._running(module)
        if layer is None:
            return
        adapters = _adapters_of_call(layer) if named else adapters_of(layer.lora_A)
        if adapters and x.shape[0] % adapters:
            raise cut_sequence(x, adapters)

    def _running(self, module: nn.Module) -> LoRALinear | None:
        """A layer of the batch that is still in `module` and not switched off; None without one."""
        layers = (m for m in module.modules() if isinstance(m, LoRALinear))
        return next(
            (m for m in layers if m.adapter_rows is self._calls and not m.disable_adapters), None
        )


@_disable_dynamo
def _adapters_of_call(layer: LoRALinear) -> int:
    rows = rows_of_call(layer)
    return adapters_of(layer.lora_A) if rows is None else len(rows.numbers)


def check_inputs(model: nn.Module, layers: Mapping[str, LoRALinear]) -> None:
    """Add a hook that checks the batch size to `model` and to each submodule outside of repeated blocks with a layer.

    Args:
        model: of `batch_adapters`.
        layers: {path: LoRALinear} in it.
    """
    one = next(iter(layers.values()))
    for caller in _callers(model, layers):
        main = getattr(caller, "main_input_name", "input_ids")  # as transformers has it
        names = tuple(dict.fromkeys((main, "input_ids", "inputs_embeds")))
        caller.register_forward_pre_hook(BatchInput(one, names), with_kwargs=True)


def _callers(model: nn.Module, paths: Iterable[str]) -> Iterator[nn.Module]:
    seen: set[int] = set()
    for path in paths:
        module = model
        for name in path.split("."):
            if id(module) not in seen and not isinstance(module, nn.ModuleList):
                seen.add(id(module))
                yield module
            if isinstance(module, _REPEATED):
                break
            module = module.get_submodule(name)
            if isinstance(module, LoRALinear):
                break
