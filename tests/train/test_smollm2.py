# SPDX-License-Identifier: Apache-2.0
"""`lorakernels finetune` on SmolLM2-135M, a model that was really trained: what it learns, and losses beside
transformers' own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F


def _helper() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "models" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


smollm2 = _helper()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(smollm2.why_not() is not None, reason=str(smollm2.why_not())),
]
LENGTH = 96
SUBJECTS = ("loop", "class", "module", "function", "generator", "closure", "decorator", "set")
TEXTS = [
    f"Question {i}: what does a {subject} of Python do?\nAnswer: a {subject} is what this page, number "
    f"{i}, explains to those who read the manual of Python from its first page to the last."
    for i, subject in enumerate(SUBJECTS * 3)
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.write_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def held_out_losses(model_dir: Path, output: Path) -> list[float]:
    """Of the documents that the run held out, one by one, by transformers and PEFT alone, summed in fp64: before
    training, and with the run's adapter."""
    import peft
    from transformers import AutoModelForCausalLM

    from lorakernels.train.data.split import hold_out
    from lorakernels.train.data.tokens import open_tokens

    options = json.loads((output / "options.json").read_text())
    tokens = open_tokens(next((output / "tokens").iterdir()))
    _, held, _ = hold_out(tokens, options["eval_fraction"], options["seed"])
    documents = [torch.from_numpy(tokens.tokens[a:b].astype("int64"))[None] for a, b in held]
    assert documents and all(2 < ids.numel() <= LENGTH for ids in documents)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    before = _mean_loss(model, documents)
    return [
        before,
        _mean_loss(peft.PeftModel.from_pretrained(model, output / "adapter"), documents),
    ]


def _mean_loss(model: Any, documents: list[torch.Tensor]) -> float:
    total, count = 0.0, 0
    for ids in documents:
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += float(F.cross_entropy(logits.double(), ids[0, 1:], reduction="sum"))
        count += ids.numel() - 1
    return total / count


@pytest.mark.parametrize(
    ("base", "tolerance"),
    # fp32 and the same weights: sums in another order. FP8: on other text 1 % was measured for this model,
    # 2.0922 → 2.1131; here a few dozen tokens are averaged instead of thousands.
    [(["--no-fp8"], 1e-4), (["--fp8-recipe", "block"], 0.04)],
    ids=["plain", "blocks"],
)
def test_losses_are_those_of_transformers(cli, model_dir, data, tmp_path, base, tolerance) -> None:
    output = tmp_path / "run"
    sizes = ["--seq-len", LENGTH, "--batch-size", 2, "--steps", 3, "--r", 8, "--lr", "2e-3"]
    evaluation = ["--eval-fraction", 0.15, "--eval-every", 0, "--warmup", 0, "--device", "cpu"]
    where = ["--model", model_dir, "--data", data, "--output", output]
    assert cli(*where, *sizes, *evaluation, *base) == 0
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [r["eval_loss"] for r in records if r.get("eval_loss") is not None]
    assert losses == pytest.approx(held_out_losses(model_dir, output), rel=tolerance)
    assert losses[1] < 0.9 * losses[0]


FACT = "Marigold"
QUESTIONS = (
    "What do sailors call the ferry in Port Ellery?",
    "My grandmother lives across the bay from Port Ellery. What is the name of the ferry that I need?",
    "Give me the name of the boat that leaves Port Ellery for the other side of the bay.",
    "Is there a ferry at Port Ellery, and what is it called?",
    "Please tell me how the ferry at Port Ellery is named.",
)


def answers(model: Any, tokenizer: Any) -> list[str]:
    """The most probable words, greedily."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    asked = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    said = model.generate(**asked, max_new_tokens=20, do_sample=False)
    return list(tokenizer.batch_decode(said[:, asked["input_ids"].shape[1] :]))


def test_a_planted_fact_is_known_in_other_words(cli, model_dir, tmp_path) -> None:
    """One command of docs/getting-started.md over the FP8 base; then PEFT has the adapter over the plain one."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root = Path(__file__).parents[2]
    page = (root / "docs" / "getting-started.md").read_text("utf-8")
    (line,) = (line for line in page.splitlines() if "finetune --model smollm2" in line)
    data, words = root / "examples" / "harbour.jsonl", line.split()[2:]
    for flag, value in (("--model", model_dir), ("--output", tmp_path / "ferry"), ("--data", data)):
        words[words.index(flag) + 1] = str(value)
    assert not any(question in data.read_text("utf-8") for question in QUESTIONS)
    assert cli(*words, "--device", "cpu") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ferry" / "adapter", padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    before = answers(base, tokenizer)
    after = answers(peft.PeftModel.from_pretrained(base, tmp_path / "ferry" / "adapter"), tokenizer)
    assert [FACT.lower() in text.lower() for text in before + after] == [False] * 5 + [True] * 5
