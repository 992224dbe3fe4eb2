# SPDX-License-Identifier: Apache-2.0
"""A call taken apart: its tensors, and its constants, which a graph freezes."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

CONSTANT_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.memory_format,
    type,
)


@cache
def extension() -> ModuleType:
    """`lorakernels._C`: the capture and the comparison of fingerprints.

    Raises:
        ImportError: it was not built.
    """
    import lorakernels._C as compiled

    return compiled


class TensorSpec(NamedTuple):
    """The properties of a tensor that a graph fixes, besides its address. Strides count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> TensorSpec:
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last."""
        if 0 in self.shape:
            return 0
        steps = (s * (n - 1) for n, s in zip(self.shape, self.stride, strict=True))
        return (1 + sum(steps)) * self.dtype.itemsize

    def dense_stride(self) -> tuple[int, ...]:
        """The strides of its gradient: its own if it is dense in some order of dimensions, else contiguous ones."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1 and stride != expected:
                return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
            expected *= size
        return self.stride

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        grad = ", requires grad" if self.requires_grad else ""
        return f"{dtype} {list(self.shape)} with strides {list(self.stride)} on {self.device}{grad}"


def distinct(x: Tensor) -> Tensor:
    """`x` with size 1 in the dimensions that `expand` repeats: those cannot be copied into."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def number_types(spec: list[Any]) -> list[tuple[int, type]]:
    """Positions and types of the numbers in `spec`: 1, 1.0 and True are equal, but do not compute the same."""
    numbers = (int, float, complex)
    return [(i, type(value)) for i, value in enumerate(spec) if isinstance(value, numbers)]


def typed(spec: list[Any]) -> tuple[tuple[type, Any], ...]:
    """`spec` as a key, which is equal if the constants are equal in value and type."""
    return tuple((type(value), value) for value in spec)


def autocast_state(device_type: str) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is on for the device, and to which dtype if it is."""
    enabled = torch.is_autocast_enabled(device_type)
    return enabled, torch.get_autocast_dtype(device_type) if enabled else None


class Signature:
    """A nesting of tuples, lists and dicts, taken apart: `spec` has everything but the tensors.

    `spec` is comparable: container types, lengths, keys and constants in depth-first order, with `Tensor` itself in
    place of each tensor, and `type` before a constant that is a class. `paths` names the places of the tensors.
    """

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor]
        self.tensors, self.spec = flatten(value)
        self.paths: list[str] = []
        self.constants: list[tuple[str, Any]] = []
        self._walk(iter(self.spec), "")
        self.rebuild = builder(self.spec)

    def _walk(self, spec: Any, path: str) -> None:
        head = next(spec)
        if head is Tensor:
            self.paths.append(path or "value")
        elif head is tuple or head is list:
            for i in range(next(spec)):
                self._walk(spec, f"{path}[{i}]")
        elif head is dict:
            for _ in range(next(spec)):
                key = next(spec)
                self._walk(spec, f"{path}.{key}" if path else str(key))
        else:
            self.constants.append((path or "value", next(spec) if head is type else head))

    def unsupported(self) -> str | None:
        """The first constant that could change unseen, described; None if there is none."""
        for path, value in self.constants:
            if (
                value is not None
                and not isinstance(value, CONSTANT_TYPES)
                and not _is_function(value)
            ):
                return f"{path} is a {type(value).__module__}.{type(value).__qualname__}"
        return None


def flatten(value: Any) -> tuple[list[Tensor], list[Any]]:
    """The tensors in `value`, and its `Signature.spec`."""
    return extension().flatten(value, Tensor)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, torch.nn.Module) and hasattr(value, "__code__")


def builder(spec: list[Any]) -> Callable[[Sequence[Tensor]], Any]:
    """The function that puts tensors back into the structure of `spec`."""
    if spec == [Tensor]:
        return lambda tensors: tensors[0]
    if spec[0] is tuple and spec[2:] == [Tensor] * spec[1]:
        return tuple
    return lambda tensors: _build(iter(spec), iter(tensors))


def _build(spec: Any, tensors: Any) -> Any:
    head = next(spec)
    if head is Tensor:
        return next(tensors)
    if head is tuple or head is list:
        return head(_build(spec, tensors) for _ in range(next(spec)))
    if head is dict:
        return {next(spec): _build(spec, tensors) for _ in range(next(spec))}
    return next(spec) if head is type else head


def difference(expected: list[Any], actual: list[Any]) -> tuple[str, str] | None:
    """The first place where two specs differ, as (expected, actual); None if they are equal."""
    constant = False  # the entry before says that this one is a class
    for i, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a is not b and not (type(a) is type(b) and a == b):
            return _show(expected[i:], constant), _show(actual[i:], constant)
        constant = a is type and not constant
    if len(expected) != len(actual):
        return f"{len(expected)} entries", f"{len(actual)} entries"
    return None


def _show(spec: list[Any], constant: bool) -> str:
    head = spec[0]
    if constant:
        return repr(head)
    if head is type:
        return repr(spec[1])
    if head is Tensor:
        return "a tensor"
    return f"a {head.__name__}" if isinstance(head, type) else repr(head)
