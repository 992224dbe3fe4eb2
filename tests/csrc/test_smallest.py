# SPDX-License-Identifier: Apache-2.0
"""What `make sanitize` launches: every kernel of csrc, and every tile of every product in each of its forms."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from lorakernels.kernels import tune
from tests.csrc.smallest import GROUPS, RANKS, calls_of, launch, run
from tests.csrc.test_compile import REGISTERS
from tests.dry_cuda import dry_cuda
from tests.ops.cases import CONTRACTS

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")


def test_its_groups_have_every_op_of_csrc_and_make_runs_each() -> None:
    ours = {n for n, c in CONTRACTS.items() if c.op.implementations[0].name == "csrc"}
    assert sorted(itertools.chain(*GROUPS.values())) == sorted(ours)
    [listed] = re.findall(r"^SMALLEST := (.*)$", MAKEFILE, re.MULTILINE)
    assert listed.split() == list(GROUPS)


def test_products_have_every_tile_rank_and_mask() -> None:
    """By what the extension is handed, all of whose checks it makes without a GPU."""
    found = set()
    with dry_cuda() as recorded:
        for group in ("products", "gradients", "blocks"):
            for call in calls_of(group):
                assert run(call, "cpu") or call.tile is None, call.what
        for each in recorded.calls:
            if each.kind == "extension" and "tile_rows" in each.arguments:
                a = each.arguments
                mask = "none" if not a.get("slot") else "given" if a["dropped"] else "drawn"
                tile = (a["tile_rows"], a["tile_cols"])
                splits = a["splits"] and "block" not in each.name  # which always do
                found.add((each.name, tile, splits, a["rank"], mask))
    assert not set(wanted_products()) - found


def wanted_products():
    for how, tiles in tune.CSRC_TILES.items():
        splits = how in ("split", "turned")
        for tile, rank in itertools.product(tiles, RANKS):
            masks = ("none", "drawn", "given") if rank else ("none",)
            if how == "blocks":
                yield "fp8_block_linear", tile, False, rank, "none"
                yield from (("fp8_block_grad_input", tile, False, rank, m) for m in masks)
            elif how.startswith("turned"):
                yield from (("fp8_grad_input", tile, splits, rank, m) for m in masks)
            else:
                yield "fp8_linear_lora", tile, splits, rank, "none"


@pytest.mark.gpu
def test_every_kernel_is_launched() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert all(map(launch, GROUPS))
    names = {event.key for event in profile.key_averages()}
    missing = {kernel for kernel in REGISTERS if not any(kernel in name for name in names)}
    assert not missing
