# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer and TRL's SFTTrainer with a clock, for check_full.py and bench_finetune.py.

`sft` trains as examples/trl_sft.py does. TRL packs the documents and flattens a batch into one row. The adapters are
PEFT's, on our layers, which are fused and replayed, or on PEFT's own layers with SDPA.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.lib.timing import synchronize
from benchmarks.peers.base import Unavailable
from benchmarks.peers.models import ADAPTED, ALPHA, RANK, P, Spec
from lorakernels import fuse
from lorakernels.integrations.collators import FixedShapes
from lorakernels.integrations.transformers import LoRAKernelsCallback
from lorakernels.train.data.byte_tokenizer import byte_tokenizer

LORA = {
    "r": RANK,
    "lora_alpha": ALPHA,
    "lora_dropout": P,
    "target_modules": list(ADAPTED["all"]),
}
IGNORE = -100


class Clock(TrainerCallback):
    """The seconds of each step, the device's work included, and how often the layers of `kernels` were replayed."""

    def __init__(self, device: torch.device, kernels: LoRAKernelsCallback | None = None) -> None:
        self.device, self.kernels, self.replayed = device, kernels, 0
        self._times: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._stamp()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._stamp()
        if self.kernels is not None and self.kernels.attached is not None:
            self.replayed = self.kernels.attached.replayed

    def _stamp(self) -> None:
        synchronize(self.device)
        self._times.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self._times)]


class Counted:
    """Around a collator: the positions and the trained tokens of each batch it made."""

    def __init__(self, collator: Callable[[Sequence[Any]], dict[str, Any]]) -> None:
        self.collator = collator
        self.positions: list[int] = []
        self.tokens: list[int] = []

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        batch = self.collator(examples)
        self.positions.append(batch["input_ids"].numel())
        self.tokens.append(int((batch["labels"] != IGNORE).sum()))
        return batch


def settled(values: Sequence[float]) -> float:
    """The median of the last half."""
    return statistics.median(values[len(values) // 2 :])


def trainer_arguments(
    steps: int, batch: int, device: torch.device, scratch: Path
) -> dict[str, Any]:
    """Of TrainingArguments and of SFTConfig."""
    return {
        "output_dir": str(scratch),
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "dataloader_drop_last": True,
        "learning_rate": 2e-4,
        "use_cpu": device.type != "cuda",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def trl_or_unavailable() -> None:
    """Unavailable where a package that `sft` needs is not installed."""
    for name in ("trl", "datasets", "peft"):
        if importlib.util.find_spec(name) is None:
            raise Unavailable(f"{name} is not installed")


def sft(
    spec: Spec, model: Any, texts: Path, steps: int, scratch: Path, ours: bool
) -> dict[str, Any]:
    """`steps` steps of SFTTrainer with `model`, which it changes, over a .jsonl file of texts.

    Returns "seconds", "tokens_per_s" and "positions_per_s", medians of the last half of the steps, the seconds of all
    steps as "training", the first and last of the "losses", on a GPU the "peak" in GiB, and for ours "replayed" and
    "why_not".

    Raises:
        RuntimeError: our layers ran eagerly on a GPU.
    """
    device = model.device
    adapted, kernels = _adapted(model, ours)
    clock = Clock(device, kernels)
    made = _sft_trainer(spec, adapted, texts, trainer_arguments(steps, spec.batch, device, scratch))
    for callback in (kernels, clock):
        if callback is not None:
            made.add_callback(callback)
    if ours:
        tokens = spec.batch * spec.length
        made.data_collator = FixedShapes(made.data_collator, tokens, longest=spec.length)
    made.data_collator = counted = Counted(made.data_collator)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    made.train()
    losses = [line["loss"] for line in made.state.log_history if "loss" in line]
    found = {**rates(clock, counted), "losses": [losses[0], losses[-1]]}
    if device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated(device) / 2**30
    if kernels is None:
        return found
    if device.type == "cuda" and kernels.why_not:
        raise RuntimeError(f"the layers are not replayed: {kernels.why_not}")
    return {**found, "replayed": clock.replayed, "why_not": kernels.why_not or ""}


def rates(clock: Clock, counted: Counted) -> dict[str, Any]:
    """Batches come in the order of the steps; the data loader may have made one that no step took."""
    found: dict[str, Any] = {"seconds": settled(clock.seconds), "training": sum(clock.seconds)}
    for name, counts in (("tokens", counted.tokens), ("positions", counted.positions)):
        steps = zip(counts, clock.seconds, strict=False)
        found[f"{name}_per_s"] = settled([count / took for count, took in steps])
    return found


def _adapted(model: Any, ours: bool) -> tuple[Any, LoRAKernelsCallback | None]:
    """A PeftModel. PEFT's own layers have adapters in the base's dtype, as its default, fp32, is slower."""
    import peft

    from lorakernels.integrations.peft import register

    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA)
    if not ours:
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False), None
    adapted = peft.get_peft_model(model, register(config))
    fuse(adapted)
    return adapted, LoRAKernelsCallback(adapted)


def _sft_trainer(spec: Spec, model: Any, texts: Path, arguments: dict[str, Any]) -> Any:
    import datasets
    import trl

    documents = [json.loads(line) for line in texts.read_text().splitlines()]
    config = trl.SFTConfig(
        max_length=spec.length,
        packing=True,
        logging_steps=1,
        bf16=False,  # the model's dtype is the one it computes in
        gradient_checkpointing=False,
        **arguments,
    )
    return trl.SFTTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list(documents),
        processing_class=byte_tokenizer(),
    )
