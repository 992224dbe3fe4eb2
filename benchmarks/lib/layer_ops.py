# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the decoder layer's ops between its GEMMs share: passes, providers, checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.common import (
    Row,
    against_floor,
    arguments,
    environment,
    finish,
    measured_floor,
    parser,
)

FP8_STEP = {torch.float8_e4m3fn: (2.0**-3, 2.0**-9), torch.float8_e5m2: (2.0**-2, 2.0**-16)}
COLUMN = 1


@dataclass
class Pass:
    """One call of an op: `ours` and the reference's `form` take `arguments()`, fresh ones for each provider."""

    name: str
    ours: Callable[..., Any]
    form: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    fault: Callable[[Any], str]  # what is wrong with the result of one call, "" if nothing
    size: int  # bytes that have to be moved


Passes = Callable[[str, torch.dtype, torch.device], Iterator[Pass]]


def delayed_state(scale: float, device: torch.device) -> Tensor:
    """An FP8 state of three tensors with a set scale."""
    state = torch.zeros(4, 3, device=device)
    state[-1] = scale
    return state


def off(found: Tensor, exact: Tensor, steps: float = 1.0) -> bool:
    """Somewhere by more than `steps` roundings to found's dtype and 2⁻¹⁷, for fp32's on the way."""
    bound = (steps * torch.finfo(found.dtype).eps / 2 + 2.0**-17) * exact.abs() + 2.0**-17
    return not bool(((found.double() - exact).abs() <= bound).all())


def off_fp8(bytes_: Tensor, scale_inv: Tensor, dtype: torch.dtype, exact: Tensor) -> bool:
    """Somewhere by more than one rounding to 16 bits and one to FP8, beside saturation."""
    relative, smallest = FP8_STEP[dtype]
    scaled = exact / scale_inv.double()
    inside = scaled.abs() <= 0.99 * torch.finfo(dtype).max
    error = (bytes_.view(dtype).double() - scaled).abs()
    return not bool((error <= (relative / 2 + 2.0**-7) * scaled.abs() + smallest)[inside].all())


def runs(each: Pass, providers: list[str]) -> dict[str, Callable[[], object]]:
    """Provider → its call. A form that does not compile is named and left out."""
    found: dict[str, Callable[[], object]] = {}
    for name in providers:
        function = each.ours if name == "ours" else each.form
        if name == "compiled":
            torch._dynamo.reset()
            function = torch.compile(function, fullgraph=True, dynamic=False)
            try:
                function(*each.arguments())
            except Exception as error:  # of Dynamo, Inductor or its compilers
                print(f"{each.name}: torch.compile fails: {type(error).__name__}")
                continue
        found[name] = _call(function, each.arguments())
    return found


def _call(function: Callable[..., Any], values: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: function(*values)


def main(name: str, passes: Passes, gpu_shapes: list[str], cpu_shapes: list[str]) -> int:
    options = parser(f"{name} against PyTorch's kernels and torch.compile's")
    options.add_argument("--shapes", nargs="+", help=f"default on a GPU: {' '.join(gpu_shapes)}")
    options.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    options.add_argument("--providers", nargs="+", choices=["ours", "torch", "compiled"])
    options.add_argument("--passes", nargs="+", help="those whose name contains one of these words")
    args, device = arguments(options)
    on_gpu = device.type == "cuda"
    named = args.providers is not None
    args.providers = args.providers or ["ours", "torch", *(["compiled"] if on_gpu else [])]
    bandwidth, facts = measured_floor(device, args.repetitions)
    rows: list[Row] = []
    for index, shape in enumerate(args.shapes or (gpu_shapes if on_gpu else cpu_shapes)):
        if index == 1 and not named and "compiled" in args.providers:
            args.providers.remove("compiled")
            print("compiled: the first shape only, unless --providers names it")
        for each in passes(shape, getattr(torch, args.dtype), device):
            if _chosen(each.name, args):
                case: Row = {"shape": shape, "dtype": args.dtype, "pass": each.name}
                floor_ms = each.size / bandwidth * 1e3
                called = runs(each, args.providers)
                rows += against_floor(case, called, each.fault, floor_ms, device, args.repetitions)
    return finish(name, rows, {**environment(device), **facts}, args.output)


def _chosen(name: str, args: argparse.Namespace) -> bool:
    return args.passes is None or any(word in name for word in args.passes)
