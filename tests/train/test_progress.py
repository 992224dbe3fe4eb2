# SPDX-License-Identifier: Apache-2.0
"""What a run says of how far it is: lines by an injected clock, a terminal's bars, and what the phases are told."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorakernels.train import progress
from lorakernels.train.data import encode
from lorakernels.train.data.byte_tokenizer import byte_tokenizer
from lorakernels.train.data.tokens import tokenize_files
from lorakernels.train.progress import (
    Estimate,
    Lines,
    duration,
    in_batches,
    in_bytes,
    in_steps,
)
from lorakernels.train.run.loop import StepResult
from lorakernels.train.run.reporter import Reporter

Cli = Callable[..., int]
RATES = {"tokens_per_s": 500.0}


class Clock:
    """A clock that stands still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def said_of(seconds: list[float], every: int) -> list[tuple[float, str]]:
    """(when, line) of a run whose steps take `seconds`."""
    clock, said = Clock(), []
    lines = Lines("train", in_steps, every, lambda text: said.append((clock.now, text)), clock)
    lines.start(0, len(seconds))
    for step, took in enumerate(seconds, start=1):
        clock.now = round(clock.now + took, 9)
        lines(step, len(seconds))
    return said


@pytest.mark.parametrize(
    ("seconds", "steps", "expected"),
    [
        (0.01, 3000, [2.0, 12.0, 22.0, 30.0]),
        (5.0, 30, [10.0, 40.0, 50.0, 80.0, 100.0, 130.0, 150.0]),
        (80.0, 4, [80.0, 160.0, 240.0, 320.0]),
    ],
    ids=["10-ms", "5-s", "80-s"],
)
def test_when_lines_come(seconds: float, steps: int, expected: list[float]) -> None:
    """Soon, then 10 to 30 seconds apart or after every step, and after the last one."""
    said = said_of([seconds] * steps, every=10)
    assert [when for when, _ in said] == expected
    end = expected[-1]
    for when, text in said[1:-1]:
        assert text.endswith(f"{duration(end - when)} left")
    assert said[-1][1] == f"train step {steps}/{steps}  in {duration(end)}"


def test_the_first_step_alone_promises_nothing() -> None:
    said = said_of([80.0] * 3, every=10)
    assert [text for _, text in said[:2]] == ["train step 1/3", "train step 2/3  1 min 20 s left"]


def test_steps_that_compile_and_capture_are_soon_forgotten() -> None:
    estimate, now = Estimate(), 0.0
    estimate.add(now, 0)
    for step, took in enumerate([90.0, 20.0, 20.0, 40.0, *[1.0] * 6], start=1):
        now += took
        estimate.add(now, step)
    assert estimate.left(1010) == pytest.approx(1000.0)


def test_pauses_between_steps_count() -> None:
    """As evaluations, of 10 s after every tenth step of 1 s."""
    estimate, now = Estimate(), 0.0
    for step in range(401):
        estimate.add(now, step)
        now += 11.0 if step % 10 == 9 else 1.0
    assert estimate.left(500) == pytest.approx(200.0, rel=0.02)  # by half a period of the window


def test_a_run_that_goes_back_is_timed_anew() -> None:
    estimate = Estimate()
    for now, step in ((0.0, 0), (50.0, 1), (100.0, 2), (101.0, 1)):
        estimate.add(now, step)
    assert estimate.left(10) is None
    for now, step in ((102.0, 2), (103.0, 3)):
        estimate.add(now, step)
    assert estimate.left(10) == pytest.approx(7.0)


