# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint belongs to this run: which options may change when it is resumed, and which may not."""

from __future__ import annotations

from typing import Any

from lorakernels.train.errors import CheckpointError
from lorakernels.train.files.checkpoint import Checkpoints
from lorakernels.train.options.names import GONE
from lorakernels.train.options.options import FinetuneOptions

# These options may change when a run is resumed. Any other change would make it another run.
FREE_ON_RESUME = {
    "model", "data", "output", "resume", "demo", "steps", "epochs", "eval_every", "eval_rows", "save_every", "keep",
    "log_every", "device", "max_bad_steps", "loss_chunk", "gradient_checkpointing", "deterministic", "eager",
    "graphs", "cp", "pp", "tp", "sequence_parallel", "shard_base", "shard_embeddings", "layout", "offload",
    "offload_activations", "merge",
    "eval_data", "chat_template", "train_on_inputs", "skip_bad_rows",  # the keys of the token files tell
    "batch_size", "grad_accum",  # batch_size · grad_accum · ranks is part of the identity
    "eval_every_sequences", "load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold",
    "target_loss", "on_divergence", "logger", "run_name",
}  # fmt: skip


def check_same_options(checkpoints: Checkpoints, options: FinetuneOptions) -> None:
    """Raise CheckpointError if the newest checkpoint has other options. This needs no model."""
    if newest := checkpoints.peek():
        check_equal(newest[0], with_defaults(newest[1]["options"]), kept_options(options))


def kept_options(options: FinetuneOptions) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in FREE_ON_RESUME}


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a checkpoint. An option that is newer than the checkpoint had its default.

    One that is gone is left out if its value was that by which every run goes now.
    """
    there = {n: value for n, value in options.items() if n not in GONE or value != GONE[n].now}
    return {**kept_options(FinetuneOptions()), **there}


def check_equal(step: int, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in sorted(set(before) | set(now)):
        if before.get(name) != now.get(name):
            hint = "restore it"
            if name == "rows_per_step":
                hint = "it is batch_size · grad_accum · ranks: restore it by one of them"
            if name == "the order of jobs" and before.get(name) is None:
                hint = "an earlier version did not record it: go on with that version"
            # of a run, or of one of its jobs
            if name.rpartition(": ")[2] in ("tokens", "eval_tokens"):
                hint = "data, tokenizer or the version that makes tokens of rows is another: restore it"
            if name in GONE:
                hint = f"{GONE[name]}: go on with an earlier version"
            if name == "memory_budget":
                hint = "restore it, where layout auto chose it by layout given with its shard_base and offload"
            raise CheckpointError(
                f"cannot resume step {step}: {name} was {before.get(name)!r}, now it is {now.get(name)!r}; {hint} or "
                "start in another output directory"
            )
