# SPDX-License-Identifier: Apache-2.0
"""The training loop: S002's seven stages, once per optimizer step.

    1 data        the step's rows, prepared by a thread while the step before runs
    2–4           per microbatch: forward, loss in fp32, backward of (sum of token losses) / (tokens of the whole step)
    5 clipping    a norm that is not finite: the step is skipped and counted
    6 optimizer   fused AdamW on whatever trains, then FP8State.reduce_and_update()
    7 schedule    a function of the step number

Dividing by the tokens of the whole step makes 1 × 4 and 4 × 1 microbatches the same step, however the padding falls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels import FP8State
from lorakernels.train.checkpoint import Checkpoint, rng_state, set_rng_state
from lorakernels.train.errors import CheckpointError, Diverged
from lorakernels.train.model import summed_loss
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.packing import Batch, PackedRows, RowOrder
from lorakernels.train.schedule import learning_rate, warmup_steps


@dataclass
class Counters:
    """Where a run is. ``step`` counts optimizer steps tried, ``rows`` the rows they took."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    skipped: bool


def make_optimizer(parameters: list[nn.Parameter], options: FinetuneOptions) -> torch.optim.AdamW:
    """AdamW, fused where PyTorch has a fused kernel; weight decay on matrices only."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, options.weight_decay), (vectors, 0.0))
        if group
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(
        groups, lr=options.lr, betas=(options.beta1, options.beta2), fused=fused
    )


class Trainer:
    """Model, optimizer, data order and counters of one run; ``step()`` and ``evaluate()`` do the work."""

    def __init__(
        self,
        model: nn.Module,
        options: FinetuneOptions,
        rows: PackedRows,
        fp8_state: FP8State | None,
    ) -> None:
        self.model, self.options, self.rows, self.fp8_state = model, options, rows, fp8_state
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.trainable.values())).device
        self.optimizer = make_optimizer(list(self.trainable.values()), options)
        self.order = RowOrder(len(rows), options.seed)
        per_step = options.batch_size * options.grad_accum
        self.steps = options.steps or max(1, math.ceil(options.epochs * len(rows) / per_step))
        self.warmup = warmup_steps(options.warmup, self.steps)
        self.counters = Counters()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._next: tuple[int, Future[list[Batch]]] | None = None
        if fp8_state is not None:
            fp8_state.reduce_and_update()  # takes charge of the scales; without an amax seen it changes nothing

    def step(self) -> StepResult:
        """One optimizer step over batch_size · grad_accum rows."""
        began = time.perf_counter()
        batches = self._take_batches()
        tokens = sum(batch.targets for batch in batches)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for batch in batches:
            micro = summed_loss(self.model, batch.to(self.device), self.options.loss_chunk) / tokens
            micro.backward()
            loss += micro.detach()
        lr = learning_rate(
            self.counters.step,
            peak=self.options.lr,
            steps=self.steps,
            warmup=self.warmup,
            floor=self.options.min_lr_ratio,
        )
        value, norm = self._clip(loss)
        skipped = not (math.isfinite(value) and math.isfinite(norm))
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        if self.fp8_state is not None:
            self.fp8_state.reduce_and_update()
        self._count(tokens, skipped)
        return StepResult(value, norm, lr, tokens, time.perf_counter() - began, skipped)

    def _clip(self, loss: Tensor) -> tuple[float, float]:
        """Clip the gradients; loss and norm come to the host in one transfer, the only one of a step."""
        parameters = list(self.trainable.values())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.options.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.max_grad_norm, norm)
        value, norm_value = torch.stack([loss, norm.to(loss)]).tolist()
        return value, norm_value

    def _count(self, tokens: int, skipped: bool) -> None:
        counters = self.counters
        counters.step += 1
        counters.rows += self.options.batch_size * self.options.grad_accum
        counters.tokens += tokens
        counters.skipped += skipped
        counters.bad_in_a_row = counters.bad_in_a_row + 1 if skipped else 0
        if counters.bad_in_a_row >= self.options.max_bad_steps:
            raise Diverged(
                f"loss or gradient was not finite in {counters.bad_in_a_row} steps in a row (up to step "
                f"{counters.step}); the adapter is unchanged since step {counters.step - counters.bad_in_a_row}. "
                "Look at the data there, or start in another output directory with a lower lr"
            )

    def _take_batches(self) -> list[Batch]:
        position = self.counters.rows
        if self._next is None or self._next[0] != position:
            self._next = (position, self._thread.submit(self._prepare, position))
        batches = self._next[1].result()
        following = position + self.options.batch_size * self.options.grad_accum
        self._next = (following, self._thread.submit(self._prepare, following))
        return batches

    def _prepare(self, position: int) -> list[Batch]:
        size = self.options.batch_size
        batches = [
            self.rows.batch(self.order.take(position + micro * size, size))
            for micro in range(self.options.grad_accum)
        ]
        return [batch.pin() for batch in batches] if self.device.type == "cuda" else batches

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def checkpoint(self, extra: dict[str, Any]) -> Checkpoint:
        fp8 = None if self.fp8_state is None else self.fp8_state.state_dict()
        state = {
            "optimizer": self.optimizer.state_dict(),
            "rng": rng_state(self.device),
            "fp8": fp8,
        }
        trainer = {"counters": asdict(self.counters), **extra}
        return Checkpoint(self.counters.step, dict(self.trainable), state, trainer)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put everything back in place; CheckpointError names what does not fit, before anything is changed."""
        self._check_fits(checkpoint.tensors)
        if (checkpoint.state["fp8"] is None) != (self.fp8_state is None):
            raise CheckpointError("the checkpoint and this run differ in fp8")
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(checkpoint.tensors[name])
        self.optimizer.load_state_dict(checkpoint.state["optimizer"])
        if self.fp8_state is not None:
            self.fp8_state.load_state_dict(checkpoint.state["fp8"])
        set_rng_state(checkpoint.state["rng"], self.device)
        self.counters = Counters(**checkpoint.trainer["counters"])

    def _check_fits(self, tensors: dict[str, Tensor]) -> None:
        odd = sorted(set(tensors) ^ set(self.trainable))
        if odd:
            raise CheckpointError(
                f"the checkpoint is of another run: tensors differ, e.g. {', '.join(odd[:3])}"
            )
        for name, parameter in self.trainable.items():
            if tensors[name].shape != parameter.shape or tensors[name].dtype != parameter.dtype:
                raise CheckpointError(
                    f"the checkpoint is of another run: {name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, "
                    f"expected {parameter.dtype} {tuple(parameter.shape)}"
                )


def evaluation_batches(rows: PackedRows, limit: int, size: int) -> Iterator[Batch]:
    """``limit`` rows (0: all), evenly spread: rows are packed longest document first."""
    count = min(len(rows), limit) if limit else len(rows)
    chosen = [i * len(rows) // count for i in range(count)]
    for start in range(0, count, size):
        yield rows.batch(chosen[start : start + size])


@torch.no_grad()
def evaluate(model: nn.Module, rows: PackedRows, options: FinetuneOptions) -> float:
    """Mean token loss on held-out rows; draws no random number and changes no state."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in evaluation_batches(rows, options.eval_rows, options.batch_size):
        total += summed_loss(model, batch.to(device), options.loss_chunk)
        tokens += batch.targets
    model.train(training)
    return float(total) / max(tokens, 1)
