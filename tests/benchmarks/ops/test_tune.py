# SPDX-License-Identifier: Apache-2.0
"""`bench --tune`: what it would time is valid, and what it prints can be pasted into kernels/tune.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lorakernels.kernels.tune import TILES, KernelConfig, Problem, choose, is_valid
from tests.benchmarks.aliases import Load

HOPPER = (9, 0)


@pytest.fixture
def tune(load: Load) -> Any:
    return load("ops.tune")


@pytest.mark.parametrize("m", [64, 4096], ids=["one-row-tile", "many"])
def test_candidates_fit_the_gpu_and_hold_the_table(tune: Any, m: int) -> None:
    problem = Problem(m, 4096, 4096, 16)
    found = list(tune.candidates(problem, HOPPER))
    assert len(set(found)) == len(found) > 20
    assert all(is_valid(config, problem, HOPPER) for config in found)
    table = [c for c in TILES[HOPPER] if is_valid(c, problem, HOPPER)]
    assert found[: len(table)] == table, "what is used now is timed too, and first"


def test_a_printed_line_is_the_configuration(tune: Any) -> None:
    for config in tune.candidates(Problem(8192, 8192, 8192, 16), HOPPER):
        assert eval(tune.line(config), {"KernelConfig": KernelConfig}) == (config,)


def test_the_table_is_sorted_and_always_shows_what_is_taken(tune: Any) -> None:
    problem = Problem(1024, 1024, 1024, 16)
    configs = list(tune.candidates(problem, HOPPER))[:6]
    times = dict(
        zip(configs, [0.5, 0.2, "OutOfResources: shared memory", 0.3, 0.4, 0.1], strict=True)
    )
    lines = tune.table(problem, times, taken=configs[0], top=2).splitlines()
    assert [
        tune.line(c) in line
        for c, line in zip((configs[5], configs[1], configs[0]), lines[1:4], strict=True)
    ] == [True] * 3
    assert "0.1000 ms" in lines[1] and lines[3].endswith("taken now")
    assert lines[4:] == ["    # 1 × OutOfResources: shared memory"]


def test_a_budget_ends_the_search_and_the_table_says_so(
    tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[KernelConfig] = []
    clock = iter(range(1000))
    monkeypatch.setattr(tune.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(tune, "milliseconds", lambda config, *_: tried.append(config) or 1.0)
    problem = Problem(512, 1024, 64, 16)
    times = tune.milliseconds_of(problem, HOPPER, torch.device("cpu"), 5, 3)
    all_of_them = list(tune.candidates(problem, HOPPER))
    assert tried == all_of_them[:2] and list(times) == all_of_them
    said = tune.table(problem, times, all_of_them[0], top=8)
    assert f"# {len(all_of_them) - 2} × not tried: --budget-s 3 was spent" in said


@pytest.mark.gpu
def test_a_configuration_is_timed_on_the_gpu_and_a_wrong_one_is_not(
    tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, problem = torch.device("cuda"), Problem(256, 512, 1024, 16)
    i = tune.make_inputs("256x512x1024", 16, device)
    config = choose(problem, torch.cuda.get_device_capability(), 132)
    assert 0 < tune.milliseconds(config, problem, i, device, 3) < 10
    monkeypatch.setattr(
        tune, "error", lambda y, *_: float(y.isnan().any()) + 1 if y is not None else 0
    )
    monkeypatch.setattr(tune, "pytorch", lambda _: None)
    assert str(tune.milliseconds(config, problem, i, device, 3)).startswith("WRONG")
