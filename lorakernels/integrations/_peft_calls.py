# SPDX-License-Identifier: Apache-2.0
"""PEFT's calls with `adapter_names`, which hook every layer for the time of one call.

PEFT takes the hooks away after a call that returns. After one that raises they stay (PEFT 0.21), and mix the adapters
of later calls. Here they are taken away in both cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.model import LoraModel
from torch import nn

from lorakernels.modules.marks import became

_enable_hooks = LoraModel._enable_peft_forward_hooks


def mend_hooks_of_calls() -> None:
    """Let every LoraModel remove the hooks of a call at its end. Calling this twice changes nothing more."""
    LoraModel._enable_peft_forward_hooks = _enabled_hooks


def _enabled_hooks(model: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    if kwargs.get("adapter_names") is None:
        return _enable_hooks(model, *args, **kwargs)
    for name, module in model.model.named_modules():
        if isinstance(module, LoraLayer) and became(module).fused_projection:
            raise ValueError(
                f"adapter_names: {name} is in a fused layer, which runs one adapter for all sequences: call "
                "unfuse(model) first"
            )
    return _leaving_none(model, _enable_hooks(model, *args, **kwargs))


@contextmanager
def _leaving_none(model: nn.Module, hooks: AbstractContextManager[None]) -> Iterator[None]:
    """Inside, `hooks` are there. An exception leaves the modules of `model` with the hooks that they had before."""
    before = {module: set(module._forward_pre_hooks) for module in model.modules()}
    try:
        with hooks:
            yield
    except BaseException:
        for module, keys in before.items():
            for key in module._forward_pre_hooks.keys() - keys:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        raise
