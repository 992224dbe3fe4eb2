# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ranks share rows that are too long for one GPU, each with some of a row's tokens.

All but attention looks at one token at a time, so a rank runs the model on its tokens alone (attention.py has
which). Weights, whole or in a sharded base, are as without it. The loss is over all tokens, and gradients are summed.
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
from lorakernels.parallel.context.check import check, fingerprint, refuse_masks
from lorakernels.parallel.context.loss import (
    Asked,
    Given,
    agreed,
    mean_loss,
    own_inputs,
    targets,
)
from lorakernels.parallel.context.rows import (
    Limits,
    check_places,
    chunks_of,
    refuse_long,
    refused,
    to_document_end,
)
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.agree import check_equal
from lorakernels.parallel.ranks.exchange import row_exchange
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.known_tokens import Turns, vocabulary_of


class ContextParallel:
    """What `context_parallel` returns.

    Attributes:
        model: the model, which now runs on this rank's tokens.
        ranks: the group, and this rank's place in it.
        checks_places: whether each call looks at where documents begin, for which the host waits for the device, and
            `loss` at whether inputs fit and are equal on all ranks, on a GPU in one call of 64. Leave it out where rows
            are right by the way they are made.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.model, self.ranks, self.checks_places = model, ranks, True
        self._changes, self._turns = Changes(), Turns()
        self._plain: Tensor | None = None  # positions of rows that are one document each, made here
        self._angles: list[DocumentAngles] = []  # which need to know where a rank's documents end
        self._dynamic = 0  # tokens that dynamic RoPE lets a document have; 0 without it
        self._looked = False  # whether who calls the model has looked at its rows

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """The ContextParallel of a copied model, over the same ranks."""
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
        """Collective: [B, S, …] of every rank's tokens [B, S/n, …], without a gradient."""
        gathered = comm.gather_rows(self.ranks.group, part.detach())
        return Chunks.of(self.ranks, part.shape[1]).in_order(gathered)

    def loss(self, labels: Tensor, items: Any = None, **inputs: Any) -> Tensor:
        """Collective: the mean loss of a causal language model, fp32 [], equal on all ranks.

        Its gradients are those of this rank's tokens; `reduce_gradients` sums them. Logits of all tokens never exist.

        Args:
            labels: int64 [B, S] as transformers takes them: the model's own shift follows; −100 does not count.
            items: divide by this number instead of by the labels that count.
            inputs: of the whole rows: `input_ids` [B, S] or `inputs_embeds` [B, S, H]; `position_ids` [1 or B, S], from
                0 to S − 1 if not given; for packed documents `cu_seq_lens_q`, int32 [N + 1] over the B S tokens, with
                `max_length_q`.

        Raises:
            RuntimeError: the model was cut into stages, which `PipelineParallel.forward_backward` runs.
            TypeError: another input.
            ValueError: a shape or dtype does not fit, ranks have other shapes, values, modes or items, positions jump
                without `cu_seq_lens_q`, or it does not reach the end, or has a document longer than `max_length_q`. All
                ranks raise if one does.
        """
        if became(self.model).pipeline_cut is not None:
            raise RuntimeError(
                "the model was cut into stages: call PipelineParallel.forward_backward, or PipelineParallel.loss"
            )
        asked = Asked(labels, items, inputs)
        give = partial(self._given, asked)
        if not self.checks_places:
            return mean_loss(self.model, self.ranks.group, give())
        given = agreed(self.model, self.ranks, asked, give, self._turns.next())
        return mean_loss(self.model, self.ranks.group, given)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Collective: sum the gradients over the ranks, in place and in fp32. Then all ranks have equal ones.

        Where only other ranks have a gradient of a parameter, such as of an expert that no token here chose, this rank
        gets theirs. The host then waits for the device.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            return
        dtype = torch.float64 if trained[0].dtype == torch.float64 else torch.float32
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        there = torch.tensor([float(p.grad is not None) for p in trained])
        parts = [*grads, there.to(grads[0].device, non_blocking=True)]
        flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        comm.all_reduce(self.ranks.group, flat)
        *sums, counts = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(grads, [x.view(g.shape) for x, g in zip(sums, grads, strict=True)])
        if any(p.grad is None for p in trained):
            for p, grad, count in zip(trained, grads, counts.tolist(), strict=True):
                p.grad = grad if count else None

    def check(self) -> None:
        """Collective: look for ranks that have drifted apart, such as one that drew random numbers of its own.

        It reads the device, so call it now and then.

        Raises:
            ValueError: trained parameters, scales and histories of FP8 or generators differ, or a module has come
                whose masks cannot be drawn over ranks, such as of an adapter of PEFT's own. It names the first.
        """
        with comm.together(self.ranks.group):
            refuse_masks(self.model, self.ranks.group)
        check_equal(comm.agree(self.ranks.group, fingerprint(self.model)))

    def together(self) -> AbstractContextManager[None]:
        """Collective at its end: what one rank raises inside is raised on all. For `GraphOptions.together`."""
        return comm.together(self.ranks.group)

    def close(self) -> None:
        """Let the model run on whole rows again."""
        self._changes.undo()

    def _given(self, asked: Asked) -> Given:
        own = self.own_inputs(asked.labels, asked.inputs)
        wanted, items = targets(asked.labels, asked.items)
        return Given(own, self.shard(wanted), items, self.looks_at(own))

    def own_inputs(self, labels: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of `inputs` of whole rows, with positions. Arguments and errors are those of `loss`."""
        own = own_inputs(self.ranks, labels, inputs)
        made = inputs.get("position_ids") is None
        self._plain = own["position_ids"] if made else None
        return own

    def looks_at(self, inputs: dict[str, Any]) -> bool:
        """Whether `look_at` waits for the device: rows are not one document each as they are made here."""
        positions, starts = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
        plain = starts is None and positions is not None and positions is self._plain
        return self.checks_places and not plain

    def look_at(self, rows: Tensor, inputs: dict[str, Any]) -> None:
        """Collective if `looks_at`: refuse a call of the model that cannot be right over the ranks.

        Args:
            rows: [B, S/n, …], this rank's tokens.
            inputs: what else the call has.

        Raises:
            RuntimeError: the model's attention is another one since `context_parallel`.
            ValueError: as `loss` does.
        """
        config: Any = self.model.config
        found = config.get_text_config()._attn_implementation
        if found != ATTENTION:
            raise RuntimeError(
                f"attention no longer runs over the ranks: attn_implementation is {found!r} since context_parallel; "
                "call ContextParallel.close, change the model, and call context_parallel again"
            )
        why = refused(rows, inputs)
        if self.looks_at(inputs):
            places = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
            known = 0 if rows.is_floating_point() else vocabulary_of(self.model)
            limits = Limits(inputs.get("max_length_q"), known, self._dynamic)
            check_places(self.ranks, rows, *places, limits, why)
        elif why:
            raise ValueError(why)
        elif self._dynamic:
            refuse_long(self._dynamic, rows.shape[1] * self.ranks.size, inputs)

    @contextmanager
    def looked(self) -> Iterator[None]:
        """Inside, calls of the model are not looked at, as `look_at` has seen their rows."""
        self._looked = True
        try:
            yield
        finally:
            self._looked = False

    def attach(self, layers: dict[str, nn.Module]) -> ContextParallel:
        """Let the model's attention run over the ranks."""
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
    """Collective: let the ranks of `mesh` share the model's rows, each with some of every row's tokens.

    Every rank has the same model, its frozen base whole or sharded over the same ranks. Keys and values of a layer are
    gathered while it runs. A token's masks of dropout are those that one process draws for it.

    Args:
        model: a causal language model of transformers of a family that `fuse` knows, fused or not, or after
            `parallelize` or `pipeline_parallel` over another dimension.
        mesh: one dimension of a DeviceMesh, such as `mesh["cp"]`.

    Raises:
        TypeError: the model has no config of transformers, or is PEFT's around one.
        ValueError: the mesh has several dimensions; ranks' adapters, FP8 scales or generators differ; a layer has a
            sliding window, capped scores or FP8 attention, or graphs replay it; there is an nn.Dropout, or dropout
            over DoRA; layers are split, or stages are, over the same ranks. All ranks raise, and nothing is changed.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['cp'], found {mesh}")
    ranks, cut = Ranks(mesh.get_group()), became(model).pipeline_cut
    stages = None if cut is None else cut.ranks
    with nullcontext() if stages is None else comm.together(stages.group):
        layers = check(model, ranks, stages)
    ranks.rows, _ = row_exchange("auto", ranks.group, next(model.parameters()).device)
    found = ContextParallel(model, ranks)
    try:
        with comm.together(ranks.group):
            return found.attach(layers)
    except BaseException:
        found.close()
        raise
