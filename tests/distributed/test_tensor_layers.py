# SPDX-License-Identifier: Apache-2.0
"""Column and row layers over 2 and 4 ranks: bytes of one process, results near it and near float64, faults found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.tensor_layers import K, N, R, Way, worker
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
FAULTS = (
    Way("row", False, fault="no sum over the ranks"),
    Way("column", True, fault="no sum over the ranks"),
    Way("row", True, fault="rows not summed"),
    Way("column", True, fault="rows not summed"),
    Way("row", False, fault="each rank's own scale"),
    Way("column", True, fault="each rank's own scale"),
    Way("row", False, fault="equal masks"),
    Way("column", True, fault="equal masks"),
    Way("row", True, fault="factors not summed"),
    Way("column", True, fault="factors not summed"),
)
WAYS = tuple(
    Way(by, sequence, fp8, dtype)
    for by in ("column", "row")
    for sequence in (False, True)
    for fp8, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16))
)
ON_GPU = tuple(way for way in WAYS if way.fp8 and way.dtype == torch.bfloat16)
WORLDS = {2: (*WAYS, *FAULTS), 4: WAYS}
_ran: dict[tuple[str, int], Any] = {}


def results(world: int, backend: str = "gloo") -> Any:
    """Of each rank. The ranks of one world train all its ways."""
    if (backend, world) not in _ran:
        ways = [*WORLDS[world]] if backend == "gloo" else [*ON_GPU]
        _ran[backend, world] = on_ranks(worker, world, backend, ways)
    return _ran[backend, world]


def bound(way: Way, world: int) -> float:
    """Of a norm's relative difference.

    fp32: each value is a sum of at most n = max(K, N) + R products. Two orders of it differ by n roundings of 2^-24 of
    the sum of magnitudes, which is √n of the sum's norm where signs are random. Descent adds the same once a step.
    bf16: the op rounds y or dx up to four times and s or ds once, on either side. Over ranks, each partial sum is
    rounded, and each of world − 1 additions. A rounding is 2^-9 at most.
    """
    if way.dtype == torch.float32:
        n = max(K, N) + R
        return 2 * n**1.5 * 2.0**-24
    return (5 + 5 + 2 * world) * 2.0**-9


def differences(found: dict[str, Any], limit: float) -> dict[str, Any]:
    """What is wrong with a way on one rank."""
    wrong: dict[str, Any] = {name: value for name, value in found["bits"].items() if not value}
    for beside in ("whole", "exact"):
        worst = max(found[beside], key=found[beside].__getitem__)
        if not found[beside][worst] <= limit:
            wrong[f"{worst} beside {beside}"] = found[beside][worst]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("world", [2, 4], ids=["2 ranks", "4 ranks"])
def test_parts_compute_what_the_whole_layer_computes(world: int, way: Way) -> None:
    for rank, found in enumerate(results(world)):
        assert differences(found[str(way)], bound(way, world)) == {}, rank


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_seen(fault: Way) -> None:
    """The comparison above is red on a rank if one of its causes is taken away."""
    assert any(differences(found[str(fault)], bound(fault, 2)) for found in results(2))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ON_GPU, ids=str)
def test_on_two_gpus(way: Way) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for rank, found in enumerate(results(2, "nccl")):
        assert differences(found[str(way)], bound(way, 2)) == {}, rank
