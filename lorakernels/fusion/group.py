# SPDX-License-Identifier: Apache-2.0
"""FusedGroup: projections of one x that remain separate modules, while their weights are rows of one matrix.

joined_rows.py has the matrices, and finds out when a member's parameter was moved or written: before the next forward,
and before the next replay of lorakernels.graphs (`renew`). prepared.py has what a forward prepares, which is kept until
a member changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lorakernels.autograd.decoder.recorded import recorded_projections, way_of
from lorakernels.autograd.linear.projections import OverRanks, Projections
from lorakernels.autograd.linear.values import LoRASpec, check_frozen
from lorakernels.fusion.joined_rows import JoinedRows
from lorakernels.fusion.prepared import Derived, Prepared, Variant, state_of_call
from lorakernels.modules.linear.calls import rows_of_call
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.projections import is_active
from lorakernels.modules.marks import became, bring
from lorakernels.numerics.segments import adapters_of, check_sequences
from lorakernels.ops.quantize_lora_down import MAX_RANK
from lorakernels.values import Dropout

MOST_VARIANTS = 64  # a group forgets them then: context parallel has one for each length


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
        self.over: OverRanks | None = became(self.first).loaded_part  # ranks that share the members
        self.forget()

    def forget(self) -> None:
        """Let go of joined memory and prepared calls, as a copy that has joined nothing yet."""
        self.joined = JoinedRows(self.members, self.results)
        self._variants: dict[tuple[Any, ...], Variant] = {}
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
        if prepared is None or not prepared.holds(state_of_call(self.members)):
            prepared = self._prepared = self._prepare()
        first = self.first
        state = first.fp8_state
        if state is not None and first.training:
            state.on_training_forward(first.column)
        masks = self._masks(prepared.variant, prepared.adapted)
        return prepared.with_masks(masks)

    def eager_ways(self, kinds: Mapping[Hashable, str]) -> list[str]:
        """[""] if the last forward was recorded, or [why it ran by the ops]; [] before the first forward.

        `kinds`: `ways_of_kinds()` of autograd.
        """
        return [] if self._prepared is None else [way_of(self._prepared.to, kinds)]

    def _prepare(self) -> Prepared:
        """Join the members, and make everything of a call except its masks."""
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
            first.stored if self.joined.weight is None else self.joined.weight,
            derived.scale_inv,
            derived.grad_scale_inv,
            bias,
            derived.multiplier,
            self.rows,
            variant.ranks,
            self.joined.stacked_A(adapted, lora_A),
            self._factors_of(adapted),
            (None,) * len(variant.masks),
            None if state is None else state.forward,
            None if state is None else state.backward,
            variant.spec,
            tuple(w for w in weights if w is not None),
            over=self.over,
        )
        drawn = tuple(variant.drops and adapted[i].lora_dropout for i in variant.masks)
        params = [*lora_A, *lora_B, *biases]
        to = to._replace(recorded=recorded_projections(to, drawn, params))
        # what was copied goes stale when a parameter is written
        copied = len(adapted) > 1 and not self.joined.has_joined_A(adapted)
        made_from = None if copied else state_of_call(self.members)
        return Prepared(made_from, variant, tuple(adapted), to, params)

    def _variant(self, training: bool, adapted: Sequence[LoRALinear]) -> Variant:
        """The Variant for this mode, these adapters and their rows. It is kept until there are `MOST_VARIANTS`."""
        state = self.first.fp8_state
        self._check_alike(training, adapted)
        rows = [(m.row0, m.chunks) for m in adapted]
        adapters = ((id(m), m.r, m.scaling, m.lora_dropout) for m in adapted)
        key = (training, state, self.first.column, *rows, *adapters)
        if key not in self._variants:
            if len(self._variants) >= MOST_VARIANTS:
                self._variants.clear()
            row0, chunks = rows[0] if rows else (0, ())
            spec = LoRASpec(self._scaling(adapted), row0=row0, chunks=chunks)
            spec = spec.following(self.first.recipe, self.first.column, training)
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
            dropouts = {m.name: m.lora_dropout for m in adapted}
            raise ValueError(
                f"adapters that share a mask must have one lora_dropout, found {dropouts}"
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
        return biases[0] if len(self.members) == 1 else self.joined.bias, trained

    def _factors_of(self, adapted: Sequence[LoRALinear]) -> Tensor | None:
        """`JoinedRows.factors_of`. None for one member or without adapters."""
        if len(self.members) == 1 or not adapted:
            return None
        return self.joined.factors_of(self._scaling(adapted))

    def join(self) -> Derived:
        """Join the members' weights, A's and biases where they are not, and renew derived tensors that are stale."""
        if self.joined.is_stale():
            self._prepared = None  # it would keep a weight's old memory
            self.joined.update()
        assert self.joined.derived is not None
        return self.joined.derived

    def renew(self) -> list[Tensor]:
        """Join, and renew, as the next forward would: for graphs, which read the derived tensors.

        Returns:
            `JoinedRows.sources`. Empty while FSDP has a weight sharded: the next forward gathers it into other memory.
        """
        if any(is_sharded(m._parameters["weight"]) for m in self.members):
            return []
        if self.joined.has_been_written():
            for member in self.members:
                bring(getattr(member, "base", member))  # a PEFT layer's base
        self.join()
        if len(self.members) > 1:
            self._check_alike(self.first.training, self.adapted)
            self._factors_of(self.adapted)  # they come from the host
        return self.joined.sources()

    def separate(self) -> None:
        """Give every member memory of its own again. A weight of a sharded base stays in its slot."""
        self.joined.separate()
        self._variants, self._prepared = {}, None

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and deepcopy: the members. The next forward joins their memory again."""
        kept = ("members", "shared_dropout", "results", "rows", "over")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()
