# SPDX-License-Identifier: Apache-2.0
"""workers.py: a provider's process answers, and one that breaks says why without taking the benchmark along."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.aliases import Load

ROOT = Path(__file__).parents[3]
CHILD = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.lib.workers import serve

def noisy(x):
    print("a library's banner")
    os.system("echo program")
    return 2 * x

def dies():
    print("last words", file=sys.stderr)
    os._exit(3)

serve({{
    "variable": lambda: os.environ.get("BENCH_VARIABLE"),
    "noisy": noisy,
    "fails": lambda: 1 / 0,
    "dies": dies,
    "hangs": lambda: time.sleep(60),
}})
"""


@pytest.fixture
def start(load: Load, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """start() → a worker of the module above; `start.module` is workers.py."""
    module, started = load("lib.workers"), []

    def begin() -> Any:
        log = tmp_path / f"{len(started)}.log"
        started.append(module.Worker([sys.executable, "-c", CHILD], log))
        return started[-1]

    begin.module = module  # type: ignore[attr-defined]
    yield begin
    for worker in started:
        worker.close()


def test_answers_are_not_what_is_printed(start: Any) -> None:
    worker = start()
    assert worker.ask("noisy", 30, x=21) == 42
    worker.send("noisy", x=1)
    worker.send("noisy", x=2)
    assert [worker.receive(30), worker.receive(30)] == [2, 4], "in the order of the requests"
    text = worker.log.read_text()
    assert "a library's banner" in text and "program" in text


def test_a_failed_request_says_why_and_the_next_one_is_answered(start: Any) -> None:
    worker, error = start(), start.module.WorkerError
    with pytest.raises(error, match=r"^ZeroDivisionError: division by zero$"):
        worker.ask("fails", 30)
    with pytest.raises(error, match=r"^KeyError: 'unknown'$"):
        worker.ask("unknown", 30)
    assert worker.ask("noisy", 30, x=1) == 2


def test_a_process_that_dies_leaves_its_last_words(start: Any) -> None:
    worker, other = start(), start()
    for _ in range(2):  # whoever asks again hears it again
        with pytest.raises(start.module.WorkerError, match=r"^ended with code 3: last words$"):
            worker.ask("dies", 30)
    assert other.ask("noisy", 30, x=4) == 8


def test_a_process_that_hangs_is_killed(start: Any) -> None:
    worker = start()
    assert worker.ask("noisy", 30, x=1) == 2
    began = time.perf_counter()
    with pytest.raises(start.module.WorkerTimeout, match=r"^no answer within 0 s$"):
        worker.ask("hangs", 0.3)
    with pytest.raises(start.module.WorkerError, match=r"^no answer within 0 s$") as again:
        worker.ask("noisy", 30, x=1)
    assert again.type is start.module.WorkerError, "it is dead: nothing was waited for"
    assert time.perf_counter() - began < 10 and worker._process.poll() is not None


def test_a_workers_environment_has_what_it_is_given(start: Any, tmp_path: Path) -> None:
    assert start().ask("variable", 30) is None
    command = [sys.executable, "-c", CHILD]
    worker = start.module.Worker(command, tmp_path / "log", {"BENCH_VARIABLE": "7"})
    try:
        assert worker.ask("variable", 30) == "7"
    finally:
        worker.close()


def test_without_its_parent_a_worker_ends(start: Any) -> None:
    worker = start()
    worker._process.stdin.close()
    assert worker._process.wait(30) == 0


def test_in_this_process_it_is_the_same(load: Load) -> None:
    module = load("lib.workers")
    worker = module.Local({"double": lambda x: 2 * x, "fails": lambda: 1 / 0})
    assert worker.ask("double", 0, x=(1, 2)) == [1, 2, 1, 2], "as JSON would have it"
    with pytest.raises(module.WorkerError, match=r"^ZeroDivisionError: division by zero$"):
        worker.ask("fails", 0)
    worker.close()
    with pytest.raises(module.WorkerError):
        worker.ask("double", 0, x=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "name", "request_", "options", "key"),
    [("layers/bench_decoder_layer", "hf bf16, no lora", "build", {"size": "tiny"}, "hf bf16, no lora"),
     ("models/bench_end_to_end", "hf + te fp8 + lora", "measure",
      {"provider": "hf + te fp8 + lora", "model": "tiny", "adapted": "qkvo", "device": "cpu",
       "at_most": 1}, "check")],
    ids=["decoder_layer", "end_to_end"],
)  # fmt: skip
def test_a_benchmark_starts_as_its_own_worker(
    script: str,
    name: str,
    request_: str,
    options: dict[str, Any],
    key: str,
    load: Load,
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    module = load("lib.workers")
    torch.save(torch.zeros(2, 32, dtype=torch.int64), tmp_path / "rows.pt")
    if "provider" in options:
        options = {**options, "rows": str(tmp_path / "rows.pt")}
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / f"{script}.py"),
        "--device",
        "cpu",
        "--worker",
        name,
    ]
    worker = module.Worker(command, tmp_path / "log")
    try:
        assert key in worker.ask(request_, 120, **options)
    finally:
        worker.close()
