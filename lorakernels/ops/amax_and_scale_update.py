# SPDX-License-Identifier: Apache-2.0
"""All scales of a model from their amax histories, both directions at once.

    amax = max(history's finite ones, new) or new      scale = fp8_max · 2^−margin / amax      then the history rolls

Rows 0…L−1 of a state [L + 1, n] are the amax history of n tensors, row L is their scales.
csrc/ops/amax_and_scale_update reads and writes each state once, in one launch. PyTorch's form needs a dozen launches
for each direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, in_backward, why_not_csrc
from lorakernels.kernels.arguments import where
from lorakernels.numerics.fp8 import FLT_MAX, divide
from lorakernels.ops.hardware import LayerOnGPU, chosen_csrc
from lorakernels.ops.register import Implementation, Op, define


class Update(NamedTuple):
    """The states `forward` and `backward` are fp32 [L + 1, n]; `current` is fp32 [2n], forward's and then backward's.

    The largest FP8 values are of each direction's type. `most_recent`: an amax is the current one, not the history's.
    """

    forward: Tensor
    backward: Tensor
    current: Tensor | None
    gated: bool
    fp8_max_forward: float
    fp8_max_backward: float
    margin: int
    most_recent: bool


def reference(a: Update) -> None:
    """Roll the amax histories and compute new scales, in place, for every column of both directions.

    A column's current amax is its row 0, or its entry of `current`. A column whose current amax is 0 is left as it is.
    Otherwise its scale becomes `fp8_max · 2^−margin / amax`. The amax is the current one, or the history's largest
    finite one. An inf or NaN current amax keeps the scale. A scale that overflows becomes FLT_MAX. Then the history
    rolls. `gated`: nothing changes unless one of backward's current amaxes is > 0 or NaN. Transformer Engine's
    `delayed_scaling.cu`, less the freeze that one inf causes for a whole history.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit; nothing is changed then.
    """
    check(a)
    current = a.current
    if current is None:
        current = torch.cat((a.forward[0], a.backward[0]))
    new_x, new_dy = current.view(2, -1)
    is_open = ~(new_dy <= 0).all() if a.gated else torch.ones_like(new_dy, dtype=torch.bool)
    for state, new, fp8_max in (
        (a.forward, new_x, a.fp8_max_forward),
        (a.backward, new_dy, a.fp8_max_backward),
    ):
        history, scale = state[:-1], state[-1]
        live = (new != 0) & is_open
        older = torch.where(history[1:].isfinite(), history[1:], 0.0)
        amax = new if a.most_recent else torch.cat((new[None], older)).amax(0)
        fresh = divide(fp8_max * 2.0**-a.margin, amax).clamp(max=FLT_MAX)
        scale.copy_(torch.where(live & new.isfinite() & (amax > 0), fresh, scale))
        rolled = torch.cat((history[1:], new[None]))
        rolled[0] = 0.0
        history.copy_(torch.where(live, rolled, history))


def fake(a: Update) -> None:
    return None


def check(a: Update) -> None:
    """ValueError if a state's or current's shape, dtype, device or strides do not fit."""
    forward, backward, current = a.forward, a.backward, a.current
    named = [("forward", forward), ("backward", backward)]
    for name, state in named:
        if state.dim() != 2 or state.shape[0] < 2 or state.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 [history length + 1, tensors] with a history of at least 1, "
                f"found {state.dtype} {tuple(state.shape)}"
            )
    if forward.shape != backward.shape:
        shapes = f"{tuple(forward.shape)} and {tuple(backward.shape)}"
        raise ValueError(f"forward and backward must have one shape, found {shapes}")
    if current is not None:
        named.append(("current", current))
        expected = 2 * forward.shape[1]
        if current.shape != (expected,) or current.dtype != torch.float32:
            raise ValueError(
                f"current must be float32 ({expected},), forward's amaxes and then backward's, "
                f"found {current.dtype} {tuple(current.shape)}"
            )
    for name, tensor in named:
        if tensor.device != forward.device:
            raise ValueError(f"{name} is on {tensor.device}, forward on {forward.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()}")


def why_not_csrc_kernel(a: Update) -> str | None:
    """None if csrc's kernel runs on this device; otherwise the reason why not."""
    return why_not_csrc(capability_of(a.forward.device))


def by_csrc(a: Update) -> None:
    """The reference bit for bit, on the current stream."""
    forward, backward, current, gated, fp8_max_forward, fp8_max_backward, margin, most_recent = a
    if forward.shape[1] == 0:  # an empty `current` has no address, which a gated launch asks for
        return
    if gated and current is None:  # every block asks the whole row 0, which others already roll
        current = torch.cat((forward[0], backward[0]))
    length, n = forward.shape
    algo = "most_recent" if most_recent else "max"
    extension().amax_and_scale_update(
        (forward, backward, current, n, length - 1),
        (fp8_max_forward, fp8_max_backward, margin, algo),
        gated,
        where(forward),
    )


def chosen(place: LayerOnGPU) -> tuple[str, str]:
    return chosen_csrc("one launch for all tensors", place)


def not_in_recomputation(run: Callable[[Update], None]) -> Callable[[Update], None]:
    """`run`, less the automatic (gated) updates that a checkpoint's recomputation reaches inside a backward.

    Asked when the op runs: a compiled layer's trace does not know where it will be called.
    """

    def guarded(a: Update) -> None:
        if not a.gated or not in_backward():
            run(a)

    return guarded


amax_and_scale_update = define(
    Op(
        "amax_and_scale_update",
        Update,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("torch", reference),
        ),
        chosen,
    ),
    "(Tensor(a0!) forward, Tensor(a1!) backward, Tensor? current, bool gated, float fp8_max_forward,"
    " float fp8_max_backward, SymInt margin, bool most_recent) -> ()",
    guard=not_in_recomputation,
)
