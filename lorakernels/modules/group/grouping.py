# SPDX-License-Identifier: Apache-2.0
"""group_projections: a LoRALinearGroup in every layer of a model that has the named projections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lorakernels.modules.group.layer import LoRALinearGroup, check_members
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.order import refuse


def group_projections(
    model: nn.Module, groups: Iterable[Sequence[str]], *, shared_dropout: bool = False
) -> list[LoRALinearGroup]:
    """Group the projections of every layer of `model`, after `apply_lora` or `load_adapter`. Its code need not change.

        group_projections(model, [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")])

    Args:
        model: changed in place. If a module has LoRALinears under all names of a sequence, they become one group.
            A module without a LoRALinear under these names is left alone.
        groups: sequences of names; the model calls the projections of one sequence on the same tensor.
        shared_dropout: see `LoRALinearGroup`.

    Returns:
        The new groups, in module order.

    Raises:
        ValueError: a layer is fused, the model was cut into stages, a sequence of names is found nowhere, or a module
            has LoRALinears for only some of the names. Or members do not fit together. Nothing is changed then.
    """
    refuse(model, "group_projections", ())
    found: list[tuple[LoRALinear, ...]] = []
    for names in groups:
        if isinstance(names, str):
            raise ValueError(f"groups must be sequences of names, found the string {names!r}")
        here = [
            members
            for path, parent in model.named_modules()
            if (members := _members_of(path, parent, names))
        ]
        if not here:
            raise ValueError(f"no module of {type(model).__name__} has LoRALinears {list(names)}")
        found += here
    everyone = [member for members in found for member in members]
    if len({id(member) for member in everyone}) < len(everyone):
        raise ValueError(
            f"a projection is in two of the groups {[list(names) for names in groups]}"
        )
    for members in found:
        check_members(members, shared_dropout)
    return [LoRALinearGroup(members, shared_dropout=shared_dropout) for members in found]


def _members_of(path: str, parent: nn.Module, names: Sequence[str]) -> tuple[LoRALinear, ...]:
    children = {name: parent._modules.get(name) for name in names}
    members = {name: m for name, m in children.items() if isinstance(m, LoRALinear)}
    if members and len(members) < len(children):
        kinds = {
            name: "missing" if child is None else type(child).__name__
            for name, child in children.items()
            if name not in members
        }
        raise ValueError(
            f"{path or 'the model'}: {list(members)} are LoRALinears, but not {kinds}; target them with "
            "apply_lora, or leave them out of the group"
        )
    return tuple(members.values())
