# SPDX-License-Identifier: Apache-2.0
"""LoRALinearGroup: LoRALinears of one input (q, k, v; gate, up) that quantize it once.

Models call their projections one by one: `q_proj(x)`, `k_proj(x)`, `v_proj(x)`. The first member called with an x
quantizes it. If all members use one dropout mask or none, it also computes the down-projection of all. The other
members reuse that result, once each, if they get the same, unmodified tensor in the same mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.autograd import (
    Adapter,
    Call,
    LoRASpec,
    SharedInput,
    check_input,
    is_compiling,
    quantize_in_blocks,
    quantize_input,
    rows_of,
    share_input,
    shared_linear,
    traced_slot,
)
from lorakernels.device import in_backward
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.projections import is_active
from lorakernels.modules.marks import became, mark
from lorakernels.modules.order import refuse_module
from lorakernels.numerics.autocast import autocast_dtype
from lorakernels.state.fp8 import FP8State
from lorakernels.values import Scaled, Weight

_Key = tuple[list[Any], list[Any]]  # objects, and values


@dataclass(frozen=True)
class _Entry:
    """A result that members share: computed from `x` when `_key` was `key`, and still unused by members `waiting`."""

    x: weakref.ref[Tensor]
    key: _Key
    shared: SharedInput
    waiting: set[int]

    def serves(self, index: int, x: Tensor, key: _Key) -> bool:
        (objects, values), (ours, then) = key, self.key
        if self.x() is not x or index not in self.waiting or values != then:
            return False
        return all(map(is_, objects, ours))


class LoRALinearGroup:
    """LoRALinears that share the quantization of their input.

    The members stay where they are, with their parameters and names; each becomes a `GroupedLoRALinear`. Calling a
    member works as before. `group(x)` computes the outputs of all members without running their hooks. Under
    `torch.compile`, `group(x)` quantizes x once and runs one down-projection per member. Members called one by one are
    then traced separately, and each quantizes x.

    Without dropout one `quantize_lora_down` serves all adapters. With dropout each member has its own mask, as in PEFT,
    and only the quantized x is shared. `shared_dropout=True` draws one mask for all instead, so that one
    `quantize_lora_down` serves all here too; checkpointing must then put all members into one checkpointed function.
    In backward each member is by itself, as if it were in no group.

    x has one amax and one scale, in the first member's column of the FP8 state (and in every member's state_dict).
    Under BlockScaling it has a scale for each 1 × 128, and there is no state.

    Args:
        members: two or more LoRALinears of equal in_features, FP8 recipe, FP8 state, device and dropout. Ranks and
            scalings may differ.
        shared_dropout: one mask for all members instead of one each.

    Attributes:
        members, shared_dropout: as given.
        names: the members' names.

    Raises:
        TypeError: a member is no LoRALinear.
        ValueError: members do not fit together, or are in a group already. Nothing is changed then.
    """

    def __init__(self, members: Sequence[LoRALinear], *, shared_dropout: bool = False) -> None:
        # below, each becomes a GroupedLoRALinear
        self.members: tuple[GroupedLoRALinear, ...] = tuple(members)  # type: ignore[arg-type]
        self.shared_dropout = shared_dropout
        self._entry: _Entry | None = None
        self._drew: set[int] = set()
        check_members(self.members, shared_dropout)
        for member in self.members:
            member.__class__ = GroupedLoRALinear
            mark(member, group=self)
            member.column_x = self.members[0].column

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., K] → one [..., N] per member, as if each had been called.

        Raises:
            ValueError: some members are in training and some in eval.
        """
        if len({member.training for member in self.members}) > 1:
            raise ValueError(f"members {list(self.names)} must all be in training, or all in eval")
        if is_compiling():
            return self._compiled(x)
        outputs, shared = [], None
        for index in range(len(self.members)):
            self._begin(index, x)
            shared = shared or self._share(0, x)
            outputs.append(self._project(index, x, shared))
        return tuple(outputs)

    def index_of(self, member: nn.Module) -> int | None:
        """The index of `member` in `members`. None for another module, such as a replica with a member's attributes."""
        return next((i for i, own in enumerate(self.members) if own is member), None)

    def project(self, index: int, x: Tensor) -> Tensor:
        """Output [..., N] of member `index` for x [..., K]. It reuses what earlier members computed from the same x."""
        self._begin(index, x)
        # traced and inference tensors have no version, so a write to x would go unnoticed: share nothing
        if torch.compiler.is_compiling() or x.is_inference():
            return self._project(index, x, self._share(index, x, alone=True))
        key, entry = self._key(index, x), self._entry
        if entry is None or not entry.serves(index, x, key):
            self._entry = entry = None  # free the last input's result first
            shared = self._share(index, x)
            waiting = set(range(len(self.members)))
            entry = _Entry(weakref.ref(x, self._forget), key, shared, waiting)
        entry.waiting.discard(index)
        self._entry = entry if entry.waiting else None
        return self._project(index, x, entry.shared)

    def _forget(self, x: weakref.ref[Tensor]) -> None:
        if self._entry is not None and self._entry.x is x:
            self._entry = None

    def _begin(self, index: int, x: Tensor) -> None:
        """Check x and prepare the FP8 state for member `index`, before any mask is drawn."""
        member = self.members[index]
        check_input(x, member.stored)
        if member.fp8_state is not None:
            member.fp8_state.begin(x.device, member.column, member.training)

    def _compiled(self, x: Tensor) -> tuple[Tensor, ...]:
        """`group(x)` in a trace: x is quantized once, and each member has a down-projection of its own."""
        first = self.members[0]
        check_input(x, first.stored)
        shared: dict[str, Any] = {}
        if first.holds_fp8:
            rows, blocks = rows_of(x.detach()), first.block_scaling
            if blocks is None:
                x8, x_scale_inv = quantize_input(rows, first.handle.tensor, first.training)
            else:
                x8, x_scale_inv = quantize_in_blocks(Scaled(rows), blocks)
            shared = {"x8": x8, "x_scale_inv": x_scale_inv}
        if self.shared_dropout:
            owner = [*(m for m in self.members if is_active(m)), first][0]
            shared["mask"] = owner.handle.tensor
            drops = any(m.training and m.handle.drops and is_active(m) for m in self.members)
            slot = traced_slot(owner.rng_state, owner.handle.tensor) if drops else None
        outputs = []
        for member in self.members:
            if not self.shared_dropout:
                drops = member.training and member.handle.drops and is_active(member)
                slot = traced_slot(member.rng_state, member.handle.tensor) if drops else None
            outputs.append(member._traced(x, slot, shared))
        return tuple(outputs)

    def _key(self, index: int, x: Tensor) -> _Key:
        """Everything that a shared result depends on besides x itself. Equal values come with equally many objects."""
        autocast = autocast_dtype(x.device.type)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        own_hooks = None if hooks is None else weakref.ref(hooks[0])  # a checkpoint has its own
        training = self.members[index].training
        values: list[Any] = [x._version, torch.is_grad_enabled(), autocast, training, own_hooks]
        if x.is_cuda:
            values.append(torch.cuda.current_stream(x.device).cuda_stream)
            values.append(torch.cuda.is_current_stream_capturing())
        stack = self._together(index)
        for i, a in stack.items():
            values.append((i, a._version, a.data_ptr(), self.members[i].lora_dropout))
        return [*stack.values()], values

    def _together(self, index: int) -> dict[int, Tensor]:
        """{index: A} of the members whose adapters are stacked; empty if each member has its own mask."""
        active = {i: m for i, m in enumerate(self.members) if is_active(m)}
        if not self.shared_dropout and any(_drops(m) for m in active.values()):
            return {}
        return {i: m.lora_A for i, m in active.items()}

    def _share(self, index: int, x: Tensor, alone: bool = False) -> SharedInput:
        """Compute what the members share of x. Member `index` is called first; `alone` stacks no other adapters."""
        member, first = self.members[index], self.members[0]
        stack = {} if alone else self._together(index)
        if not stack and is_active(member):
            stack = {index: member.lora_A}
        owner = self.members[next(iter(stack), index)]  # the mask uses its dropout site
        drops = bool(stack) and member.training and owner.lora_dropout > 0
        if len(stack) > 1:
            self._check_stack(index, stack, member.training)
        slot = owner.draw_slot(x.device) if drops else None
        state = first.fp8_state
        spec = LoRASpec(
            p=owner.lora_dropout,
            site=owner.site,
            row0=owner.row0,
            chunks=owner.chunks,
            column=first.column,
            delayed=member.training,
            blocks=first.block_scaling,
        )
        state_x = None if state is None else state.forward
        return share_input(x, stack, Call(spec, slot, state_x))

    def _check_stack(self, index: int, stack: Iterable[int], training: bool) -> None:
        """Refuse a down-projection of all members in `stack` that member `index` cannot compute.

        Raises:
            RuntimeError: an A is sharded, or a recomputation would draw another mask than the forward.
            ValueError: the members have different dropout probabilities.
        """
        caller, others = self.members[index], [self.members[i] for i in stack]
        for other in others:
            if is_sharded(other.lora_A):
                raise RuntimeError(
                    f"{other.name}.lora_A is sharded while {caller.name} runs, which reads it: let fully_shard "
                    "take the module that holds the whole group"
                )
        p = {other.name: other.lora_dropout for other in others}
        if not training or not any(p.values()):
            return
        if len(set(p.values())) > 1:
            raise ValueError(f"one mask for all needs one lora_dropout, found {p}")
        if not torch.compiler.is_compiling():
            self._check_recomputation(index)

    def _check_recomputation(self, index: int) -> None:
        """RuntimeError if a recomputation lets another member draw the mask than the forward did: it would differ."""
        if not in_backward():
            self._drew.add(index)
        elif index not in self._drew:
            raise RuntimeError(
                f"{self.members[index].name} would draw the group's mask in a recomputation, but "
                f"{[self.members[i].name for i in sorted(self._drew)]} drew it in the forward: "
                "checkpoint all members in one function, or use shared_dropout=False"
            )

    def _project(self, index: int, x: Tensor, shared: SharedInput) -> Tensor:
        member, active = self.members[index], is_active(self.members[index])
        slot, owner = shared.slot, shared.spec  # who drew the mask, if it is shared
        mask = owner.p, owner.site, owner.row0, owner.chunks
        if index not in shared.s:
            slot = member.draw_slot(x.device) if _drops(member) else None
            mask = member.lora_dropout, member.site, member.row0, member.chunks
        spec = LoRASpec(member.scaling, *mask, blocks=member.block_scaling)
        state = member.fp8_state
        if state is not None:
            spec = spec.following(state.recipe, member.column, member.training)
        weight = Weight(member.stored, member.weight_scale_inv)
        adapter = Adapter(member.lora_A, member.lora_B) if active else Adapter()
        call = Call(spec, slot, state_dy=None if state is None else state.backward)
        return shared_linear(x, shared, index, weight, member.bias, adapter, call)

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and deepcopy: everything except the result that is kept for the last input."""
        return {**self.__dict__, "_entry": None}

    def __repr__(self) -> str:
        return f"LoRALinearGroup({', '.join(self.names)}, shared_dropout={self.shared_dropout})"


class GroupedLoRALinear(LoRALinear):
    """A LoRALinear that shares the quantization of its input with the other members of its `group`."""

    @property
    def group(self) -> LoRALinearGroup:
        group = became(self).group
        assert group is not None
        return group

    def forward(self, x: Tensor) -> Tensor:
        """As LoRALinear's."""
        if is_compiling():
            return super().forward(x)
        index = self.group.index_of(self)
        return super().forward(x) if index is None else self.group.project(index, x)

    def _traced(self, x: Tensor, slot: Tensor | None, shared: dict[str, Any]) -> Tensor:
        """The output in a trace, with what the members share of x."""
        adapter = (self.lora_A, self.lora_B) if is_active(self) else (None, None)
        return self._compiled(x, adapter, slot, **shared)

    def move_state(self, state: FP8State, name: str) -> None:
        """As LoRALinear's. The members then take x's column from where the first one's is now."""
        super().move_state(state, name)
        for member in self.group.members:
            member.column_x = self.group.members[0].column

    @property
    def fp8_scale(self) -> Tensor:
        return self._values()[-1]

    @property
    def fp8_amax_history(self) -> Tensor:
        return self._values()[:-1]

    def _values(self) -> Tensor:
        """fp32 [amax_history_len + 1, 2]: the group's column for x, and this layer's own column for dy."""
        first = self.group.members[0]
        assert self.fp8_state is not None and first.fp8_state is not None
        x = first.fp8_state.forward[:, first.column]
        return torch.stack((x, self.fp8_state.backward[:, self.column]), 1)


