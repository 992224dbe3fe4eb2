# SPDX-License-Identifier: Apache-2.0
"""The contract of every op: one file of cases for each file of lorakernels/ops.

They are not in the package: what is installed has no use for them, and importing it would make them.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.ops.contract import Contract

CONTRACTS: dict[str, Contract] = {
    contract.op.name: contract
    for module in pkgutil.iter_modules(__path__)
    for contract in importlib.import_module(f"{__name__}.{module.name}").CONTRACTS
}
