# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels compile for GPUs other than Hopper's, as the ops launch them there, and fit into shared memory.

No GPU is needed: the ops' CUDA paths run as on that GPU, and what they would launch is compiled for it by Triton.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lorakernels import _C
from lorakernels.ops.hardware import TMA_CAPABILITY
from lorakernels.ops.register import OPS
from tests.dry_cuda import dry_cuda
from tests.ops.cases import CONTRACTS

CASES = 2  # of each implementation of an op
ALL_CASES = (
    12,
    0,
)  # all of them, with all their tiles, are compiled for the GPU with the least shared memory
# Of a block, by compute capability (CUDA C++ programming guide, "technical specifications")
SHARED = {(8, 0): 163 << 10, (8, 9): 99 << 10, (10, 0): 227 << 10, (12, 0): 99 << 10}
OF_OPS = {"block_diagonal", "cross_entropy", "expert_route", "grouped", "quantize_blocks"}
OF_OPS |= {"rms_norm", "rope_qkv", "segments", "swiglu"}
run = JITFunction.run

pytestmark = pytest.mark.slow


class Compiled:
    """Kernels that were compiled for `capability`: shared bytes by name, each with its options and types."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.number = 10 * capability[0] + capability[1]
        self.shared: dict[tuple[str, str], int] = {}

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In place of a launch."""
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        assert made.metadata.target.arch == self.number
        name = f"{kernel.__module__}.{kernel.__name__}"
        self.shared[name, made.hash] = made.metadata.shared

    def get_current_device(self) -> int:
        """Kernels are kept by device: one of its own for each target."""
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.number, 32)


@contextmanager
def compiles_for(found: Compiled) -> Iterator[None]:
    before = dict(vars(driver))
    driver.set_active(found)  # type: ignore[arg-type]  # as far as a compilation asks
    try:
        with mock.patch.object(
            JITFunction, "run", lambda *args, **more: found.compile(*args, **more)
        ):
            yield
    finally:
        vars(driver).update(before)


def compiled_for(capability: tuple[int, int]) -> Compiled:
    found = Compiled(capability)
    built = {**_C.build_info(), "cuda": True, "cuda_archs": "80;89;90a;100;120"}
    for name, op in OPS.items():
        if not any("triton" in each.name for each in op.implementations):
            continue
        taken, contract = Counter[str](), CONTRACTS[name]
        for case in (*contract.cases.values(), *contract.shapes.values()):
            arguments = case.arguments("cpu")
            with (
                dry_cuda(),
                compiles_for(found),
                mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
                mock.patch.object(_C, "build_info", lambda: built),
            ):
                takes = op.takes(*arguments)
                taken[takes.name] += 1
                wanted = taken[takes.name] <= CASES or capability == ALL_CASES
                if "triton" in takes.name and wanted:
                    takes.run(op.arguments(*arguments))
    return found


@pytest.mark.parametrize("capability", SHARED, ids=str)
def test_what_ops_launch_compiles_and_fits(capability: tuple[int, int]) -> None:
    found = compiled_for(capability)
    modules = {name.split(".")[-2] for name, _ in found.shared}
    assert modules == OF_OPS | ({"fp8_linear_lora"} if capability >= TMA_CAPABILITY else set())
    too_large = {k: size for k, size in found.shared.items() if size > SHARED[capability]}
    assert not too_large
