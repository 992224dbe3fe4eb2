# SPDX-License-Identifier: Apache-2.0
"""Groups that are made of a group: one for each use, until all are destroyed."""

from __future__ import annotations

from weakref import ref

import torch.distributed as dist

from lorakernels.parallel.ranks import comm


def test_a_group_that_was_made_ends_with_all_groups() -> None:
    """As long as it lives, so do its threads, which destroy_process_group does not end. A new world gets a new one."""
    ended = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            world = dist.group.WORLD
            made = comm.patient(world)
            assert comm.patient(world) is made is not world
            assert dist.get_backend(made) == "gloo"
            assert comm.agree(made, "here") == ["here"]
        finally:
            dist.destroy_process_group()
        ended += [ref(world), ref(made)]
        del world, made
        assert [group() for group in ended] == [None] * len(ended)
