# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the decoder layer's ops between its GEMMs share: passes, and the providers of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.lib.op_bench import Bench, Call, Option, Setting, against_floor, verdict
from benchmarks.lib.rows import Row
from lorakernels.values import Scaling


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


def delayed_scaling(scale: float, device: torch.device) -> Scaling:
    """By an FP8 state of three tensors with a set scale."""
    state = torch.zeros(4, 3, device=device)
    state[-1] = scale
    return Scaling(state, 1, True)


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


def bench_of(name: str, passes: Passes, shapes: list[str], cpu_shapes: list[str]) -> Bench:
    """The benchmark of the op `name`: a row for each shape, pass and provider."""
    options = (
        Option("shapes", shapes, cpu=cpu_shapes, help=f"default on a GPU: {' '.join(shapes)}"),
        Option("dtype", "bfloat16", choices=["bfloat16", "float16"]),
        Option(
            "providers",
            ["ours", "torch", "compiled"],
            cpu=["ours", "torch"],
            choices=["ours", "torch", "compiled"],
        ),
        Option("passes", [""], help="those whose name contains one of these words"),
    )

    def rows(setting: Setting) -> Iterator[Row]:
        args = setting.args
        providers = list(args.providers)
        for index, shape in enumerate(args.shapes):
            if index == 1 and "providers" not in setting.given and "compiled" in providers:
                providers.remove("compiled")
                print("compiled: the first shape only, unless --providers names it")
            for each in passes(shape, getattr(torch, args.dtype), setting.device):
                if any(word in each.name for word in args.passes):
                    case: Row = {"shape": shape, "dtype": args.dtype, "pass": each.name}
                    yield from against_floor(case, _calls(each, providers), each.size, setting)

    return Bench(name, f"{name} against PyTorch's kernels and torch.compile's", options, rows)


def _calls(each: Pass, providers: list[str]) -> dict[str, Call]:
    def check(result: Any) -> Row:
        return verdict(each.fault(result))

    return {name: Call(run, check) for name, run in runs(each, providers).items()}
