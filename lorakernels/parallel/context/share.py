# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ranks share rows that are too long for one GPU, each with some of a row's tokens.

Everything except attention works on one token at a time, so a rank runs the model on its tokens alone (attention.py
says which). Weights are not changed, and may be in a sharded base. The loss is over all tokens, and the ranks sum the
gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.modules.marks import became
from lorakernels.modules.model.angles import DocumentAngles, document_angles, dynamic_length
from lorakernels.parallel.context.attention import Chunks
from lorakernels.parallel.context.changes import ATTENTION, Changes, share_rows
from lorakernels.parallel.context.check import check, refuse_masks
from lorakernels.parallel.context.loss import (
    LossArguments,
    RankInputs,
    agreed,
    mean_loss,
    own_inputs,
    targets,
)
from lorakernels.parallel.context.rows import (
    Limits,
    check_places,
    chunks_of,
    objection,
    refuse_long,
    to_document_end,
)
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.agree import check_equal, fingerprint, trained
from lorakernels.parallel.ranks.exchange import row_exchange
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.known_tokens import Turns, vocabulary_of


class ContextParallel:
    """A model whose rows are split over ranks. `context_parallel` returns it.

    Attributes:
        model: the model, which now runs on this rank's tokens.
        ranks: the process group, and this rank's index in it.
        checks_places: whether each call checks where documents begin, for which the host waits for the device; and
            whether `loss` checks that inputs fit and are equal on all ranks, on a GPU in one call of 64. Set it to
            False if rows are always valid.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.model, self.ranks, self.checks_places = model, ranks, True
        self._changes, self._turns = Changes(), Turns()
        self._plain: Tensor | None = (
            None  # positions that `own_inputs` made, for rows of one document each
        )
        self._angles: list[DocumentAngles] = []  # hooks that need the ends of a rank's documents
        self._dynamic = 0  # tokens that dynamic RoPE lets a document have; 0 without it
        self._looked = False  # whether the caller has checked the rows

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """The ContextParallel of the copied model, over the same ranks."""
        made = memo[id(self)] = ContextParallel(self.model, self.ranks)
        made.model, made.checks_places = copy.deepcopy(self.model, memo), self.checks_places
        made._changes = copy.deepcopy(self._changes, memo)
        made._angles, made._dynamic = copy.deepcopy(self._angles, memo), self._dynamic
        return made

    @classmethod
    def of(cls, model: nn.Module) -> ContextParallel | None:
        """The ContextParallel of a model whose rows are shared; None if they are not."""
        return became(model).context_parallel

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's tokens [B, S/n, …] of [B, S, …].

        Raises:
            ValueError: S is no positive multiple of twice the number of ranks.
        """
        return chunks_of(self.ranks, whole).own(whole)

    def whole(self, part: Tensor) -> Tensor:
        """Collective: whole rows [B, S, …] of the tokens [B, S/n, …] of all ranks, without a gradient."""
        gathered = comm.gather_rows(self.ranks.group, part.detach())
        return Chunks.of(self.ranks, part.shape[1]).in_order(gathered)

    def loss(self, labels: Tensor, items: Any = None, **inputs: Any) -> Tensor:
        """Collective: the mean loss of a causal language model, fp32 [], equal on all ranks.

        Its backward computes the gradients of this rank's tokens; `reduce_gradients` sums them over the ranks. Logits
        of all tokens never exist.

        Args:
            labels: int64 [B, S] as transformers takes them: not shifted, and −100 is ignored.
            items: divide by this number instead of by the number of labels.
            inputs: whole rows: `input_ids` [B, S] or `inputs_embeds` [B, S, H]; `position_ids` [1 or B, S], by default
                from 0 to S − 1; for packed documents `cu_seq_lens_q`, int32 [N + 1] over the B S tokens, with
                `max_length_q`.

        Raises:
            RuntimeError: the model was cut into stages, which `PipelineParallel.forward_backward` runs.
            TypeError: another input.
            ValueError: a shape or dtype does not fit; the ranks' shapes, values, modes or items differ; positions jump
                without `cu_seq_lens_q`; or `cu_seq_lens_q` does not reach the end, or has a document longer than
                `max_length_q`. All ranks raise if one does.
        """
        if became(self.model).pipeline_cut is not None:
            raise RuntimeError(
                "the model was cut into stages: call PipelineParallel.forward_backward, or PipelineParallel.loss"
            )
        arguments = LossArguments(labels, items, inputs)
        cut = partial(self._cut, arguments)
        if not self.checks_places:
            return mean_loss(self.model, self.ranks.group, cut())
        part = agreed(self.model, self.ranks, arguments, cut, self._turns.next())
        return mean_loss(self.model, self.ranks.group, part)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Collective: sum the gradients over the ranks, in place and in fp32. Then all ranks have equal gradients.

        If only other ranks have a gradient of a parameter, such as of an expert that no token here chose, this rank
        gets their sum. The host then waits for the device.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            return
        dtype = torch.float64 if trained[0].dtype == torch.float64 else torch.float32
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        present = torch.tensor([float(p.grad is not None) for p in trained])
        parts = [*grads, present.to(grads[0].device, non_blocking=True)]
        flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        comm.all_reduce(self.ranks.group, flat)
        *sums, counts = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(grads, [x.view(g.shape) for x, g in zip(sums, grads, strict=True)])
        if any(p.grad is None for p in trained):
            for p, grad, count in zip(trained, grads, counts.tolist(), strict=True):
                p.grad = grad if count else None

    def check(self) -> None:
        """Collective: check that all ranks still have the same model. Another draw of random numbers makes them differ.

        It reads the device, so do not call it in every step.

        Raises:
            ValueError: trained parameters, FP8 scales and histories, or generators differ; or a new module cannot draw
                its dropout masks over ranks, such as an adapter of PEFT. The message names the first one.
        """
        with comm.together(self.ranks.group):
            refuse_masks(self.model, self.ranks.group)
        check_equal(comm.agree(self.ranks.group, fingerprint(self.model, trained(self.model))))

    def together(self) -> AbstractContextManager[None]:
        """Collective at its end: an exception inside, on one rank, is raised on all. For `GraphOptions.together`."""
        return comm.together(self.ranks.group)

    def close(self) -> None:
        """Undo `context_parallel`: the model runs on whole rows again."""
        self._changes.undo()

    def _cut(self, arguments: LossArguments) -> RankInputs:
        labels, items, inputs = arguments
        part = self.own_inputs(labels, inputs)
        shifted, divisor = targets(labels, items)
        return RankInputs(part, self.shard(shifted), divisor, self.looks_at(part))

    def own_inputs(self, labels: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the `inputs` of whole rows, with positions. It raises as `loss` does."""
        part = own_inputs(self.ranks, labels, inputs)
        made = inputs.get("position_ids") is None
        self._plain = part["position_ids"] if made else None
        return part

    def looks_at(self, inputs: dict[str, Any]) -> bool:
        """Whether `look_at` waits for the device: rows may be packed, or have positions that were not made here."""
        positions, starts = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
        plain = starts is None and positions is not None and positions is self._plain
        return self.checks_places and not plain

    def look_at(self, rows: Tensor, inputs: dict[str, Any]) -> None:
        """Collective if `looks_at`: refuse a call of the model that would be wrong over the ranks.

        Args:
            rows: [B, S/n, …], this rank's tokens.
            inputs: the other arguments of the call.

        Raises:
            RuntimeError: the model's attention was changed after `context_parallel`.
            ValueError: as for `loss`.
        """
        config: Any = self.model.config
        attention = config.get_text_config()._attn_implementation
        if attention != ATTENTION:
            raise RuntimeError(
                f"attention no longer runs over the ranks: attn_implementation is {attention!r} now; "
                "call ContextParallel.close, change the model, and call context_parallel again"
            )
        why = objection(rows, inputs)
        if self.looks_at(inputs):
            places = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
            vocabulary = 0 if rows.is_floating_point() else vocabulary_of(self.model)
            limits = Limits(inputs.get("max_length_q"), vocabulary, self._dynamic)
            check_places(self.ranks, rows, *places, limits, why)
        elif why:
            raise ValueError(why)
        elif self._dynamic:
            refuse_long(self._dynamic, rows.shape[1] * self.ranks.size, inputs)

    @contextmanager
    def looked(self) -> Iterator[None]:
        """Inside, calls of the model skip `look_at`, as the caller has called it."""
        self._looked = True
        try:
            yield
        finally:
            self._looked = False

    def attach(self, layers: dict[str, nn.Module]) -> ContextParallel:
        """Make the model's attention run over the ranks."""
        self._changes.mark(self.model, context_parallel=self)
        share_rows(self.model, self.ranks, layers, self._changes)
        self._angles, self._dynamic = document_angles(self.model), dynamic_length(self.model)
        self._changes.hook(self.model, self._before_model)
        base: Any = self.model.base_model
        self._changes.hook(base, self._before_rows)
        return self

    def _before_model(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None:
            raise ValueError(
                "labels: the model sees this rank's tokens alone; call ContextParallel.loss(labels, input_ids=…)"
            )

    def _before_rows(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        rows = args[0] if args else kwargs.get("input_ids")
        rows = kwargs.get("inputs_embeds") if rows is None else rows
        if rows is None:
            return
        if not self._looked:
            self.look_at(rows, kwargs)
        if self._angles:
            chunks = Chunks.of(self.ranks, rows.shape[1])
            starts = kwargs.get("cu_seq_lens_q")
            to_end = to_document_end(chunks, len(rows), starts, rows.device)
            for hook in self._angles:
                hook.to_end = to_end


def context_parallel(model: nn.Module, mesh: Any) -> ContextParallel:
    """Collective: split the tokens of each of the model's rows over the ranks of `mesh`.

    Every rank has the same model, with a frozen base that is whole or sharded over the same ranks. Keys and values of a
    layer are gathered while it runs. A token gets the dropout masks that a single process would draw for it.

    Args:
        model: a causal language model of transformers of a family that `fuse` supports, fused or not, or after
            `parallelize` or `pipeline_parallel` over another dimension.
        mesh: one dimension of a DeviceMesh, such as `mesh["cp"]`.

    Raises:
        TypeError: the model has no config of transformers, or is wrapped by PEFT.
        ValueError: the mesh has several dimensions; the ranks' adapters, FP8 scales or generators differ; a layer has a
            sliding window, capped scores or FP8 attention, or is replayed by graphs; there is an nn.Dropout, or dropout
            over DoRA; layers or stages are split over the same ranks. All ranks raise, and nothing is changed.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['cp'], found {mesh}")
    ranks, cut = Ranks(mesh.get_group()), became(model).pipeline_cut
    stages = None if cut is None else cut.ranks
    with nullcontext() if stages is None else comm.together(stages.group):
        layers = check(model, ranks, stages)
    ranks.rows, _ = row_exchange("auto", ranks.group, next(model.parameters()).device)
    context = ContextParallel(model, ranks)
    try:
        with comm.together(ranks.group):
            return context.attach(layers)
    except BaseException:
        context.close()
        raise
