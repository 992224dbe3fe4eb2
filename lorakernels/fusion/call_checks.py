# SPDX-License-Identifier: Apache-2.0
"""Checks of each call of a fused decoder layer: arguments, modes, and modules that were replaced since `fuse`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.autograd.attention.longest_document import check_longest
from lorakernels.autograd.linear.values import refuse_trace
from lorakernels.fusion.parts import Parts
from lorakernels.numerics.autocast import autocast_dtype

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def check_call(
    layer: nn.Module, parts: Parts, h: Tensor, mask: object, kwargs: dict[str, Any]
) -> None:
    """Refuse a call of a fused `layer` that would not compute what the layer's own forward does.

    Raises:
        TypeError, ValueError, RuntimeError: as FusedDecoderLayer.forward has them.
    """
    refuse_trace()
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        form = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"attention_mask must be None or a 4-D tensor, found {form}")
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions must be False: a fused layer has no attention weights; unfuse the model to see them"
        )
    _check_packing(kwargs)
    for group in parts.groups:
        group.check_sequences(h)
    if not parts.spec.looks_back(layer):
        name, flag = parts.spec.attention, layer.get_submodule(parts.spec.attention).is_causal
        raise ValueError(
            f"{name}.is_causal must be True in a fused layer, found {flag!r}: unfuse the model first"
        )
    if (dropout := parts.spec.drops(layer)) is not None:
        raise ValueError(
            f"dropouts in a fused layer must be 0 in training, found {dropout}: unfuse the model first"
        )
    dtype = autocast_dtype(h.device.type)
    if dtype is not None and dtype != h.dtype:
        raise RuntimeError(
            f"a fused layer computes in the dtype of its input, found {h.dtype} under autocast to {dtype}: load the "
            "model in that dtype"
        )
    for path, owner, name, module in parts.places:
        if owner.get(name) is not module:
            raise RuntimeError(
                f"{path} is another module than when the layer was fused: unfuse the model first, "
                "then change it"
            )
        hooks = module.__dict__
        if any([hooks[kind] for kind in _HOOKS]):
            refuse_hooks(path, module)


def _check_packing(kwargs: dict[str, Any]) -> None:
    """Refuse queries and keys that are not the same tokens. Only the form of `cu_seq_lens_k` is compared: for its
    numbers the host would wait for the device."""
    starts, ends = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if starts is not None and (starts.dim() != 1 or starts.dtype != torch.int32):
        form = f"{starts.dtype} {tuple(starts.shape)}"
        raise ValueError(f"cu_seq_lens_q must be int32 [sequences + 1], found {form}")
    if ends is not None and (starts is None or _form(starts) != _form(ends)):
        wanted = None if starts is None else _form(starts)
        raise ValueError(
            f"cu_seq_lens_k must be equal to cu_seq_lens_q, {wanted}, found {_form(ends)}"
        )
    longest = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    if None not in longest and longest[0] != longest[1]:
        raise ValueError(f"max_length_q and max_length_k must be equal, found {longest}")


def _form(x: Tensor) -> str:
    return f"{str(x.dtype)[6:]} {list(x.shape)} on {x.device}"


def check_window(layer: nn.Module, parts: Parts, h: Tensor, kwargs: dict[str, Any]) -> None:
    """Refuse packed sequences longer than a sliding window, which only a mask can express."""
    if kwargs.get("cu_seq_lens_q") is None:
        return
    window = parts.spec.window_of(layer)
    longest = kwargs.get("max_length_q") or h.shape[:2].numel() * parts.spread
    if window is not None and longest > window:
        raise ValueError(
            f"cu_seq_lens_q: sequences of up to {longest} tokens need a sliding window of {window}, which packed "
            "attention does not have; pass an attention_mask"
        )


def check_documents(parts: Parts, h: Tensor, kwargs: dict[str, Any]) -> None:
    """Refuse a document that is longer than `max_length_q`, unless `max_length_q` covers all tokens."""
    starts, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    if starts is not None and longest and parts.checks_longest and longest < parts.tokens(h):
        check_longest(starts, longest)


def _hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks of `module` that a fused layer would not run. transformers' output collectors do not count: they
    do nothing unless a call collects outputs."""
    for name in _HOOKS:
        for hook in vars(module)[name].values():
            if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":
                yield hook


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Raise ValueError if `module`, inside of a fused layer, has a hook that would not run."""
    for hook in _hooks_of(module):
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise ValueError(
            f"{path} has a hook ({name}) that would not run in a fused layer: remove it, or hook the layer"
        )
