# SPDX-License-Identifier: Apache-2.0
"""Where this torch cannot say whether a call is watched, no call is recorded, and the reports say why."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lorakernels.recorded import routing

NAMES = (
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "_are_functorch_transforms_active",
    "_get_tracing_state",
    "_autograd._profiler_enabled",
    "_autograd._top_saved_tensors_default_hooks",
)


def made_again() -> Any:
    """The module, as an import would make it now."""
    spec = importlib.util.spec_from_file_location("routing_again", routing.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_without_a_name_no_call_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_again().is_plain()
    owner, _, last = name.rpartition(".")
    monkeypatch.delattr(torch._C._autograd if owner else torch._C, last)
    lacking = made_again()
    assert not lacking.is_plain()
    said: str = lacking.WATCHED
    assert said == f"torch {torch.__version__} has no torch._C.{name}"
