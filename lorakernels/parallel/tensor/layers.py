# SPDX-License-Identifier: Apache-2.0
"""Linear layers of which each rank of a tensor-parallel group holds a part.

A column layer has this rank's rows of W, of the bias and of B. A row layer has its columns of W and of A. The other
factor and a row layer's bias are whole, and equal on all ranks. W8 is cut out of the whole layer's bytes, with its
scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lorakernels.autograd import is_compiling
from lorakernels.autograd.lent import mark_part
from lorakernels.autograd.linear.projections import OverRanks
from lorakernels.config import LoRAConfig
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.marks import SplitModule
from lorakernels.modules.model.trained_parts import change_originals
from lorakernels.numerics.autocast import autocast_dtype
from lorakernels.numerics.blocks import BLOCK
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.ranks.scales import SharedScales, shared
from lorakernels.parallel.tensor.projections import Split
from lorakernels.values import Weight

OWN_ROWS = "own_rows"  # attribute of a stand-in for a whole x (rows.py)


class Part(SplitModule):
    """What a rank's part adds to a FrozenFP8Linear or a LoRALinear.

    Attributes:
        over: the ranks, and the FP8 scales that they share.
        flat: whether x and y, if they are split by rows, are [M, 1, …] with their rows in one dimension.
        by: "column" or "row".
    """

    over: OverRanks | None  # a Split
    flat: bool
    by: ClassVar[str]

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N], as the whole layer. One side is this rank's part of the features (column: y; row: x).

        With sequence parallelism, the other side is this rank's part of the first dimension.

        Raises:
            RuntimeError: under torch.compile, which is not supported yet; in the capture of a CUDA graph, as long as
                ranks lack an FP8 scale or the memory in which they exchange rows.
            TypeError, ValueError: as for a LoRALinear; TypeError also for float16.
        """
        what = f"{getattr(self, 'name', '') or type(self).__name__} is split over ranks and"
        if is_compiling():
            raise RuntimeError(f"{what} cannot be compiled yet: run it eagerly")
        x = self._rows(x)
        if (autocast_dtype(x.device.type) or x.dtype) == torch.float16:
            raise TypeError("x must be float32 or bfloat16 over ranks, found torch.float16")
        shape = self._y_shape(x)
        y: Tensor = super().forward(x.reshape(-1, x.shape[-1]))  # type: ignore[misc]
        return y.view(*shape, y.shape[1])

    def run_over(self, ranks: Ranks, flat: bool, scales: SharedScales | None) -> None:
        """From now on, this part runs together with the other parts, over `ranks`."""
        self.ranks, self.flat = ranks, flat  # `ranks` first: it says why a part cannot be copied
        self.over = Split(self.by, ranks, scales)

    def _rows(self, x: Tensor) -> Tensor:
        """x with rows in the dimensions that are split: with `flat`, in one."""
        x = getattr(x, OWN_ROWS, x)
        return x.reshape(-1, 1, x.shape[-1]) if self.flat and self.ranks.sequence else x

    def _y_shape(self, x: Tensor) -> tuple[int, ...]:
        raise NotImplementedError

    def put_merged(self, total: Tensor) -> None:
        raise RuntimeError(
            f"{getattr(self, 'name', '')}: cannot merge into a layer that is split over ranks yet"
        )

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        return f"{text}, part {self.ranks.rank} of {self.ranks.size}"


class ColumnPart(Part):
    by = "column"
    dimensions: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0, "lora_B": 0}

    def _y_shape(self, x: Tensor) -> tuple[int, ...]:
        if not self.ranks.sequence:
            return tuple(x.shape[:-1])
        return x.shape[0] * self.ranks.size, *x.shape[1:-1]


class RowPart(Part):
    by = "row"
    dimensions: ClassVar[Mapping[str, int]] = {"weight": 1, "lora_A": 1}

    def _y_shape(self, x: Tensor) -> tuple[int, ...]:
        if not self.ranks.sequence:
            return tuple(x.shape[:-1])
        if x.dim() < 2 or x.shape[0] % self.ranks.size:
            raise ValueError(
                f"x must have a first dimension that {self.ranks.size} ranks divide, found {tuple(x.shape)}"
            )
        return x.shape[0] // self.ranks.size, *x.shape[1:-1]


class ColumnFrozen(ColumnPart, FrozenFP8Linear):
    """A column layer without an adapter."""


class RowFrozen(RowPart, FrozenFP8Linear):
    """A row layer without an adapter."""


class ColumnLoRA(ColumnPart, LoRALinear):
    """A LoRALinear cut by its outputs, which returns y as a LoRALinear does."""


class RowLoRA(RowPart, LoRALinear):
    """A LoRALinear cut by its inputs, which returns y as a LoRALinear does."""


KINDS: dict[tuple[str, bool], type[Part]] = {
    ("column", False): ColumnFrozen,
    ("column", True): ColumnLoRA,
    ("row", False): RowFrozen,
    ("row", True): RowLoRA,
}


