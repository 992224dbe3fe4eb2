# SPDX-License-Identifier: Apache-2.0
"""JoinedRows: the memory that the members of a FusedGroup share, and tensors that are derived from it.

The members' weights are rows of one [ΣN, K], their A's rows of one [ΣR, K], their biases parts of one [ΣN]. The
Parameter objects and their names stay; their addresses change.

Derived tensors (scales by column) become stale when torch writes a member's weight or scale. A write through
`.data.copy_` goes unnoticed: it leaves the tensor's version as it was. After `.to`, deepcopy or
`load_state_dict(assign=True)` has moved a parameter, `update` joins the members again. Weights that already lie one
behind the other, as in a sharded base's block, are joined without a copy.

FSDP2 gives the parameters that it manages other Parameter objects, and other memory at every forward. Their A's are
not joined. Weights and biases have to be in its `ignored_params`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lorakernels.fusion.prepared import Derived
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.projections import is_active
from lorakernels.modules.marks import is_held


class JoinedRows:
    """The joined weights, A's and biases of the modules `members`. A single member keeps its own memory.

    Args:
        members: of one FusedGroup.
        results: how many results the joined matrix has.

    Attributes:
        weight: [ΣN, K], or None before the first `update` and for a single member.
        bias: [ΣN], or None for a single member and without biases.
        lora_A: {ids of the adapted members: [ΣR, K]}. Empty where their A's are not joined.
        derived: scales and multipliers, or None before the first `update`.
        factors: {ratios: what `factors_of` has returned}. Captured graphs read them.
    """

    def __init__(self, members: Sequence[FrozenFP8Linear], results: int) -> None:
        self.members = tuple(members)
        self.results = results
        self.forget()
        self._remember_parameters()

    def forget(self) -> None:
        """Let go of all joined memory. The next `update` joins and derives as if for the first time."""
        self.weight: Tensor | None = None
        self.lora_A: dict[tuple[int, ...], Tensor] = {}
        self.bias: Tensor | None = None
        self.derived: Derived | None = None
        self.factors: dict[tuple[float, ...], Tensor] = {}
        self._has_bias: list[bool] = []  # of each member when it was joined
        self._derived_from: tuple[list[Any], list[int]] = ([], [])

    def _remember_parameters(self) -> None:
        """Note the members' Parameters, which FSDP exchanges for others."""
        parameters = (p for m in self.members for p in m._parameters.values())
        self._originals = [ref(p) for p in parameters if p is not None]

    @property
    def first(self) -> FrozenFP8Linear:
        return self.members[0]

    @property
    def rows(self) -> list[int]:
        return [member.out_features for member in self.members]

    def is_stale(self) -> bool:
        """Whether `update` has something to do. During a capture, scales that were written in place do not count."""
        if len(self.members) > 1 and not self.is_joined():
            return True
        now = self._state_of_members()
        only_scales = now[0] == self._derived_from[0]
        return now != self._derived_from and not (only_scales and self._capturing())

    def update(self) -> None:
        """Join the members' weights, A's and biases where they are not, and derive tensors from them.

        Raises:
            RuntimeError: a graph is being captured, or FSDP manages a weight or a bias.
        """
        self._refuse_in_capture()
        if len(self.members) > 1 and not self.is_joined():
            self._refuse_fsdp("weight", "bias")
            self._join()
        state = self._state_of_members()
        with torch.inference_mode(False):
            self._renew(self._derive())
        self._derived_from = state

    def has_been_written(self) -> bool:
        """Whether a weight or a scale was moved or written since the last `update`."""
        return self._state_of_members() != self._derived_from

    def sources(self) -> list[Tensor]:
        """The weights and scales that derived tensors were made from. A single member's are its own."""
        if len(self.members) == 1:
            return []
        pairs = [(m._parameters["weight"], m._buffers["weight_scale_inv"]) for m in self.members]
        return [x for pair in pairs for x in pair if x is not None and pair[1] is not None]

    def has_joined_A(self, adapted: Sequence[LoRALinear]) -> bool:
        """Whether the A's of several adapters are rows of one matrix."""
        return tuple(map(id, adapted)) in self.lora_A

    def stacked_A(
        self, adapted: Sequence[LoRALinear], lora_A: Sequence[Tensor | None]
    ) -> Tensor | None:
        """The A's of `adapted` as one [ΣR, K], copied where they are not joined; None without adapters."""
        parts = [a.detach() for a in lora_A if a is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        joined = self.lora_A.get(tuple(map(id, adapted)))
        return torch.cat(parts, -2) if joined is None else joined

    def factors_of(self, scaling: float) -> Tensor:
        """fp32 [2, n]: ρ_i and ρ_i / m_i, as in autograd/linear/linear.py. ρ_i is member i's ratio to `scaling`.

        They are one tensor for each ρ, whatever the mode and the rows.
        """
        ratios = tuple(m.scaling / scaling if is_active(m) else 0.0 for m in self.members)
        if ratios not in self.factors:
            self.factors[ratios] = self._new_factors(ratios)
        return self.factors[ratios]

    @torch.inference_mode(False)
    def _new_factors(self, ratios: tuple[float, ...]) -> Tensor:
        assert self.derived is not None
        multiplier = self.derived.multiplier
        first = torch.tensor(ratios).float().to(multiplier.device)
        return torch.stack((first, first / multiplier))

    @torch.inference_mode(False)  # training will use these tensors too
    def _join(self) -> None:
        self.forget()
        self._join_weights()
        if self._managed_by_fsdp("lora_A") is None:
            self._join_A()
            self._remember_parameters()
        self._join_biases()

    def is_joined(self) -> bool:
        """Whether every parameter still is where it was when the members were joined."""
        if self.weight is None:
            return False
        address = self.weight.data_ptr()
        for member in self.members:
            parameter = member._parameters["weight"]
            if parameter is None or parameter.data_ptr() != address:
                return False
            address += parameter.numel() * parameter.element_size()
        for joined in self.lora_A.values():
            address = joined.data_ptr()
            for member in self.members:
                lora_A = member._parameters.get("lora_A")
                if lora_A is not None:
                    if lora_A.data_ptr() != address:
                        return False
                    address += lora_A.numel() * lora_A.element_size()
        return self._has_joined_biases()

    def _has_joined_biases(self) -> bool:
        biases = [m._parameters.get("bias") for m in self.members]
        if self._has_bias != [bias is not None for bias in biases]:
            return False
        address, element = 0, 0
        if self.bias is not None:
            address, element = self.bias.data_ptr(), self.bias.element_size()
        for rows, bias in zip(self.rows, biases, strict=True):
            if bias is not None and bias.data_ptr() != address:
                return False
            address += rows * element
        return True

    def _join_weights(self) -> None:
        parts = [m._parameters["weight"] for m in self.members]
        assert all(p is not None for p in parts)
        self.weight = join_rows([p for p in parts if p is not None])
        if self.first.weight_scale_inv is not None:
            self.weight = self.weight.view(torch.uint8)

    def _join_A(self) -> None:
        # of a layer of PEFT's all adapters may have been deleted
        adapted: list[Any] = [m for m in self.members if m._parameters.get("lora_A") is not None]
        if len(adapted) > 1 and adapted[0].lora_A.dim() == 2:
            self.lora_A = {tuple(id(m) for m in adapted): join_rows([m.lora_A for m in adapted])}

    @torch.no_grad()
    def _join_biases(self) -> None:
        """Join the biases into one [ΣN], with zeros for a member without a bias."""
        biases = [m._parameters.get("bias") for m in self.members]
        self.bias, self._has_bias = None, [bias is not None for bias in biases]
        first = next((b for b in biases if b is not None), None)
        if first is None:
            return
        self.bias = first.data.new_zeros(sum(self.rows))
        for bias, part in zip(biases, self.bias.split(self.rows), strict=True):
            if bias is not None:
                part.copy_(bias.data)
                bias.data = part

    def separate(self) -> None:
        """Give every member memory of its own again. A weight of a sharded base stays in its slot."""
        if len(self.members) > 1:
            for member in self.members:
                parameters = [
                    None if is_held(member) else member._parameters["weight"],
                    getattr(member, "lora_A", None),
                    member._parameters.get("bias"),
                ]
                for parameter in parameters:
                    if parameter is not None:
                        parameter.data = parameter.data.clone()
        self.forget()

    def _state_of_members(self) -> tuple[list[Any], list[int]]:
        """(addresses and weight versions, scale versions), by which stale derived tensors are noticed. Only the second
        list changes when a scale alone is written in place, as graph capture does when it restores buffers."""
        weights: list[Any] = []
        scales: list[int] = []
        for m in self.members:
            weight, scale = m._parameters["weight"], m._buffers["weight_scale_inv"]
            assert weight is not None
            weights += (weight.data_ptr(), weight._version)
            if scale is not None:
                weights.append(scale.data_ptr())
                scales.append(scale._version)
        return weights, scales

    @torch.no_grad()
    def _derive(self) -> Derived:
        """Scales by column, their largest, and the multipliers of dy.

        The scale of an all-zero weight is meaningless. It does not count for the largest, and its multiplier is one.
        """
        scales = [s for m in self.members if (s := m.weight_scale_inv) is not None]
        if len(self.members) == 1 or not scales or self.first.block_scaling is not None:
            # a single one is the member's own: captured graphs read it at its address
            scale = torch.cat(scales) if len(scales) > 1 else next(iter(scales), None)
            ones = torch.ones(self.results, device=self.first.stored.device)
            return Derived(scale, scale, ones)
        scale_inv = torch.cat(scales)
        zero = torch.stack([_is_zero(m.stored) for m in self.members])
        one = torch.ones((), device=scale_inv.device)
        largest = scale_inv.masked_fill(zero, 0.0).max().view(1)
        largest = torch.where(zero.all(), one, largest)
        counts = torch.tensor(self.rows, device=scale_inv.device)
        by_column = scale_inv.repeat_interleave(counts, output_size=sum(self.rows))
        multiplier = torch.where(zero, one, scale_inv / largest)
        return Derived(by_column, largest, multiplier)

    @torch.no_grad()
    def _renew(self, derived: Derived) -> None:
        """Take new derived tensors. If shapes, dtypes and devices are the old ones, copy the values into the old
        tensors: captured graphs read them at their addresses."""
        before = self.derived
        if before is None or [_form_of(t) for t in before] != [_form_of(t) for t in derived]:
            self.derived, self.factors = derived, {}
            return
        # one member: the scales are its own tensors, and the multiplier stays 1
        if len(self.members) == 1:
            self.derived = derived._replace(multiplier=before.multiplier)
            return
        for old, new in zip(before, derived, strict=True):
            if old is not None and new is not None and old is not new:
                old.copy_(new)
        for factors in self.factors.values():
            factors[1] = factors[0] / before.multiplier

    def _capturing(self) -> bool:
        weight = self.first._parameters["weight"]
        return weight is not None and weight.is_cuda and torch.cuda.is_current_stream_capturing()

    def _managed_by_fsdp(self, *names: str) -> FrozenFP8Linear | None:
        """A member with a parameter of such a name that FSDP gathers; None without one.

        FSDP marks the modules. The parameters that it ignores are still the module's own.
        """
        ours = {id(parameter()) for parameter in self._originals}
        for member in self.members:
            if getattr(member, "_is_fsdp_managed_module", False):
                parameters = map(member._parameters.get, names)
                if any(p is not None and id(p) not in ours for p in parameters):
                    return member
        return None

    def _refuse_fsdp(self, *names: str) -> None:
        member = self._managed_by_fsdp(*names)
        if member is not None:
            raise RuntimeError(
                f"{' or '.join(names)} of {member.name} is managed by FSDP, which gives it other memory at "
                "every forward: call fully_shard(..., ignored_params={p for p in model.parameters() if not "
                "p.requires_grad}) after fuse and after loading, or unfuse(model) before fully_shard"
            )

    def _refuse_in_capture(self) -> None:
        if self._capturing():
            raise RuntimeError(
                f"{self.first.name}: its memory was moved or written since the last forward; run one "
                "forward before capturing a graph"
            )


def _storage_of(x: Tensor) -> int:
    """The address of the memory that x is in, wherever x begins there."""
    return x.untyped_storage().data_ptr()


@torch.no_grad()
def join_rows(parameters: Sequence[Tensor]) -> Tensor:
    """One contiguous matrix. Each parameter becomes a view of its rows.

    Parameters that lie one behind the other stay where they are. The others are copied.
    """
    counts = [p.shape[0] for p in parameters]
    if _are_adjacent(parameters):
        first = parameters[0].data
        return first.as_strided((sum(counts), first.shape[1]), first.stride())
    whole = parameters[0].data.new_empty(sum(counts), parameters[0].shape[1])
    for parameter, part in zip(parameters, whole.split(counts), strict=True):
        part.copy_(parameter.data)
        parameter.data = part
    return whole


def _are_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Whether each parameter begins where the one before it ends, in one storage."""
    storage, address = _storage_of(parameters[0]), parameters[0].data_ptr()
    for parameter in parameters:
        follows = parameter.data_ptr() == address and _storage_of(parameter) == storage
        if not follows or not parameter.is_contiguous():
            return False
        address += parameter.numel() * parameter.element_size()
    return True


def _form_of(x: Tensor | None) -> tuple[Any, ...] | None:
    """Shape, dtype and device; None of None."""
    return None if x is None else (x.shape, x.dtype, x.device)


def _is_zero(raw: Tensor) -> Tensor:
    """bool []: whether all e4m3 bytes are 0 or −0 (0x80). The bytes are not copied."""
    return (raw.view(torch.int8).max() <= 0) & (raw.max() <= 0x80)
