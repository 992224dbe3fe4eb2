# SPDX-License-Identifier: Apache-2.0
"""Whether a call may go by a plan, and not through torch's dispatcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)
_allowed = True
_lacking: list[str] = []


def _asked(name: str) -> Any:
    """A function of torch._C by its path; None, and noted in `_lacking`, where this torch has none."""
    found: Any = torch._C
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        _lacking.append(f"torch._C.{name}")
    return found


# What is true of a call that somebody watches or changes. Where this torch lacks a name, no call may go by a plan.
_dispatches = _asked("_len_torch_dispatch_stack")
_functions = _asked("_len_torch_function_stack")
_transforms = _asked("_are_functorch_transforms_active")
_traces = _asked("_get_tracing_state")
_profiles = _asked("_autograd._profiler_enabled")
_hooks = _asked("_autograd._top_saved_tensors_default_hooks")
_is_compiling = torch.compiler.is_compiling
_EVAL_FRAME = torch._C._dynamo.eval_frame
# Why the ops ran, for reports.
WATCHED = "on a CPU, or watched by a mode, hook, profiler or checkpoint"
if _lacking:
    WATCHED = f"torch {torch.__version__} has no {', '.join(_lacking)}"
NOT_PLAIN = "no FP8 weight, or tensors of other classes"
OVER_RANKS = "split over ranks"


def counted(ways: Iterable[str]) -> str:
    """How forwards ran, in words for a report: each of `ways` is "" by plans, or else why by the ops."""
    found = Counter(ways)
    if not found:
        return "none yet"
    planned = [f"{found.pop('')} by plans"] if "" in found else []
    return ", ".join([*planned, *(f"{n} by the ops ({why})" for why, n in found.items())])


def are_allowed() -> bool:
    """Whether plans are used at all (`without_plans`)."""
    return _allowed


def is_plain() -> bool:
    """Whether no mode, transform, trace, profiler or hook of saved tensors is active, which has to see the ops.

    torch.utils.checkpoint without reentrance has such hooks.
    """
    if _is_compiling() or _lacking or not _allowed or _dispatches() or _transforms() or _profiles():
        return False
    if _traces() is not None:
        return False
    if _hooks(True) is not None:  # they may keep a tensor in another form, as save_on_cpu does
        return False
    return not _functions() or _only_default_device()


def _only_default_device() -> bool:
    """`torch.set_default_device` leaves a function mode for good. It changes no op that names its device."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def put_ahead(op: Any, call: Callable[[Callable[..., Any], tuple[Any, ...], Any], Any]) -> None:
    """Let calls of the overload `op` without gradients, that nobody watches, be `call(general, args, kwargs)`.

    `general(*args, **kwargs)` is what the overload does. Torch's dispatcher takes more of the host's time than most
    ops of a compiled layer. Nothing is changed where this torch lacks a name.
    """
    if not hasattr(op, "_op") or not hasattr(_EVAL_FRAME, "get_eval_frame_callback"):
        return
    general = op._op

    def asked(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.is_grad_enabled()
            or not is_plain()
            or _EVAL_FRAME.get_eval_frame_callback() is not None  # torch.compile would trace `call`
        ):
            return general(*args, **kwargs)
        return call(general, args, kwargs)

    op._op = asked


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors of torch's own type, without gaps, on one device."""
    there = [t for t in tensors if t is not None]
    plain = all([type(t) in PLAIN and t.is_contiguous() for t in there])
    return plain and len({t.device for t in there}) < 2


@contextmanager
def without_plans() -> Iterator[None]:
    """Everything goes through the ops, for tests that compare."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before
