# SPDX-License-Identifier: Apache-2.0
"""One layer over ranks beside the whole layer, on each rank: equal bytes, and results beside float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lorakernels import DelayedScaling, LoRAConfig, LoRALinear, PhiloxState
from lorakernels.autograd.linear import linear
from lorakernels.modules.linear import calls
from lorakernels.numerics.dropout import drawn_mask, keep_scale
from lorakernels.numerics.fp8 import E4M3
from lorakernels.parallel import ColumnParallelLoRALinear, RowParallelLoRALinear
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks import scales as shared_scales
from lorakernels.parallel.ranks.exchange import CollectiveRows
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.projections import Split
from lorakernels.recorded.routing import without_recordings
from lorakernels.values import Dropout, Scaled

K, N, ROWS, R, P, STEPS = 64, 96, 16, 4, 0.25, 5
ADAPTER = ("lora_A", "lora_B", "bias")
CLASSES = {"column": ColumnParallelLoRALinear, "row": RowParallelLoRALinear}
RECIPE = DelayedScaling(amax_history_len=2)
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How a layer is split and trained. `fault` names an invariant that is broken, in tests of these tests."""

    by: str
    sequence: bool
    fp8: bool = True
    dtype: torch.dtype = torch.float32
    fault: str = ""

    @property
    def config(self) -> LoRAConfig:
        fp8 = RECIPE if self.fp8 else None
        return LoRAConfig(r=R, lora_alpha=8, lora_dropout=P, fp8=fp8, bias="lora_only")

    def __str__(self) -> str:
        rows, base = ("split" if self.sequence else "whole"), ("FP8" if self.fp8 else "plain")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.by}, rows {rows}, {base}, {dtype}" + (self.fault and f", {self.fault}")


class Seen:
    """What the products over the base were given, in order, and the slots that were drawn."""

    def __init__(self) -> None:
        self.x8: list[Scaled] = []
        self.dy8: list[Scaled] = []
        self.slots: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        project, grad_x, draw = linear.project, linear.grad_x, calls.draw_slot

        def forward(operand: Scaled, *others: Any, **options: Any) -> Any:
            self.x8.append(operand)
            return project(operand, *others, **options)

        def backward(to: Any, dy8: Scaled, *others: Any) -> Any:
            self.dy8.append(dy8)
            return grad_x(to, dy8, *others)

        def drawn(*arguments: Any) -> Tensor:
            self.slots.append(draw(*arguments))
            return self.slots[-1]

        with ExitStack() as stack:
            for place, name, own in (
                (linear, "project", forward),
                (linear, "grad_x", backward),
                (calls, "draw_slot", drawn),
            ):
                stack.enter_context(mock.patch.object(place, name, own))
            yield


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Train while one invariant does not hold."""
    replaced: dict[str, tuple[Any, str, Any]] = {
        "no sum over the ranks": (comm, "all_reduce", lambda group, x: None),
        "rows not summed": (
            comm,
            "sum_rows",
            lambda group, whole: whole[Ranks(group).share(len(whole))].contiguous(),
        ),
        "each rank's own scale": (shared_scales, "reduce_amax", lambda amax, group: None),
        "equal masks": (
            Split,
            "placed",
            lambda split, to, rows: to,
        ),
        "factors not summed": (CollectiveRows, "total", lambda rows, *parts: [*parts]),
    }
    with ExitStack() as stack:
        if fault:
            stack.enter_context(mock.patch.object(*replaced[fault]))
        yield


def step_data(step: int, way: Way, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [M, K] and dy [M, N]. Rows and columns have sizes of their own, so that the amax is in one part alone."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, K, generator=generator) * torch.linspace(1, 3, K)
    x *= torch.linspace(1, 2, ROWS)[:, None]
    dy = torch.randn(ROWS, N, generator=generator) * torch.linspace(1, 3, N)
    dy *= torch.linspace(1, 2, ROWS)[:, None]
    return x.to(device, way.dtype), dy.to(device, way.dtype)


def make(kind: Any, way: Way, device: torch.device, **options: Any) -> Any:
    """A layer whose B is not zero: the whole one, or this rank's part of it."""
    torch.manual_seed(3)
    options |= {"device": device, "dtype": way.dtype, "adapter_dtype": torch.float32}
    layer = kind(K, N, config=way.config, **options)
    B = 0.2 * torch.randn(N, R, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        rows = layer.ranks.share(N) if way.by == "column" and kind is not LoRALinear else slice(N)
        layer.lora_B.copy_(B[rows])
    layer.rng_state = PhiloxState(11, device)
    return layer.train()


def train(layer: Any, part: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], way: Way) -> Any:
    """[(adapter before, {name: y, dx and gradients})] of each step of plain descent."""
    torch.manual_seed(7)
    found = []
    for step in range(STEPS):
        x, dy = part(*step_data(step, way, layer.lora_A.device))
        x = x.clone().requires_grad_()
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(dy)
        trained = {name: getattr(layer, name) for name in ADAPTER}
        before = {name: p.detach().clone() for name, p in trained.items()}
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        found.append((before, {"y": y.detach(), "dx": x.grad, **gradients}))
        with torch.no_grad():
            for p in trained.values():
                p -= 0.01 * p.grad
                p.grad = None
        if layer.fp8_state is not None:
            layer.fp8_state.reduce_and_update(dist.group.WORLD)
        layer.rng_state.advance()
    return found


