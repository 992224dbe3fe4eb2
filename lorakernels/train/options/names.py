# SPDX-License-Identifier: Apache-2.0
"""Names of our options in other trainers, those that we had before, and suggestions for an unknown option.

PEERS has names of PEFT's LoraConfig, transformers' TrainingArguments, TRL, axolotl, unsloth, LLaMA-Factory and
torchtune.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

PEERS = {
    "model": (
        "model_name_or_path", "model_name", "base_model", "pretrained_model_name_or_path", "model_path",
        "model_id", "base_model_name_or_path",
    ),
    "data": (
        "dataset", "datasets", "dataset_name", "dataset_path", "data_path", "data_file", "data_files", "train_file",
        "train_data",
    ),
    "data_weights": (
        "interleave_probs", "dataset_weights", "mixture_weights", "sampling_ratios",
    ),
    "eval_data": (
        "eval_file", "validation_file", "eval_dataset", "test_datasets", "val_data", "validation_data", "val_dataset",
    ),
    "chat_template": ("chat_template_path", "chat_template_jinja", "template"),
    "train_on_inputs": ("train_on_prompt", "train_on_input"),
    "output": ("output_dir", "out_dir", "output_path"),
    "resume": ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
    "r": ("lora_r", "lora_rank", "rank"),
    "lora_alpha": ("alpha",),
    "lora_dropout": ("dropout",),
    "target_modules": (
        "lora_target_modules", "lora_target", "lora_targets", "lora_target_linear", "lora_modules",
    ),
    "exclude_modules": ("lora_exclude_modules",),
    "target_parameters": ("lora_target_parameters",),
    "use_rslora": ("rslora", "lora_use_rslora", "peft_use_rslora"),
    "use_dora": ("dora", "lora_use_dora", "peft_use_dora"),
    "fp8": ("load_in_fp8", "use_fp8"),
    "seq_len": (
        "max_seq_length", "max_seq_len", "max_length", "sequence_len", "sequence_length", "cutoff_len", "block_size",
        "model_max_length", "seq",
    ),
    "batch_size": (
        "micro_batch_size", "per_device_train_batch_size", "train_batch_size", "per_device_eval_batch_size",
        "eval_batch_size", "per_gpu_train_batch_size",
    ),
    "grad_accum": ("gradient_accumulation_steps", "gradient_accumulation", "accumulate_grad_batches"),
    "steps": ("max_steps", "num_steps", "num_train_steps"),
    "epochs": ("num_train_epochs", "num_epochs"),
    "lr": ("learning_rate",),
    "optim": ("optimizer", "optimizer_name", "optimizer_type"),
    "loraplus_lr_ratio": ("lorap_lr_ratio",),
    "lr_scheduler_type": ("lr_scheduler", "scheduler", "scheduler_type"),
    "load_best_model_at_end": ("save_best", "keep_best"),
    "early_stopping_patience": ("early_stopping_steps", "early_stopping", "patience"),
    "early_stopping_threshold": ("min_delta", "early_stopping_min_delta"),
    "logger": ("report_to", "loggers", "log_to", "use_wandb"),
    "run_name": ("wandb_name", "wandb_run_name", "wandb_run_id"),
    "merge": ("save_merged", "save_method", "merge_lora", "merge_adapter", "merge_and_unload"),
    "cp": ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size"),
    "pp": ("pipeline_parallel_size",),
    "tp": ("tensor_parallel_size", "tp_size"),
    "min_lr_ratio": ("min_lr", "cosine_min_lr_ratio"),
    "warmup": ("warmup_steps", "warmup_ratio", "num_warmup_steps"),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "max_grad_norm": ("gradient_clipping", "clip_grad_norm", "grad_clip"),
    "eval_fraction": ("val_set_size", "val_size", "test_size", "do_eval", "test_split_ratio"),
    "eval_every": ("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"),
    "save_every": ("save_steps", "saves_per_epoch", "save_strategy", "checkpointing_steps"),
    "keep": ("save_total_limit",),
    "log_every": ("logging_steps", "logging_strategy"),
    "eager": ("enforce_eager",),
    "graphs": ("cuda_graphs",),
    "attention": (
        "attn_implementation", "attn", "flash_attn", "flash_attention", "use_flash_attention_2",
    ),
    "seed": ("random_state", "random_seed", "data_seed"),
    "dtype": ("torch_dtype", "bf16", "fp16", "precision", "mixed_precision"),
    "device": ("device_map", "use_cpu", "no_cuda"),
    "deterministic": ("full_determinism",),
    "gradient_checkpointing": ("activation_checkpointing", "use_gradient_checkpointing"),
}  # fmt: skip
OURS = {peer: ours for ours, peers in PEERS.items() for peer in peers}


class Gone(NamedTuple):
    """An option that there was: the value by which every run goes now, and why."""

    now: str
    why: str

    def __str__(self) -> str:
        return f"there is no such option any more, as {self.why}"


GONE = {
    "weight_layout": Gone(
        "single",
        "a second, transposed copy of the base took a byte more per parameter and saved no time",
    )
}


def near(name: str, options: Collection[str]) -> list[str]:
    """Up to three of the `options` that `name` may have meant, the likeliest first. `name` has underscores."""
    if name in OURS and OURS[name] in options:
        return [OURS[name]]
    names = [*options, *OURS]
    close, loose = (difflib.get_close_matches(name, names, 6, cutoff) for cutoff in (0.8, 0.6))
    matches = close or loose
    ours = dict.fromkeys(OURS.get(option, option) for option in matches)
    return [option for option in ours if option in options][:3]


def why_absent(name: str, options: Collection[str], absent: Mapping[str, str]) -> str | None:
    """The reason in `absent`, {name: why not}, for the name closest to `name`. None if an option is closer."""
    closest = difflib.get_close_matches(name, [*options, *OURS, *absent], 1, 0.8)
    return absent.get(closest[0]) if closest else None


def unknown_argument(
    words: Sequence[str], options: Collection[str], absent: Mapping[str, str] | None = None
) -> str:
    """The message about words of a command line that are none of the `options`. `absent`: {name: why not}."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if flag is None:
        return f"unexpected argument {words[0]!r}: a switch takes no value, --no-NAME turns it off"
    name = flag.lstrip("-").replace("-", "_")
    if name in GONE:
        return f"{flag}: {GONE[name]}: drop it"
    negated = name.startswith("no_") and name not in OURS
    prefix, name = ("--no-", name.removeprefix("no_")) if negated else ("--", name)
    if why := why_absent(name, options, absent or {}):
        return f"unknown option {flag}: {why}"
    flags = [prefix + option.replace("_", "-") for option in near(name, options)]
    page = "--help-all" if "help_all" in options else "--help"
    return f"unknown option {flag}; " + (
        f"did you mean {' or '.join(flags)}?" if flags else f"see {page}"
    )
