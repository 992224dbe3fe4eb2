# SPDX-License-Identifier: Apache-2.0
"""bench_finetune: it starts the command line, on checkpoints that transformers loads, and reads what that leaves."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks.aliases import Load, RowsOf, Run

CPU = torch.device("cpu")
Rows = Callable[[Path], list[dict[str, str]]]


@pytest.fixture
def bench(load: Load) -> Any:
    for name in ("transformers", "peft", "tokenizers", "numpy", "matplotlib", "rich"):
        pytest.importorskip(name)
    return load("models.bench_finetune")


@pytest.fixture
def files(bench: Any) -> Any:
    return sys.modules["benchmarks.lib.finetune_files"]


def test_the_checkpoint_is_the_model_that_loops_train(
    bench: Any, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several shards; every tensor in one of them, none twice."""
    from lorakernels.train.model.model import load_model, load_tokenizer

    spec = files.JOBS["tiny"]
    monkeypatch.setattr(files, "SHARD", 40_000)
    files.write_checkpoint(spec, CPU, tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    found = load_model(tmp_path / "model", torch.float32, CPU)
    expected = sys.modules["benchmarks.peers.models"].plain_model(spec.config(), CPU)
    for (name, one), (_, other) in zip(
        found.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert len(load_tokenizer(tmp_path / "model")) <= spec.shape["vocab_size"]


def test_texts_are_packed_documents_of_mixed_lengths_and_whole_rows(
    bench: Any, files: Any, tmp_path: Path
) -> None:
    texts = files.write_texts(tmp_path, 200_000, 2048)
    found = {}
    for name, path in texts.items():
        tokens = bench.tokenize_files([path], bench.byte_tokenizer(), tmp_path / "tokens")
        found[name] = bench.PackedRows(tokens.tokens, tokens.spans, 2048)
    mixed, long = found["mixed"], found["long"]
    assert long.fill == 1 and not long.split_documents, "one document fills a row"
    assert all(len(row) == 1 for row in long.rows)
    assert np.mean([len(row) for row in mixed.rows]) > 2 and mixed.fill > 0.95
    assert mixed.targets > 200_000 and long.targets > 0.9 * 200_000
    with pytest.raises(ValueError, match="characters, 1099511627776 were asked for"):
        files.write_texts(tmp_path, 1 << 40, 2048)


def test_the_command_is_what_a_user_types(bench: Any, files: Any, tmp_path: Path) -> None:
    from lorakernels.train.options.options import FinetuneOptions

    spec = files.JOBS["8b8"]
    words = bench.command(spec, tmp_path, "cli, default", 25, "cuda")
    assert words[:4] == [sys.executable, "-m", "lorakernels.cli", "finetune"]
    names = [word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
    assert set(names) <= set(vars(FinetuneOptions()))
    chosen = {"deterministic", "isolate_documents", "fuse", "eager", "graphs", "attention", "save"}
    assert not chosen & set(names), "what is timed is the default"
    more = bench.command(spec, tmp_path, "cli, --graphs layer", 25, "cuda")
    assert [w for w in more if w not in words] == [
        str(tmp_path / "cli, --graphs layer"), "--graphs", "layer"]  # fmt: skip


def test_rates_are_medians_of_the_last_half(bench: Any, files: Any) -> None:
    steps = [
        {"loss": 9 - i / 10, "step_s": s, "tokens_per_s": 100 / s, "replayed": i > 2}
        for i, s in enumerate([60.0, 9.0, 9.0, 0.5, 0.5, 0.6])
    ]
    found = bench.numbers_of(steps)
    assert (found["seconds"], found["tokens_per_s"], found["replayed"]) == (0.5, 200.0, 3)
    row = bench.columns(files.JOBS["tiny"], {**found, "rest": 3.14, "attention": "cuDNN"})
    assert (row["positions/s"], row["ms/step"], row["rest s"]) == (256.0, 500.0, 3.1)
    assert (row["first loss"], row["last loss"], row["attention"]) == (9.0, 8.5, "cuDNN")


@pytest.mark.parametrize(
    ("first", "last", "check"),
    [
        (5.8, 5.7, "ok"),
        (5.95, 5.7, "WRONG: losses 5.95, 5.7, expected 5.75"),
        (5.8, float("nan"), "WRONG: losses 5.8, nan, expected 5.75"),
    ],
    ids=["right", "another model", "diverged"],
)
def test_a_loss_unlike_the_peers_is_wrong(
    bench: Any, first: float, last: float, check: str
) -> None:
    cli, peft = _row(bench, "cli, default", first, last), _row(bench, bench.PEFT, 5.75, 5.0)
    rows = bench.compared([{**cli, "positions/s": 300.0}, peft])
    assert rows[0]["check"] == check
    assert rows[0]["× hf + peft"] == (3.0 if check == "ok" else "")


def test_trl_s_losses_are_compared_with_each_other(bench: Any) -> None:
    """TRL packs rows of its own: their first loss may be another than the other rows'."""
    peft, ours = bench.TRL
    for found, check in ((6.0, "ok"), (6.3, "WRONG: losses 6.3, 5.0, expected 6.02")):
        rows = [(bench.PEFT, 5.75), (ours, found), (peft, 6.02)]
        checked = bench.compared([_row(bench, name, first, 5.0) for name, first in rows])
        assert [row["check"] for row in checked] == ["ok", check, "ok"]


def _row(bench: Any, provider: str, first: float, last: float) -> dict[str, Any]:
    numbers = {"positions/s": 100.0, "first loss": first, "last loss": last}
    return {"provider": provider, "check": "ok", **bench.NO_NUMBERS, **numbers}


def test_a_command_that_fails_says_its_last_line(bench: Any, tmp_path: Path) -> None:
    fails = [sys.executable, "-c", "print('why'); raise SystemExit(3)"]
    found = bench.run_command(fails, tmp_path, tmp_path / "logs" / "a.log", 60)
    assert found == {"check": "WRONG: exit code 3: why"}
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    found = bench.run_command(sleeps, tmp_path, tmp_path / "logs" / "a.log", 0.5)
    assert found["check"].startswith("not finished within")


def test_the_table(
    bench: Any,
    run: Run,
    rows_of: RowsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command in this process: its start costs seconds."""
    from lorakernels.cli.__main__ import main

    def here(words: list[str], output: Path, log: Path, timeout: float) -> dict[str, Any]:
        assert words[1:3] == ["-m", "lorakernels.cli"] and main(words[3:]) == 0
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return {**bench.numbers_of([json.loads(line) for line in lines]), "rest": 0.0}

    monkeypatch.setattr(bench, "run_command", here)
    chosen = ["--providers", "cli, default", bench.PEFT, bench.LOOP, "--steps", 4]
    assert run(bench, *chosen) == 0
    cli, peft, loop = rows_of("finetune")
    assert [row["check"] for row in (cli, peft, loop)] == ["ok", "ok", "needs a GPU"]
    assert float(cli["× hf + peft"]) > 0 and float(peft["× hf + peft"]) == 1
    assert abs(float(cli["first loss"]) / float(peft["first loss"]) - 1) < 0.01, "the same rows"
    assert run(bench, *chosen, "--budget-s", 0) == 0
    checks = {row["check"] for row in rows_of("finetune")}
    assert checks == {"not run: --budget-s 0 was spent before"}


def test_sft_trainers_rows(
    bench: Any,
    run: Run,
    rows_of: RowsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same checkpoint and text as the loop's; without TRL, rows that say so."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    chosen = ["--providers", bench.PEFT, *bench.TRL, "--steps", 5]
    assert run(bench, *chosen) == 0
    loop, peft, ours = rows_of("finetune")
    assert [row["check"] for row in (loop, peft, ours)] == ["ok"] * 3
    assert (peft["replayed"], ours["replayed"]) == ("", "0")
    for row in (peft, ours):
        assert float(row["first loss"]) == pytest.approx(float(loop["first loss"]), rel=0.01)
        assert 0 < float(row["tokens/s"]) < float(row["positions/s"])
    hide(monkeypatch, "trl")
    assert run(bench, *chosen) == 0
    checks = [row["check"] for row in rows_of("finetune")]
    assert checks == ["ok", "trl is not installed", "trl is not installed"]


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name)
    )


@pytest.mark.parametrize("provider", ["trl sft, peft bf16", "trl sft, ours fused, graphs"])
def test_what_sft_trainer_raises_is_wrong_where_the_layers_are_ours(
    bench: Any, tmp_path: Path, provider: str
) -> None:
    """Here for want of a checkpoint."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    found = bench.measure(provider, "tiny", "cpu", str(tmp_path / "nothing"), 4)
    expected = "WRONG: " if "ours" in provider else "raised: "
    assert list(found) == ["check"] and found["check"].startswith(expected)


@pytest.mark.gpu
def test_every_provider_runs_on_a_gpu(
    bench: Any, rows_of: RowsOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of their own, a tiny model, the command's defaults replayed as graphs."""
    chosen = ["--models", "tiny", "--steps", "8", "--providers", "cli, default"]
    trl = list(bench.TRL) if importlib.util.find_spec("trl") else []
    chosen += ["cli, --no-isolate-documents", bench.PEFT, bench.LOOP, *trl]
    chosen += ["--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda", *chosen])
    assert bench.main() == 0
    rows = {row["provider"]: row for row in rows_of("finetune")}
    assert {row["check"] for row in rows.values()} == {"ok"}
    assert rows["cli, default"]["replayed"] == "5"
    assert all(int(rows[name]["replayed"]) > 0 for name in trl if "graphs" in name)