def own_part(whole: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """A copy of this rank's part of `whole`. FP8 is copied as bytes."""
    stored = whole.view(torch.uint8) if whole.element_size() == 1 else whole
    part = stored.narrow(dim, ranks.share(stored.shape[dim]).start, stored.shape[dim] // ranks.size)
    return part.clone(memory_format=torch.contiguous_format).view(whole.dtype)


def why_not_blocks(size: int, dim: int, ranks: int) -> str | None:
    """None if parts of a side of `size` end with a block of a BlockScaling; otherwise the reason why not."""
    if size % (ranks * BLOCK) == 0:
        return None
    name = ("out_features", "in_features")[dim]
    return (
        f"follows BlockScaling and has {name} {size}, which must be a multiple of {ranks} ranks · {BLOCK}, so that a "
        "part ends with a block"
    )


def cut(
    layer: FrozenFP8Linear,
    kind: type[Part],
    ranks: Ranks,
    flat: bool = False,
    read: Weight | None = None,
) -> None:
    """Keep this rank's part of a whole layer, in place. Its parameters stay the same objects, except for the weight.

    Args:
        layer: a FrozenFP8Linear or LoRALinear, which becomes a `kind`. The ranks divide its sizes.
        kind: one of KINDS.
        ranks: the group whose other ranks keep the other parts.
        flat: see `Part`.
        read: this rank's part of the weight, if only that was read, so that the layer's weight has no values.

    Raises:
        ValueError: the layer's FP8 state belongs to another group, or a part would end within a block.
    """
    dim = kind.dimensions["weight"]
    if layer.block_scaling is not None:
        if why_not := why_not_blocks(layer.stored.shape[dim], dim, ranks.size):
            raise ValueError(f"{layer.name or 'this layer'} {why_not}")
        assert layer.weight_scale_inv is not None
        if read is None:
            layer.weight_scale_inv = own_part(layer.weight_scale_inv, dim, ranks)
    scales = shared(layer.fp8_state, ranks)
    for name, dim in kind.dimensions.items():
        whole = layer._parameters.get(name)
        if whole is None:
            continue
        if name == "weight":
            kept = own_part(whole.detach(), dim, ranks) if read is None else read.data
            layer._parameters[name] = nn.Parameter(kept.view(whole.dtype), requires_grad=False)
        else:
            whole.data, whole.grad = own_part(whole.detach(), dim, ranks), None
    dimensions = kind.dimensions
    change_originals(
        layer, lambda name, x: own_part(x, dimensions[name], ranks) if name in dimensions else x
    )
    if read is not None:
        layer.weight_scale_inv = read.scale_inv
    for parameter in layer.parameters(recurse=False):
        mark_part(parameter)
    layer.out_features, layer.in_features = layer.stored.shape
    layer.__class__ = kind  # type: ignore[assignment]
    part: Any = layer
    part.run_over(ranks, flat, scales)
    layer.column = layer.column  # a new handle


class _Author:
    """A part that constructs the whole layer and cuts it. It returns what Megatron's layers return."""

    kind: ClassVar[type[Part]]  # what the whole LoRALinear is cut to
    cut_size: ClassVar[str]  # the argument that the ranks divide
    skip_bias_add: bool

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: LoRAConfig | None = None,
        tp_group: Any,
        **options: Any,
    ) -> None:
        layer: Any = self
        cls, sizes = type(self), {"input_size": input_size, "output_size": output_size}
        sequence = options.pop("sequence_parallel", False)
        self.skip_bias_add = options.pop("skip_bias_add", False)
        for name, supported in (("gather_output", False), ("input_is_parallel", True)):
            if (value := options.pop(name, supported)) is not supported:
                raise ValueError(
                    f"{name} must be {supported}, found {value!r}: only this is supported yet"
                )
        ranks = Ranks(tp_group, sequence)
        if sizes[self.cut_size] % ranks.size:
            raise ValueError(
                f"{self.cut_size} must be a multiple of the {ranks.size} ranks, found {sizes[self.cut_size]}"
            )
        LoRALinear.__init__(layer, input_size, output_size, config=config, **options)
        self.initialize()
        cut(layer, self.kind, ranks)
        layer.__class__ = cls

    def initialize(self) -> None:
        """Called while the layer is whole, for a subclass to give its weight other values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(y, the bias if `skip_bias_add`, else None)."""
        y = super().forward(x)  # type: ignore[misc]
        return y, self.bias if self.skip_bias_add else None  # type: ignore[attr-defined]


class ColumnParallelLoRALinear(_Author, ColumnLoRA):  # type: ignore[misc]
    """A LoRALinear whose outputs are split over the ranks of `tp_group`: y_t [..., N/T] of a whole x.

    Args:
        input_size, output_size: K and N of the whole layer.
        config: rank, scaling, dropout, FP8 recipe.
        tp_group: the ranks that hold the layer. All must construct it with torch's generators in one state: the whole
            layer is drawn on each, and cut, so that a part does not depend on how many ranks there are.
        options: `bias`, `device`, `dtype`, `adapter_dtype`, `fp8_state` and `name` as for a LoRALinear.
            `sequence_parallel`: x is this rank's part of the first dimension, y has all of it. `skip_bias_add`: return
            the bias instead of adding it. `gather_output=True` is refused.

    Raises:
        ValueError: the ranks do not divide N, or an option is not supported yet.
        TypeError, KeyError: as for a LoRALinear.
    """

    kind, cut_size = ColumnLoRA, "output_size"


class RowParallelLoRALinear(_Author, RowLoRA):  # type: ignore[misc]
    """A LoRALinear whose inputs are split over the ranks of `tp_group`: a whole y of x_t [..., K/T].

    Args:
        input_size, output_size, config, tp_group, options: as for ColumnParallelLoRALinear. With `sequence_parallel` y
            is this rank's part of the first dimension. `input_is_parallel=False` is refused.

    Raises:
        ValueError: the ranks do not divide K, or an option is not supported yet.
        TypeError, KeyError: as for a LoRALinear.
    """

    kind, cut_size = RowLoRA, "input_size"
