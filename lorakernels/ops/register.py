# SPDX-License-Identifier: Apache-2.0
"""An op as one object, and its registration with torch.library.

An op's arguments are written once, as the fields of a NamedTuple. A call of the op has them for its parameters, and
each of the op's functions takes such a tuple. Fields are values (values.py); the schema is flat, as torch.library wants
it. `define` makes two small functions of both: one takes the values apart for torch's dispatcher, the other puts the
tuple together again. A value's part has its schema's name: `data` of a field x is "x", `scale_inv` "x_scale_inv", and
any other part goes by its own name. A part that the schema lacks is not passed on.

Integers and flags choose code, floats are run-time values; an FP8 state is passed whole, with the column to use.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from lorakernels.numerics.blocks import blocks_of
from lorakernels.ops.hardware import LayerOnGPU
from lorakernels.values import Dropout, Groups, Scaled, Scaling, SideBySide, Up, Weight

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
_LIBRARY = torch.library.Library("lorakernels", "FRAGMENT")
# Names of a value's parts that the schema derives from the field's.
_BY_FIELD = {"data": "{}", "scale_inv": "{}_scale_inv"}
_VALUES = (Dropout, Groups, Scaled, Scaling, SideBySide, Up, Weight)
# What the flat arguments are where an optional value is None.
_ABSENT: dict[type, tuple[Any, ...]] = {
    Dropout: (None, 0.0, 0, 0, 0, None, ()),
    Scaling: (None, 0, False),
    SideBySide: (None, None),
    Up: (None, None, 0.0),
}


@dataclass(frozen=True, eq=False)
class Implementation(Generic[A, R]):
    """One way to run an op on CUDA. `why_not` returns the reason why it cannot run these arguments, or None."""

    name: str
    run: Callable[[A], R]
    why_not: Callable[[A], str | None] = lambda a: None


@dataclass(eq=False)
class Op(Generic[P, A, R]):
    """A kernel's place in torch: `torch.ops.lorakernels.<name>`, called with values.

    Attributes:
        name: as torch.library knows it.
        arguments: a NamedTuple of the op's arguments, which the functions below take.
        reference: the op in plain PyTorch: the truth for tests, the CPU's implementation.
        fake: the results' shapes and dtypes, for compile and export.
        check: TypeError or ValueError for arguments that no implementation takes.
        implementations: on CUDA the first one without an objection (`why_not`) runs.
        chosen: which implementation a GPU and a layer's sizes get, and why; None for an op that goes with another one.
        run: the op on CUDA tensors, without the dispatcher; called as the op is.
        run_flat: `run`, with the arguments of the schema.
    """

    name: str
    arguments: Callable[P, A]
    reference: Callable[[A], R]
    fake: Callable[[A], R]
    check: Callable[[A], None]
    implementations: tuple[Implementation[A, R], ...]
    chosen: Callable[[LayerOnGPU], tuple[str, str]] | None = None
    run: Callable[P, R] = field(init=False, repr=False)
    run_flat: Callable[..., R] = field(init=False, repr=False)
    _call: Callable[P, R] = field(init=False, repr=False)
    __signature__: inspect.Signature = field(init=False, repr=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(*args, **kwargs)

    def by_reference(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The reference, called as the op is."""
        return self.reference(self.arguments(*args, **kwargs))

    def takes(self, *args: P.args, **kwargs: P.kwargs) -> Implementation[A, R]:
        """The implementation that runs these CUDA tensors."""
        return self._taking(self.arguments(*args, **kwargs))

    def _taking(self, a: A) -> Implementation[A, R]:
        for implementation in self.implementations:  # in less of the host's time than `next`
            if not implementation.why_not(a):
                return implementation
        raise RuntimeError(f"no implementation of {self.name} takes these arguments")

    def _run(self, a: A) -> R:
        self.check(a)
        return self._taking(a).run(a)


OPS: dict[str, Op[..., Any, Any]] = {}


