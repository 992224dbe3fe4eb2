# SPDX-License-Identifier: Apache-2.0
"""Captures the steps of a plan, in the plan's order, into one pool.

While a step is captured, its inputs, saved tensors and outputs are ordinary tensors in the pool. The capturer drops a
tensor after the step that is its last reader by the plan, so that later steps may reuse its memory. A replay reaches
that memory through an alias, a tensor that does not keep the memory allocated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..compare.signature import distinct
from ..device.backend import Captured, Graph
from ..interface.errors import CaptureError, hint_for
from ..plan.call_spec import Key
from ..plan.order import Direction, Step
from ..plan.plan import Buffer, CallPlan, CapturePlan
from ..record.tracer import RecordedCall, Trace
from ..replay.block_graphs import BlockGraphs
from ..replay.buffers import CallInput, ExposedBuffer, InputGroup
from ..replay.derived import renew_derived
from ..replay.grads import GradMemory, LayerGrads
from ..replay.graphed_call import GraphedCall
from .checks import check_outputs, check_trained
from .layer import InputGrads, Layer, enter
from .states import no_device_rng_in_checkpoints, place, repeats_nothing

# Elements. One block of torch's foreach kernels takes 65536 elements of one tensor: pieces keep more blocks busy.
PIECE = 1 << 14


@dataclass(eq=False)
class _OpenCall:
    """A call whose forward is captured and whose backward is not. It holds none of the call's tensors."""

    outputs: list[GradientEdge | None]
    leaves: dict[int, Tensor]
    grads: InputGrads


