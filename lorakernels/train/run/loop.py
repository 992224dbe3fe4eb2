# SPDX-License-Identifier: Apache-2.0
"""The training loop: seven stages, once per optimizer step.

    1 data        the step's rows, prepared by a thread during the step before; each rank takes its rows or tokens
    2–4           per microbatch: forward, loss in fp32, backward of (sum of token losses) / (tokens of the whole step)
    5 clipping    after one all-reduce of gradients and loss
    6 optimizer   fused AdamW, or another by name, then FP8State.reduce_and_update();
                  it skips the step, AdamW on the device, if loss or norm is not finite
    7 schedule    the learning rate, a function of the step number

Stages 2 to 6 launch kernels and wait for none. Two things make them wait: an optimizer that no graph can hold, and long
steps over several ranks, as the first one may be. The values that change from step to step (tokens, learning rate) are
on the device. The stages are therefore one function, which a runtime may capture.

The loss is divided by the trained tokens of the whole step. Hence 1 × 4 and 4 × 1 microbatches, on one rank or four,
are the same step, however the padding falls.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels import ContextParallel, FP8State, quantize_head
from lorakernels.train.data.packing import PackedBatch, PackedRows, RowOrder, spread
from lorakernels.train.errors import CheckpointError, Diverged
from lorakernels.train.files.checkpoint import (
    Checkpoint,
    check_rng_state,
    rng_state,
    set_rng_state,
)
from lorakernels.train.layouts.context import own_part
from lorakernels.train.layouts.parts import RankPart
from lorakernels.train.layouts.pipeline import PipelinePart
from lorakernels.train.model.model import decoder_and_head, mean_loss, summed_loss
from lorakernels.train.optimizer.optimizers import Updater
from lorakernels.train.optimizer.schedule import make_schedule
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.progress import Observer, nobody
from lorakernels.train.ranks.ranks import STEP, RunRanks, wait_for
from lorakernels.train.run.runtime import Runtime

# buffers of layers that OLoRA or PiSSA started from their base weight
INITIAL = (".lora_A_init", ".lora_B_init")
# Seconds of a step from which on the host waits for the device before each forward, backward and sum. NCCL's timeout
# counts from the launch of a collective, and the host launches a step in far less time than it takes. A twelfth of it
# leaves room for a step that takes much longer than the one before, by which this is decided.
LONG = STEP.total_seconds() / 12


@dataclass
class Counters:
    """The position of a run.

    ``step`` counts optimizer steps tried, and ``rows`` is the place in the order of rows. ``bad_rows`` are those of the
    last steps in a row that were not finite. ``left_out`` are those that rollbacks have left out.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0
    bad_rows: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    rollbacks: int = 0


@dataclass(frozen=True)
class StepRows:
    """This rank's microbatches of a step.

    The rest is of all ranks together: numbers of the rows, tokens, trained labels, and where the next step begins.
    """

    batches: list[PackedBatch]
    numbers: list[int]
    inputs: int
    targets: int
    stop: int


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    skipped: bool
    replayed: bool = False
    stop: bool = False  # whether any rank got a request to stop


