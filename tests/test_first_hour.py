# SPDX-License-Identifier: Apache-2.0
"""What the README and docs/getting-started.md tell a newcomer to type runs as it stands: own data, adapter, numbers.

`make demo` and `make test-all` are .ci/run's, and the latter installs the wheel. tests/test_docs.py runs the
Python.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for _module in ("rich", "matplotlib", "yaml", "transformers", "tokenizers", "peft"):
    pytest.importorskip(_module, reason="the first hour needs the extras hf and train")

from tests.train.chats import PLAIN  # noqa: E402
from tests.train.conftest import save_model  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/getting-started.md"]


def commands() -> list[str]:
    """Lines that are indented by four spaces and begin with a program, without their comments."""
    programs = r"(?:pip|make|lorakernels|torchrun|python)"
    found: dict[str, None] = {}
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        for line in re.findall(rf"^    ({programs} .*)$", text, re.MULTILINE):
            found[re.sub(r"\s+#.*", "", line).strip()] = None
    return list(found)


def of(program: str) -> list[str]:
    found = [line for line in commands() if line.split()[0] == program]
    assert found, program
    return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a small chat model in DIR, chats in chat.jsonl, and what a command before left there."""
    folder = tmp_path_factory.mktemp("desk")
    model = save_model(folder / "DIR", 2)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": PLAIN}))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    shutil.copy(ROOT / "examples/chat.jsonl", folder)
    yield folder


def typed(line: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The line, by this Python and on this machine's CPUs, unless a GPU is there."""
    words = line.split()
    module = {"lorakernels": ["lorakernels.cli"], "torchrun": ["torch.distributed.run"]}[words[0]]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    environment = {**os.environ, **fixed, **variables}
    return subprocess.run(
        [sys.executable, "-m", *module, *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_every_command_is_run_here_or_named() -> None:
    """A new line in these pages needs its test."""
    known = {"pip", "make", "lorakernels", "torchrun", "python"}
    assert {line.split()[0] for line in commands()} == known
    assert len(of("python")) == 1  # with SmolLM2's line of finetune: tests/train/test_smollm2.py
    assert {line.split()[1] for line in of("lorakernels")} == {"finetune", "bench", "plan"}


@pytest.mark.parametrize("line", of("make"))
def test_make_knows_the_target(line: str) -> None:
    done = subprocess.run(
        ["make", "-n", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", of("pip"))
def test_the_extras_that_are_installed_exist(line: str) -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = set(
        re.findall(r"^(\w+) = \[", text.split("[project.optional-dependencies]")[1], re.MULTILINE)
    )
    asked = {extra for group in re.findall(r"\[([\w,]+)\]", line) for extra in group.split(",")}
    assert asked <= extras


@pytest.mark.slow
def test_own_data_then_the_adapter_in_peft(desk: Path) -> None:
    """The page's first command, then what it says of the adapter: PEFT opens it, and it changes what the model says."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    line, _ = (line for line in of("lorakernels") if line.split()[1] == "finetune")
    done = typed(line, desk)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(row) for row in (desk / "out/metrics.jsonl").read_text().splitlines()]
    assert any("loss" in row for row in steps)
    base = AutoModelForCausalLM.from_pretrained(desk / "DIR", dtype=torch.float32)
    ids = torch.arange(64, 96)[None]
    before = base(ids).logits.detach()
    adapted = PeftModel.from_pretrained(base, desk / "out/adapter")
    assert not torch.equal(adapted(ids).logits, before)


@pytest.mark.slow
def test_two_ranks_train_as_the_page_starts_them(desk: Path) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks need two GPUs, or none")
    (line,) = of("torchrun")
    line = line.replace("FILE", "chat.jsonl").replace("--output out", "--output out2")
    done = typed(line, desk)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (desk / "out2/adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_bench_says_what_there_is(desk: Path) -> None:
    done = typed("lorakernels bench --help", desk)
    assert done.returncode == 0 and "--quick" in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
def test_own_numbers(desk: Path) -> None:
    done = typed("lorakernels bench --quick", desk)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drop-in, fused" in done.stdout


@pytest.mark.slow
def test_a_plan_of_the_model(desk: Path) -> None:
    (line,) = (line for line in of("lorakernels") if line.split()[1] == "plan")
    done = typed(line, desk)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens a second" in done.stdout
