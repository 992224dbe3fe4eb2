# SPDX-License-Identifier: Apache-2.0
"""TRL's DPOTrainer and GRPOTrainer take a step with PEFT's adapters over our layers, beside plain PEFT."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels import DelayedScaling, fuse
from lorakernels.integrations.transformers import LoRAKernelsCallback

peft = pytest.importorskip("peft")
pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
from lorakernels.integrations.peft import register  # noqa: E402

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_sft.py"))
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 2,
    "learning_rate": 0.1,
    "optim": "sgd",  # Adam's first step divides a gradient by itself
    "bf16": False,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "gradient_checkpointing": False,
    "seed": 3,
}
BASES = {"PEFT's": None, "plain": {"fp8": None}, "fp8": {"fp8": DelayedScaling()}}


def adapted(base: str) -> tuple[Any, Any]:
    """A small Llama with adapters, and its tokenizer."""
    model, tokenizer = EXAMPLE["load"](None, "cpu")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if BASES[base] is not None:
        register(config, **BASES[base])
    torch.manual_seed(1)
    made = peft.get_peft_model(model, config)
    if base == "fp8":
        fuse(made)
    return made, tokenizer


def preferences() -> Any:
    """The sum before no answer."""
    rows = []
    for system, question, answer in EXAMPLE["chats"]()[:8]:
        wrong = {**answer, "content": "I do not know."}
        rows.append({"prompt": [system, question], "chosen": [answer], "rejected": [wrong]})
    return datasets.Dataset.from_list(rows)


def dpo(base: str, output: Path) -> tuple[Any, Any]:
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = adapted(base)
    trainer = DPOTrainer(
        model,
        args=DPOConfig(str(output), max_length=96, **ARGUMENTS),
        train_dataset=preferences(),
        processing_class=tokenizer,
        callbacks=[] if base == "PEFT's" else [LoRAKernelsCallback(model)],
    )
    trainer.train()
    return trainer, model


def grpo(base: str, output: Path) -> tuple[Any, Any]:
    from trl import GRPOConfig, GRPOTrainer

    def longest(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(str(completion))) for completion in completions]

    model, tokenizer = adapted(base)
    trainer = GRPOTrainer(
        model,
        longest,
        args=GRPOConfig(
            str(output), num_generations=2, max_completion_length=8, beta=0.1, **ARGUMENTS
        ),
        train_dataset=preferences().select_columns("prompt"),
        processing_class=tokenizer,
        callbacks=[] if base == "PEFT's" else [LoRAKernelsCallback(model)],
    )
    trainer.train()
    return trainer, model


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("train", [dpo, grpo])
def test_steps_are_those_of_plain_peft(train: Any, tmp_path: Path) -> None:
    """Over fp8=None, in fp32: sums in another order."""
    found = [train(base, tmp_path / base) for base in ("PEFT's", "plain")]
    theirs, ours = (dict(model.named_parameters()) for _, model in found)
    classes = [{type(module).__module__.split(".")[0] for module in m.modules()} for _, m in found]
    assert ["lorakernels" in names for names in classes] == [False, True]
    assert losses(found[1][0]) == pytest.approx(losses(found[0][0]), abs=1e-6)
    moved = [name for name in theirs if "lora_B.default" in name and bool(theirs[name].any())]
    assert len(moved) == 14
    for name in moved:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("train", [dpo, grpo])
def test_steps_over_a_fused_fp8_base_leave_an_adapter_of_pefts(train: Any, tmp_path: Path) -> None:
    """DPO's and GRPO's reference is the model with its adapter switched off."""
    trainer, model = train("fp8", tmp_path)
    assert all(torch.isfinite(torch.tensor(losses(trainer)))) and len(losses(trainer)) == 2
    ours = {name: p for name, p in model.named_parameters() if "lora_B.default" in name}
    moved = [
        bool(p.any()) for p in ours.values()
    ]  # TRL has an adapter of its own for DPO's reference
    assert moved == [True] * 14
    trainer.save_model(str(tmp_path / "adapter"))
    base, _ = EXAMPLE["load"](None, "cpu")
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    held = dict(opened.named_parameters())
    for name, parameter in ours.items():
        assert torch.equal(held[name], parameter), name
