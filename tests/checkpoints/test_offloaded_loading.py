# SPDX-License-Identifier: Apache-2.0
"""load_quantized(offload=): straight into the host's memory, without a mesh, and given back when loading fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels import fuse, load_quantized
from lorakernels.parallel import Offload, shard_base
from lorakernels.parallel.base.offload import HostShards
from lorakernels.train.model.model import reproducible
from tests.checkpoints.test_sharded_loading import LAYERS, load, step
from tests.small_checkpoints import LORA, config, write_checkpoint

SOME = Offload(0.3, 2**34)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, config(num_hidden_layers=LAYERS))
    return path


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_loading_is_that_of_a_resident_base(fused: bool, folder: Path) -> None:
    with reproducible(True):
        options: dict[str, Any] = {"attn_implementation": "sdpa" if fused else "eager"}
        into = load(folder, offload=SOME, **options)
        after, whole = load(folder, **options), load(folder, **options)
        if fused:
            for loaded in (into, after, whole):
                fuse(loaded.model, attention="math")
        base = shard_base(after.model, offload=SOME)
        assert torch.equal(base.shards.memory, into.sharded.shards.memory)
        assert str(base) == str(into.sharded) and base.shards.blocks == into.sharded.shards.blocks
        steps = [step(loaded) for loaded in (into, after, whole)]
    for found in steps[:2]:
        assert [n for n in steps[2] if not torch.equal(found[n], steps[2][n])] == []


def test_a_load_that_fails_leaves_nothing_pinned(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[HostShards] = []
    monkeypatch.setattr(HostShards, "close", lambda shards: closed.append(shards))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_quantized(folder, device="cpu", lora=LORA, offload=SOME, progress=interrupt)
    assert len(closed) == 1
