# SPDX-License-Identifier: Apache-2.0
"""Which steps are captured, which memory they share, and how long each piece of it lives. No tensors here.

    forward   … F(i) ──out──▶ F(i+1) …       one buffer: what layer i writes is what layer i+1 reads
    backward  … B(i) ◀─grad── B(i+1) …       one buffer, the other way round

A buffer lives from the step that writes it to its last reader. Steps that are captured later may reuse its memory.
Therefore a replay is right only in the captured order, and eager code that keeps a buffer longer must have a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .call_spec import CallSpec, FromOutput, Key, block_length
from .order import Direction, Order, Step


@dataclass(eq=False)
class Buffer:
    """One piece of memory. `birth` and `death`: positions of the first step that uses it and of the last."""

    name: str
    kind: str  # "input", "activation", "gradient"
    spec: Any
    birth: int
    death: int
    chained: bool = False  # handed from one layer to the next without a copy
    index: int = -1


@dataclass
class CallPlan:
    """The buffers of one captured call. An entry is None where an input or output has no gradient."""

    inputs: list[Buffer]
    copies: list[bool]  # whether this call copies the caller's tensor into the buffer
    outputs: list[Buffer]
    grad_inputs: list[Buffer | None]
    grad_outputs: list[Buffer | None]


@dataclass
class CapturePlan:
    """The captured steps and their buffers."""

    order: Order  # of the captured block
    repeats: int  # how many blocks make an iteration
    calls: dict[Key, CallPlan] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    unshared_buffers: int = 0
    unshared_bytes: int = 0

    def dying(self, position: int) -> list[Buffer]:
        """Buffers whose last reader is the step at `position`."""
        return [b for b in self.buffers if b.death == position]

    @property
    def bytes(self) -> int:
        return sum(b.spec.nbytes for b in self.buffers)

    def add(self, buffer: Buffer) -> Buffer:
        buffer.index = len(self.buffers)
        self.buffers.append(buffer)
        return buffer


def make_plan(order: Order, calls: Mapping[Key, CallSpec]) -> CapturePlan:
    """The plan for an order and what was seen of its calls."""
    count = block_length(order, calls)
    size = len(order) * count // order.num_microbatches
    block = Order(order.steps[:size], order.layers, count)
    plan = CapturePlan(block, order.num_microbatches // count)
    readers = _readers(calls, count)
    groups: dict[tuple[int, int], Buffer] = {}
    for step in block:
        key = (step.layer, step.microbatch)
        if step.direction is Direction.FORWARD:
            plan.calls[key] = _plan_forward(plan, key, calls[key], readers, groups)
    for step in block:
        if step.direction is Direction.BACKWARD:
            _plan_backward(plan, (step.layer, step.microbatch), calls, readers)
    return plan


def _readers(
    calls: Mapping[Key, CallSpec], count: int
) -> dict[tuple[Key, int], list[tuple[Key, int]]]:
    """For each output, the (call, input) places that read it."""
    readers: dict[tuple[Key, int], list[tuple[Key, int]]] = {}
    for key, call in calls.items():
        for i, source in enumerate(call.sources):
            if isinstance(source, FromOutput) and key[1] < count:
                readers.setdefault((source.call, source.index), []).append((key, i))
    return readers


def _at(plan: CapturePlan, key: Key, direction: Direction) -> int:
    return plan.order.index(Step(*key, direction))


def _plan_forward(
    plan: CapturePlan,
    key: Key,
    call: CallSpec,
    readers: Mapping[tuple[Key, int], Sequence[tuple[Key, int]]],
    groups: dict[tuple[int, int], Buffer],
) -> CallPlan:
    here, name = _at(plan, key, Direction.FORWARD), plan.order.layers[key[0]]
    inputs, copies = [], []
    for i, (spec, source) in enumerate(zip(call.inputs, call.sources, strict=True)):
        copies.append(False)
        if isinstance(source, FromOutput):
            inputs.append(plan.calls[source.call].outputs[source.index])
            continue
        group = (source.group, key[1])
        if group not in groups:
            groups[group] = plan.add(Buffer(f"{name} input {i}", "input", spec, here, here))
            copies[-1] = True
        groups[group].death = here
        inputs.append(groups[group])
    outputs = []
    for k, spec in enumerate(call.outputs):
        reads = [_at(plan, reader, Direction.FORWARD) for reader, _ in readers.get((key, k), ())]
        buffer = Buffer(
            f"{name} output {k}", "activation", spec, here, max([here, *reads]), bool(reads)
        )
        outputs.append(plan.add(buffer))
    _count(plan, [*call.inputs, *call.outputs])
    return CallPlan(inputs, copies, outputs, [None] * len(inputs), [None] * len(outputs))


def _plan_backward(
    plan: CapturePlan,
    key: Key,
    calls: Mapping[Key, CallSpec],
    readers: Mapping[tuple[Key, int], Sequence[tuple[Key, int]]],
) -> None:
    here, name = _at(plan, key, Direction.BACKWARD), plan.order.layers[key[0]]
    call, mine = calls[key], plan.calls[key]
    for k, spec in enumerate(call.outputs):
        if spec.requires_grad and mine.grad_outputs[k] is None:
            buffer = Buffer(f"gradient of {name} output {k}", "gradient", spec, here, here)
            mine.grad_outputs[k] = plan.add(buffer)
    for i, (spec, source) in enumerate(zip(call.inputs, call.sources, strict=True)):
        if not spec.requires_grad:
            continue
        buffer = Buffer(f"gradient of {name} input {i}", "gradient", spec, here, here)
        mine.grad_inputs[i] = plan.add(buffer)
        if isinstance(source, FromOutput) and len(readers[source.call, source.index]) == 1:
            there = _at(plan, source.call, Direction.BACKWARD)
            if there > here:
                buffer.chained, buffer.death = True, there
                plan.calls[source.call].grad_outputs[source.index] = buffer
    _count(plan, [s for s in (*call.inputs, *call.outputs) if s.requires_grad])


def _count(plan: CapturePlan, specs: Sequence[Any]) -> None:
    plan.unshared_buffers += len(specs)
    plan.unshared_bytes += sum(spec.nbytes for spec in specs)
