# SPDX-License-Identifier: Apache-2.0
"""The parts of a node's run: the benchmarks take their commands, and none waits for one that hangs."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from benchmarks.parallel import node
from benchmarks.parallel.node import PARTS, Part, run_all


class Script(Part):
    """Runs `words` as a Python program."""

    def command(self, folder: Path, port: int) -> list[str]:
        return [sys.executable, "-c", self.words]


@pytest.mark.parametrize(
    "part", [p for p in PARTS if not p.words.startswith("pytest")], ids=lambda part: part.name
)
def test_a_benchmark_takes_a_part_s_options(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse reads options in order, so that it has seen all when it comes to --help."""
    script, *options = shlex.split(part.words)
    module = importlib.import_module(f"benchmarks.parallel.{script.removesuffix('.py')}")
    monkeypatch.setattr(sys, "argv", [script, "--output", "x", *options, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "part", [p for p in PARTS if not p.words.startswith("pytest")], ids=lambda part: part.name
)
def test_torchrun_leaves_a_benchmark_its_options(part: Part, tmp_path: Path) -> None:
    """Also those behind the script may be no beginning of several of torchrun's, as --run was."""
    from torch.distributed.run import get_args_parser

    module = importlib.import_module(f"benchmarks.parallel.{part.words.split('.py')[0]}")
    named = [*{*re.findall(r"(?<![-\w])--[a-z][-a-z]*", Path(str(module.__file__)).read_text())}]
    given = [word for name in named for word in (name, "1")]
    script, *options = part.command(tmp_path, 5)[7:]
    found = get_args_parser().parse_args(["--nproc-per-node", "8", script, *options, *given])
    assert found.training_script == script
    assert found.training_script_args == [*options, *given]


def test_a_part_starts_its_ranks_on_its_gpus(tmp_path: Path) -> None:
    (part,) = (part for part in PARTS if part.name == "405b")
    words = part.command(tmp_path, 5)
    assert words[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "8"]
    assert Path(words[7]).is_file() and words[8:] == ["--output", str(tmp_path), "--preset", "405b"]


def test_parts_fail_and_hang_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two run at once on GPUs of their own, and what is left of a hanging one's processes is ended with it."""
    monkeypatch.setattr(node, "PATIENCE", 0.5)
    shown = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    parts = [
        Script("first", 2, 30.0, shown),
        Script("hangs", 2, 2.0, f"{child}; print(p.pid, flush=True); p.wait()"),
        Script("fails", 4, 30.0, "raise SystemExit(3)"),
        Script("too many", 8, 30.0, ""),
        Script("last one", 4, 30.0, shown),
    ]
    found = run_all(parts, 4, tmp_path)
    assert found["first"].startswith("ok") and found["last one"].startswith("ok")
    assert found["hangs"] == "ended after its 2 s"
    assert found["fails"].startswith("exit code 3")
    assert found["too many"] == "not run: it needs 8 GPUs of 4"
    assert (tmp_path / "first.log").read_text() == "0,1\n"
    assert (tmp_path / "last_one.log").read_text() == "0,1,2,3\n"
    with pytest.raises(ProcessLookupError):  # ended with the part that started it
        for _ in range(100):
            os.kill(int((tmp_path / "hangs.log").read_text()), 0)
            time.sleep(0.05)


def test_what_does_not_fit_the_budget_is_named(tmp_path: Path) -> None:
    parts = [Script("short", 1, 60.0, ""), Script("long", 1, 600.0, "")]
    found = run_all(parts, 1, tmp_path, budget=120.0)
    assert found["short"].startswith("ok")
    assert found["long"] == "not run: its 600 s are more than is left"
