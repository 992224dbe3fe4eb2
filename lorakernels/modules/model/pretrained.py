# SPDX-License-Identifier: Apache-2.0
"""Make transformers' `save_pretrained` work for a model with our layers. transformers is not imported."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.modules.experts.layer import LoRAExperts
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.lora import LoRALinear, first_plain_dtype
from lorakernels.modules.linear.state_entries import STATE_KEYS

_METHOD = "save_pretrained"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class GuardedSave:
    """Replaces a model's `save_pretrained`, which understands neither our adapters nor our FP8 weights.

    If an adapter is not merged, the model's own method writes a training checkpoint, and a warning says so. Trainer
    resumes from it, but `from_pretrained` does not understand it. Otherwise plain weights are written, as
    `merge_and_unload` would leave them. This copies the FP8 layers to the host.

    Raises:
        ValueError: a `state_dict` with FP8 values is given, and all adapters are merged. Or there are LoRAExperts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        model: Any = self._model()
        save = getattr(type(model), _METHOD)
        if not getattr(model, "_hf_peft_config_loaded", False):
            if any(isinstance(module, LoRAExperts) for module in model.modules()):
                raise ValueError(
                    "save_pretrained: the model has LoRAExperts, whose names transformers does not know: call "
                    "merge_and_unload first, or save_adapter for the adapter alone"
                )
            if _adapters_apart(model):
                warnings.warn(_checkpoint_only(model, save_directory), UserWarning, stacklevel=2)
            elif state_dict is None:
                state_dict = plain_state_dict(model)
            else:
                _refuse_fp8(state_dict)
        with _tying_as_it_is(model):
            return save(model, save_directory, is_main_process, state_dict, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and deepcopy: a copied model gets a GuardedSave of its own."""
        return GuardedSave, (self._model(),)


def guard_saving(model: nn.Module) -> None:
    """Make every transformers model in `model` save through a `GuardedSave`.

    PEFT's models, and models with a `save_pretrained` set on the instance, keep theirs.
    """
    for module in model.modules():
        kind = type(module)
        if _METHOD in vars(module):
            continue
        if callable(getattr(kind, _METHOD, None)) and not kind.__module__.startswith("peft."):
            module.__dict__[_METHOD] = GuardedSave(module)


def release_saving(model: nn.Module) -> None:
    """Undo `guard_saving`."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_METHOD), GuardedSave):
            del module.__dict__[_METHOD]


@torch.no_grad()
def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()`, but with plain weights on the host, in `plain_dtype`, and no scales for FP8 layers.

    The weights contain merged adapters and are rounded once; see `LoRALinear.merged_weight`.
    """
    state, dtype = model.state_dict(), plain_dtype(model)
    for path, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, FrozenFP8Linear) or layer.weight_scale_inv is None:
            continue
        prefix = f"{path}." if path else ""
        if isinstance(layer, LoRALinear) and layer.merged:
            weight = layer.merged_weight(dtype)
        else:
            weight = layer.dequantized_weight(dtype)
        state[prefix + "weight"] = weight.cpu()
        for key in ("weight_scale_inv", *STATE_KEYS):
            state.pop(prefix + key, None)
    return state


def plain_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first plain parameter outside of our layers, else of our layers' biases, else bfloat16."""
    others: list[Any] = []
    biases: list[Any] = []
    for module in model.modules():
        if isinstance(module, FrozenFP8Linear):
            biases.append(module.bias)
        else:
            others += module.parameters(recurse=False)
    return first_plain_dtype([*others, *biases]) or torch.bfloat16


def describe_tying(model: Any) -> Any:
    """Set the config's `tie_word_embeddings` to False if input and output embedding are now two tensors.

    Returns the config if it changed, else None.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(config, "tie_word_embeddings", False) or not _is_untied(model):
        return None
    config.tie_word_embeddings = False
    return config


def _is_untied(model: Any) -> bool:
    if not hasattr(model, "get_output_embeddings"):
        return False
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [getattr(module, "weight", None) for module in ends]
    return all(isinstance(w, Tensor) for w in weights) and weights[0] is not weights[1]


@contextmanager
def _tying_as_it_is(model: Any) -> Iterator[None]:
    """Inside the context, the config says whether the embeddings are tied at present."""
    changed = describe_tying(model)
    try:
        yield
    finally:
        if changed is not None:
            changed.tie_word_embeddings = True


def _adapters_apart(model: nn.Module) -> bool:
    return any(isinstance(m, LoRALinear) and not m.merged for m in model.modules())


def _checkpoint_only(model: nn.Module, folder: Any) -> str:
    return (
        f"{folder} will hold base and adapter apart, as a run that goes on needs them, and not a model that "
        f"from_pretrained understands. To use {type(model).__name__} elsewhere: save_adapter(model, path), "
        "merge_and_unload(model).save_pretrained(path), or export_model(...)"
    )


def _refuse_fp8(state_dict: dict[str, Any]) -> None:
    held = [k for k, v in state_dict.items() if isinstance(v, Tensor) and v.dtype in _FP8]
    if held:
        raise ValueError(
            f"state_dict must hold plain weights, found FP8 in {len(held)} (the first is {held[0]!r}), which "
            "from_pretrained would not understand: leave state_dict out, or call merge_and_unload first"
        )
