# SPDX-License-Identifier: Apache-2.0
"""Make a LoRALinear of the linear layers a user's model arrives with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorakernels.config import LoRAConfig
from lorakernels.fp8 import FP8State
from lorakernels.modules.frozen import FrozenFP8Linear
from lorakernels.modules.lora import LoRALinear
from lorakernels.targets import is_fp8_linear


def dequantize_blocks(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """fp32 [N, K] from e4m3 [N, K] and one scale_inv per block, [⌈N/bn⌉, ⌈K/bk⌉] (128×128 in FP8 checkpoints).

    Raises:
        ValueError: the scales do not divide the weight into equal blocks.
    """
    scales = scale_inv.float()
    if scales.numel() == 1:
        return weight.float() * scales.reshape(())
    n, k = weight.shape
    if scales.dim() != 2:
        raise ValueError(f"weight_scale_inv must be [N/bn, K/bk], found {tuple(scales.shape)}")
    blocks = [_block_size(size, count) for size, count in zip((n, k), scales.shape, strict=True)]
    for dim, block in enumerate(blocks):
        scales = scales.repeat_interleave(block, dim)
    return weight.float() * scales[:n, :k]


def _block_size(size: int, count: int) -> int:
    """The block of `count` blocks that cover `size`: 128 where it fits, as checkpoints use, else an even split."""
    block = 128 if -(-size // 128) == count else -(-size // count)
    if -(-size // block) != count:
        raise ValueError(f"weight_scale_inv has {count} blocks for a dimension of {size}")
    return block


def to_lora(
    module: nn.Module,
    config: LoRAConfig,
    *,
    name: str,
    adapter_dtype: torch.dtype | None,
    fp8_state: FP8State | None,
) -> LoRALinear:
    """A LoRALinear over the weight of an `nn.Linear`, a `FrozenFP8Linear` or a transformers `FP8Linear`.

    A per-tensor FP8 weight keeps its bytes. A block-scaled one is requantized with one scale from its exact
    amax, this layer alone in fp32 for the moment. With `config.fp8=None` an FP8 weight is dequantized to bf16.
    """
    if isinstance(module, nn.Linear):
        return LoRALinear.from_linear(
            module, config, adapter_dtype=adapter_dtype, fp8_state=fp8_state, name=name
        )
    scale_inv = module.weight_scale_inv
    weight = module.weight
    assert isinstance(weight, Tensor)
    bias = module.bias if isinstance(module.bias, Tensor) else None
    if isinstance(scale_inv, Tensor) and scale_inv.numel() == 1 and config.fp8 is not None:
        new = LoRALinear.from_quantized(
            weight,
            scale_inv,
            bias,
            config,
            adapter_dtype=adapter_dtype,
            fp8_state=fp8_state,
            name=name,
        )
        return new.train(module.training)
    plain = nn.Linear(1, 1, bias=bias is not None, device="meta")
    dense = (
        weight.detach()
        if scale_inv is None
        else dequantize_blocks(weight.detach(), _tensor(scale_inv))
    )
    plain.weight = nn.Parameter(dense if config.fp8 else _half(dense), requires_grad=False)
    plain.bias = bias if isinstance(bias, nn.Parameter) else None  # type: ignore[assignment]
    plain.train(module.training)
    return LoRALinear.from_linear(
        plain, config, adapter_dtype=adapter_dtype, fp8_state=fp8_state, name=name
    )


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _half(weight: Tensor) -> Tensor:
    return weight if weight.dtype in (torch.bfloat16, torch.float16) else weight.bfloat16()


def base_kind(module: nn.Module) -> str:
    """How a convertible module holds its weight now, for the report."""
    if is_fp8_linear(module):
        return "block FP8"
    return "FP8" if isinstance(module, FrozenFP8Linear) else "plain"
