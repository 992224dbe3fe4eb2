# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: the ranks of a group hold each linear layer together, and train it as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.fusion.layer import FusedDecoderLayer, parts_of
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.marks import mark
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.agree import check_equal, checksum, generators, scales
from lorakernels.parallel.ranks.exchange import row_exchange
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.check import (
    SplitTargets,
    check,
    check_loaded,
    check_vocabulary,
    split_fingerprint,
    targets_by,
    targets_in,
)
from lorakernels.parallel.tensor.inputs import check_call, check_inputs
from lorakernels.parallel.tensor.known_tokens import Turns
from lorakernels.parallel.tensor.projections import split_parts
from lorakernels.parallel.tensor.rows import Rows
from lorakernels.parallel.tensor.split import LayerCut, LoadedParts, split_linear, split_vocabulary
from lorakernels.parallel.tensor.vocabulary import VocabularyHead
from lorakernels.parallel.tensor.whole import PartPlace, places, whole_of


class TensorParallel:
    """What `parallelize` returns. `print` it to see what was split.

    Attributes:
        model: the model, of which this rank has its part.
        ranks: the group, this rank's place in it, and whether rows are split.
        cuts: {path: LayerCut} of the split layers.
        mesh: the one-dimensional DeviceMesh of the group.
        checks_inputs: whether `loss`, and a call of the model, check on the host that arguments fit and are equal on
            all ranks. Values on a GPU are compared in one call of 64, for which the host waits. Set it to False if
            the arguments are always right.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, cuts: dict[str, LayerCut], mesh: Any, why: str
    ) -> None:
        self.model, self.ranks, self.cuts, self.mesh = model, ranks, cuts, mesh
        self.checks_inputs, self._turns = True, Turns()
        self._looked = False  # whether `loss` has checked this call's inputs
        self._why = why  # the reason for the transport
        self._vocabulary = any(cut.by == "vocabulary" for cut in cuts.values())

    def loss(self, labels: Tensor, items: Any = None, **inputs: Any) -> Tensor:
        """Collective: the mean loss of a causal language model, fp32 [], without the whole logits.

        Args:
            labels: int64 [B, S] as transformers takes them: the model's own shift follows; −100 does not count.
            items: divide by this number instead of by the labels that count.
            inputs: of the model, `input_ids` [B, S] or `inputs_embeds` [B, S, H] among them; equal on all ranks.

        Raises:
            TypeError: there are no rows, or `items` is no number.
            ValueError: the model was split without `vocabulary=True`; labels do not fit the rows, or ranks' arguments
                have other shapes, dtypes or values. All ranks raise if one does.
        """
        head = self.model.get_output_embeddings() if self._vocabulary else None  # type: ignore[operator]
        if not isinstance(head, VocabularyHead):
            raise ValueError("loss needs a split head: call parallelize with vocabulary=True")
        if self.checks_inputs:
            check_inputs(self.model, self.ranks, labels, items, inputs, self._turns.next())
        base: Any = self.model.base_model
        self._looked = True
        try:
            hidden = base(use_cache=False, **inputs).last_hidden_state
        finally:
            self._looked = False
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        return head.loss(hidden.reshape(-1, hidden.shape[-1]), shifted, items)

    def look_at(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Collective on CPUs, and on GPUs in one call of 64: refuse a call whose rows are not equal on all ranks.

        Raises:
            ValueError: they are not, or a token on a CPU is outside of the vocabulary. All ranks raise.
        """
        if self.checks_inputs and not self._looked and not torch.compiler.is_compiling():
            inputs = dict(zip(("input_ids",), args, strict=False)) | kwargs
            check_call(self.model, self.ranks, inputs, self._turns.next())

    def whole_adapters(self) -> dict[str, Tensor]:
        """Collective: {name: whole value} of the trained parameters, by their names on one GPU. All ranks get it."""
        return self.gather(dict(self._trained()))

    def whole_gradients(self) -> dict[str, Tensor]:
        """Collective: {name: whole gradient} of the trained parameters that have one."""
        return self.gather({n: p.grad for n, p in self._trained() if p.grad is not None})

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collective: {name: whole tensor} of this rank's `values`, such as AdamW's exp_avg. All ranks get copies.

        Args:
            values: {name of a trained parameter: a tensor of its shape on this rank}, in one order on all ranks.

        Raises:
            ValueError: a name is not a trained parameter's, or a shape differs from this rank's part.
        """
        return {name: whole_of(value, place) for name, value, place in self._placed(values)}

    def own(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{name: this rank's part} of whole `values`, as copies. The reverse of `gather`.

        Raises:
            ValueError: a name is not a trained parameter's, or a shape differs from the whole parameter's.
        """
        placed = self._placed(values, whole=True)
        return {name: x.clone() if place is None else place.part(x) for name, x, place in placed}

    @contextmanager
    def whole(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, trained parameters have the whole `values`, and `save_adapter` on one rank alone writes them.

        The model cannot run meanwhile.

        Args:
            values: {name: whole tensor}, as `whole_adapters` returns them. Parameters of other names stay as they are.

        Raises:
            ValueError: as for `own`.
        """
        self._placed(values, whole=True)
        trained = dict(self._trained())
        before = {name: trained[name].data for name in values}
        mark(self.model, adapters_are_whole=True)
        try:
            for name, value in values.items():
                # data on another device would reset autograd's accumulator
                trained[name].data = value.to(before[name].device)
            yield
        finally:
            for name, part in before.items():
                trained[name].data = part
            mark(self.model, adapters_are_whole=False)

    def state_dict(self) -> dict[str, Any]:
        """{name: DTensor} of the trained parameters, for torch.distributed.checkpoint to save and load at any layout.

        The DTensors share the parameters' memory, so that `dcp.load` fills the model. Names are those of one process.
        """
        return self.dtensors({name: p for name, p in self._trained()})

    def dtensors(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """{name: DTensor} over this rank's `values`, each placed as the trained parameter of its name is.

        Args:
            values: {name of a trained parameter: a tensor of its shape on this rank}, such as AdamW's exp_avg.

        Raises:
            ValueError: a name is not a trained parameter's, or a shape differs from this rank's part.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        tensors: dict[str, Any] = {}
        for name, value, place in self._placed(values):
            placement = Replicate() if place is None else Shard(place.dim)
            tensors[name] = DTensor.from_local(
                value.detach(), self.mesh, [placement], run_check=False
            )
        return tensors

    @staticmethod
    def whole_numel(model: nn.Module) -> Callable[[Tensor], int]:
        """How many elements a parameter of `model` has as a whole tensor."""
        place_of = places(model)

        def count(parameter: Tensor) -> int:
            place = place_of.get(id(parameter))
            return parameter.numel() * (1 if place is None else place.ranks.size)

        return count

    def check(self) -> None:
        """Collective: look for ranks that have drifted apart, such as one that drew random numbers of its own.

        It reads the device, so call it now and then.

        Raises:
            ValueError: generators, scales and histories of FP8, or adapters that all ranks hold whole differ. It names
                the first.
        """
        model, device = self.model, next(self.model.parameters()).device
        cut = places(model)
        whole = {n: p for n, p in self._trained() if id(p) not in cut}
        mine = {f"the values of {name}": checksum(value) for name, value in whole.items()}
        check_equal(comm.agree(self.ranks.group, mine | scales(model) | generators(model, device)))

    def together(self) -> AbstractContextManager[None]:
        """Collective at its end: what one rank raises inside is raised on all. For `GraphOptions.together`."""
        return comm.together(self.ranks.group)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Collective: scale the gradients down to a norm of `max_norm`, and return the norm before, fp32 [].

        `torch.nn.utils.clip_grad_norm_` sees this rank's parts only, and would scale each rank by another factor.
        """
        norm = self.grad_norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, p in self._trained():
            if p.grad is not None:
                p.grad.mul_(factor)
        return norm

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Collective: the norm of the gradients on one GPU, fp32 [].

        Parts are summed over the ranks, and those of tensors that all ranks hold count once.
        """
        place_of, device = places(self.model), next(self.model.parameters()).device
        grads = [(id(p) in place_of, p.grad) for _, p in self._trained() if p.grad is not None]
        parts = _sum_of_squares([grad for is_part, grad in grads if is_part], device)
        whole = _sum_of_squares([grad for is_part, grad in grads if not is_part], device)
        comm.all_reduce(self.ranks.group, parts)
        return (parts + whole).sqrt()[0]

    def _placed(
        self, values: Mapping[str, Tensor], whole: bool = False
    ) -> list[tuple[str, Tensor, PartPlace | None]]:
        """(name, value, its place in the whole tensor) of `values`, whose shapes are checked."""
        trained, place_of = dict(self._trained()), places(self.model)
        kind = "the whole" if whole else "this rank's"
        placed = []
        for name, value in values.items():
            if name not in trained:
                raise ValueError(f"values must have names of trained parameters, found {name!r}")
            place, shape = place_of.get(id(trained[name])), tuple(trained[name].shape)
            if whole and place is not None:
                shape = place.shape(trained[name])
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"values[{name!r}] must have {kind} shape {shape}, found {tuple(value.shape)}"
                )
            placed.append((name, value, place))
        return placed

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        for name, parameter in trained:
            if is_sharded(parameter):
                raise RuntimeError(
                    f"{name} is a part of a layer that parallelize split, and FSDP2 shards it, which is not supported "
                    "yet: average gradients by DistributedDataParallel over the other dimension, and use shard_base"
                )
        return trained

    def __str__(self) -> str:
        ranks = self.ranks
        rows = "rows whole"
        if ranks.sequence:
            rows = f"rows split between them and exchanged by {ranks.rows.name!r} ({self._why})"
        lines = [f"{len(self.cuts)} layers over {ranks.size} ranks, {rows}"]
        for path, (by, whole, part, adapted) in self.cuts.items():
            kind, axes = (
                "LoRA" if adapted else "frozen",
                "[V, H]" if by == "vocabulary" else "[N, K]",
            )
            lines.append(f"  {path}: {kind}, by {by}, {axes} {list(whole)} → {list(part)}")
        return "\n".join(lines)


