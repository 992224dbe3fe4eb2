# SPDX-License-Identifier: Apache-2.0
"""Whether tensors are like earlier ones in all that a recording depends on, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def _guards() -> Any:
    """The class by which Dynamo compares tensors; None where this torch lacks it."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    return TensorGuards


_Guards = _guards()


def sees_dispatch_keys() -> bool:
    """Whether a function of `forms_of` also compares the dispatch keys that are on."""
    return _Guards is not None


def forms_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each has the class, dtype, device, shape, strides and `requires_grad` of
    its counterpart in `tensors`. It keeps none of these tensors.

    Dynamo's function also compares which dispatch keys are on, as under inference mode. It takes a tenth of the time of
    a comparison in Python.
    """
    if _Guards is not None:
        check: Callable[..., bool] = _Guards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        return check
    forms = [_form(tensor) for tensor in tensors]
    return lambda *others: [_form(tensor) for tensor in others] == forms


def _form(tensor: Tensor) -> tuple[Any, ...]:
    facts = (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad)
    return type(tensor), *facts, tensor.is_inference()
