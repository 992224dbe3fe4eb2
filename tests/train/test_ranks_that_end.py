# SPDX-License-Identifier: Apache-2.0
"""A rank that ends, or cannot read the model, ends all ranks with a message, and the last checkpoint stands."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorakernels.train.files.checkpoint import Checkpoints
from tests import processes
from tests.train.test_ranks import losses, on_ranks
from tests.train.test_resume import steps_logged

pytestmark = pytest.mark.slow

LIMIT = 60  # seconds from the end of one rank to the end of all others


def drive(rank: int, where: dict[str, str], end: str, arguments: list[list[str]]) -> None:
    """One run on rank `rank` of several. The middle one ends or stands still after its second step, as `end` says."""
    from lorakernels.cli.finetune import add_arguments, run
    from lorakernels.parallel.ranks import comm
    from lorakernels.train.ranks import ranks
    from lorakernels.train.run.loop import StepResult, Trainer

    if end == "hangs":
        ranks.STEP = comm.GATHER = timedelta(seconds=10)
    size = len(arguments)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), **where}
    real = Trainer.step

    def step(self: Trainer, stop: bool = False) -> StepResult:
        if rank == size // 2 and self.counters.step == 2:
            if end.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            if end == "is asked to stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if end == "raises":
                raise MemoryError("no memory for this rank's rows")
            if end.startswith("runs out of memory"):
                named = [(type(m).__name__, m) for m in self.model.modules()]
                layers = [m for name, m in named if name.endswith("DecoderLayer")]
                layers[-1].register_forward_hook(partial(run_out, end))
        if rank == 0 and self.counters.step == 2 and end == "killed beside one that computes":
            time.sleep(200)
        return real(self, stop)

    Trainer.step = step  # type: ignore[method-assign]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sys.exit(run(parser.parse_args(arguments[rank])))


def run_out(end: str, layer: object, args: object, output: Any) -> None:
    """A hook of a layer that raises as torch does where a GPU is full: behind forward, or before backward."""

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("no memory for this rank's rows")

    if end.endswith("forward"):
        fail(None)
    hidden = output if isinstance(output, torch.Tensor) else output[0]
    if hidden.requires_grad:
        hidden.register_hook(fail)


def end_of(
    end: str, arguments: list[list[Any]], folder: Path, limit: int = LIMIT
) -> tuple[list[int | None], list[str]]:
    """(exit codes, what was said) of ranks with `arguments` each, of which the middle one ends as `end` says."""
    words = [[str(word) for word in own] for own in arguments]
    size, (_store, where) = len(words), processes.meet()
    said = [folder / f"said{rank}" for rank in range(size)]
    on_gpu = "cuda" in words[0]
    ranks = [
        processes.start(drive, rank, where, end, words, on_gpu=on_gpu, said=said[rank])
        for rank in range(size)
    ]
    victim = ranks[size // 2]
    others = [process for process in ranks if process is not victim]
    if end == "hangs":  # until the others have given up
        for process in others:
            process.join(300)
        victim.kill()
    victim.join(300)
    ended = time.monotonic()
    for process in others:
        process.join(max(0.0, ended + limit + 30 - time.monotonic()))
    took = time.monotonic() - ended
    for process in ranks:
        process.kill()
    codes, found = [process.exitcode for process in ranks], [path.read_text() for path in said]
    assert took < limit, (codes, found)
    print(f"{size} ranks: all others ended {took:.1f} s after one", file=sys.stderr)
    return codes, found


@pytest.fixture
def run(base_args: list[str], deep_model: Path) -> list[Any]:
    more = {"--model": deep_model, "--steps": 4, "--save-every": 1, "--eval-fraction": 0}
    return [*base_args, *(word for pair in more.items() for word in pair)]


WHOLE, SHARDED, SHARED, STAGES = "--no-shard-base", "--shard-base", "--cp=2", "--pp=2"
PARTS = "--tp=2"
KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("end", "code", "base"),
    [
        ("killed", KILLED, WHOLE),
        ("killed beside one that computes", KILLED, WHOLE),
        ("raises", 1, WHOLE),
        ("killed", KILLED, SHARDED),
        ("hangs", KILLED, SHARDED),
        ("killed", KILLED, SHARED),
        ("raises", 1, SHARED),
        ("killed", KILLED, STAGES),
        ("raises", 1, STAGES),
        ("hangs", KILLED, STAGES),
        ("killed", KILLED, PARTS),
        ("raises", 1, PARTS),
        ("hangs", KILLED, PARTS),
        ("runs out of memory in forward", 1, SHARDED),
        ("runs out of memory in backward", 1, WHOLE),
        ("runs out of memory in backward", 1, STAGES),
        ("runs out of memory in backward", 1, PARTS),
    ],
    ids=lambda value: {
        WHOLE: "whole",
        SHARDED: "sharded",
        SHARED: "shared rows",
        STAGES: "stages",
        PARTS: "parts of layers",
    }.get(value),
)
def test_a_rank_that_ends_in_the_middle_ends_all(
    end: str, code: int, base: str, run: list[Any], even_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    model = ["--model", even_model] if base == PARTS else []
    codes, said = end_of(end, [[*run, base, *model, "--output", output]] * 2, tmp_path)
    assert codes == [1, code], said
    assert "error: rank 0 lost contact with the others" in said[0]
    assert "Traceback" not in said[0] and "--resume" in said[0]
    checkpoints = Checkpoints(output / "checkpoints", 2)
    newest = checkpoints.load_newest(pytest.fail, torch.device("cpu"))
    assert newest is not None and newest.step == 2


@pytest.mark.parametrize("base", [WHOLE, PARTS])
def test_all_ranks_stop_after_the_same_step_if_one_is_asked(
    base: str, run: list[Any], even_model: Path, tmp_path: Path
) -> None:
    """Rank 1 gets the signal, in its third step. Rank 0 hears of it in the fourth."""
    output, rows = tmp_path / "out", ["--model", even_model, "--steps", 9, "--save-every", 0]
    codes, said = end_of(
        "is asked to stop", [[*run, *rows, base, "--output", output]] * 2, tmp_path
    )
    assert codes == [143, 143], said
    assert all("SIGTERM: saved" in text and "step-00000004" in text for text in said)
    assert Checkpoints(output / "checkpoints", 2).steps() == [4]


def killed_and_resumed(
    run: list[Any], layouts: tuple[list[Any], list[Any]], sizes: tuple[int, int], folder: Path
) -> Path:
    """A run whose middle rank is killed in the third step, on `sizes[0]` ranks; `sizes[1]` ranks go on with it.

    `layouts`: the options of both. Returns the run's folder.
    """
    (before, after), (many, few), output = layouts, sizes, folder / "out"
    codes, said = end_of("killed", [[*run, *before, "--output", output]] * many, folder)
    victim = many // 2
    assert codes == [KILLED if rank == victim else 1 for rank in range(many)], said
    for rank in {*range(many)} - {victim}:
        assert f"error: rank {rank} lost contact with the others" in said[rank]
        assert "Traceback" not in said[rank] and "--resume" in said[rank]
    assert Checkpoints(output / "checkpoints", 2).steps()[-1] == 2
    on_ranks([[*run, *after, "--output", output, "--resume"]], folder, size=few)
    assert steps_logged(output) == [1, 2, 3, 4]
    return output


@pytest.mark.parametrize(
    "layouts",
    [
        (["--tp", 2, "--cp", 2, SHARDED], [SHARDED, "--grad-accum", 1]),
        (["--pp", 2, "--cp", 2], ["--tp", 2]),
    ],
    ids=["parts of layers and of rows", "stages and parts of rows"],
)
def test_one_of_four_is_killed_and_two_in_another_layout_go_on(
    layouts: tuple[list[Any], list[Any]],
    cli: Callable[..., int],
    run: list[Any],
    even_model: Path,
    tmp_path: Path,
) -> None:
    """Within 1e-3 of one process that nobody stopped. Without dropout single roundings of FP8 turn, as sums differ."""
    run = [*run, "--model", even_model, "--lora-dropout", 0, "--fuse"]
    output = killed_and_resumed(run, layouts, (4, 2), tmp_path)
    assert cli(*run, "--output", tmp_path / "whole") == 0
    np.testing.assert_allclose(losses(output), losses(tmp_path / "whole"), rtol=1e-3)


def cut(model: Path) -> str:
    """Cut the file of the weights short; the header tells that."""
    path = model / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    return f"{path} is truncated or corrupted"


def spoil(model: Path) -> str:
    """A value that is not finite, which only reading finds."""
    from safetensors.torch import load_file, save_file

    path, name = model / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    return f"{name}: weight must be finite"


@pytest.mark.parametrize(
    ("damage", "base"),
    [(cut, SHARDED), (spoil, WHOLE), (spoil, SHARDED)],
    ids=["cut, sharded", "spoilt", "spoilt, sharded"],
)
def test_a_rank_that_cannot_read_the_model_ends_all_with_its_message(
    damage: Callable[[Path], str], base: str, run: list[Any], deep_model: Path, tmp_path: Path
) -> None:
    """The other rank has a whole copy."""
    copy = Path(shutil.copytree(deep_model, tmp_path / "copy"))
    message = damage(copy)
    args = [*run, base, "--output", tmp_path / "out"]
    codes, said = end_of("", [args, [*args, "--model", copy]], tmp_path)
    assert codes == [1, 1], said
    named = [bool(re.search("rank 1(| stopped): ", text)) for text in said]
    assert named == [True, False], said
    assert all(message in text for text in said), said


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("end", ["killed", "raises"])
@pytest.mark.parametrize("base", [WHOLE, SHARDED, SHARED, STAGES, PARTS])
def test_a_rank_that_ends_in_the_middle_ends_both_gpus(
    base: str, end: str, gpu_run: list[Any], tmp_path: Path
) -> None:
    """NCCL alone would wait for `STEP`, and as long again until its watchdog ends the process."""
    args = [*gpu_run, base, "--steps", 4, "--save-every", 1, "--output", tmp_path / "out"]
    codes, said = end_of(end, [args, args], tmp_path)
    assert 0 not in codes and None not in codes, said
    checkpoints = Checkpoints(tmp_path / "out" / "checkpoints", 2)
    newest = checkpoints.load_newest(pytest.fail, torch.device("cpu"))
    assert newest is not None and newest.step == 2


GPUS = min(8, torch.cuda.device_count())


@pytest.mark.gpu
@pytest.mark.skipif(GPUS not in (4, 8), reason="needs four or eight GPUs")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tp": 2, "cp": 2, "base": SHARDED}, {"cp": GPUS // 2, "base": SHARDED}),
        ({"cp": GPUS, "base": WHOLE}, {"tp": 2, "base": SHARDED}),
    ],
    ids=["parts of layers and of rows, one base", "shared rows"],
)
def test_one_of_all_gpus_is_killed_and_half_of_them_go_on(
    before: dict[str, Any],
    after: dict[str, Any],
    cli: Callable[..., int],
    gpu_run: list[Any],
    tmp_path: Path,
) -> None:
    """Within 1e-2 of one GPU that nobody stopped: roundings of bf16, and of FP8 that turn after them."""
    more = {"--lora-dropout": 0, "--lr": "1e-3", "--steps": 4, "--save-every": 1}
    run = [*gpu_run, *(word for pair in more.items() for word in pair)]
    sizes = GPUS, GPUS // 2
    layouts = before | {"size": sizes[0]}, after | {"size": sizes[1]}
    output = killed_and_resumed(run, (spread(**layouts[0]), spread(**layouts[1])), sizes, tmp_path)
    assert cli(*run, "--output", tmp_path / "whole") == 0
    np.testing.assert_allclose(losses(output), losses(tmp_path / "whole"), rtol=1e-2)


def spread(size: int, base: str, tp: int = 1, cp: int = 1) -> list[Any]:
    """Options of `size` ranks, with two microbatches a step in all."""
    return ["--tp", tp, "--cp", cp, base, "--grad-accum", max(1, 2 * tp * cp // size)]


@pytest.mark.parametrize("how", [[], ["--shard-base"]], ids=["replicas", "sharded"])
def test_no_thread_of_gloo_outlives_a_run(
    how: list[str], base_args: list[str], tmp_path: Path
) -> None:
    """Such a thread can abort a rank that has done all its work."""
    root = Path(__file__).parents[2]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(root / "tests" / "threads_at_exit.py"), "-m", "lorakernels.cli", "finetune"]
    options = [*base_args, *how, "--steps", "1", "--output", str(tmp_path / "out")]
    found = subprocess.run(
        [*start, "--", *program, *options],
        capture_output=True, text=True, cwd=root, timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[:4000]