def parallelize(
    model: nn.Module,
    mesh: Any,
    plan: Mapping[str, str] | None = None,
    *,
    sequence_parallel: bool = True,
    vocabulary: bool = False,
    transport: str = "auto",
    overlap: bool | None = None,
) -> TensorParallel:
    """Collective: split a model's linear layers over the ranks of `mesh`, in place.

    Every rank gives the same whole model, adapters included, or the parts of it that it has read. Each keeps its part.
    Weights keep the bytes and the scale of the whole layer, and masks are those of one GPU. Call it between steps:
    the backward of an earlier forward raises an error after it, for its parameters have other shapes then.

    Args:
        model: a model of transformers of a family that `fuse` knows, fused or not, after `apply_lora`; or any, with
            `plan`, not fused. Or the parts that `load_quantized(tp=…)` read over the same mesh, with the same `plan`
            and `vocabulary`.
        mesh: one dimension of a DeviceMesh, such as `mesh["tp"]`.
        plan: {pattern of paths: "column" or "row"}. None splits q, k, v, gate and up by column, o and down by row.
        sequence_parallel: whether norms, residuals and activations between the split layers are split by rows.
            With a `plan` the model's own code has to split them, by the first dimension.
        vocabulary: whether the embedding and the head are split, too, by tokens. Both must be frozen. Compute the loss
            by `TensorParallel.loss` then. The model's own forward still works, but gathers the whole logits.
        transport: how rows are exchanged with sequence parallelism. "auto" takes "peer", which reads the other GPUs'
            memory, where all ranks can, else "nccl" or "gloo". The report says which and why.
        overlap: whether fused layers over an FP8 base on Hopper exchange rows while their products are computed, where
            that gains time. None does so with sequence parallelism over "peer". If True is impossible, a ValueError
            says why.

    Raises:
        TypeError: the model has no config of transformers.
        RuntimeError: `transport` is "peer", and a rank cannot read the others' memory.
        ValueError: the mesh has several dimensions, sizes or heads are not divisible, a pattern matches nothing, the
            ranks' models, FP8 scales, random states or arguments differ, a layer is merged or sharded, or
            fused with offloaded activations or FP8 attention, a parameter outside of the split layers trains, or
            `context_parallel` has seen the model. All ranks raise, and nothing is changed.
        torch.OutOfMemoryError: this rank's GPU is full, and so the model is lost. The others raise a ValueError.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['tp'], found {mesh}")
    ranks = Ranks(mesh.get_group(), sequence_parallel)
    loaded = LoadedParts.of(model)
    with comm.together(ranks.group):
        targets = targets_in(model) if plan is None else targets_by(model, plan)
        if loaded is not None:
            check_loaded(loaded, targets, ranks, vocabulary)
        check(model, targets, ranks)
        if overlap and not sequence_parallel:
            raise ValueError(
                "overlap=True needs sequence_parallel=True: nothing else is exchanged by rows"
            )
        rows_read = loaded is not None and bool(loaded.vocabulary)
        if vocabulary and not rows_read:
            check_vocabulary(model, targets, ranks)
        _refuse_other_groups(model, targets, ranks)
        options = {"overlap": overlap, "transport": transport, "vocabulary": vocabulary}
        mine = split_fingerprint(model, targets, sequence_parallel) | options
    check_equal(comm.agree(ranks.group, mine))
    device = next(model.parameters()).device
    beside = overlap if sequence_parallel else False
    ranks.rows, why = row_exchange(transport, ranks.group, device, beside)
    with comm.together(ranks.group):  # one rank's GPU may be full
        cuts = _cut(model, targets, ranks, loaded)
        if vocabulary and not rows_read:
            cuts |= split_vocabulary(model, ranks)
    split = TensorParallel(model, ranks, cuts, mesh, why)
    if hasattr(model, "get_input_embeddings"):  # a model of transformers
        model.base_model.register_forward_pre_hook(split.look_at, with_kwargs=True)  # type: ignore[union-attr]
    return split


def _cut(
    model: nn.Module, targets: SplitTargets, ranks: Ranks, loaded: LoadedParts | None
) -> dict[str, LayerCut]:
    """Keep this rank's part of the layers that were found, and let them run over the ranks."""
    flat = targets.spec is not None
    fused = [parts_of(x) for x in targets.layers.values() if isinstance(x, FusedDecoderLayer)]
    if loaded is not None:
        cuts = loaded.take(model, ranks, flat)
    else:
        for group in (group for parts in fused for group in parts.groups):
            group.separate()  # its matrices are joined again, from the parts
        cuts = {
            path: split_linear(model, (path, by), ranks, flat) for path, by in targets.cuts.items()
        }
    for parts in fused:
        split_parts(parts, ranks)
    if targets.spec is not None and ranks.sequence:
        first = next(iter(targets.layers))
        base = model.get_submodule(first.rpartition(".")[0].rpartition(".")[0])
        norm = base.get_submodule(targets.spec.last_norm)
        Rows(ranks).attach([*targets.layers.values()], targets.spec.attention, norm)
    return cuts


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements of `tensors`, fp32 [1]."""
    if not tensors:
        return torch.zeros(1, device=device)
    norm = torch.nn.utils.get_total_norm([tensor.float() for tensor in tensors])
    return norm.square().reshape(1)


def _refuse_other_groups(model: nn.Module, targets: SplitTargets, ranks: Ranks) -> None:
    for path in targets.cuts:
        state = getattr(model.get_submodule(path), "fp8_state", None)
        if state is not None and state.shared_over not in ((), (ranks.group,)):
            raise ValueError(
                f"{path}: its FP8State is shared by another group: call parallelize first"
            )