def check_members(members: Sequence[LoRALinear], shared_dropout: bool) -> None:
    """Raise what LoRALinearGroup raises for members that do not fit together."""
    for member in members:
        if not isinstance(member, LoRALinear):
            raise TypeError(f"a member must be a LoRALinear, found {type(member).__name__}")
        refuse_module(member.name, member, "group_projections")
        if member.config.use_dora:
            raise ValueError(f"{member.name!r} has use_dora=True, which a group does not compute")
    names = [member.name for member in members]
    if len({id(member) for member in members}) < max(len(members), 2):
        raise ValueError(f"a group needs two or more different members, found {names}")
    for what in ("in_features", "lora_dropout", "recipe", "device"):
        values = [_asked(member, what) for member in members]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"members of a group must have one {what}, found {dict(zip(names, values, strict=True))}"
            )
    if any(member.fp8_state is not members[0].fp8_state for member in members):
        raise ValueError(
            f"members of a group must have one fp8_state, {names} have different ones: x's scale would be "
            "updated by the first one's alone; pass the same FP8State to each, as apply_lora does"
        )
    if shared_dropout and any(m.rng_state is not members[0].rng_state for m in members):
        raise ValueError(f"one mask for all needs one rng_state, {names} have different ones")


def _asked(member: LoRALinear, what: str) -> Any:
    return member.lora_A.device if what == "device" else getattr(member, what)


def _drops(member: LoRALinear) -> bool:
    return member.training and member.lora_dropout > 0 and is_active(member)
