# SPDX-License-Identifier: Apache-2.0
"""unload and merge_and_unload: replace our layers by plain `nn.Linear`s."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorakernels.fusion.layer import FusedDecoderLayer
from lorakernels.fusion.rewire import unwire
from lorakernels.modules.experts.layer import restack
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.initial import initial_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.marks import became
from lorakernels.modules.model.pretrained import describe_tying, plain_dtype, release_saving
from lorakernels.modules.model.trainable import remove_counts
from lorakernels.modules.model.trained_parts import forget_originals, swap_originals
from lorakernels.modules.order import refuse


def unload(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace every LoRALinear and FrozenFP8Linear by a plain `nn.Linear`, in place. Returns `model`.

    If adapters are not merged, they are dropped: trained biases and `modules_to_save` get their original values back.
    A weight that "olora" or "pissa" changed gets its initial adapter back, up to the rounding of what the layer holds.
    If they are merged, everything trained stays. A fused model is unfused first. All new weights are made before
    anything changes, so memory must hold old and new weights at once. Experts are stacked again.

    Args:
        model: after `apply_lora`, `load_adapter` or `load_quantized`. For a layer itself, an `nn.Linear` is returned.
        dtype: dtype of weights that were held in FP8. None takes the dtype of the model's other weights. Plain weights
            keep theirs.

    Raises:
        ValueError: there is no such layer, or some adapters are merged and some not. Or the model is inside
            `disable_lora`, is fused from a module above it, split by `parallelize`, or has layers of a PeftModel; or a
            weight is not finite. Nothing is changed then.
        TypeError: `dtype` is no floating-point type of two bytes or more.
        RuntimeError: parameters are sharded (FSDP2), or the weights belong to a sharded base.
    """
    states = {m.merged for m in model.modules() if isinstance(m, LoRALinear)}
    if len(states) > 1:
        raise ValueError(
            "some adapters are merged and some are not: call merge_lora or unmerge_lora first"
        )
    return _unload(model, dtype, merge=True in states)


def merge_and_unload(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """As `unload`, but with the adapters added to the weights: W + scaling · B A in fp32, rounded once to their dtype.

    Over an FP8 base this is more precise than `merge_lora`, which rounds the sum to e4m3.

    Raises:
        ValueError, TypeError, RuntimeError: as `unload`; ValueError also if there is no LoRALinear.
    """
    if not any(isinstance(m, LoRALinear) for m in model.modules()):
        raise ValueError(f"model has no LoRALinear: {type(model).__name__}; call apply_lora first")
    return _unload(model, dtype, merge=True)


@torch.no_grad()
def _unload(model: nn.Module, dtype: torch.dtype | None, merge: bool) -> nn.Module:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, FrozenFP8Linear)}
    _check(model, layers)
    refuse(model, "merge_and_unload" if merge else "unload", layers)
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise TypeError(f"dtype must be one of a plain weight, such as bfloat16, found {dtype}")
    swapped = [] if merge else swap_originals(model, show=True)
    try:
        kind = dtype or plain_dtype(model)
        plain = {m: _plain_linear(name, m, kind, merge) for name, m in layers.items()}
        if any(isinstance(m, FusedDecoderLayer) for m in model.modules()):
            unwire(model)
    except BaseException:
        for module in swapped:
            swap_originals(module, show=False)
        raise
    for layer, linear in plain.items():
        if linear.weight is None:
            linear._parameters["weight"] = layer._parameters["weight"]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, FrozenFP8Linear):
                parent._modules[name] = plain[child]
    restack(model)
    forget_originals(model)
    release_saving(model)
    remove_counts(model)
    describe_tying(model)
    return plain[model] if isinstance(model, FrozenFP8Linear) else model


def _check(model: nn.Module, layers: dict[str, FrozenFP8Linear]) -> None:
    if not layers:
        raise ValueError(
            f"model has no LoRALinear and no FrozenFP8Linear: {type(model).__name__} is plain already"
        )
    fused = [n for n, m in model.named_modules() if isinstance(m, FusedDecoderLayer)]
    if fused and became(model).before_fuse is None:
        raise ValueError(f"{fused[0]} is fused: pass the model that fuse() was given")
    for name, layer in layers.items():
        if name.rpartition(".")[2] == "base_layer":
            raise ValueError(f"{name} is the base of a PEFT layer: call the PeftModel's own method")
        if any(is_sharded(p) for p in layer.parameters(recurse=False)):
            raise RuntimeError(f"{name or 'model'}: cannot unload sharded parameters")


def _plain_linear(name: str, layer: FrozenFP8Linear, dtype: torch.dtype, merge: bool) -> nn.Linear:
    """An nn.Linear for `layer`. Its weight is None if the layer's own can be used; `unfuse` may move that first."""
    weight, bias = _new_weight(layer, dtype, merge), layer.bias
    if weight is not None:
        if not weight.is_meta and not bool(weight.isfinite().all()):
            raise ValueError(f"{name or 'model'}: the weight would not be finite in {weight.dtype}")
        if bias is not None and bias.dtype != weight.dtype:
            bias = nn.Parameter(bias.to(weight.dtype), requires_grad=bias.requires_grad)
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = layer.out_features, layer.in_features
    parameter = None if weight is None else nn.Parameter(weight, requires_grad=False)
    linear._parameters.update(weight=parameter, bias=bias)
    return linear.train(layer.training)


def _new_weight(layer: FrozenFP8Linear, dtype: torch.dtype, merge: bool) -> Tensor | None:
    if isinstance(layer, LoRALinear) and not merge and initial_of(layer) is not None:
        return layer.original_weight(dtype if layer.holds_fp8 else layer.weight.dtype)
    if layer.weight_scale_inv is None:
        if not (isinstance(layer, LoRALinear) and merge) or layer.merged:
            return None
        return layer.merged_weight(layer.weight.dtype)
    if isinstance(layer, LoRALinear) and merge:
        return layer.merged_weight(dtype)
    return layer.dequantized_weight(dtype)
