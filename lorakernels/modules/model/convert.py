# SPDX-License-Identifier: Apache-2.0
"""Convert the linear layers of a user's model to LoRALinear or FrozenFP8Linear.

transformers' `FP8Linear` is read by its attributes; transformers is not imported. Its `weight` is e4m3 [N, K]. Its
`weight_scale_inv` has one value for the tensor or one per block: [⌈N/bn⌉, ⌈K/bk⌉] with `block_size` (bn, bk). Today's
checkpoints have blocks of 128×128.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lorakernels.config import LoRAConfig
from lorakernels.modules.linear.dora import kind_for
from lorakernels.modules.linear.frozen import FrozenFP8Linear, quantize_weight
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.linear.weights import in_blocks
from lorakernels.modules.model.targets import is_fp8_linear
from lorakernels.numerics.blocks import BLOCK
from lorakernels.numerics.fp8 import E4M3, FP8_MAX
from lorakernels.recipes import BlockScaling, Recipe
from lorakernels.state.fp8 import FP8State
from lorakernels.values import Weight


def check_fp8_linear(path: str, module: nn.Module) -> None:
    """Refuse an FP8Linear with a weight or scales that this file cannot read.

    Raises:
        TypeError: the weight is not e4m3, or there are no scales.
        ValueError: the scales' shape does not fit the weight's, a value is not finite, or a scale is negative.
    """
    weight, scales = module.weight, getattr(module, "weight_scale_inv", None)
    assert isinstance(weight, Tensor)
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{path}.weight must be float8_e4m3fn, found {weight.dtype}")
    if not isinstance(scales, Tensor):
        raise TypeError(f"{path}.weight_scale_inv must be a tensor, found {scales!r}")
    block = _block_size(module)
    expected = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True)) if block else ()
    if scales.numel() != 1 and tuple(scales.shape) != expected:
        raise ValueError(
            f"{path}.weight_scale_inv must be {expected} for a weight {tuple(weight.shape)} in "
            f"blocks of {block}, found {tuple(scales.shape)}"
        )
    if not (weight.is_meta or scales.is_meta or _is_finite(module)):
        raise ValueError(f"{path}.weight must be finite to be held in FP8, found inf or NaN in it")
    if not scales.is_meta and bool((_scales(module) < 0).any()):
        least = float(_scales(module).min())
        raise ValueError(f"{path}.weight_scale_inv must not be negative, found {least}")


def _is_finite(module: nn.Module) -> bool:
    """True if all weights are finite, also multiplied by their scales.

    e4m3 has no inf. Its NaNs are 0x7F, the largest signed byte, and 0xFF, the largest unsigned byte: two maxima find
    them without a copy.
    """
    weight, scales = module.weight, _scales(module)
    assert isinstance(weight, Tensor)
    if not weight.numel():
        return True
    raw = weight.detach().view(torch.uint8)
    if int(raw.view(torch.int8).max()) == 0x7F or int(raw.max()) == 0xFF:
        return False
    if not bool(scales.isfinite().all()):
        return False
    overflows = bool(scales.abs().max() > torch.finfo(torch.float32).max / FP8_MAX[E4M3])
    return not overflows or bool(dequantize(module).isfinite().all())


def dequantize(module: nn.Module) -> Tensor:
    """fp32 [N, K]: an FP8Linear's weight, each block times its scale_inv."""
    weight, scales = module.weight, _scales(module)
    assert isinstance(weight, Tensor)
    if scales.numel() > 1:
        for dim, size in enumerate(_block_size(module)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return weight.detach().float() * scales


def per_tensor_weight(module: nn.Module) -> tuple[Tensor, Tensor]:
    """(e4m3 bytes uint8 [N, K], scale_inv fp32 [1]) of an FP8Linear.

    If all blocks share one scale, the bytes are kept. Otherwise W is requantized from its exact amax; meanwhile this
    one layer exists in fp32.
    """
    scales = _scales(module)
    if bool((scales == scales.flatten()[0]).all()):
        weight = module.weight
        assert isinstance(weight, Tensor)
        return weight.detach().view(torch.uint8), scales.flatten()[:1].clone()
    return quantize_weight(dequantize(module))


def check_block_size(path: str, module: nn.Module, recipe: Recipe | None) -> None:
    """Refuse an FP8Linear with blocks other than 128 × 128 under BlockScaling, which is to keep them.

    Raises:
        ValueError: the block has another size.
    """
    block = tuple(_block_size(module))
    if isinstance(recipe, BlockScaling) and _scales(module).numel() > 1 and block != (BLOCK,) * 2:
        raise ValueError(
            f"{path}.weight_scale_inv must be of blocks of ({BLOCK}, {BLOCK}) under BlockScaling, found {block}; "
            "DelayedScaling requantizes other blocks with one scale"
        )


def held_weight(module: nn.Module, recipe: Recipe | None) -> Weight:
    """An FP8Linear's weight as a layer holds it under `recipe`: its very bytes in blocks, or `per_tensor_weight`.

    One scale for the whole tensor becomes each block's.
    """
    if not isinstance(recipe, BlockScaling):
        return Weight(*per_tensor_weight(module))
    check_block_size("FP8Linear", module, recipe)
    weight, scales = module.weight, _scales(module)
    assert isinstance(weight, Tensor)
    scales = in_blocks(weight, scales) if scales.numel() == 1 else scales.clone()
    return Weight(weight.detach().view(torch.uint8), scales)


def _block_size(module: nn.Module) -> Sequence[int]:
    block = getattr(module, "block_size", None)
    return tuple(block) if isinstance(block, Sequence) else ()


def _scales(module: nn.Module) -> Tensor:
    """fp32 scale_inv. Some checkpoints store ue8m0 scales as uint8 bytes."""
    scales = module.weight_scale_inv
    assert isinstance(scales, Tensor)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.detach().float()


def to_lora(
    module: nn.Module,
    config: LoRAConfig,
    *,
    name: str,
    adapter_dtype: torch.dtype | None,
    fp8_state: FP8State | None,
) -> LoRALinear:
    """A LoRALinear over the weight of an `nn.Linear`, a `FrozenFP8Linear` or a transformers `FP8Linear`.

    With `config.fp8=None` an FP8 weight is dequantized to bf16. If a `FrozenFP8Linear` follows the same recipe, the new
    layer takes its scales and amax histories.
    """
    if not is_fp8_linear(module) and not isinstance(module, FrozenFP8Linear):
        assert isinstance(module, nn.Linear)
        return kind_for(config).from_linear(
            module, config, adapter_dtype=adapter_dtype, fp8_state=fp8_state, name=name
        )
    new = kind_for(config).from_weight(
        _held(module, config.fp8),
        _bias(module),
        config,
        adapter_dtype=adapter_dtype,
        fp8_state=fp8_state,
        name=name,
    )
    if isinstance(module, FrozenFP8Linear):
        _hand_over_scales(module, new)
    return new.train(module.training)


def to_frozen(module: nn.Module, spec: FrozenSpec) -> FrozenFP8Linear:
    """A FrozenFP8Linear over the weight of an `nn.Linear` or a transformers `FP8Linear`.

    The bias is frozen. The new layer is in training or eval mode as the old one was.
    """
    if is_fp8_linear(module):
        weight = held_weight(module, spec.fp8)
    else:
        assert isinstance(module, nn.Linear)
        weight = Weight(module.weight.detach())
    return FrozenFP8Linear.from_weight(weight, _bias(module), spec).train(module.training)


def _hand_over_scales(old: FrozenFP8Linear, new: LoRALinear) -> None:
    theirs, ours = old.fp8_state, new.fp8_state
    if theirs is None or ours is None or theirs.recipe != ours.recipe:
        return
    ours.set_values(new.column, theirs.values(old.column))
    if theirs.in_charge != "auto":
        ours.in_charge = theirs.in_charge


def _bias(module: nn.Module) -> Tensor | None:
    return module.bias if isinstance(module.bias, Tensor) else None


def _held(module: nn.Module, recipe: Recipe | None) -> Weight:
    """The weight as a LoRALinear will hold it under `recipe`: bytes and scale_inv, or a plain tensor."""
    if not isinstance(module, FrozenFP8Linear):
        if recipe is None:
            return Weight(dequantize(module).bfloat16())
        return held_weight(module, recipe)
    if module.weight_scale_inv is None or recipe is None:
        dtype = None if module.weight_scale_inv is None else torch.bfloat16
        return Weight(module.dequantized_weight(dtype or module.weight.dtype))
    data, scale_inv = module.stored.detach(), module.weight_scale_inv.clone()
    if isinstance(recipe, BlockScaling) and module.block_scaling is None:
        return Weight(data, in_blocks(data, scale_inv))
    if not isinstance(recipe, BlockScaling) and module.block_scaling is not None:
        return Weight(*quantize_weight(module.dequantized_weight()))
    return Weight(data, scale_inv)
