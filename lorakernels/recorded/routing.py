# SPDX-License-Identifier: Apache-2.0
"""Whether a call may be recorded, and so bypass torch's dispatcher."""

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


def _of_torch(name: str) -> Any:
    """A function of torch._C by its path; None, and noted in `_lacking`, where this torch has none."""
    function: Any = torch._C
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is None:
        _lacking.append(f"torch._C.{name}")
    return function


# Each says whether something watches or changes calls. Where this torch lacks one of them, no call is recorded.
_dispatches = _of_torch("_len_torch_dispatch_stack")
_functions = _of_torch("_len_torch_function_stack")
_transforms = _of_torch("_are_functorch_transforms_active")
_traces = _of_torch("_get_tracing_state")
_profiles = _of_torch("_autograd._profiler_enabled")
_hooks = _of_torch("_autograd._top_saved_tensors_default_hooks")
_is_compiling = torch.compiler.is_compiling
_EVAL_FRAME = torch._C._dynamo.eval_frame
# Why the ops ran, for reports.
WATCHED = "on a CPU, or watched by a mode, hook, profiler or checkpoint"
if _lacking:
    WATCHED = f"torch {torch.__version__} has no {', '.join(_lacking)}"
NOT_PLAIN = "no FP8 weight, or tensors of other classes"
OVER_RANKS = "split over ranks"


def counted(ways: Iterable[str]) -> str:
    """How forwards ran, in words for a report: each of `ways` is "" if recorded, or else why by the ops."""
    counts = Counter(ways)
    if not counts:
        return "none yet"
    recorded = [f"{counts.pop('')} recorded"] if "" in counts else []
    return ", ".join([*recorded, *(f"{n} by the ops ({why})" for why, n in counts.items())])


def are_allowed() -> bool:
    """Whether calls are recorded at all (`without_recordings`)."""
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
    """Make plain calls of the overload `op` without gradients run `call(general, args, kwargs)`.

    `general(*args, **kwargs)` does what the overload did before. Torch's dispatcher takes more of the host's time
    than most ops of a compiled layer. Nothing is changed where this torch lacks a name.
    """
    if not hasattr(op, "_op") or not hasattr(_EVAL_FRAME, "get_eval_frame_callback"):
        return
    general = op._op

    def put(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.is_grad_enabled()
            or not is_plain()
            or _EVAL_FRAME.get_eval_frame_callback() is not None  # torch.compile would trace `call`
        ):
            return general(*args, **kwargs)
        return call(general, args, kwargs)

    op._op = put


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors of torch's own type, without gaps, on one device."""
    present = [t for t in tensors if t is not None]
    plain = all([type(t) in PLAIN and t.is_contiguous() for t in present])
    return plain and len({t.device for t in present}) < 2


@contextmanager
def without_recordings() -> Iterator[None]:
    """All calls run by the ops, for tests that compare."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before