def define(
    op: Op[P, A, R],
    schema: str,
    guard: Callable[[Callable[[A], R]], Callable[[A], R]] = lambda run: run,
    names: dict[str, str] | None = None,
) -> Op[P, A, R]:
    """Register `op` under the flat `schema`, "(Tensor x, …) -> …".

    Args:
        guard: wraps the function that runs, on both devices.
        names: {part of a value: the schema's name for it} where the two differ.
    """
    names = names or {}
    _LIBRARY.define(op.name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.lorakernels, op.name).default
    arguments = overload._schema.arguments
    flat = [argument.name for argument in arguments]
    fields = _fields(op.arguments)
    signature = _signature(op)
    parameters = signature.parameters.values()
    called = [_named(p.name, p.default, p.default is not p.empty) for p in parameters]
    defaulted = [_named(a.name, a.default_value, a.has_default_value()) for a in arguments]
    types_of = {kind.__name__: kind for kind in _VALUES} | {"Arguments": op.arguments}

    def behind(run: Callable[[A], R]) -> Callable[..., R]:
        """`run` as a function of the flat arguments."""
        return _function(
            defaulted, _tuple("Arguments", _together(fields, flat, names)), run, types_of
        )

    op.run = _function(called, _tuple("Arguments", list(signature.parameters)), op._run, types_of)
    op.run_flat = behind(guard(op._run))
    for device_type, flat_run in (("cpu", behind(guard(op.reference))), ("cuda", op.run_flat)):
        implementation = _disable_dynamo(_without_autocast(flat_run, device_type))
        _LIBRARY.impl(op.name, implementation, device_type.upper())
    torch.library.register_fake(f"lorakernels::{op.name}", behind(op.fake), lib=_LIBRARY)
    _LIBRARY.impl(op.name, _undifferentiable(overload), "Autograd", with_keyset=True)
    op.__signature__ = signature  # inspect.signature and editors show it
    op._call = _function(called, ", ".join(_apart(fields, flat, names)), overload, types_of)
    op._call.__qualname__ = op.name  # Python's errors about arguments show it
    OPS[op.name] = op
    return op


def _signature(op: Op[P, A, R]) -> inspect.Signature:
    """The op's signature: its arguments' fields, and the type that the reference returns."""
    hints = typing.get_type_hints(op.arguments)
    parameters = [
        p.replace(annotation=hints[p.name])
        for p in inspect.signature(op.arguments).parameters.values()
    ]
    returned = typing.get_type_hints(op.reference)["return"]
    return inspect.Signature(parameters, return_annotation=returned)


def _named(name: str, default: object, has_default: bool) -> str:
    return f"{name}={default!r}" if has_default else name


def _tuple(kind: str, entries: list[str]) -> str:
    return f"new({kind}, ({', '.join(entries)},))"


def _function(
    parameters: list[str], arguments: str, target: Callable[..., R], types_of: dict[str, Any]
) -> Callable[..., R]:
    """`lambda parameters: target(arguments)`, which may name the types in `types_of`, {name: type}.

    It is compiled from text: a loop over the arguments costs each call several times as much. torch.compile also traces
    such a function without a guard on every name in it.
    """
    source = f"lambda {', '.join(parameters)}: target({arguments})"
    return eval(source, {"target": target, "new": tuple.__new__, **types_of})


class _Field(NamedTuple):
    """One of an op's arguments: the value type that it has, if any, and whether it may be None."""

    name: str
    value: Any
    optional: bool


def _fields(arguments: Any) -> list[_Field]:
    fields = []
    for name, hint in typing.get_type_hints(arguments).items():
        kinds = _kinds(hint)
        value = next((kind for kind in kinds if hasattr(kind, "_fields")), None)
        fields.append(_Field(name, value, type(None) in kinds))
    return fields


def _kinds(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _flat_name(argument: str, part: str, names: dict[str, str]) -> str:
    pattern = _BY_FIELD.get(part, names.get(part, part))
    return pattern.format(argument)


def _apart(fields: list[_Field], flat: list[str], names: dict[str, str]) -> list[str]:
    """For each flat argument the expression that takes it out of the op's arguments."""
    expressions = {}
    for argument, kind, optional in fields:
        if kind is None:
            expressions[argument] = argument
            continue
        absent = _ABSENT[kind] if optional else (None,) * len(kind._fields)
        for part, value in zip(kind._fields, absent, strict=True):
            taken = f"{argument}.{part}"
            or_absent = f"({value!r} if {argument} is None else {taken})" if optional else taken
            expressions[_flat_name(argument, part, names)] = or_absent
    return [expressions[name] for name in flat]


def _together(fields: list[_Field], flat: list[str], names: dict[str, str]) -> list[str]:
    """For each of the op's arguments the expression that makes it of the flat ones."""
    expressions = []
    for argument, kind, optional in fields:
        if kind is None:
            expressions.append(argument)
            continue
        name_of = {part: _flat_name(argument, part, names) for part in kind._fields}
        parts = []
        for part, name in name_of.items():
            default = kind._field_defaults.get(part)
            as_it_is = f"tuple({name})" if default == () else name  # torch makes lists
            parts.append(as_it_is if name in flat else repr(default))
        made = _tuple(kind.__name__, parts)
        absent = _is_absent(kind, [*name_of.values()])
        expressions.append(f"(None if {absent} else {made})" if optional else made)
    return expressions


def _is_absent(kind: type, names: list[str]) -> str:
    """The expression that is true where an optional value is None: its first part is None, or all its lists are empty.

    One list without the other makes a SideBySide, so that the op's check can refuse it.
    """
    return f"not ({' or '.join(names)})" if kind is SideBySide else f"{names[0]} is None"


def define_composed(
    fn: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
    draws: bool = False,
) -> Any:
    """Register `fn`, which calls other ops, as the op of its name on every device.

    `save(ctx, inputs, output)` and `differentiate(ctx, *grads)` are its gradient; without them it has none. `draws`
    says that it draws from torch's generator.
    """
    name = fn.__name__
    schema = torch.library.infer_schema(fn, mutates_args=(), op_name=name)
    random = (torch.Tag.nondeterministic_seeded,) if draws else ()
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *random))
    for device_type in ("cpu", "cuda"):
        run = _disable_dynamo(_without_autocast(fn, device_type))
        _LIBRARY.impl(name, run, device_type.upper())
    torch.library.register_fake(f"lorakernels::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.lorakernels, name).default
    if differentiate is None:
        _LIBRARY.impl(name, _undifferentiable(op), "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(
            f"lorakernels::{name}", differentiate, setup_context=save, lib=_LIBRARY
        )
    if _CAN_BE_SHORT:
        for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA):
            general = torch.library.get_kernel(op, f"Autograd{key.name}").call_boxed
            _LIBRARY.impl(name, _short(fn, general, key), f"Autograd{key.name}", with_keyset=True)
    return op


