# SPDX-License-Identifier: Apache-2.0
"""tests/processes.py: a server that outlives a test hands nothing of it to the next one's processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import processes

NAMES = ("LORAKERNELS_TEST_SET", "LORAKERNELS_TEST_GONE")


def write_environment(path: Path) -> None:
    path.write_text(json.dumps({name: os.environ.get(name) for name in NAMES}))


def environment_of_rank(rank: int, device: object) -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.slow
def test_processes_have_the_environment_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, values in enumerate([("a", "b"), ("c", None)]):
        for name, value in zip(NAMES, values, strict=True):
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
        path, said = tmp_path / f"{index}.json", tmp_path / "said"
        process = processes.start(write_environment, path, on_gpu=False, said=said)
        process.join(120)
        assert process.exitcode == 0, said.read_text()
        assert tuple(json.loads(path.read_text()).values()) == values
    assert processes.on_ranks(environment_of_rank, 2, "gloo") == [["c", None]] * 2


@pytest.mark.parametrize(
    ("gpus", "needs_nccl", "found"),
    [
        (4, "", "nccl"),
        (4, "graphs", "nccl"),
        (2, "", "cuda:shared"),
        (1, "", "cuda:shared"),
        (2, "graphs", None),
        (0, "", None),
    ],
)
def test_four_ranks_share_the_gpus_unless_they_need_nccl(
    monkeypatch: pytest.MonkeyPatch, gpus: int, needs_nccl: str, found: str | None
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    if found is not None:
        assert processes.backend_on_gpus(4, needs_nccl) == found
        return
    with pytest.raises(pytest.skip.Exception, match=f"needs 4 GPUs, found {gpus}.*(graphs|share)"):
        processes.backend_on_gpus(4, needs_nccl)
