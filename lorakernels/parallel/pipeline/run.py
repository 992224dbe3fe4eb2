# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: each rank has some of a model's decoder layers, and torch's engine runs them as stages.

The engine is torch.distributed.pipelining: its stages and its 1F1B schedules. Stages send by torch, over NCCL or
gloo, or by peers.py. This file cuts the model, and runs steps with the losses, gradients, masks and FP8 scales of one
process that accumulates over microbatches.

With `context_parallel` after the cut, several ranks have a stage together, each with some of every row's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.autograd.loss import CHUNK
from lorakernels.modules.marks import became, mark
from lorakernels.modules.model.angles import angles_by_document
from lorakernels.modules.order import refuse
from lorakernels.parallel.context.share import ContextParallel
from lorakernels.parallel.pipeline import cut as pipeline_cut
from lorakernels.parallel.pipeline.check import (
    agreed_slots,
    check,
    check_numbers,
    check_ranks,
    generators,
    places_of,
    stages_fingerprint,
    states_of,
)
from lorakernels.parallel.pipeline.cut import PipelineCut, stages_of
from lorakernels.parallel.pipeline.engine import as_it_was, engine
from lorakernels.parallel.pipeline.inputs import (
    StepArguments,
    check_agreed,
    check_inputs,
    own_inputs,
)
from lorakernels.parallel.pipeline.own import OwnStages
from lorakernels.parallel.pipeline.stages import (
    Batch,
    LayerDraws,
    Microbatch,
    Stage,
    microbatches_of,
    shifted,
)
from lorakernels.parallel.pipeline.whole import (
    clip_grad_norm_,
    filled,
    gathered,
    initial,
    trained,
)
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.agree import check_equal
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.head import IGNORE
from lorakernels.parallel.tensor.known_tokens import Turns, digests, refuse_unknown
from lorakernels.state.philox import PhiloxState