_EVAL_FRAME = torch._C._dynamo.eval_frame
# torch 2.8 has no get_kernel
_CAN_BE_SHORT = hasattr(torch.library, "get_kernel") and hasattr(
    _EVAL_FRAME, "get_eval_frame_callback"
)
_BELOW = torch._C._after_autograd_keyset.remove(torch._C.DispatchKey.ADInplaceOrView)


def _short(
    fn: Callable[..., Any], general: Callable[..., Any], key: torch._C.DispatchKey
) -> Callable[..., Any]:
    """An Autograd kernel that calls `fn` itself if the dispatcher would call only the device's kernel. Else `general`.

    Calls from compiled code are of this kind. The dispatcher takes more of the host's time than a recorded `fn`.
    """
    device_type = key.name.lower()
    ends_there: dict[int, bool] = {}

    def run(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        keys = keyset.raw_repr()
        if keys not in ends_there:
            ends_there[keys] = (keyset & _BELOW).highestPriorityTypeId() == key
        if (
            not ends_there[keys]
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled(device_type)
            or _EVAL_FRAME.get_eval_frame_callback() is not None  # torch.compile would trace `fn`
        ):
            return general(keyset, *args, **kwargs)
        return fn(*args, **kwargs)

    return run


def _undifferentiable(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A kernel that refuses a gradient. torch.library.custom_op does the same in several times the host's time
    (docs/facts.md, T1)."""
    mutated = [
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def run(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        written: list[Any] = []
        if mutated:
            written = [args[i] if i < len(args) else kwargs.get(name) for i, name in mutated]
        if torch.is_grad_enabled():
            tensors = list(_tensors_with_gradients((*args, *kwargs.values())))
            if any(t is w for t in tensors for w in written):
                raise RuntimeError(
                    f"{op} writes to a tensor that requires grad: no autograd formula"
                )
            if tensors:
                return _NoFormula.apply(op, keyset, args, kwargs, *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            out = op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        for tensor in written:
            if tensor is not None:
                torch.autograd.graph.increment_version(tensor)
        return out

    return run


def _tensors_with_gradients(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.requires_grad:
                yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors_with_gradients(tuple(argument))


class _NoFormula(torch.autograd.Function):
    """`tensors` are those among the arguments that autograd has to see."""

    @staticmethod
    def forward(
        ctx: Any,
        op: Any,
        keyset: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *tensors: Tensor,
    ) -> Any:
        ctx.op = op
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{ctx.op}: no autograd formula; lorakernels.autograd composes gradients from these ops"
        )


def _without_autocast(fn: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device_type):  # the context alone costs 6 µs
            return fn(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return fn(*args, **kwargs)

    return run


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype or like.dtype)


def fake_quantized(
    x: Tensor, scaling: Scaling | None, power_of_two: bool | None = None
) -> tuple[Tensor, Tensor]:
    """What `numerics.blocks.quantize_by` returns of x [M, K], without values."""
    if power_of_two is not None:
        scale_inv = empty(x, blocks_of(x.shape[1]), x.shape[0], dtype=torch.float32)
        return empty(x, *x.shape, dtype=torch.uint8), scale_inv
    if scaling is None:
        return empty(x, 0, dtype=torch.uint8), empty(x, 0, dtype=torch.float32)
    return empty(x, *x.shape, dtype=torch.uint8), empty(x, 1, dtype=torch.float32)