class Trainer:
    """Model, optimizer, data order and counters of one run; ``step()`` does the work.

    Without a ``runtime`` the layers run eagerly, and dropout draws from torch's generator.
    """

    def __init__(
        self,
        model: nn.Module,
        options: FinetuneOptions,
        rows: PackedRows,
        fp8_state: FP8State | None,
        runtime: Runtime | None = None,
        ranks: RunRanks = RunRanks(),  # noqa: B008  (frozen)
    ) -> None:
        self.model, self.options, self.rows, self.fp8_state = model, options, rows, fp8_state
        self.runtime = runtime or Runtime(model, replace(options, eager=True), fp8_state, None)
        self.ranks, self.context = ranks, ContextParallel.of(model)
        self.parts: RankPart | None = RankPart.of(model)
        self.stages: PipelinePart | None = PipelinePart.of(model)
        head = decoder_and_head(model)[1] if options.fp8_head else None
        self.head8 = None if head is None else quantize_head(head.get_parameter("weight"))
        self.trainable = self._trained()
        self.initial = {name: b for name, b in model.named_buffers() if name.endswith(INITIAL)}
        self.device = next(iter(self.trainable.values())).device
        self.updater = Updater(self.trainable, options, self._ratio)
        self.optimizer = self.updater.optimizer
        self.items = torch.ones((), device=self.device)  # trained labels of a step, over all ranks
        self.order = RowOrder(len(rows), options.seed)
        self.rows_per_step = options.batch_size * options.grad_accum * ranks.replicas
        self.steps = options.steps or max(
            1, math.ceil(options.epochs * len(rows) / self.rows_per_step)
        )
        self.schedule = make_schedule(options, self.steps)
        self.counters = Counters()
        self._seconds = math.inf  # of the step before; the first one may be long
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._next: tuple[int, Future[StepRows]] | None = None
        self._ready: tuple[int, StepRows] | None = None
        if fp8_state is not None:
            # From now on the trainer updates the scales. Before the first amax this call changes nothing.
            fp8_state.reduce_and_update()

    def step(self, stop: bool = False) -> StepResult:
        """One optimizer step over batch_size · grad_accum rows of each rank. ``stop`` reaches all ranks together with
        the loss.

        Raises:
            Diverged: too many steps in a row were not finite.
        """
        began = time.perf_counter()
        rows = self._take_rows()
        self.model.train()
        lr = self.schedule(self.counters.step)
        self.updater.set_rate(lr)
        self._set_items(rows)
        stopping = torch.full((), float(stop), device=self.device)
        loss, norm = self._run(rows.batches, stopping)
        replayed = self.runtime.replayed
        self.runtime.end_step(self.counters.step + 1)
        self._fetch(rows.stop)
        # This is the only wait of a step. By now everything is launched and the next rows are on their way.
        value, norm_value, stops = torch.stack([loss, norm, stopping]).tolist()
        skipped = not (math.isfinite(value) and math.isfinite(norm_value))
        self._count(rows, skipped)
        seconds = self._seconds = time.perf_counter() - began
        return StepResult(value, norm_value, lr, rows.inputs, seconds, skipped, replayed, stops > 0)

    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer steps, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _ratio(self, name: str) -> float:
        """The learning rate of a trained tensor as a multiple of the run's."""
        return 1.0

    def _set_items(self, rows: StepRows) -> None:
        self.items.fill_(rows.targets)

    def _run(self, batches: list[PackedBatch], stopping: Tensor) -> tuple[Tensor, Tensor]:
        """Run `_compute`, eagerly or through the runtime. Returns (loss, norm), two fp32 scalars."""
        tensors = [batch.tensors() for batch in batches]
        return self.runtime.run(self._compute, self.optimizer, tensors, stopping)

    def _compute(
        self, batches: list[tuple[Tensor | None, ...]], stopping: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The device's whole work of a step. Nothing here depends on a value on the host."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._forward_and_backward(
            [PackedBatch.of(tensors, self.rows.longest) for tensors in batches]
        )
        adder = self.ranks if self.parts is None else self.parts
        self._keep_near()
        gradients = adder.add_up_gradients([*self.trainable.values()], loss, stopping)
        norm = self._clip(gradients)
        self.updater.step(torch.isfinite(loss) & torch.isfinite(norm))
        if self.fp8_state is not None:
            self.fp8_state.reduce_and_update()
        return loss, norm

    def _keep_near(self) -> None:
        """In long steps over several ranks, let the host wait until the device has done what was launched."""
        if self._seconds >= LONG and self.ranks.size > 1:
            wait_for(self.device)

    def _forward_and_backward(self, batches: list[PackedBatch]) -> Tensor:
        """Forward and backward of all microbatches. Returns this rank's part of the step's loss, an fp32 scalar."""
        if self.stages is not None:
            return self._through_stages(self.stages, batches)
        loss = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            self.runtime.begin_microbatch()
            self._keep_near()
            micro = mean_loss(self.model, batch, self.options, self.items, self.head8)
            self._keep_near()
            micro.backward()
            self.runtime.end_microbatch(last=number == len(batches) - 1)
            loss += micro.detach()
        return loss if self.ranks.counts else torch.zeros_like(loss)

    def _through_stages(self, stages: PipelinePart, batches: list[PackedBatch]) -> Tensor:
        """The same, where microbatches run through the stages of several ranks."""
        self.runtime.begin_microbatch()
        loss = stages.forward_backward(batches, self.items, self._keep_near)
        for number in range(len(batches)):
            self.runtime.end_microbatch(last=number == len(batches) - 1)
        return loss

    def _clip(self, gradients: list[Tensor]) -> Tensor:
        """Clip the gradients. Returns their norm before clipping, an fp32 scalar."""
        whole = torch.nn.utils.get_total_norm if self.parts is None else self.parts.total_norm
        norm = whole(gradients)
        if self.options.max_grad_norm > 0:
            parameters = list(self.trainable.values())
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.max_grad_norm, norm)
        return norm.float()

    def _count(self, rows: StepRows, skipped: bool) -> None:
        counters = self.counters
        counters.step += 1
        counters.rows = rows.stop
        counters.tokens += rows.inputs
        counters.skipped += skipped
        counters.bad_in_a_row = counters.bad_in_a_row + 1 if skipped else 0
        counters.bad_rows = [*counters.bad_rows, *rows.numbers] if skipped else []
        if counters.bad_in_a_row >= self.options.max_bad_steps:
            raise Diverged(
                f"loss or gradient was not finite in {counters.bad_in_a_row} steps in a row (up to step "
                f"{counters.step}); the adapter is unchanged since step {counters.step - counters.bad_in_a_row}. "
                "Look at the data there, or start in another output directory with a lower lr"
            )

    def _take_rows(self) -> StepRows:
        """This rank's rows of the next step."""
        if self._ready is None or self._ready[0] != self.counters.rows:
            self._fetch(self.counters.rows)
        assert self._ready is not None
        return self._ready[1]

    def _fetch(self, position: int) -> None:
        """Copy the rows from `position` on to the device, and let the thread prepare the following rows."""
        if self._next is None or self._next[0] != position:
            self._next = (position, self._thread.submit(self._prepare, position))
        rows = self._next[1].result()
        moved = [batch.to(self.device) for batch in rows.batches]
        self._ready = (position, replace(rows, batches=moved))
        self._next = (rows.stop, self._thread.submit(self._prepare, rows.stop))

    def _prepare(self, position: int) -> StepRows:
        size, ranks = self.options.batch_size, self.ranks
        everywhere, stop = self.order.take(position, self.rows_per_step)
        batches = []
        for micro in range(self.options.grad_accum):
            first = (micro * ranks.replicas + ranks.replica) * size
            batch = self.rows.batch(everywhere[first : first + size])
            batch = own_part(batch, self.context, self.options.isolate_documents)
            batches.append(batch.pin() if self.device.type == "cuda" else batch)
        inputs, targets = (
            sum(map(count, everywhere)) for count in (self.rows.inputs_of, self.rows.targets_of)
        )
        return StepRows(batches, everywhere, inputs, targets, stop)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.runtime.close()

    def checkpoint(self, extra: dict[str, Any]) -> Checkpoint:
        fp8 = None if self.fp8_state is None else self.fp8_state.state_dict()
        tensors: dict[str, Tensor] = {**self.trainable, **self.initial}
        optimizer = self.optimizer.state_dict()
        if self.parts is not None:
            tensors, optimizer = self.parts.gathered(self.optimizer)
        state = {
            "optimizer": optimizer,
            "rng": rng_state(self.device),
            "fp8": fp8,
            "runtime": self.runtime.state_dict(),
        }
        trainer = {"counters": asdict(self.counters), **extra}
        return Checkpoint(self.counters.step, tensors, state, trainer)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore all state. Raises CheckpointError, which names the misfit, before anything is changed."""
        checkpoint = self._own_part(checkpoint)
        self._check_fits(checkpoint)
        self._take(checkpoint)
        self.updater.load_state_dict(checkpoint.state["optimizer"])
        set_rng_state(checkpoint.state["rng"], self.device)
        self.runtime.load_state_dict(checkpoint.state["runtime"])
        self.counters = Counters(**checkpoint.trainer["counters"])
        self.order.left_out = frozenset(self.counters.left_out)

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Take the trained tensors and the FP8 scales of a checkpoint of this run, and nothing else."""
        self._take(self._own_part(checkpoint))

    def _own_part(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint if self.parts is None else self.parts.own_part(checkpoint)

    def _take(self, checkpoint: Checkpoint) -> None:
        if self.fp8_state is not None:
            try:
                self.fp8_state.load_state_dict(checkpoint.state["fp8"])
            except ValueError as error:
                raise CheckpointError(f"the checkpoint is of another run: {error}") from error
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(checkpoint.tensors[name])

    def go_back(self, checkpoint: Checkpoint, left_out: list[int], rollbacks: int) -> None:
        """Restore all state in the middle of a run, and pass over the rows `left_out` from there on."""
        if self._next is not None:
            self._next[1].result()  # the thread reads the order
        self._next = self._ready = None
        self.runtime.start_anew()
        self.restore(checkpoint)
        self.counters.left_out, self.counters.rollbacks = left_out, rollbacks
        self.order.left_out = frozenset(left_out)

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        state, tensors = checkpoint.state, checkpoint.tensors
        if (state["fp8"] is None) != (self.fp8_state is None):
            raise CheckpointError("the checkpoint and this run differ in fp8")
        check_rng_state(state["rng"], self.device)
        groups = [
            [len(group["params"]) for group in param_groups]
            for param_groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        ]
        if groups[0] != groups[1]:
            raise CheckpointError(
                f"the checkpoint is of another run: its optimizer has groups of {groups[0]} parameters, this one of "
                f"{groups[1]}"
            )
        odd = sorted(set(tensors) ^ {*self.trainable, *self.initial})
        if odd:
            raise CheckpointError(
                f"the checkpoint is of another run: tensors differ, e.g. {', '.join(odd[:3])}"
            )
        for name, value in self.initial.items():
            if not torch.equal(tensors[name].to(value), value):
                raise CheckpointError(
                    f"the checkpoint's run took another {name} from the base weight than this run did: resume it on "
                    "the same kind of device, with the same base and torch"
                )
        for name, parameter in self.trainable.items():
            if tensors[name].shape != parameter.shape or tensors[name].dtype != parameter.dtype:
                raise CheckpointError(
                    f"the checkpoint is of another run: {name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, "
                    f"expected {parameter.dtype} {tuple(parameter.shape)}"
                )


def evaluation_batches(rows: PackedRows, limit: int, size: int) -> Iterator[PackedBatch]:
    """Batches of ``limit`` rows (0: all), evenly spread."""
    chosen = spread(len(rows), limit)
    for start in range(0, len(chosen), size):
        yield rows.batch(chosen[start : start + size])


def rounds(batches: Iterator[PackedBatch], ranks: RunRanks) -> Iterator[tuple[PackedBatch, bool]]:
    """This replica's share of `batches`, and whether each counts.

    All ranks get as many, because a sharded base takes all of them for every forward. The last one of a replica may be
    another's, which does not count here.
    """
    for whole in iter(lambda: list(itertools.islice(batches, ranks.replicas)), []):
        counts = ranks.replica < len(whole)
        yield whole[ranks.replica if counts else 0], counts


@torch.no_grad()
def evaluate(
    model: nn.Module,
    rows: PackedRows,
    options: FinetuneOptions,
    ranks: RunRanks = RunRanks(),  # noqa: B008  (frozen)
    progress: Observer = nobody,
) -> float:
    """Mean token loss, in nats, on held-out rows. Each rank evaluates its share of the batches.

    Evaluation draws no random number and changes no state. ``progress`` reports the batches of all ranks that were
    handed out, without a wait for the device, and the last one when the loss is there.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    context, stages = ContextParallel.of(model), PipelinePart.of(model)
    batches = evaluation_batches(rows, options.eval_rows, options.batch_size)
    count = math.ceil(len(spread(len(rows), options.eval_rows)) / options.batch_size)
    if stages is not None:
        batches, total = iter(()), stages.evaluate(rows, device, progress)
    for number, (whole, counts) in enumerate(rounds(batches, ranks), start=1):
        batch = own_part(whole, context, options.isolate_documents)
        if ranks.size > 1:  # its collectives must not be launched long before the device is there
            wait_for(device)
        loss = summed_loss(model, batch.to(device), options.loss_chunk, options.isolate_documents)
        if counts and ranks.counts:
            total[0] += loss
            total[1] += batch.targets
        progress(min(number * ranks.replicas, count - 1), count)
    model.train(training)
    ranks.add_up([total])
    summed, tokens = total.tolist()
    progress(count, count)
    return summed / max(tokens, 1.0)
