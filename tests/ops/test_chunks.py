# SPDX-License-Identifier: Apache-2.0
"""Every op with dropout draws the mask of rows in chunks, in each form that its kernels have for a size."""

from __future__ import annotations

import pytest

from lorakernels.values import RowChunks
from tests.ops.cases import CONTRACTS
from tests.ops.contract import over_chunks
from tests.ops.test_contract import assert_bound, call

MASKED = [name for name, contract in CONTRACTS.items() if "chunks" in contract.cases]


def test_ops_with_dropout_have_a_case() -> None:
    assert set(MASKED) == {
        *("bias_dropout_add", "bias_dropout_add_", "bias_dropout_add_backward"),
        *("fp8_grad_input", "lora_grad_a", "quantize_lora_down", "quantize_grad"),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKED)
def test_all_shapes_over_chunks(name: str) -> None:
    """Chunks of one row, of an odd number, and of more rows than a tile has."""
    contract, seen = CONTRACTS[name], 0
    for i, case in enumerate(contract.shapes.values()):
        chunks = RowChunks(i % 3, 3, (1, 37, 256, 4099)[i % 4])
        if arguments := over_chunks(case.arguments("cuda"), chunks):
            assert_bound(contract, call(contract, arguments))
            seen += 1
    assert seen