class PipelineParallel:
    """What `pipeline_parallel` returns. `print` it to see which rank has which layers.

    Attributes:
        model: the model, of which this rank has its stages.
        ranks: the group, and this rank's place in it.
        microbatches: how many parts the rows of a step are cut into.
        stages: paths of each stage's decoder layers. Stage i is on rank i modulo the number of ranks.
        transport: how stages send to the next one: "peer", "nccl" or "gloo".
        loss_chunk: number of tokens whose logits exist at the same time.
        checks_inputs: whether a step checks on the host that arguments fit and are equal on all ranks, and that layers
            can run. Values on a GPU are compared in one step of 64. If ranks share rows, it is for `run` only, and
            `ContextParallel.checks_places` is for `forward_backward` and `loss`.
        offsets: a random state, or None. If set, microbatches differ by its offset, and all begin with the state that
            torch's CPU generator has before the step. Replayed layers keep the state of their capture. So advance
            `offsets` by the microbatches after each step: the pipeline does not, and masks would repeat.
    """

    loss_chunk: int = CHUNK
    checks_inputs: bool = True
    offsets: PhiloxState | None = None

    def __init__(
        self,
        model: nn.Module,
        cut: PipelineCut,
        microbatches: int,
        slots: list[int],
        by: tuple[str, str],
    ) -> None:
        self.model, self.microbatches, self._cut = model, microbatches, cut
        self.ranks, self.stages = cut.ranks, cut.stages
        self.transport, self._why = by
        self._own = OwnStages(model, cut, slots)
        self._turns = Turns()
        self._schedules: dict[bool, tuple[Any, Any]] = {}
        cut.mark(model)
        mark(model, pipeline_parallel=self)

    @classmethod
    def of(cls, model: nn.Module) -> PipelineParallel | None:
        """The PipelineParallel of a model that was cut into stages; None for other models."""
        return became(model).pipeline_parallel

    @property
    def context(self) -> ContextParallel | None:
        """What `context_parallel` returned, where ranks share the rows of each stage."""
        return ContextParallel.of(self.model)

    @property
    def writes(self) -> bool:
        """Whether this rank writes files: it is the first that has stages, and the first that shares rows."""
        return self.ranks.rank == 0 and (self.context is None or self.context.ranks.rank == 0)

    def together(self) -> AbstractContextManager[None]:
        """Collective at its end: an exception of one rank is raised on all that have stages or share rows."""
        rows = None if self.context is None else self.context.ranks.group
        return comm.all_together((self.ranks.group, rows))

    @property
    def layers(self) -> dict[str, nn.Module]:
        """{path: decoder layer} of this rank's stages that have a backward, for a GraphManager.

        The model's first layers have none, up to the first one that trains.
        """
        return self._own.layers

    @property
    def rng_states(self) -> list[LayerDraws]:
        """For a GraphManager of `layers`, with `offsets` set: where each layer draws. Empty without dropout."""
        return [self._own.layer_draws] if self._own.has_dropout else []

    own_layers_alone = staticmethod(pipeline_cut.own_layers_alone)
    elsewhere = staticmethod(pipeline_cut.elsewhere)

    @property
    def bubble(self) -> float:
        """The fraction of a step in which a rank waits, if all stages take equally long."""
        waits, works = self.ranks.size - 1, len(self.stages) // self.ranks.size * self.microbatches
        return waits / (waits + works)

    def forward_backward(self, labels: Tensor, items: Any = None, **inputs: Any) -> Tensor:
        """Collective: the mean loss of a causal language model, fp32 [] and equal on all ranks; its gradients are added
        to `.grad` of this rank's parameters.

        Where ranks share rows, by `context_parallel` after the cut, these gradients are of this rank's tokens, and
        `ContextParallel.reduce_gradients` sums them.

        Args:
            labels: int64 [B, S] as transformers takes them: the model's own shift follows; −100 does not count.
            items: divide by this number instead of by the labels that count.
            inputs: of the whole rows, equal on all ranks: `input_ids` [B, S]; `position_ids` [1 or B, S] and
                `attention_mask` [B, S], if wanted; for packed documents `cu_seq_lens_q`, int32 [N + 1] over the B S
                tokens, with `max_length_q`. No document may run over the end of a row.

        Raises:
            TypeError: another input, or no `input_ids`.
            ValueError: a shape does not fit, the microbatches do not divide B, ranks have other arguments or modes, or
                share rows that `ContextParallel.loss` would refuse, or that have an `attention_mask`. All ranks raise.
            RuntimeError: gradients are off, layers with dropout are managed by graphs without `offsets` or without
                `rng_states`, or checkpointed by torch with `offsets`, or this is compiled or captured.
        """
        return self._step(labels, items, inputs, True)

    @torch.no_grad()
    def loss(self, labels: Tensor, items: Any = None, **inputs: Any) -> Tensor:
        """Collective: the loss alone, without a gradient. Arguments and errors are those of `forward_backward`."""
        return self._step(labels, items, inputs, False)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Collective: scale the gradients of all stages down to a norm of `max_norm`; the norm before, fp32 [].

        `torch.nn.utils.clip_grad_norm_` sees this rank's gradients alone, and would scale each rank otherwise. Over
        shared rows `ContextParallel.reduce_gradients` comes first: until then gradients differ between ranks.
        """
        return clip_grad_norm_(self.model, self.ranks.group, max_norm)

    def whole_adapters(self) -> dict[str, Tensor]:
        """Collective: {name: value} of the trained parameters of all stages, on the CPU, in the model's order."""
        return self.gathered({n: p.detach() for n, p in trained(self.model).items()})

    def whole_gradients(self) -> dict[str, Tensor]:
        """Collective: {name: gradient} of the trained parameters of all stages that have one, on the CPU."""
        return self.gathered(
            {n: p.grad for n, p in trained(self.model).items() if p.grad is not None}
        )

    def gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collective: all ranks' `tensors` by name, on the CPU. Trained parameters come in the model's order."""
        return gathered(self._cut, tensors)

    def whole_values(self) -> dict[str, Tensor]:
        """Collective: `whole_adapters`, and the initial adapters of OLoRA and PiSSA, for `whole`."""
        values = {n: p.detach() for n, p in trained(self.model).items()}
        return self.gathered(values | initial(self.model))

    @contextmanager
    def whole(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Inside, the model has all modules. Modules of other ranks have `values`, and are on meta otherwise.

        It cannot run. `save_adapter` saves it like a model of one process.
        """
        with filled(self.model, self._cut, values):
            mark(self.model, pipeline_parallel=None)
            try:
                yield
            finally:
                mark(self.model, pipeline_parallel=self)

    def check(self) -> None:
        """Collective: look for ranks that have drifted apart, such as one that drew random numbers of its own.

        Raises:
            ValueError: generators differ. It names the first.
        """
        check_equal(comm.agree(self.ranks.group, generators(self.model)))

    def structure(self) -> AbstractContextManager[None]:
        """Inside, the model has all modules by their names. Modules of other ranks have no values: they are on meta."""
        return self._cut.structure()

    def _step(self, labels: Tensor, items: Any, inputs: dict[str, Any], trains: bool) -> Tensor:
        context, ranks, group = self.context, 1, self.ranks.group
        step = StepArguments(labels, items, inputs, trains, self._own.how, self._turns.next())

        def check() -> None:
            check_inputs(step, self.microbatches, context is not None)
            refuse_unknown(self.model, inputs["input_ids"], labels)
            self._own.refuse(self.offsets)

        if context is not None:
            together = self.together if context.checks_places else nullcontext
            inputs = own_inputs(context, group, together, step, check)
            ranks = context.ranks.size
        elif self.checks_inputs:
            check_agreed(self._own.groups(), step, check, step.values)
        else:
            check()
        wanted = shifted(labels)
        count = (wanted != IGNORE).sum().clamp(min=1) if items is None else items
        wanted = wanted if context is None else context.shard(wanted)
        parts = microbatches_of(wanted, inputs, self.microbatches, ranks)
        return self._run(self._batch(parts, count), trains)

    def run(
        self,
        microbatches: Sequence[Microbatch],
        items: Any,
        trains: bool,
        begins: Callable[[], None] | None = None,
    ) -> Tensor:
        """Collective: what `forward_backward` does, or with `trains` False `loss`, of rows that are cut already.

        Args:
            microbatches: as many as `pipeline_parallel` was given, of one shape and equal on all ranks. Where ranks
                share rows, each passes its tokens, and starts of documents are not checked.
            items: divisor of the losses' sum, a number or a tensor of one value.
            trains: whether there is a backward.
            begins: called before each forward and backward of a microbatch through a stage of this rank, for
                example to let the host wait for the device.

        Raises:
            RuntimeError: as `forward_backward` does.
            ValueError: shapes of rows or modes differ between ranks, or another rank raised.
        """
        refuse = partial(self._own.refuse, self.offsets)
        if self.checks_inputs:
            rows = [list(m.tokens.shape) for m in microbatches]
            step = f"backward {trains}; {self._own.how}; microbatches of {rows}"
            values = partial(digests, self._values_of(microbatches), self._turns.next())
            check_agreed(self._own.groups(), step, refuse, values)
        else:
            refuse()
        return self._run(self._batch(microbatches, items, begins), trains)

    def _values_of(self, microbatches: Sequence[Microbatch]) -> dict[str, Any]:
        """{name: tensor} that must be equal on all ranks with stages. It is empty if ranks share rows."""
        if self.context is not None:
            return {}
        tensors = [{"input_ids": m.tokens, "labels": m.labels, **m.inputs} for m in microbatches]
        return {
            f"{n} of microbatch {i}": x for i, named in enumerate(tensors) for n, x in named.items()
        }

    def _run(self, batch: Batch, trains: bool) -> Tensor:
        tokens = torch.cat([m.tokens for m in batch.microbatches])
        schedule = self._schedule((tokens.shape[0] // self.microbatches, tokens.shape[1]), trains)
        numbers = torch.arange(self.microbatches)
        with self._own.begun(batch, self.offsets) as stages, as_it_was():
            last = stages[-1]
            try:
                schedule.step(
                    *((tokens,) if stages[0].is_first else ()),
                    target=numbers if trains and last.is_last else None,
                    return_outputs=False,
                    microbatch=numbers,
                )
            except BaseException:
                # its buffers may hold what other ranks sent, which is not for the next step
                del self._schedules[trains]
                raise
        total = torch.zeros(1, device=self._own.device)
        for loss in last.losses:
            total += loss
        comm.all_reduce(self.ranks.group, total)
        if self.context is not None:
            comm.all_reduce(self.context.ranks.group, total)
        return total[0]

    def begun(
        self,
        microbatches: Sequence[Microbatch],
        items: Any,
        begins: Callable[[], None] | None = None,
    ) -> AbstractContextManager[list[Stage]]:
        """Inside, this rank's stages run, in any order and without the other ranks: `stage(x, microbatch)`.

        Masks are drawn as in one process. Arguments are those of `run`.
        """
        return self._own.begun(self._batch(microbatches, items, begins), self.offsets)

    def _batch(
        self,
        microbatches: Sequence[Microbatch],
        items: Any,
        begins: Callable[[], None] | None = None,
    ) -> Batch:
        items = torch.as_tensor(items, dtype=torch.float32, device=self._own.device)
        return Batch(microbatches, items, self.loss_chunk, begins)

    def _schedule(self, shape: tuple[int, int], trains: bool) -> Any:
        """torch's schedule over this rank's stages. Another shape [b, S], device or dtype needs a new one."""
        kept, key = self._schedules.get(trains), (shape, self._own.device, self._own.dtype)
        if kept is not None and kept[0] == key:
            return kept[1]
        sent = self._own.sent(shape, self.transport)
        schedule = engine(self._own.stages, sent, self.ranks, self.microbatches, trains)
        self._schedules[trains] = key, schedule
        return schedule

    def __str__(self) -> str:
        size, count = self.ranks.size, len(self.stages)
        kind = "1F1B" if count == size else f"interleaved 1F1B, {count // size} chunks a rank"
        lines = [
            f"{count} stages over {size} ranks, {kind}, {self.microbatches} microbatches; a rank waits "
            f"{self.bubble:.1%} of a step if stages take equally long; they send by {self.transport}: {self._why}"
        ]
        for i, paths in enumerate(self.stages):
            before = "the embedding, " if i == 0 else ""
            after = ", the norm, head and loss" if i == count - 1 else ""
            lines.append(f"  stage {i}, rank {i % size}: {before}{paths[0]} … {paths[-1]}{after}")
        return "\n".join(lines)


def pipeline_parallel(
    model: nn.Module, mesh: Any, *, microbatches: int, chunks: int = 1, transport: str = "auto"
) -> PipelineParallel:
    """Collective: cut a model into stages, one or more for each rank of `mesh`, and keep this rank's, in place.

    Every rank passes the same whole model, adapters included, or what `load_quantized(stages=…)` loaded of it. The
    first stage has the embedding, and the last one the last norm, the head and the loss. Names of modules and
    parameters stay. The model's own forward then raises.

    FP8 scales are updated by `reduce_and_update` alone from now on: call it once a step, over a group with these ranks.
    Masks are drawn where one process would draw them, from torch's CPU generator.

    Args:
        model: a causal language model of transformers of a family that `fuse` knows, fused or not, after `apply_lora`.
        mesh: one dimension of a DeviceMesh, such as `mesh["pp"]`.
        microbatches: how many parts the rows of a step are cut into, at least one for each rank.
        chunks: stages of each rank. One is torch's Schedule1F1B, more are ScheduleInterleaved1F1B.
        transport: how stages send: "peer" by copy engines into the next rank's memory, "nccl", or "gloo" on CPUs.
            "auto" is "peer" where all ranks' GPUs read each other's memory.

    Raises:
        TypeError: the model has no config of transformers, or no head.
        ValueError: the mesh has several dimensions; a number does not fit; there are fewer layers than stages; the
            ranks' adapters, generators or arguments differ; the model is compiled, managed by graphs, sharded,
            offloaded, split, or its rows are shared; a parameter outside of the decoder layers trains; there is
            dropout without a PhiloxState. All ranks raise, and nothing is changed.
        RuntimeError: `transport` is "peer", and a rank cannot read the others' memory.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['pp'], found {mesh}")
    ranks = Ranks(mesh.get_group())
    loaded = PipelineCut.of(model)
    with comm.together(ranks.group):
        check_numbers(microbatches, chunks, ranks.size)
        refuse(model, "pipeline_parallel", ())
        cut = _cut_of(model, ranks, chunks)
        check(model, cut.places)
        with cut.structure():
            check_ranks(model, cut.stages, ranks.size)
            mine = {"microbatches": microbatches, "chunks": chunks, "transport": transport}
            mine |= {"load_quantized(stages=…)": loaded is not None}
            mine |= stages_fingerprint(model, has_values=loaded is None)
        states = states_of(model)
    check_equal(comm.agree(ranks.group, mine))
    by = comm.choose(transport, ranks.group, next(model.parameters()).device)
    for state in states:
        # "auto" would let a layer update it while microbatches are in flight
        state.in_charge = "explicit"
    if loaded is None:
        cut.take_out(model)
    angles_by_document(model)
    slots = agreed_slots(model, ranks, cut.stages, states)
    return PipelineParallel(model, cut, microbatches, slots, by)


def _cut_of(model: nn.Module, ranks: Ranks, chunks: int) -> PipelineCut:
    loaded = PipelineCut.of(model)
    if loaded is None:
        places = places_of(model)
        return PipelineCut(ranks, places, stages_of(places, ranks.size, chunks))
    was = loaded.ranks.size, loaded.ranks.rank, loaded.chunks
    if was != (ranks.size, ranks.rank, chunks):
        raise ValueError(
            f"the model was loaded as rank {was[1]} of {was[0]}, {was[2]} stages a rank, found rank {ranks.rank} of "
            f"{ranks.size} and chunks={chunks}: give both the same mesh and chunks"
        )
    loaded.ranks = ranks
    return loaded
