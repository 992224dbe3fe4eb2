# SPDX-License-Identifier: Apache-2.0
"""The extension's functions: `_C.pyi` and the flat names of tests say what they take; values are taken by position."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels import _C
from lorakernels.values import Dropout, RankSizes, Scale, Sizes, Where
from tests.kernels.bindings import ARGUMENTS
from tests.kernels.recording import recording, symbolic

STUBS = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text()).body
STUBBED = {f.name: [a.arg for a in f.args.args] for f in STUBS if isinstance(f, ast.FunctionDef)}


def parameters(doc: str) -> list[str]:
    """The names in pybind11's first line, as "f(a: int, b: tuple = ()) -> None"."""
    text = doc.splitlines()[0]
    found = ast.parse(f"def {text}: ...").body[0]
    assert isinstance(found, ast.FunctionDef)
    return [argument.arg for argument in found.args.args]


@pytest.mark.parametrize("name", STUBBED)
def test_the_stubs_have_the_parameters_of_the_extension(name: str) -> None:
    assert parameters(getattr(_C, name).__doc__) == STUBBED[name]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_flat_names_are_of_the_parameters(name: str) -> None:
    assert [*ARGUMENTS[name]] == STUBBED[name]


class Pointer:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def test_a_tensor_an_integer_and_none_are_addresses() -> None:
    out, sizes = (symbolic(0), Pointer(symbolic(1, 64)), None, 0), RankSizes(8, 64, 0)
    with recording() as launches:
        _C.quantize_lora_down(
            out,
            symbolic(2),
            None,
            Scale(0, 0),
            sizes,
            ("bfloat16", "bfloat16", None),
            None,
            Where(0, -1),
        )
    launches.place([(0, 0), (1, 0), (2, 0)], [True] * 3)
    ((_, addresses),) = launches.calls((1 << 20, 1 << 21, 1 << 22), ())
    assert [a for a in addresses if a] == [1 << 20, (1 << 21) + 64, 1 << 22]


DROPOUT = Dropout(torch.tensor([1, 2]), 0.5, 3)


@pytest.mark.parametrize(
    ("out", "sizes", "dropout"),
    [
        (1.5, Sizes(0, 8), DROPOUT),
        (None, [0, 8], DROPOUT),
        (None, (0, 8, 1), DROPOUT),
        (None, Sizes(0, 8), tuple(DROPOUT)[:5]),
        (None, Sizes(0, 8), DROPOUT._replace(site="3")),
        (None, Sizes(0, 8), None),
    ],
    ids=["float", "list", "long", "short", "string", "none"],
)
def test_what_is_no_such_value_is_refused(out: Any, sizes: Any, dropout: Any) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _C.dropout_mask_host(out, sizes, dropout)


def test_an_error_of_data_ptr_is_not_hidden() -> None:
    fake = torch.empty(2, dtype=torch.int64, device="meta").expand(2)
    broken = type("Broken", (), {"data_ptr": lambda self: 1 // 0})()
    _C.dropout_mask_host(None, Sizes(0, 8), DROPOUT._replace(dropped=fake))
    with pytest.raises(ZeroDivisionError):
        _C.dropout_mask_host(None, Sizes(0, 8), DROPOUT._replace(dropped=broken))