def test_short_phases_have_no_line() -> None:
    assert said_of([0.1] * 19, every=0) == []
    assert [text for _, text in said_of([0.1] * 20, every=0)] == ["train step 20/20  in 2 s"]
    assert [text for _, text in said_of([0.1] * 19, every=10)] == ["train step 19/19  in 2 s"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3600, "1 h 00 min"),
        (1e5, "27 h 46 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_amounts() -> None:
    assert in_bytes(300_000, 700_000) == "0.3 of 0.7 MB"
    assert in_bytes(6_100_000_000, 16_060_000_000) == "6.1 of 16.1 GB"
    assert in_batches(3, 1200) == "3 of 1,200 batches"


def shown_by(**options: Any) -> str:
    """What a reporter of a console with these options writes: a load, a step, an evaluation, the last step."""
    console = pytest.importorskip("rich.console")
    clock, file = Clock(), io.StringIO()
    quiet = options.pop("quiet", False)
    made = console.Console(file=file, width=120, quiet=quiet, **options)
    reporter = Reporter("train", 1, console=made, clock=clock)
    with reporter.phase("loading") as loading:
        for done in range(1, 4):
            clock.now += 1
            loading(done * 10**9, 3 * 10**9)
    reporter.start(0, 3)
    for step in range(1, 4):
        clock.now += 40
        reporter.step(step, 3, StepResult(2.5, 0.5, 1e-4, 100, 40.0, False), RATES)
        if step == 2:
            with reporter.phase("evaluation", in_batches) as shown:
                clock.now += 5
                shown(1, 1)
    reporter.stop()
    assert loading.began
    return file.getvalue()


def test_lines_without_a_terminal() -> None:
    step = "loss 2.5000  500 tokens/s  40.00 s/step  lr 1.00e-04  grad norm 0.5"
    assert shown_by(force_terminal=False).splitlines() == [
        "loading 3.0 of 3.0 GB  in 3 s",
        f"train step 1/3  {step}",
        f"train step 2/3  {step}  40 s left",
        "evaluation 1 of 1 batches  in 5 s",
        f"train step 3/3  {step}  in 2 min 05 s",
    ]


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same last lines, and bars that say the time left."""
    monkeypatch.setenv("TERM", "xterm")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown_by(force_terminal=True))
    assert re.search(r"loading ━+ 3\.0 of 3\.0 GB", shown)
    assert re.search(r"train ━+ step 3/3  loss 2\.5000  500 tokens/s", shown)
    ends = [line.strip() for line in shown.splitlines() if re.search(r"  in \d", line)]
    assert [end.split("  ")[0] for end in ends] == [
        "loading 3.0 of 3.0 GB",
        "evaluation 1 of 1 batches",
        "train step 3/3",
    ]


def test_a_gpu_has_rates_of_operations() -> None:
    console, file = pytest.importorskip("rich.console"), io.StringIO()
    reporter = Reporter("train", 1, console=console.Console(file=file, width=120))
    rates = {**RATES, "tflops": 412.0, "mfu": 0.41, "peak_memory_gib": 20.0}
    reporter.start(0, 1)
    reporter.step(1, 1, StepResult(2.5, 0.5, 1e-4, 100, 40.0, False), rates)
    assert "  500 tokens/s, 412 TFLOP/s, MFU 41 %  40.00 s/step" in file.getvalue()


def test_other_ranks_are_silent() -> None:
    assert shown_by(force_terminal=False, quiet=True) == ""
    assert shown_by(force_terminal=True, quiet=True) == ""


def data_of(kind: str, folder: Path) -> Path:
    """A data file of several rows."""
    texts = [f"{i}: " + "fox " * i for i in range(70)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = folder / f"data.{kind}"
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "jsonl.zst":
        pyarrow = pytest.importorskip("pyarrow")
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(lines)
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        written = {
            "jsonl": lines,
            "json": json.dumps([{"text": text} for text in texts]).encode(),
            "csv": "\n".join(["text", *texts]).encode(),
            "txt": "\n".join(texts).encode(),
        }
        path.write_bytes(written[kind])
    return path


@pytest.mark.parametrize(
    "kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "csv", "txt", "parquet"]
)
def test_tokenizing_tells_the_bytes_of_its_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two files: in order, more than once in the first one, and to the end; nothing where they were tokenized."""
    monkeypatch.setattr(encode, "BLOCK", 64)
    first, second = data_of(kind, tmp_path), tmp_path / "more.txt"
    second.write_text("one document")
    told: list[tuple[int, int]] = []
    given = [first, second], byte_tokenizer(), tmp_path / "cache"
    tokenize_files(*given, progress=lambda *both: told.append(both))
    size, total = first.stat().st_size, first.stat().st_size + second.stat().st_size
    done = [n for n, _ in told]
    assert done == sorted(done) and {n for _, n in told} == {total}
    assert size in done and done[-1] == total
    packed = kind in ("jsonl.gz", "jsonl.zst", "csv")  # read by larger pieces than this file
    assert packed or len({n for n in done if 0 < n < size}) > 3
    told.clear()
    tokenize_files(*given, progress=lambda *both: told.append(both))
    assert told == []


def test_blocks_of_a_long_text_have_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In as many calls of the tokenizer as it takes."""
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {i}\n" for i in range(400)))
    whole = tokenize_files([path], byte_tokenizer(), tmp_path / "whole").tokens
    monkeypatch.setattr(encode, "BLOCK", 50)
    assert (
        tokenize_files([path], byte_tokenizer(), tmp_path / "cut").tokens.tolist() == whole.tolist()
    )


@pytest.fixture(scope="module")
def runs(
    cli: Cli, base_args: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[str, list[float]]]]:
    """(what it said, its losses) of a run, and of one whose phases all have lines."""
    found = []
    for first in (1e9, 0.0):
        output, file = tmp_path_factory.mktemp("out"), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(progress, "FIRST", first)
            patch.setattr("sys.stdout", file)
            assert cli(*base_args, "--output", output, "--steps", 4, "--eval-every", 2) == 0
        records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        losses = [r.get("loss", r.get("eval_loss")) for r in records]
        found.append((file.getvalue(), losses))
    yield found


def test_a_run_shows_its_phases_in_their_order(runs: list[tuple[str, list[float]]]) -> None:
    """Tokens, weights, and steps with the evaluations between them."""
    said = [line.split(" ")[:2] for line in runs[1][0].splitlines()]
    phases = ("tokenizing", "loading", "finetune", "evaluation")
    order = [
        name for name, what in said if name in phases and (name != "finetune" or what == "step")
    ]
    folded = [name for i, name in enumerate(order) if order[i - 1 : i] != [name]]
    assert folded == [
        "tokenizing",
        "loading",
        "evaluation",
        *["finetune", "evaluation"] * 2,
        "finetune",
    ]
    assert re.search(r"^loading 0\.1 of 0\.1 MB  in \d s$", runs[1][0], re.MULTILINE)
    assert re.search(
        r"^finetune step 4/4  loss .* grad norm \S+  in \d s$", runs[1][0], re.MULTILINE
    )


def test_short_runs_show_their_last_step_alone(runs: list[tuple[str, list[float]]]) -> None:
    said = runs[0][0]
    assert not re.search(r"^(tokenizing|loading|evaluation) ", said, re.MULTILINE)
    assert re.findall(r"^finetune step (\d)/4", said, re.MULTILINE) == ["4"]


def test_losses_are_those_of_a_run_without_lines(runs: list[tuple[str, list[float]]]) -> None:
    assert runs[0][1] == runs[1][1] and len(runs[0][1]) == 7


def test_a_cpu_has_no_rate_of_operations(runs: list[tuple[str, list[float]]]) -> None:
    assert "FLOP" not in runs[0][0] and "MFU" not in runs[0][0]
