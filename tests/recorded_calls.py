# SPDX-License-Identifier: Apache-2.0
"""What lorakernels handed to the extension, Triton and torch, written down so that two runs can be compared."""

from __future__ import annotations

import bisect
import ctypes
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.kernels.bindings import flat

INDEX_BITS = 48  # of a stand-in's address: what is above is its index, from 1
LEAST_ADDRESS = 1 << 40  # above every size and dropout site
BACKENDS = ("flash", "mem_efficient", "cudnn", "math")  # of scaled_dot_product_attention
PLACE = re.compile(r"(m\d+\+\d+) (.*)", re.DOTALL)  # in memory that nobody named
attention = torch.nn.functional.scaled_dot_product_attention
data_ptr = torch._C.TensorBase.data_ptr


@dataclass(frozen=True)
class Call:
    """`kind` is "extension", "triton" or "torch"; `arguments` have their defaults, and values that JSON can hold."""

    kind: str
    name: str
    arguments: dict[str, Any]


@dataclass
class Memory:
    """Storages by the address that they begin at. Those that were seen stay alive."""

    begins: list[int] = field(default_factory=list)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def see(self, tensor: Tensor) -> int:
        """Where the tensor's storage begins, 0 of an empty one."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        known = self.storages.get(begin)
        if begin and (known is None or known._cdata != storage._cdata):
            if known is None:
                bisect.insort(self.begins, begin)
            self.storages[begin] = storage
            self.labels.pop(begin, None)  # the earlier one gave its memory up
        return begin

    def at(self, address: int) -> str | None:
        """The address as `Call`s have it; None of what is no address of memory that was seen."""
        place = bisect.bisect_right(self.begins, address) - 1
        begin = self.begins[place] if place >= 0 else 0
        left = begin + self.storages[begin].nbytes() - address if begin else -1
        if left < 0:  # its end is where memory of no bytes lies
            return None
        label = self.labels.get(begin) or f"m{next(self.numbers)}"
        self.labels[begin] = label
        return f"{label}+{address - begin} ={ctypes.string_at(address, min(left, 4)).hex()}"


@dataclass(frozen=True)
class Placed:
    """A tensor of a recorded call's run: a form on "meta", and the address that it has."""

    form: Tensor
    address: int


