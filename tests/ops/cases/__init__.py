# SPDX-License-Identifier: Apache-2.0
"""The contract of every op: one file of cases for each file of lorakernels/ops.

They are not in the package: what is installed has no use for them, and importing it would make them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import replace

import torch

from lorakernels.values import Dropout, RowChunks
from tests.ops.contract import Arguments, Case, Contract, Made, Refusal, over_chunks

CHUNKS = RowChunks(1, 3, 3)  # of the second of three ranks


def with_chunks(contract: Contract) -> Contract:
    """A contract of an op with dropout has a case of rows in chunks, and refuses what is no rank's chunks."""
    if "dropout" not in inspect.signature(contract.op).parameters:
        return contract
    with torch.random.fork_rng(devices=[]):
        usual = next(
            case
            for case in contract.cases.values()
            if case.why_not is None and over_chunks(case.arguments("cpu"), CHUNKS)
        )

    def make(m: Made) -> Arguments:
        return over_chunks(usual.make(m), CHUNKS)

    message = (
        r"chunks must be \(\) or \(rank, ranks, size\) with rank below ranks, .* found \(3, 3, 8\)"
    )
    slot = torch.tensor([5, 9])
    wrong = Refusal({"dropout": Dropout(slot, 0.1, 0, chunks=(3, 3, 8))}, ValueError, message)
    return replace(
        contract,
        cases={**contract.cases, "chunks": Case(make, usual.rows + 18)},
        refusals={**contract.refusals, "chunks": wrong},
    )


CONTRACTS: dict[str, Contract] = {
    contract.op.name: with_chunks(contract)
    for module in pkgutil.iter_modules(__path__)
    for contract in importlib.import_module(f"{__name__}.{module.name}").CONTRACTS
}
