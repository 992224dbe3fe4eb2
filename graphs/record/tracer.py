# SPDX-License-Identifier: Apache-2.0
"""Records what goes into the layers and what comes out of them, while `OrderRecorder` records their order."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..compare.signature import Signature, TensorSpec, autocast_state, typed
from ..interface.errors import CaptureError
from ..plan.call_spec import CallSpec, FromOutput, FromOutside, Key


@dataclass(eq=False)
class RecordedCall:
    """One recorded forward.

    Attributes:
        inputs, outputs: the call and its result, without their tensors.
        sources: for each input tensor, (the call, the output) that it is; or the number of its group, if it comes from
            outside of the layers.
        samples: the input tensors from outside, detached; None for other inputs. A capture warms up on their values.
        autocast: whether autocast was on, and to which dtype.
        input_specs, output_specs: of the tensors.
    """

    inputs: Signature
    outputs: Signature
    sources: list[tuple[object, int] | int]
    samples: list[Tensor | None]
    autocast: tuple[bool, torch.dtype | None]
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]


@dataclass
class Trace:
    """The calls of one iteration: `specs` are what the plan needs, `calls` what the capture needs besides."""

    specs: dict[Key, CallSpec]
    calls: dict[Key, RecordedCall]
    recomputed: set[int]  # layers that something outside of them checkpoints
    reentrant: set[int]  # those among them where it is a reentrant checkpoint

    def keep(self, keys: Collection[Key]) -> None:
        """Drop the sample inputs of other calls: their blocks are replays of the block that is captured."""
        for key, call in self.calls.items():
            if key not in keys:
                call.samples = []


@dataclass
class _TracedIteration:
    calls: dict[object, RecordedCall] = field(default_factory=dict)
    origins: dict[int, tuple[weakref.ref[Tensor], int, object, int]] = field(default_factory=dict)
    groups: dict[tuple[int, int], tuple[Tensor, int]] = field(default_factory=dict)
    entered: dict[int, tuple[Signature, list[int]]] = field(default_factory=dict)


class Tracer:
    """The recorder's `Observer`. It holds the iteration that is running, until `finish` returns it.

    An input comes from a layer only if it is that layer's output object, unmodified. Every other tensor comes from
    outside. Inputs from outside that are one object, unmodified in between, form one group.
    """

    def __init__(self, names: Sequence[str], device_type: str) -> None:
        self.names = names
        self._device_type = device_type
        self._recomputed: set[int] = set()
        self._reentrant: set[int] = set()
        self._now = _TracedIteration()

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
        origin = self._now.origins.get(id(x))
        if origin is not None and origin[0]() is x and origin[1] == x._version:
            return origin[2], origin[3]
        group = self._now.groups.setdefault((id(x), x._version), (x, len(self._now.groups)))
        return group[1]  # `groups` holds the tensor, so that no other tensor gets its id

    def discard(self) -> None:
        """Forget the iteration that is running."""
        self._now = _TracedIteration()

    def finish(self, microbatches: Mapping[Any, int]) -> Trace:
        """The trace of the iteration that ends. `microbatches` numbers its calls, each of a `layer`."""
        now, self._now = self._now, _TracedIteration()
        key_of = {call: (call.layer, m) for call, m in microbatches.items()}
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
        if (unsupported := recorded.inputs.unsupported()) is not None:
            reason = f"argument {_argument(unsupported)}, whose changes a replay could not see"
            hint = (
                "Pass tensors and plain constants; for a KV cache of transformers: use_cache=False"
            )
            raise CaptureError(name, "check", reason, hint)
        if (unsupported := recorded.outputs.unsupported()) is not None:
            raise CaptureError(
                name, "check", f"its output {unsupported}, which a replay cannot renew"
            )


def _argument(path: str) -> str:
    """ "[0][2]…" or "[1].mask…" of (args, kwargs) as a user would say it."""
    return path.removeprefix("[0]").removeprefix("[1].") or path
