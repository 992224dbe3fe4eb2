# SPDX-License-Identifier: Apache-2.0
"""Watches what goes into the layers and comes out of them while `OrderRecorder` watches their order."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import CaptureError
from ..plan.call_spec import CallSpec, FromOutput, FromOutside, Key
from ..signature import Signature, TensorSpec, autocast_state, typed


@dataclass(eq=False)
class RecordedCall:
    """One recorded forward. `samples`: the inputs from outside, detached; a capture warms up on their values."""

    inputs: Signature
    outputs: Signature
    sources: list[tuple[object, int] | int]  # (recorder's call, output), or a group
    samples: list[Tensor | None]
    autocast: tuple[bool, torch.dtype | None]
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]


@dataclass
class Trace:
    """An iteration's calls: what the plan needs, and what the capture needs besides."""

    specs: dict[Key, CallSpec]
    calls: dict[Key, RecordedCall]
    recomputed: set[int]  # layers that something outside of them checkpoints
    reentrant: set[int]  # those among them where it is a reentrant checkpoint

    def keep(self, keys: Collection[Key]) -> None:
        """Drop the samples of all calls but these: their block is another one's replay."""
        for key, call in self.calls.items():
            if key not in keys:
                call.samples = []


@dataclass
class _Iteration:
    calls: dict[object, RecordedCall] = field(default_factory=dict)
    origins: dict[int, tuple[weakref.ref[Tensor], int, object, int]] = field(default_factory=dict)
    groups: dict[tuple[int, int], tuple[Tensor, int]] = field(default_factory=dict)
    entered: dict[int, tuple[Signature, list[int]]] = field(default_factory=dict)


class Tracer:
    """`recorder.Observer`. Remembers the iteration that is running; `finish` gives it away.

    An input comes from a layer only if it is that layer's output object, unmodified. Every other tensor comes from
    outside, and one object, as yet unmodified, seen by several calls is one group.
    """

    def __init__(self, names: Sequence[str], device_type: str) -> None:
        self.names = names
        self._device_type = device_type
        self._recomputed: set[int] = set()
        self._reentrant: set[int] = set()
        self._now = _Iteration()

    def before(self, layer: int, args: Any, kwargs: Any) -> None:
        signature = Signature((args, kwargs))
        self._now.entered[layer] = signature, [x._version for x in signature.tensors]

    def recomputation(self, layer: int) -> None:
        self._recomputed.add(layer)

    def reentrant(self, layer: int) -> None:
        self._reentrant.add(layer)

    def forward(self, layer: int, call: object, output: Any) -> None:
        now, name = self._now, self.names[layer]
        inputs, versions = now.entered.pop(layer)
        for path, x, version in zip(inputs.paths, inputs.tensors, versions, strict=True):
            if x._version != version:
                what = f"its forward modifies {_argument(path)} in place"
                raise CaptureError(name, "check", what, "Let it return a new tensor")
        outputs = Signature(output)
        sources = [self._source(x) for x in inputs.tensors]
        outside = zip(inputs.tensors, sources, strict=True)
        recorded = RecordedCall(
            inputs,
            outputs,
            sources,
            [x.detach() if isinstance(source, int) else None for x, source in outside],
            autocast_state(self._device_type),
            tuple(map(TensorSpec.of, inputs.tensors)),
            tuple(map(TensorSpec.of, outputs.tensors)),
        )
        now.calls[call] = recorded
        for k, x in enumerate(outputs.tensors):
            now.origins[id(x)] = weakref.ref(x), x._version, call, k
        inputs.tensors, outputs.tensors = [], []

    def _source(self, x: Tensor) -> tuple[object, int] | int:
        found = self._now.origins.get(id(x))
        if found is not None and found[0]() is x and found[1] == x._version:
            return found[2], found[3]
        group = self._now.groups.setdefault((id(x), x._version), (x, len(self._now.groups)))
        return group[1]  # the tensor is held, so that its id stays its own

    def discard(self) -> None:
        self._now = _Iteration()

    def finish(self, microbatches: Mapping[Any, int], layers: Mapping[Any, int]) -> Trace:
        """What the iteration that ends had, its calls numbered as the recorder says."""
        now, self._now = self._now, _Iteration()
        key_of = {call: (layers[call], m) for call, m in microbatches.items()}
        specs, calls = {}, {}
        for call, recorded in now.calls.items():
            if call not in key_of:
                continue
            self._check(key_of[call], recorded)
            sources = tuple(
                FromOutside(s) if isinstance(s, int) else FromOutput(key_of[s[0]], s[1])
                for s in recorded.sources
            )
            constants = (
                typed(recorded.inputs.spec),
                typed(recorded.outputs.spec),
                recorded.autocast,
            )
            specs[key_of[call]] = CallSpec(
                recorded.input_specs, sources, recorded.output_specs, constants
            )
            calls[key_of[call]] = recorded
        return Trace(specs, calls, set(self._recomputed), set(self._reentrant))

    def _check(self, key: Key, recorded: RecordedCall) -> None:
        name = self.names[key[0]]
        if (found := recorded.inputs.unsupported()) is not None:
            reason = f"argument {_argument(found)}, whose changes a replay could not see"
            hint = (
                "Pass tensors and plain constants; for a KV cache of transformers: use_cache=False"
            )
            raise CaptureError(name, "check", reason, hint)
        if (found := recorded.outputs.unsupported()) is not None:
            raise CaptureError(name, "check", f"its output {found}, which a replay cannot renew")


def _argument(path: str) -> str:
    """ "[0][2]…" or "[1].mask…" of (args, kwargs) as a user would say it."""
    return path.removeprefix("[0]").removeprefix("[1].") or path
