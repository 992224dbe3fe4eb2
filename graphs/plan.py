# SPDX-License-Identifier: Apache-2.0
"""Which steps are captured, which memory they share, and how long each piece of it lives. No tensors here.

    forward   … F(i) ──out──▶ F(i+1) …       one buffer: what layer i writes is what layer i+1 reads
    backward  … B(i) ◀─grad── B(i+1) …       one buffer, the other way round

A buffer lives from the step that writes it to its last reader; from then on, steps captured later may have its memory.
So a replay is right only in the captured order, and whoever else still holds a buffer at its end must have a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .order import Direction, Order, Step

Key = tuple[int, int]  # layer, microbatch


@dataclass(frozen=True)
class FromOutput:
    """The input is, as an object, output `index` of `call`."""

    call: Key
    index: int


@dataclass(frozen=True)
class FromOutside:
    """The input comes from eager code; inputs of one `group` are one and the same object."""

    group: int


@dataclass(frozen=True)
class CallSpec:
    """What was seen of one training forward. Specs are `signature.TensorSpec`s or anything with `nbytes` and
    `requires_grad`; `constants` is what else is in the call, compared with ==."""

    inputs: tuple[Any, ...]
    sources: tuple[FromOutput | FromOutside, ...]
    outputs: tuple[Any, ...]
    constants: Any = None

    def like(self, other: CallSpec, microbatch: int, other_microbatch: int) -> bool:
        """Whether both calls could be replays of one graph."""
        return (
            self.inputs == other.inputs
            and self.outputs == other.outputs
            and self.constants == other.constants
            and [_relative(s, microbatch) for s in self.sources]
            == [_relative(s, other_microbatch) for s in other.sources]
        )


def _relative(source: FromOutput | FromOutside, microbatch: int) -> Any:
    if isinstance(source, FromOutput):
        return source.call[0], source.call[1] - microbatch, source.index
    return None


def block_length(order: Order, calls: Mapping[Key, CallSpec]) -> int:
    """How many microbatches are captured: 1 where each runs alone and all look alike, else all of them.

    With one microbatch at a time, the iteration is one block of steps over and over: one set of graphs serves all
    microbatches, and what one of them saved is dead when the next begins.
    """
    count, layers = order.num_microbatches, range(len(order.layers))
    size = len(order) // count
    first = [(s.layer, s.direction) for s in order.steps[:size]]
    for m in range(count):
        block = order.steps[m * size : (m + 1) * size]
        if (
            any(s.microbatch != m for s in block)
            or [(s.layer, s.direction) for s in block] != first
        ):
            return count
    alike = all(
        all(calls[layer, m].like(calls[layer, 0], m, 0) for layer in layers)
        and same_groups([(calls[layer, 0], calls[layer, m]) for layer in layers])
        for m in range(1, count)
    )
    return 1 if alike else count


def same_groups(calls: Sequence[tuple[CallSpec, CallSpec]]) -> bool:
    """Whether the inputs from outside are shared among the first of each pair as among the second."""
    pairs = [
        (a.group, b.group)
        for one, other in calls
        for a, b in zip(one.sources, other.sources, strict=True)
        if isinstance(a, FromOutside) and isinstance(b, FromOutside)
    ]
    return len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(set(pairs))


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
    """The buffers of one captured call; gradients are None where there is none to hand on."""

    inputs: list[Buffer]
    copies: list[bool]  # whether this call copies the caller's tensor into the buffer
    outputs: list[Buffer]
    grad_inputs: list[Buffer | None]
    grad_outputs: list[Buffer | None]


@dataclass
class Plan:
    """The captured steps and their buffers."""

    order: Order  # of the captured block
    repeats: int  # how many blocks make an iteration
    calls: dict[Key, CallPlan] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    unshared_buffers: int = 0
    unshared_bytes: int = 0

    def dying(self, position: int) -> list[Buffer]:
        """Buffers that nobody needs after the step at `position`."""
        return [b for b in self.buffers if b.death == position]

    @property
    def bytes(self) -> int:
        return sum(b.spec.nbytes for b in self.buffers)

    def add(self, buffer: Buffer) -> Buffer:
        buffer.index = len(self.buffers)
        self.buffers.append(buffer)
        return buffer


def make_plan(order: Order, calls: Mapping[Key, CallSpec]) -> Plan:
    """The plan for an order and what was seen of its calls."""
    count = block_length(order, calls)
    size = len(order) * count // order.num_microbatches
    block = Order(order.steps[:size], order.layers, count)
    plan = Plan(block, order.num_microbatches // count)
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


def _at(plan: Plan, key: Key, direction: Direction) -> int:
    return plan.order.index(Step(*key, direction))


def _plan_forward(
    plan: Plan,
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
    plan: Plan,
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


def _count(plan: Plan, specs: Sequence[Any]) -> None:
    plan.unshared_buffers += len(specs)
    plan.unshared_bytes += sum(spec.nbytes for spec in specs)
