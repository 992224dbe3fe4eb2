# SPDX-License-Identifier: Apache-2.0
"""FusedGroup: projections of one x that remain separate modules, while their weights are rows of one matrix.

The members' weights are rows of one [ΣN, K], their A's rows of one [ΣR, K], their biases parts of one [ΣN]. The
Parameter objects and their names stay; their addresses change.

Derived tensors (scales by column) are renewed after torch has written a member's weight or scale: by the next
forward, or before the next replay of lorakernels.graphs (`renew`). A write through `.data.copy_` goes unnoticed: it
leaves the tensor's version as it was. After `.to`, deepcopy or `load_state_dict(assign=True)` has moved a parameter,
the next forward joins the members again. Weights that already lie one behind the other, as in a sharded base's block,
are joined without a copy.

FSDP2 gives the parameters that it manages other Parameter objects, and other memory at every forward. A's are then
joined by a copy at every forward. Weights and biases have to be in its `ignored_params`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lorakernels.autograd.decoder.plan import planned_projections, way_of
from lorakernels.autograd.linear.projections import OverRanks, Projections
from lorakernels.autograd.linear.values import LoRASpec, check_frozen
from lorakernels.fusion.joined_rows import join_rows
from lorakernels.fusion.prepared import Derived, Prepared, Variant
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.lora import LoRALinear, rows_of_call
from lorakernels.modules.linear.projections import is_active
from lorakernels.modules.marks import became, bring, is_held
from lorakernels.numerics.segments import adapters_of, check_sequences
from lorakernels.ops.quantize_lora_down import MAX_RANK
from lorakernels.values import Dropout

MOST_VARIANTS = 64  # of a group, which are then made anew: context parallel has one for each length


class FusedGroup:
    """One or more LoRALinears and FrozenFP8Linears of one x.

    x and dy have one scale each, in the first member's columns of the FP8 state.

    Args:
        members: modules of equal in_features, FP8 state and recipe.
        shared_dropout: draw one mask for all adapters instead of one each. They must then have one lora_dropout.
        results: how many results the joined matrix has, 3 of which are q, k and v. A single member has all of them.
    """

    def __init__(
        self, members: Sequence[FrozenFP8Linear], shared_dropout: bool, results: int
    ) -> None:
        self.members = tuple(members)
        self.shared_dropout = shared_dropout
        self.results = results
        self.rows = tuple(member.out_features for member in self.members)
        self.over: OverRanks | None = became(self.first).loaded_part  # ranks that hold them
        self._forget()
        self._remember()

    def _remember(self) -> None:
        """Note the members' own Parameters. Those that FSDP puts in their place are others."""
        held = (p for m in self.members for p in m._parameters.values())
        self._own = [ref(p) for p in held if p is not None]

    def _forget(self) -> None:
        self._weight: Tensor | None = None
        self._lora_A: dict[tuple[int, ...], Tensor] = {}
        self._bias: Tensor | None = None
        self._biased: list[bool] = []  # had member i a bias when joined?
        self._seen: tuple[list[Any], list[int]] = ([], [])
        self._derived: Derived | None = None
        self._variants: dict[tuple[Any, ...], Variant] = {}
        self._factors: dict[tuple[float, ...], Tensor] = {}  # captured graphs read them
        self._prepared: Prepared | None = None

    @property
    def first(self) -> FrozenFP8Linear:
        return self.members[0]

    @property
    def adapted(self) -> list[LoRALinear]:
        """Members with an active adapter, which is neither merged nor switched off."""
        return [m for m in self.members if is_active(m)]

    def check_sequences(self, h: Tensor) -> None:
        """ValueError if several adapters do not divide the sequences of h [B, T, K]."""
        if not any("adapter_rows" in m.__dict__ for m in self.members):  # an AdapterBatch's
            return
        for member in self.adapted[:1]:
            rows = rows_of_call(member)
            check_sequences(h, adapters_of(member.lora_A) if rows is None else len(rows.numbers))

    def call(self) -> tuple[Projections, list[Tensor | None]]:
        """Prepare one forward: join the members, update the FP8 state in training, and draw the masks.

        Returns:
            The Projections, and the flat list of tensors that autograd gets for them (`fused_node.Trained`).

        Raises:
            RuntimeError: members differ in mode, FSDP manages one, a weight is to train, or memory was moved before a
                capture.
            ValueError: adapters that share a mask differ in lora_dropout.
        """
        prepared = self._prepared
        if prepared is None or not prepared.holds(self._now()):
            prepared = self._prepared = self._prepare()
        first = self.first
        state = first.fp8_state
        if state is not None and first.training:
            state.on_training_forward(first.column)
        masks = self._masks(prepared.variant, prepared.adapted)
        return prepared.with_masks(masks)

    def eager_ways(self, kinds: Mapping[Hashable, str]) -> list[str]:
        """How the last forward ran: "" by plans, or else why by the ops; empty before the first. `kinds`: of
        `ways_of_kinds` in autograd."""
        return [] if self._prepared is None else [way_of(self._prepared.to, kinds)]

    def _prepare(self) -> Prepared:
        """Join what is not joined, and make everything of a call that is not drawn."""
        derived = self.join()
        weights = [m._parameters["weight"] for m in self.members]
        for member, weight in zip(self.members, weights, strict=True):
            if weight is not None:
                check_frozen(weight, member.name)
        first, adapted = self.first, self.adapted
        state = first.fp8_state
        variant = self._variant(first.training, adapted)
        bias, biases = self._biases()
        lora_A: list[Tensor | None] = [m._parameters["lora_A"] for m in adapted]
        lora_B = [m._parameters["lora_B"] for m in adapted]
        to = Projections(
            first.stored if self._weight is None else self._weight,
            derived.scale_inv,
            derived.grad_scale_inv,
            bias,
            derived.multiplier,
            self.rows,
            variant.ranks,
            self._stacked_A(adapted, lora_A),
            self._factors_of(adapted),
            (None,) * len(variant.masks),
            None if state is None else state.forward,
            None if state is None else state.backward,
            variant.spec,
            tuple(w for w in weights if w is not None),
            first.block_scaling,
            over=self.over,
        )
        drawn = tuple(variant.drops and adapted[i].lora_dropout for i in variant.masks)
        params = [*lora_A, *lora_B, *biases]
        to = to._replace(planned=planned_projections(to, drawn, params))
        # what was copied goes stale when a parameter is written
        copied = len(adapted) > 1 and tuple(map(id, adapted)) not in self._lora_A
        seen = None if copied else self._now()
        return Prepared(seen, variant, tuple(adapted), to, params)

    def _now(self) -> tuple[list[Any], list[Any]] | None:
        """What a prepared call depends on: objects, and numbers. None if a member is not a module of ours."""
        objects: list[Any] = []
        numbers: list[Any] = []
        for member in self.members:
            own = member.__dict__
            if "_handle" not in own:
                return None
            parameters, buffers = own["_parameters"], own["_buffers"]
            weight, scale = parameters["weight"], buffers["weight_scale_inv"]
            lora_A, lora_B, bias = (parameters.get(name) for name in ("lora_A", "lora_B", "bias"))
            objects += (weight, scale, lora_A, lora_B, bias)
            objects.append(own["_handle"])  # there is a new one after a number of the layer changed
            numbers += (weight.data_ptr(), weight._version, own["training"])
            to_train = weight.requires_grad and torch.is_grad_enabled()
            numbers += (own.get("merged"), own.get("disable_adapters"), to_train)
            if scale is not None:
                numbers += (scale.data_ptr(), scale._version)
            if lora_A is not None and lora_B is not None:
                numbers += (lora_A.data_ptr(), lora_A.dtype, lora_A.shape, lora_B.dtype)
                numbers += (lora_B.shape, lora_B.is_contiguous())
            if bias is not None:
                numbers += (bias.data_ptr(), bias.dtype, bias.requires_grad)
        state = self.first.fp8_state
        if state is not None:
            objects += (state.forward, state.backward)
        return objects, numbers

    def _variant(self, training: bool, adapted: Sequence[LoRALinear]) -> Variant:
        """The Variant for this mode, these adapters and their rows. It is kept until there are `MOST_VARIANTS`."""
        state = self.first.fp8_state
        self._check_alike(training, adapted)
        at, numbers = [(m.row0, m.chunks) for m in adapted], (training, state, self.first.column)
        key = (*numbers, *at, *((id(m), m.r, m.scaling, m.lora_dropout) for m in adapted))
        if key not in self._variants:
            if len(self._variants) >= MOST_VARIANTS:
                self._variants.clear()
            spec = LoRASpec(self._scaling(adapted), 0.0, 0, *(at[0] if at else ()))
            if state is not None:
                spec = spec.following(state.recipe, self.first.column, training)
            ranks = tuple(m.r if is_active(m) else 0 for m in self.members)
            drop = training and any(m.lora_dropout for m in adapted)
            masks = [
                min(i, 0 if self.shared_dropout or not drop else i) for i in range(len(adapted))
            ]
            if sum(ranks) <= MAX_RANK and not any(masks):
                del masks[1:]
            self._variants[key] = Variant(spec, ranks, drop, tuple(masks))
        return self._variants[key]

    def _check_alike(self, training: bool, adapted: Sequence[LoRALinear]) -> None:
        if any(m.training != training for m in self.members):
            modes = {m.name: "training" if m.training else "eval" for m in self.members}
            raise RuntimeError(f"projections fused into one must be in one mode, found {modes}")
        if self.shared_dropout and len({m.lora_dropout for m in adapted}) > 1:
            found = {m.name: m.lora_dropout for m in adapted}
            raise ValueError(
                f"adapters that share a mask must have one lora_dropout, found {found}"
            )

    def _scaling(self, adapted: Sequence[LoRALinear]) -> float:
        """The scaling of the joined projection. `_factors_of` has the members' ratios to it."""
        if len(self.members) == 1 and adapted:
            return adapted[0].scaling
        return next((m.scaling for m in adapted if m.scaling), 1.0)

    def _masks(self, variant: Variant, adapted: Sequence[LoRALinear]) -> tuple[Dropout | None, ...]:
        """Draw the mask of each adapter, or one mask for all."""
        drawn: dict[int, Dropout | None] = {}
        for index in variant.masks:
            if index not in drawn:
                m = adapted[index]
                p = m.lora_dropout
                slot = m.draw_slot(m.lora_A.device) if variant.drops and p else None
                drawn[index] = variant.mask(slot, p, m.site)
        return tuple(drawn[index] for index in variant.masks)

    def _biases(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """(the joined bias [ΣN] or None, each member's bias where it is trained and None where not)."""
        biases = [m._parameters.get("bias") for m in self.members]
        trained: list[Tensor | None] = [
            b if b is not None and b.requires_grad else None for b in biases
        ]
        return biases[0] if len(self.members) == 1 else self._bias, trained

    def _stacked_A(
        self, adapted: Sequence[LoRALinear], lora_A: Sequence[Tensor | None]
    ) -> Tensor | None:
        parts = [a.detach() for a in lora_A if a is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        whole = self._lora_A.get(tuple(id(m) for m in adapted))
        return torch.cat(parts, -2) if whole is None else whole  # not joined: `_join_A`

    def _factors_of(self, adapted: Sequence[LoRALinear]) -> Tensor | None:
        """fp32 [2, n]: ρ_i and ρ_i / m_i, as in autograd/linear/linear.py. None for one member or without adapters.

        They are one tensor for each ρ, whatever the mode and the rows.
        """
        if len(self.members) == 1 or not adapted:
            return None
        whole = self._scaling(adapted)
        ratios = tuple(m.scaling / whole if is_active(m) else 0.0 for m in self.members)
        if ratios not in self._factors:
            self._factors[ratios] = self._new_factors(ratios)
        return self._factors[ratios]

    @torch.inference_mode(False)
    def _new_factors(self, ratios: tuple[float, ...]) -> Tensor:
        assert self._derived is not None
        multiplier = self._derived.multiplier
        first = torch.tensor(ratios).float().to(multiplier.device)
        return torch.stack((first, first / multiplier))

    def join(self) -> Derived:
        """Join the members' weights, A's and biases where they are not, and renew derived tensors that are stale."""
        if len(self.members) > 1 and not self._is_joined():
            self._refuse_in_capture()
            self._refuse_fsdp("weight", "bias")
            self._join_all()
        seen = self._state_of_members()
        if seen != self._seen and not (seen[0] == self._seen[0] and self._capturing()):
            self._refuse_in_capture()
            self._prepared = None  # it would keep a weight's old memory
            with torch.inference_mode(False):
                self._renew(self._derive())
            self._seen = seen
        assert self._derived is not None
        return self._derived

    def renew(self) -> list[Tensor]:
        """Join, and renew, as the next forward would: for graphs, which read the derived tensors.

        Returns:
            The weights and scales that the derived tensors were made from. A single member's are its own. Empty while
            FSDP has a weight sharded, for the next forward sees another one.
        """
        if any(is_sharded(m._parameters["weight"]) for m in self.members):
            return []
        if self._state_of_members() != self._seen:
            for member in self.members:
                bring(getattr(member, "base", member))  # a PEFT layer's base
        self.join()
        if len(self.members) == 1:
            return []
        self._check_alike(self.first.training, self.adapted)
        self._factors_of(self.adapted)  # they come from the host
        found = [(m._parameters["weight"], m._buffers["weight_scale_inv"]) for m in self.members]
        return [x for both in found for x in both if x is not None and both[1] is not None]

    @torch.inference_mode(False)  # training will use these tensors too
    def _join_all(self) -> None:
        self._forget()
        self._join_weights()
        if self._of_fsdp("lora_A") is None:
            self._join_A()
            self._remember()
        self._join_biases()

    def _is_joined(self) -> bool:
        weight = self._weight
        if weight is None:
            return False
        at = weight.data_ptr()
        for member in self.members:
            parameter = member._parameters["weight"]
            if parameter is None or parameter.data_ptr() != at:
                return False
            at += parameter.numel() * parameter.element_size()
        for whole in self._lora_A.values():
            at = whole.data_ptr()
            for member in self.members:
                lora_A = member._parameters.get("lora_A")
                if lora_A is not None:
                    if lora_A.data_ptr() != at:
                        return False
                    at += lora_A.numel() * lora_A.element_size()
        return self._has_joined_biases()

    def _has_joined_biases(self) -> bool:
        whole = self._bias
        biases = [m._parameters.get("bias") for m in self.members]
        if self._biased != [bias is not None for bias in biases]:
            return False
        at = 0 if whole is None else whole.data_ptr()
        for member, bias in zip(self.members, biases, strict=True):
            if bias is not None and bias.data_ptr() != at:
                return False
            at += member.out_features * (0 if whole is None else whole.element_size())
        return True

    def _join_weights(self) -> None:
        parts = [m._parameters["weight"] for m in self.members]
        assert all(p is not None for p in parts)
        self._weight = join_rows([p for p in parts if p is not None])
        if self.first.weight_scale_inv is not None:
            self._weight = self._weight.view(torch.uint8)

    def _join_A(self) -> None:
        # of a layer of PEFT's all adapters may have been deleted
        adapted: list[Any] = [m for m in self.members if m._parameters.get("lora_A") is not None]
        if len(adapted) > 1 and adapted[0].lora_A.dim() == 2:
            self._lora_A = {tuple(id(m) for m in adapted): join_rows([m.lora_A for m in adapted])}

    @torch.no_grad()
    def _join_biases(self) -> None:
        """Join the biases into one [ΣN], with zeros for a member without a bias."""
        biases = [m._parameters.get("bias") for m in self.members]
        self._bias, self._biased = None, [bias is not None for bias in biases]
        first = next((b for b in biases if b is not None), None)
        if first is None:
            return
        self._bias = first.data.new_zeros(sum(self.rows))
        for bias, part in zip(biases, self._bias.split(list(self.rows)), strict=True):
            if bias is not None:
                part.copy_(bias.data)
                bias.data = part

    def separate(self) -> None:
        """Give every member memory of its own again. A weight of a sharded base stays in its slot."""
        if len(self.members) > 1:
            for member in self.members:
                own = [
                    None if is_held(member) else member._parameters["weight"],
                    getattr(member, "lora_A", None),
                    member._parameters.get("bias"),
                ]
                for parameter in own:
                    if parameter is not None:
                        parameter.data = parameter.data.clone()
        self._forget()

    def _state_of_members(self) -> tuple[list[Any], list[int]]:
        """(addresses and weight versions, scale versions), by which stale derived tensors are noticed. Only the second
        list changes when a scale alone is written in place, as graph capture does when it restores buffers."""
        found: list[Any] = []
        scales: list[int] = []
        for m in self.members:
            weight, scale = m._parameters["weight"], m._buffers["weight_scale_inv"]
            assert weight is not None
            found += (weight.data_ptr(), weight._version)
            if scale is not None:
                found.append(scale.data_ptr())
                scales.append(scale._version)
        return found, scales

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
        each = torch.cat(scales)
        zero = torch.stack([_is_zero(m.stored) for m in self.members])
        one = torch.ones((), device=each.device)
        largest = each.masked_fill(zero, 0.0).max().view(1)
        largest = torch.where(zero.all(), one, largest)
        counts = torch.tensor(self.rows, device=each.device)
        by_column = each.repeat_interleave(counts, output_size=sum(self.rows))
        multiplier = torch.where(zero, one, each / largest)
        return Derived(by_column, largest, multiplier)

    @torch.no_grad()
    def _renew(self, derived: Derived) -> None:
        """Take new derived tensors. If shapes, dtypes and devices are the old ones, copy the values into the old
        tensors: captured graphs read them at their addresses."""
        before = self._derived
        if before is None or [_form_of(t) for t in before] != [_form_of(t) for t in derived]:
            self._derived, self._factors = derived, {}
            return
        # one member: the scales are its own tensors, and the multiplier stays 1
        if len(self.members) == 1:
            self._derived = derived._replace(multiplier=before.multiplier)
            return
        for old, new in zip(before, derived, strict=True):
            if old is not None and new is not None and old is not new:
                old.copy_(new)
        for factors in self._factors.values():
            factors[1] = factors[0] / before.multiplier

    def _capturing(self) -> bool:
        weight = self.first._parameters["weight"]
        return weight is not None and weight.is_cuda and torch.cuda.is_current_stream_capturing()

    def _of_fsdp(self, *names: str) -> FrozenFP8Linear | None:
        """A member with a parameter of such a name that FSDP gathers; None without one.

        FSDP marks the modules. The parameters that it ignores are still the module's own.
        """
        own = {id(r()) for r in self._own}
        for member in self.members:
            if getattr(member, "_is_fsdp_managed_module", False):
                found = map(member._parameters.get, names)
                if any(p is not None and id(p) not in own for p in found):
                    return member
        return None

    def _refuse_fsdp(self, *names: str) -> None:
        member = self._of_fsdp(*names)
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

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and deepcopy: the members. The next forward joins their memory again."""
        kept = ("members", "shared_dropout", "results", "rows", "over")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
        self._remember()


def _form_of(x: Tensor | None) -> tuple[Any, ...] | None:
    """Shape, dtype and device; None of None."""
    return None if x is None else (x.shape, x.dtype, x.device)


def _is_zero(raw: Tensor) -> Tensor:
    """bool []: whether all e4m3 bytes are 0 or −0 (0x80). The bytes are not copied."""
    return (raw.view(torch.int8).max() <= 0) & (raw.max() <= 0x80)