@torch.no_grad()
def evaluate(layer: Any, part: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], way: Way) -> None:
    x, _ = part(*step_data(STEPS, way, layer.lora_A.device))
    layer.eval()(x)


def doubled(operand: Scaled, dtype: torch.dtype) -> Tensor:
    if operand.scale_inv is None:
        return operand.data.double()
    return operand.data.view(dtype).double() * operand.scale_inv.double()


def exact(layer: LoRALinear, adapter: Values, way: Way, seen: Seen, step: int) -> Values:
    """What the whole layer computes in float64, from the bytes that it multiplied and its adapter before the step."""
    x, dy = (t.double() for t in step_data(step, way, layer.lora_A.device))
    x8, dy8 = doubled(seen.x8[step], E4M3), doubled(seen.dy8[step], RECIPE.backward_dtype)
    W, (A, B, bias) = layer.dequantized_weight().double(), (adapter[n].double() for n in ADAPTER)
    keep = drawn_mask(Dropout(seen.slots[step], P, layer.site), ROWS, K).double() * keep_scale(P)
    s, ds = (x * keep) @ A.t(), layer.scaling * dy @ B
    return {
        "y": x8 @ W.t() + bias + layer.scaling * s @ B.t(),
        "dx": dy8 @ W + keep * (ds @ A),
        "lora_A": ds.t() @ (x8 * keep),
        "lora_B": layer.scaling * dy.t() @ s,
        "bias": dy.sum(0),
    }


def own(ranks: Ranks, value: Tensor, dim: int | None) -> Tensor:
    """This rank's part of a whole value, or the whole where `dim` is None."""
    return value if dim is None else value.movedim(dim, 0)[ranks.share(value.shape[dim])].movedim(0, dim)  # fmt: skip


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ ÷ ‖expected‖."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def compare(device: torch.device, way: Way, group: Any) -> dict[str, Any]:
    """{"bits": {what: whether it is equal}, "whole", "exact": {what: the part's difference from it}} on this rank."""
    column, rows = way.by == "column", 0 if way.sequence else None
    whole = make(LoRALinear, way, device)
    part = make(CLASSES[way.by], way, device, tp_group=group, sequence_parallel=way.sequence)
    ranks = part.ranks
    dims = {name: part.dimensions.get(name) for name in (*ADAPTER, "weight")}
    dims |= {"dx": rows, "y": 1} if column else {"dx": 1, "y": rows}
    bits = {"W8": torch.equal(part.stored, own(ranks, whole.stored, dims["weight"]))}
    for name in ADAPTER:
        theirs = own(ranks, getattr(whole, name), dims[name])
        bits[f"initial {name}"] = torch.equal(getattr(part, name), theirs)
    seen, seen_part = Seen(), Seen()

    def ends(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        return own(ranks, x, dims["dx"]), own(ranks, dy, dims["y"])

    with (
        seen.watching(),
        without_recordings(),
    ):  # calls are recorded with tensors that have no values
        expected = train(whole, lambda *both: both, way)
        evaluate(whole, lambda *both: both, way)
    with seen_part.watching(), broken(way.fault):
        found = train(part, ends, way)
        evaluate(part, ends, way)
    for name, dim in (("x8", None if column else 1), ("dy8", 1 if column else None)):
        pairs = zip(getattr(seen_part, name), getattr(seen, name), strict=True)
        bits[name] = all(torch.equal(a.data, own(ranks, b.data, dim)) for a, b in pairs)
    bits["slots"] = all(map(torch.equal, seen_part.slots, seen.slots))
    if part.fp8_state is not None:
        bits["x's scales"] = torch.equal(part.fp8_state.forward, whole.fp8_state.forward)
        bits["dy's scales"] = torch.equal(part.fp8_state.backward, whole.fp8_state.backward)
    for name in (n for n in ADAPTER if dims[n] is None):
        every = comm.gather_rows(group, getattr(part, name).detach()[None])
        bits[f"{name} on all ranks"] = bool((every == every[:1]).all())
    errors: dict[str, dict[str, float]] = {"whole": {}, "exact": {}}
    for step, ((adapter, theirs), (_, ours)) in enumerate(zip(expected, found, strict=True)):
        double = exact(whole, adapter, way, seen, step)
        for name, value in ours.items():
            label = f"{name} in step {step}"
            errors["whole"][label] = relative(value, own(ranks, theirs[name], dims[name]))
            errors["exact"][label] = relative(value, own(ranks, double[name], dims[name]))
    return {"bits": bits, **errors}


def worker(rank: int, device: torch.device, ways: list[Way]) -> dict[str, dict[str, Any]]:
    return {str(way): compare(device, way, dist.group.WORLD) for way in ways}