class Capturer:
    """One attempt at capturing a plan. On an error everything is destroyed, the pool's memory included.

    Args:
        layers: by their index in the plan.
        trace: the recorded calls; the warm-up runs on their inputs.
        plan: the steps and their buffers.
        graphs: filled with the captured calls. Its backend captures.
        grads: memory for the gradients of parameters; None gives them to autograd.
        states: random states of the layers.
        replaced: executable graphs of an earlier capture of the same steps. They take over the new addresses where
            CUDA can update them; the others are destroyed. `made` says for each step what happened.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        trace: Trace,
        plan: CapturePlan,
        graphs: BlockGraphs,
        grads: GradMemory | None,
        states: Sequence[Any] = (),
        replaced: Mapping[Step, Graph] | None = None,
    ) -> None:
        self.layers, self.trace, self.plan = layers, trace, plan
        self.backend, self.grads, self._states = graphs.backend, grads, states
        self.graphs = graphs
        self.calls: dict[Key, GraphedCall] = {}
        self.seconds: dict[Step, float] = {}
        self.made: dict[Step, str] = {}
        self._replaced = dict(replaced or {})
        self._memory: dict[int, Tensor] = {}  # by the buffer's index
        self._exposed: dict[int, ExposedBuffer] = {}
        self._groups: dict[int, InputGroup] = {}
        self._running: dict[Key, _OpenCall] = {}
        self._phase = ("", "start")

    def run(self, restore: Callable[[], None], advance: Callable[[], None]) -> BlockGraphs:
        """Warm up, `restore`, capture. `advance` is captured at the end of the block.

        Raises:
            CaptureError: with the layer and the phase it failed in.
        """
        try:
            for layer in self.layers:  # stand-ins cannot move the parameters that it may have to
                self._phase = (layer.name, "warm-up")
                renew_derived(layer.module)
            with self.backend.session(), no_device_rng_in_checkpoints():
                self._warm_up()
                restore()
                self._start = torch.get_rng_state()
                self.backend.trim()
                for position, step in enumerate(self.plan.order):
                    started = time.perf_counter()
                    last = position == len(self.plan.order) - 1
                    if step.direction is Direction.FORWARD:
                        self._forward(step)
                    else:
                        self._backward(step, advance if last else None)
                    for buffer in self.plan.dying(position):
                        self._memory.pop(buffer.index, None)
                    self.seconds[step] = time.perf_counter() - started
        except CaptureError:
            self._give_up()
            raise
        except Exception as error:
            self._give_up()
            reason = f"{type(error).__name__}: {error}"
            raise CaptureError(*self._phase, reason, hint_for(reason)) from error
        self._destroy_replaced()
        self.graphs.calls = list(self.calls.values())
        return self.graphs

    def _destroy_replaced(self) -> None:
        for graph in self._replaced.values():
            graph.destroy()
        self._replaced.clear()

    @contextmanager
    def _capture(self, step: Step) -> Iterator[Captured]:
        with self.backend.capture(self._replaced.get(step)) as captured:
            yield captured
        self._replaced.pop(step, None)
        self.made[step] = captured.made

    def _give_up(self) -> None:
        self._destroy_replaced()
        for call in self.calls.values():
            for graph in (
                getattr(call, "forward_graph", None),
                getattr(call, "backward_graph", None),
            ):
                if graph is not None:
                    graph.destroy()
        for held in (self._memory, self._exposed, self._groups, self._running, self.calls):
            held.clear()
        self.graphs.calls.clear()
        self.graphs.exposed.clear()
        self.backend.release()

    # warm-up

    def _warm_up(self) -> None:
        """Run each layer once, forward and backward, on the capture's stream.

        Libraries such as cuBLAS allocate their workspaces on the first call on a stream, outside the pool.
        """
        values: dict[int, Tensor] = {}
        for position, step in enumerate(self.plan.order):
            if step.direction is Direction.FORWARD and step.microbatch == 0:
                self._warm_up_layer((step.layer, 0), values)
            for buffer in self.plan.dying(position):
                values.pop(buffer.index, None)

    def _warm_up_layer(self, key: Key, values: dict[int, Tensor]) -> None:
        layer, recorded, plan = self.layers[key[0]], self.trace.calls[key], self.plan.calls[key]
        self._phase = (layer.name, "warm-up")
        inputs = []
        for buffer, sample in zip(plan.inputs, recorded.samples, strict=True):
            value = values[buffer.index] if sample is None else sample
            inputs.append(value.detach().requires_grad_(buffer.spec.requires_grad))
        leaves = layer.leaves()
        outputs = layer.run(recorded, inputs, leaves)
        check_outputs(layer.name, outputs, recorded)
        tensors = [x for x in outputs.tensors if x.requires_grad]
        check_trained(layer.name, tensors, [*inputs, *leaves.values()])
        layer.backward(tensors, [torch.zeros_like(x) for x in tensors], leaves)
        for buffer, x in zip(plan.outputs, outputs.tensors, strict=True):
            values[buffer.index] = x.detach()

    # forward

    def _forward(self, step: Step) -> None:
        key = (step.layer, step.microbatch)
        layer, recorded, plan = self.layers[key[0]], self.trace.calls[key], self.plan.calls[key]
        self._phase = (layer.name, "forward")
        call = GraphedCall(self.graphs, layer.name, step, Step(*key, Direction.BACKWARD))
        self.calls[key] = call
        self.graphs.forwards[call.forward_at] = call
        call.spec, call.autocast = recorded.inputs.spec, recorded.autocast
        grads, leaves = InputGrads(recorded.input_specs), layer.leaves()
        inputs = [self._input(call, recorded, grads, i) for i in range(len(plan.inputs))]
        place(layer.name, self._start, self._states)
        with repeats_nothing(layer.name, self._states), self._capture(step) as captured:
            outputs = layer.run(recorded, inputs, leaves)
        call.forward_graph = captured.graph
        check_outputs(layer.name, outputs, recorded)
        call.rebuild = recorded.outputs.rebuild
        for k, (buffer, x) in enumerate(zip(plan.outputs, outputs.tensors, strict=True)):
            self._memory[buffer.index] = x.detach()
            call.outputs.append(self._expose(buffer, x.detach(), layer.name))
            if not x.requires_grad:
                call.constants.append(k)
        edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs.tensors]
        self._running[key] = _OpenCall(edges, leaves, grads)

    def _expose(self, buffer: Buffer, x: Tensor, layer: str) -> ExposedBuffer:
        exposed = ExposedBuffer(buffer.name, layer, self.backend.alias(x), buffer.chained)
        self._exposed[buffer.index] = exposed
        if buffer.chained:
            self.graphs.exposed.append((buffer.death, exposed))
        return exposed

    def _input(
        self, call: GraphedCall, recorded: RecordedCall, grads: InputGrads, i: int
    ) -> Tensor:
        """The tensor that the layer is captured on as its input `i`; `call` learns how a replay fills it."""
        plan = self.plan.calls[call.layer, call.forward_step.microbatch]
        buffer, sample = plan.inputs[i], recorded.samples[i]
        way = CallInput(recorded.inputs.paths[i], recorded.input_specs[i])
        call.inputs.append(way)
        if way.spec.requires_grad:
            call.differentiable.append(i)
        if plan.copies[i]:
            assert sample is not None
            self._copy_in(way, buffer, sample, call.name)
        elif sample is not None:  # another input, of this call or an earlier one, copies it
            way.group = self._groups[buffer.index]
            k = plan.inputs.index(buffer)
            way.same_as = k if k < i and plan.copies[k] else -1
            way.expected = way.group if way.same_as < 0 else None
        else:
            way.origin = way.expected = self._exposed[buffer.index]
        memory = self._memory[buffer.index]
        if not way.spec.requires_grad:
            return memory.detach()
        return enter(memory, grads, i)

    def _copy_in(self, way: CallInput, buffer: Buffer, sample: Tensor, layer: str) -> None:
        """Memory for an input from outside, with the recorded tensor's content."""
        memory = self.backend.allocate(way.spec)
        distinct(memory).copy_(distinct(sample))
        self._memory[buffer.index] = memory
        way.static = distinct(self.backend.alias(memory))
        way.repeats = way.static.shape != memory.shape
        group = self._groups[buffer.index] = InputGroup(f"input {way.path} of layer {layer!r}")
        if sum(p.inputs.count(buffer) for p in self.plan.calls.values()) > 1:
            way.group = group

    # backward

    def _backward(self, step: Step, advance: Callable[[], None] | None) -> None:
        key = (step.layer, step.microbatch)
        layer, plan, call = self.layers[key[0]], self.plan.calls[key], self.calls[key]
        self._phase = (layer.name, "backward")
        running = self._running.pop(key)
        outputs, grads = [], []
        for k, edge in enumerate(running.outputs):
            buffer = plan.grad_outputs[k]
            if buffer is None or edge is None:
                continue
            grad = self._grad_output(call, k, buffer)
            outputs.append(edge)
            grads.append(grad)
            running.grads.others.add(grad.untyped_storage()._cdata)
        with self._capture(step) as captured:
            layer.backward(outputs, grads, running.leaves)
            parameter_grads = [running.leaves[id(p)].grad for _, p in layer.trained]
            if self.grads is not None:
                self._add(layer, parameter_grads)
            if advance is not None:
                advance()
        call.backward_graph = captured.graph
        self._collect_grads(call, plan, running)
        self._collect_parameters(call, layer, parameter_grads)

    def _grad_output(self, call: GraphedCall, k: int, buffer: Buffer) -> Tensor:
        memory = self._memory.get(buffer.index)
        if memory is None:  # the gradient comes from eager code, and each replay copies it in
            memory = self.backend.allocate(buffer.spec)
            memory.zero_()
        exposed = self._exposed.get(buffer.index)
        alias = self.backend.alias(memory) if exposed is None else exposed.alias
        call.grad_outputs.append((k, alias))
        return memory

    def _add(self, layer: Layer, grads: Sequence[Tensor | None]) -> None:
        assert self.grads is not None
        reached = [(p, g) for (_, p), g in zip(layer.trained, grads, strict=True) if g is not None]
        if reached:
            targets = self.grads.of([p for p, _ in reached])
            _add_all([(t.grad, g) for t, (_, g) in zip(targets, reached, strict=True)])

    def _collect_grads(self, call: GraphedCall, plan: CallPlan, running: _OpenCall) -> None:
        for i in call.differentiable:
            buffer, grad = plan.grad_inputs[i], running.grads.by_input.get(i)
            if grad is None or buffer is None:
                call.grad_inputs.append(None)
                continue
            self._memory[buffer.index] = grad
            call.grad_inputs.append(self._expose(buffer, grad, call.name))
        if not call.differentiable:
            call.grad_inputs.append(None)

    def _collect_parameters(
        self, call: GraphedCall, layer: Layer, grads: Sequence[Tensor | None]
    ) -> None:
        reached = [
            (n, p, g) for (n, p), g in zip(layer.trained, grads, strict=True) if g is not None
        ]
        if self.grads is None:
            call.parameters = [p for _, p, _ in reached]
            call.parameter_grads = [self.backend.alias(g) for _, _, g in reached]
        elif reached:
            targets = self.grads.of([p for _, p, _ in reached])
            names = [n for n, _, _ in reached]
            slabs = self.grads.slabs_of(targets)
            call.grads = LayerGrads(layer.name, names, targets, slabs)


def _add_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add to the first tensor of each pair the second, in pieces where both are contiguous and of one dtype."""
    sums: list[Tensor] = []
    terms: list[Tensor] = []
    for total, grad in pairs:
        if total.dtype == grad.dtype and total.is_contiguous() and grad.is_contiguous():
            sums += total.view(-1).split(PIECE)
            terms += grad.view(-1).split(PIECE)
        else:
            sums.append(total)
            terms.append(grad)
    torch._foreach_add_(sums, terms)
