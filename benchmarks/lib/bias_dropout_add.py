# SPDX-License-Identifier: Apache-2.0
"""residual + dropout(x + bias) by ours, by PyTorch and as Megatron-LM has it: inputs, checks, times of each direction.

Every provider sees the same inputs and runs backward through autograd on a graph that is kept. Each is checked in
float64 before it is timed, ours with the reference's mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import lorakernels
from benchmarks.lib.op_checks import beyond
from benchmarks.lib.timing import Timing, time_of
from lorakernels import PhiloxState
from lorakernels.numerics.dropout import dropout_keep, dropout_threshold
from lorakernels.values import Dropout

SEED = 7


@dataclass
class Inputs:
    x: Tensor
    bias: Tensor | None
    residual: Tensor
    dout: Tensor
    p: float
    state: PhiloxState

    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.residual, self.bias) if t is not None]


Forward = Callable[[Inputs], Tensor]


def make_inputs(
    shape: str, p: float, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> Inputs:
    rows, cols = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(SEED)
    x, residual, dout, bias = (
        torch.randn(size, generator=generator, device=device, dtype=dtype)
        for size in ((rows, cols), (rows, cols), (rows, cols), (cols,))
    )
    inputs = Inputs(x, bias if has_bias else None, residual, dout, p, PhiloxState(SEED, device))
    for leaf in inputs.leaves():
        leaf.requires_grad_()
    return inputs


def ours(i: Inputs) -> Tensor:
    return lorakernels.bias_dropout_add(i.x, i.bias, i.residual, i.p, True, i.state)


def plain(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    """PyTorch's ops one by one, in x's dtype; what get_bias_dropout_add of Megatron-LM computes."""
    if bias is not None:
        x = x + bias
    out = functional.dropout(x, p, True)
    return residual + out


def eager(i: Inputs) -> Tensor:
    return plain(i.x, i.bias, i.residual, i.p)


def megatron() -> Forward:
    """`plain`, compiled for the one shape at hand."""
    from torch._functorch import config

    config.donated_buffer = False  # a compiled backward may otherwise not run twice on one graph
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    return lambda i: compiled(i.x, i.bias, i.residual, i.p)


PROVIDERS: dict[str, Callable[[], Forward]] = {
    "ours": lambda: ours,
    "eager": lambda: eager,
    "megatron": megatron,
}


def backward(out: Tensor, inputs: Inputs, dout: Tensor) -> list[Tensor]:
    """dx, dresidual and, with a bias, dbias; the graph stays."""
    return list(torch.autograd.grad(out, inputs.leaves(), dout, retain_graph=True))


def drawn_by_reference(inputs: Inputs) -> Tensor:
    """The mask of ours after torch.manual_seed(SEED), from the formula in PyTorch."""
    torch.manual_seed(SEED)
    slot = copy.deepcopy(inputs.state).slot()
    return dropout_keep(Dropout(slot, inputs.p, 0), *inputs.x.shape)


def off(found: Tensor, exact: Tensor, bound: Tensor) -> bool:
    """Somewhere by more than `bound` and the smallest step of found's dtype."""
    info = torch.finfo(found.dtype)
    return beyond(found, exact, bound + info.smallest_normal * info.eps)


@torch.no_grad()
def fault(inputs: Inputs, out: Tensor, grads: list[Tensor], keep: Tensor, exact: bool) -> str:
    """What is wrong with a provider's results given its mask, "" if nothing.

    `exact`: everything is computed in fp32 and rounded once. Otherwise x + bias, the dropout and the residual's
    addition round one after the other, and dbias sums rounded elements.
    """
    unit = torch.finfo(out.dtype).eps / 2
    roundings = unit if exact else 4 * unit
    p = dropout_threshold(inputs.p) / 65536 if exact else inputs.p
    rate, sigma = float(keep.double().mean()), (p * (1 - p) / keep.numel()) ** 0.5
    granularity = 0.0 if exact else p * 2 * unit  # peers may compare random numbers of x's dtype
    if abs(rate - (1 - p)) > 6 * sigma + granularity:
        return f"keeps {rate:.5f}, not {1 - p:.5f}"
    factor = keep.double() / (1 - p)
    bias = 0.0 if inputs.bias is None else inputs.bias.double()
    branch, residual = (inputs.x.double() + bias) * factor, inputs.residual.double()
    size = branch.abs() + residual.abs()
    expected = branch + residual
    scale = expected.abs() + 2.0**-22 / unit * size if exact else size
    if off(out, expected, roundings * scale):
        return "out"
    dx = inputs.dout.double() * factor
    if off(grads[0], dx, (roundings + 2.0**-22) * dx.abs()):
        return "dx"
    if not torch.equal(grads[1], inputs.dout):
        return "dresidual"
    if inputs.bias is None:
        return ""
    dbias, terms = dx.sum(0), dx.abs().sum(0)
    # fp32 sums of n random terms are off by about √n · 2⁻²⁴ of the sum of their magnitudes
    bound = roundings * dbias.abs() + (len(dx) ** 0.5 * 2.0**-24 + (0 if exact else unit)) * terms
    return "dbias" if off(grads[2], dbias, bound) else ""


def checked(name: str, forward: Forward, inputs: Inputs) -> tuple[str, Tensor]:
    """("ok" or "WRONG: …", out with its graph)."""
    expected = drawn_by_reference(inputs) if name == "ours" else None
    torch.manual_seed(SEED)
    out = forward(inputs)
    keep = backward(out, inputs, torch.ones_like(out))[0] != 0
    if expected is not None and not torch.equal(keep, expected):
        return "WRONG: mask", out
    found = fault(inputs, out, backward(out, inputs, inputs.dout), keep, name == "ours")
    return (f"WRONG: {found}" if found else "ok"), out


def timed(
    name: str, inputs: Inputs, device: torch.device, repetitions: int
) -> tuple[str, dict[str, Timing]]:
    """(outcome of the check, timing per direction)."""
    forward = PROVIDERS[name]()
    try:
        outcome, out = checked(name, forward, inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        return f"does not compile: {type(error).__name__}", {}
    if outcome != "ok":
        return outcome, {}
    return outcome, {
        "forward": time_of(lambda: forward(inputs), device, repetitions),
        "backward": time_of(lambda: backward(out, inputs, inputs.dout), device, repetitions),
    }


def moved(direction: str, inputs: Inputs) -> int:
    """Bytes that have to be read and written; the formula at the top."""
    bias = 0 if inputs.bias is None else inputs.bias.numel()
    if direction == "forward":
        passes = 3
    elif inputs.p:
        passes = 2
    else:
        passes = 1 if bias else 0
    return (passes * inputs.x.numel() + bias) * inputs.x.element_size()