class Recorded:
    """What a run handed over, in order.

    Attributes:
        calls: of the extension, of Triton and of torch.
        memory: what the addresses among their arguments mean.
        list: the LaunchList that is being recorded, if any.
        runs: how often one was run.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.memory = Memory()
        self.list: Any = None
        self.runs = 0

    def name(self, **tensors: Tensor | None) -> None:
        """Call these tensors' memory by these names; memory that has a name keeps its first."""
        for label, tensor in tensors.items():
            if tensor is not None and (begin := self.memory.see(tensor)):
                self.memory.labels.setdefault(begin, label)

    def add(self, kind: str, name: str, arguments: dict[str, Any]) -> None:
        plain = {key: self.plain(value, f"{name}: {key}") for key, value in arguments.items()}
        self.calls.append(Call(kind, name, plain))

    def plain(self, value: Any, where: str = "") -> Any:
        """As JSON can hold it, the same in every process.

        Raises:
            ValueError: an integer looks like an address and lies in no memory that was seen.
        """
        if isinstance(value, Tensor):
            begins = self.memory.see(value) and self.memory.at(data_ptr(value))
            return f"{begins or 0} {_form(value)}"
        if isinstance(value, Placed):
            begins = self.memory.at(value.address) if value.address else 0
            return f"{begins or 0} {_form(value.form)}"
        if hasattr(value, "_fields"):  # a NamedTuple
            return {k: self.plain(v, f"{where}.{k}") for k, v in value._asdict().items()}
        if isinstance(value, list | tuple):
            return [self.plain(v, where) for v in value]
        if isinstance(value, bool | str | float | None):
            return value
        if isinstance(value, int):
            found = self.memory.at(value)
            if found is None and value >= LEAST_ADDRESS:
                raise ValueError(f"{where} = {value:#x} lies in no memory that was seen")
            return value if found is None else found
        if hasattr(value, "block_shape"):  # Triton's TensorDescriptor
            return {"base": self.plain(value.base), **_shapes(value)}
        return str(value)

    def record_kernel(self, function: Any, **launch: Any) -> None:
        """What stands in for the extension's function of that name; `function` is of `triton`'s making."""
        self.list.recorded.append(function)

    def extension(
        self, name: str, signature: inspect.Signature, launch: Callable[..., None]
    ) -> Callable[..., None]:
        """What stands in for `launch`, a function of the extension, whose values are recorded by flat names."""

        def run(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            values = flat(name, bound.arguments)
            given = {k: _address(v) for k, v in values.items()}
            if self.list is not None:
                if any(isinstance(v, Tensor) for v in values.values()):
                    raise ValueError("an address given while a LaunchList records must be symbolic")
                self.list.recorded.append(("extension", name, given))
            else:
                self.add("extension", name, given)
            launch(*args, **kwargs)

        return run

    def launch_list(self) -> type:
        """What stands in for the extension's LaunchList: a run adds its launches to `calls`."""
        recorded = self

        class LaunchList:
            def __init__(self) -> None:
                self.recorded: list[tuple[str, str, dict[str, Any]]] = []

            def __len__(self) -> int:
                return len(self.recorded)

            def begin(self) -> None:
                assert recorded.list is None
                recorded.list = self

            def end(self) -> None:
                recorded.list = None

            def place(self, places: list[tuple[int, int]], aligned: list[bool]) -> None:
                self.places, self.aligned = places, aligned

            def run(
                self, addresses: tuple[Any, ...], sites: tuple[int, ...], stream: int, device: int
            ) -> bool:
                addresses = tuple(map(_address, addresses))
                assert len(addresses) == len(self.aligned)
                flagged = zip(addresses, self.aligned, strict=True)
                if any(is_aligned and address % 16 for address, is_aligned in flagged):
                    return False
                recorded.runs += 1
                given = {"stream": stream, "device": device}
                for kind, name, arguments in self.recorded:
                    real = {k: self.real(v, addresses) for k, v in arguments.items()}
                    if "site" in real and real.get("slot"):
                        real["site"] = sites[real["site"]]
                    recorded.add(kind, name, real | given if kind == "extension" else real)
                return True

            def real(self, value: Any, addresses: tuple[int, ...]) -> Any:
                if hasattr(value, "meta"):  # a stand-in
                    return Placed(value.meta, self.real(value.data_ptr(), addresses))
                if type(value) is not int or value < 1 << INDEX_BITS:
                    return value
                base, offset = self.places[(value >> INDEX_BITS) - 1]
                return addresses[base] + offset + value % (1 << INDEX_BITS)

        return LaunchList

    def triton(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """What stands in for `JITFunction.run`; a grid that is a function gets the arguments, as Triton's does.

        A warm-up's result is the launch to be recorded, in the form of a compiled kernel.
        """
        bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        defaults = {n: p.default for n, p in kernel.signature.parameters.items()}
        defaults = {n: d for n, d in defaults.items() if d is not inspect.Parameter.empty}
        bound = defaults | bound
        missing = [n for n in kernel.arg_names if n not in bound]
        if missing or len(args) > len(kernel.arg_names):
            raise TypeError(f"{kernel.__name__}: {len(args)} positional, missing {missing}")
        blocks = grid(bound) if callable(grid) else grid
        options = {n: bound[n] for n in sorted(bound.keys() - set(kernel.arg_names))}
        ordered = {n: bound[n] for n in kernel.arg_names}
        launch = ("triton", kernel.__name__, {"grid": tuple(blocks), **ordered, **options})
        return _compiled(launch) if warmup else self.add(*launch)

    def scaled_mm(self, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        self.add("torch", "_scaled_mm", {"a": a, "b": b, **options})
        return torch.zeros(a.shape[0], b.shape[1], dtype=options["out_dtype"])

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        allowed = [n for n in BACKENDS if getattr(torch.backends.cuda, f"{n}_sdp_enabled")()]
        heads = {"q": q, "k": k, "v": v}
        self.add("torch", "scaled_dot_product_attention", {"by": allowed, **heads, **options})
        with sdpa_kernel(SDPBackend.MATH):
            return attention(q, k, v, **options)


def _address(value: Any) -> Any:
    """Of a tensor, or of a stand-in, which must not be held: its memory lives as long as it does."""
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def _shapes(descriptor: Any) -> dict[str, Any]:
    names = ("shape", "strides", "block_shape")
    return {name: list(getattr(descriptor, name)) for name in names}


def differences(first: list[Call], second: list[Call]) -> list[str]:
    """Where two records differ: in anything but where new memory lies.

    Memory that nobody named may lie elsewhere, as where one block holds several results; but what was one place stays
    one place, and two stay two, in all calls.
    """
    names = [[call.name for call in calls] for calls in (first, second)]
    if names[0] != names[1]:
        return [f"calls: {names[0]} != {names[1]}"]
    found: list[str] = []
    there: dict[str, str] = {}
    back: dict[str, str] = {}
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        x, y = (dict(_leaves(call.arguments)) for call in (a, b))
        if x.keys() != y.keys():
            found.append(f"{number} {a.name}: {list(x)} != {list(y)}")
            continue
        wrong = [name for name in x if not _equal(x[name], y[name], there, back)]
        found += [f"{number} {a.name}{name}: {x[name]} != {y[name]}" for name in wrong]
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _leaves(part, f"{path}.{key}")
    else:
        yield path, value


def _equal(x: Any, y: Any, there: dict[str, str], back: dict[str, str]) -> bool:
    places = [PLACE.fullmatch(v) if isinstance(v, str) else None for v in (x, y)]
    if places[0] is None or places[1] is None:
        return type(x) is type(y) and x == y
    (a, a_rest), (b, b_rest) = (place.groups() for place in places if place)
    return there.setdefault(a, b) == b and back.setdefault(b, a) == a and a_rest == b_rest


def _form(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} by {list(tensor.stride())}"


def _compiled(launch: Any) -> SimpleNamespace:
    none = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False}
    metadata = SimpleNamespace(**none, num_warps=4, num_ctas=1, shared=0, launch_pdl=False)
    return SimpleNamespace(
        _init_handles=lambda: None,
        function=launch,
        metadata=metadata,
        src=SimpleNamespace(signature={}),
    )
