# SPDX-License-Identifier: Apache-2.0
"""The frozen weights of decoder layers, and checks that they can be sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lorakernels.fusion.families import spec_of
from lorakernels.fusion.layer import FusedDecoderLayer, parts_of
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.order import refuse_module
from lorakernels.parallel.ranks.blocks import Shape

Linears = Mapping[str, FrozenFP8Linear]


def frozen_linears(layer: nn.Module) -> dict[str, FrozenFP8Linear]:
    """{path in the layer: module} of the linears whose weights are sharded, group by group."""
    modules = dict(layer.named_modules())
    places = [place for group in spec_of(layer).groups for place in group]
    order = [*places, *(path for path in modules if path not in places)]
    return {path: m for path in order if isinstance(m := modules[path], FrozenFP8Linear)}


def shapes_of(layer: nn.Module) -> dict[str, Shape]:
    """{path in the layer: [N, K]} of the linears whose weights are sharded."""
    return {path: (m.out_features, m.in_features) for path, m in frozen_linears(layer).items()}


def groups_of(layer: nn.Module, shapes: Mapping[str, Shape]) -> list[list[tuple[str, Shape]]]:
    """(path in the layer, [N, K]) of the weights, one list for each input. The layer may be fused or not.

    Args:
        layer: a decoder layer of a family that `fuse` supports.
        shapes: {path in the layer: [N, K]} of the weights.
    """
    groups = [[p for p in group if p in shapes] for group in spec_of(layer).groups]
    grouped = {path for group in groups for path in group}
    groups += [[path] for path in shapes if path not in grouped]
    return [[(p, shapes[p]) for p in group] for group in groups if group]


def check_layers(layers: Mapping[str, nn.Module]) -> None:
    """Refuse weights that cannot be sharded.

    Raises:
        ValueError: a weight is not FP8, is merged, tied, sharded or on the meta device.
    """
    owners: dict[int, str] = {}
    devices: set[str] = set()
    for path, layer in layers.items():
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                raise ValueError(
                    f"{path}.{name} is an nn.Linear of {module.weight.dtype}: shard_base takes weights in FP8; "
                    "fuse(model), or FrozenFP8Linear.from_linear, makes them so"
                )
        for name, linear in frozen_linears(layer).items():
            refuse_module(f"{path}.{name}", linear, "shard_base")
            for objection in _objections(linear):
                raise ValueError(f"{path}.{name} {objection}")
            weight = stored(linear)
            devices.add(str(weight.device))
            if owners.setdefault(weight.data_ptr(), f"{path}.{name}") != f"{path}.{name}":
                raise ValueError(
                    f"{path}.{name} shares its memory with {owners[weight.data_ptr()]}"
                )
    if len(devices) > 1:
        raise ValueError(f"all frozen weights must be on one device, found {sorted(devices)}")


def _objections(linear: FrozenFP8Linear) -> Iterator[str]:
    weight = stored(linear)
    if not linear.holds_fp8:
        yield f"holds {weight.dtype}, not FP8: only an FP8 base is sharded"
    if isinstance(linear, DoRALinear):
        yield "has use_dora=True, whose norms need the whole weight: such a base is not sharded"
    if is_sharded(weight):
        yield "is sharded by FSDP2"
    if weight.is_meta:
        yield "is on the meta device: give the model its weights first"


def stored(linear: FrozenFP8Linear) -> Tensor:
    """The parameter that holds the bytes."""
    weight = linear._parameters["weight"]
    assert weight is not None
    return weight


def join_groups(layer: nn.Module) -> None:
    """Join a fused layer's matrices again after their weights were moved."""
    if isinstance(layer, FusedDecoderLayer):
        for group in parts_of(layer).groups:
            group.join()


def sums_of_frozen(model: nn.Module, device: torch.device) -> dict[str, int]:
    """{name for error messages: checksum} of every tensor that must be equal on all ranks sharing a base. One pass.

    These are frozen parameters, and the scales of frozen linears. Tensors on the meta device and DTensors are left out.
    """
    frozen: dict[str, Tensor] = {n: x for n, x in model.named_parameters() if not x.requires_grad}
    for path, module in model.named_modules():
        if isinstance(module, FrozenFP8Linear) and module.weight_scale_inv is not None:
            frozen[f"{path}.weight_scale_inv"] = module.weight_scale_inv
    frozen = {name: x for name, x in frozen.items() if not (x.is_meta or is_sharded(x))}
    sums = [_sum_of_bits(x).to(device) for x in frozen.values()]
    names = [f"the values of {name}" for name in frozen]
    return dict(zip(names, torch.stack(sums).tolist() if sums else [], strict=True))


def _sum_of_bits(x: Tensor) -> Tensor:
    """int64 [], modulo 2^64: the sum of all words of eight bytes and of the remaining bytes.

    A CPU adds words seventy times as fast as bytes.
    """
    raw = x.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words must be aligned
    words = len(raw) // 8 * 8
    return raw[:words].view(torch.int64).sum() + raw[words:].sum(dtype=torch.int64)
