# SPDX-License-Identifier: Apache-2.0
"""Which values of a run's options cannot work, by themselves or together. No model and no file is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lorakernels.train.errors import OptionError
from lorakernels.train.files.searched import is_searched
from lorakernels.train.options.fields import ALL_LINEAR
from lorakernels.train.options.values import OptionValues

# by their least value; none has a largest one but "seed"
AT_LEAST = {
    1: ("r", "cp", "pp", "tp", "seq_len", "batch_size", "grad_accum", "max_bad_steps", "loss_chunk", "keep",
        "log_every"),
    0: ("weight_decay", "max_grad_norm", "eval_every", "eval_rows", "save_every", "warmup"),
}  # fmt: skip
PLANNED = (
    "shard_base", "shard_embeddings", "offload", "memory_budget", "save", "offload_activations",
    "fp8", "fp8_head", "gradient_checkpointing", "init_lora_weights", "use_dora", "cp",
    "pp", "tp",
)  # fmt: skip


# with --jobs, these have one of these values
WITH_JOBS = {
    "demo": False, "data": [], "eval_data": [], "data_weights": [], "merge": None, "lora_dropout": 0.0,
    "use_dora": False, "init_lora_weights": ("true", "gaussian"), "target_parameters": [], "shard_base": False,
    "offload": 0.0, "layout": "given", "memory_budget": None, "cp": 1, "pp": 1, "tp": 1,
}  # fmt: skip


def check_options(options: OptionValues) -> None:
    """Raise OptionError for the first value that cannot work."""
    _check_files(options)
    _check_bounds(options)
    _check_choices(options)
    options.check_running(options.graphs)
    _check_ends(options)
    _check_runtime(options)
    if options.layout == "auto":
        _check_planned(options)
    if options.jobs:
        _check_jobs(options)


def _check_files(options: OptionValues) -> None:
    if options.demo and (
        options.model or options.data or options.eval_data or options.chat_template
    ):
        raise OptionError(
            "demo brings its own model and data: drop --demo, or drop --model, --data, --eval-data, --chat-template"
        )
    _check_needed(options)
    weights = options.data_weights
    if weights and len(weights) != len(options.data):
        raise OptionError(
            f"data_weights needs one weight for each entry of data: found {len(weights)} for {len(options.data)}"
        )
    if wrong := [weight for weight in weights if not 0 < weight < float("inf")]:
        raise OptionError(f"data_weights must be positive and finite, got {wrong[0]}")
    check_apart("data", options.data, options.output)
    check_apart("eval_data", options.eval_data, options.output)
    if options.merge and options.model and _is_within(options.output, options.model):
        raise OptionError(
            f"merge: output {options.output} must not be inside model {options.model}"
        )


def _check_needed(options: OptionValues) -> None:
    """Name all that a run needs and lacks at once."""
    flags = {}
    if not options.demo and not options.model:
        flags["model"] = "--model DIR"
    if not options.demo and not options.data and not options.jobs:
        flags["data"] = "--data FILE..."
    if options.output is None:
        flags["output"] = "--output DIR"
    if flags:
        *first, last = flags
        lacking = f"{', '.join(first)} and {last} are" if first else f"{last} is"
        demo = ", or --demo" if "model" in flags else ""
        raise OptionError(f"{lacking} missing: give {' '.join(flags.values())}{demo}")


def check_apart(name: str, entries: Sequence[str], output: str | None) -> None:
    """Raise OptionError if a folder among the `entries` of `name` holds `output`: its files would be read as data."""
    for entry in entries:
        if is_searched(Path(entry)) and _is_within(output, entry, shown=True):
            raise OptionError(
                f"{name}: the folder {entry} holds output {output}, whose files would be read as data: take an output "
                "outside of it, or name the files in it"
            )


def _check_jobs(options: OptionValues) -> None:
    """Refuse options that do not go with several adapters in one batch."""
    for name, alone in WITH_JOBS.items():
        setting = getattr(options, name)
        if setting not in (alone if isinstance(alone, tuple) else (alone,)):
            raise OptionError(f"{name} must be {_shown(alone)} with jobs, got {setting!r}")


def _shown(value: object) -> str:
    return " or ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_bounds(options: OptionValues) -> None:
    for low, names in AT_LEAST.items():
        for name in names:
            _bound(options, name, low=low)
    _bound(options, "seed", low=0, below=2**63)
    if options.demo and options.eval_fraction == 0:
        raise OptionError("the demo compares held-out losses: eval_fraction must not be 0")
    for name in ("lora_dropout", "beta1", "beta2", "eval_fraction", "offload"):
        _bound(options, name, low=0, below=1)
    _bound(options, "min_lr_ratio", low=0, below=1.0000001)
    if options.steps is not None:
        _bound(options, "steps", low=1)
    names = ("lr", "epochs", "lora_alpha")
    for name in (*names, *["memory_budget"] * (options.memory_budget is not None)):
        if not 0 < getattr(options, name) < float("inf"):
            raise OptionError(f"{name} must be positive and finite, got {getattr(options, name)}")


def _check_choices(options: OptionValues) -> None:
    if len(options.target_modules) > 1 and ALL_LINEAR in options.target_modules:
        others = ", ".join(name for name in options.target_modules if name != ALL_LINEAR)
        raise OptionError(
            f"target_modules: {ALL_LINEAR} stands alone, found it beside {others or 'itself'}"
        )
    for item in fields(options):
        allowed, value = item.metadata["choices"], getattr(options, item.name)
        for choice in value if isinstance(value, list) else [value]:
            if allowed and choice is not None and choice not in allowed:
                raise OptionError(
                    f"{item.name} must be one of {', '.join(allowed)}, got {choice!r}"
                )


def _check_ends(options: OptionValues) -> None:
    """Refuse options that end a run, or go back to a checkpoint, without the evaluations or checkpoints they need."""
    if (names := options.needs_held_out()) and not (options.eval_fraction or options.eval_data):
        raise OptionError(
            f"{names[0]} reads a held-out loss: eval_fraction is 0 and there is no eval_data"
        )
    evaluates = options.eval_every or options.eval_every_sequences
    if options.early_stopping_patience and not evaluates:
        raise OptionError(
            "early_stopping_patience needs evaluations during the run: eval_every is 0, expected at least 1"
        )
    if options.early_stopping_threshold and not options.early_stopping_patience:
        raise OptionError(
            f"early_stopping_threshold {options.early_stopping_threshold:g} needs early_stopping_patience, which is 0"
        )
    saves = options.save_every or options.load_best_model_at_end
    if options.on_divergence == "rollback" and not saves:
        raise OptionError(
            "on_divergence rollback goes back to a checkpoint: save_every is 0, expected at least 1"
        )


def _check_effects(options: OptionValues) -> None:
    """Refuse an option that another one leaves without effect."""
    if options.fuse and options.gradient_checkpointing:
        raise OptionError(
            "gradient_checkpointing recomputes whole layers, which are not fused then: drop it or --fuse, or give "
            "--save checkpoint instead of it"
        )
    if options.eager and options.graphs != "auto":
        raise OptionError(
            f"eager replays no graphs, and graphs {options.graphs} asks for them: drop one of them"
        )


def _check_runtime(options: OptionValues) -> None:
    on_device = options.memory_budget is None and options.save in ("full", "recompute")
    if options.offload_activations and on_device and options.layout == "given":
        raise OptionError(
            f"offload_activations needs save fp8 or checkpoint, or a memory_budget, got save {options.save}"
        )
    if options.fp8_recipe == "block" and not options.fp8:
        raise OptionError("fp8_recipe block is for a base in FP8: drop --fp8-recipe or --no-fp8")
    if not options.resume:  # a run that began before these were refused goes on as it began
        _check_effects(options)
    if options.attention == "fp8" and options.isolate_documents:
        raise OptionError(
            "attention fp8 needs rows that are causal as a whole, which cuDNN's FP8 takes alone: give "
            "--no-isolate-documents"
        )
    for name in ("shard_base", "offload"):
        if getattr(options, name) and options.init_lora_weights not in ("true", "gaussian"):
            raise OptionError(
                f"init_lora_weights {options.init_lora_weights} starts from the 16-bit weight, which {name} never "
                "holds: drop one of them"
            )
    for name in ("shard_base", "offload", "fuse", "merge"):
        if getattr(options, name) and options.use_dora:
            raise OptionError(f"use_dora does not go with {name}: drop one of them")
    _check_context(options)
    _check_pipeline(options)
    _check_tensor(options)
    if options.shard_base and options.demo:
        raise OptionError("shard_base is for --model: the demo's base is small")
    if options.shard_base and not options.fp8:
        raise OptionError("shard_base shards a base in FP8: drop --shard-base or --no-fp8")
    if options.shard_embeddings and not options.shard_base:
        raise OptionError(
            "shard_embeddings splits embedding and head as shard_base does the layers: give --shard-base, too"
        )
    if options.offload and (options.demo or not options.fp8):
        raise OptionError(
            "offload is for an FP8 base of --model: drop --offload, or --demo and --no-fp8"
        )


def _check_context(options: OptionValues) -> None:
    """Refuse options that rows shared by several ranks do not support."""
    if options.cp == 1:
        return
    if options.seq_len % (2 * options.cp):
        raise OptionError(
            f"seq_len must be a multiple of {2 * options.cp} with cp {options.cp}, got {options.seq_len}"
        )
    if options.attention not in ("auto", "flash", "efficient", "math", "cudnn_graph"):
        raise OptionError(
            f"attention must be auto, flash, efficient, math or cudnn_graph with cp, got {options.attention}"
        )
    if options.attention == "cudnn_graph" and options.deterministic:
        raise OptionError(
            "attention cudnn_graph has no fixed order of sums with cp: drop one of them, or --deterministic"
        )
    if options.graphs == "step":
        raise OptionError("cp replays layers, not whole steps: take graphs layer or auto")
    if options.demo:
        raise OptionError("cp is for --model: the demo runs in one process")


# with --pp, these have one of these values
WITH_PP = {
    "demo": False, "shard_base": False, "offload": 0.0, "offload_activations": False,
    "graphs": ("auto", "layer"), "gradient_checkpointing": False, "fp8_head": False, "layout": "given",
    "init_lora_weights": ("true", "gaussian"), "target_parameters": [],
}  # fmt: skip


def _check_pipeline(options: OptionValues) -> None:
    """Refuse options that pipeline stages do not support."""
    if options.pp == 1:
        return
    _check_beside(options, "pp", WITH_PP)
    if options.grad_accum < options.pp:
        raise OptionError(
            f"grad_accum must be at least pp, {options.pp}, as its microbatches run through the stages, got "
            f"{options.grad_accum}"
        )


# with --tp, these have one of these values
WITH_TP = {
    "demo": False, "pp": 1, "shard_embeddings": False, "offload": 0.0, "offload_activations": False,
    "graphs": ("auto", "layer"), "use_dora": False, "init_lora_weights": ("true", "gaussian"),
    "target_parameters": [], "layout": "given", "memory_budget": None,
    "optim": ("adamw_torch_fused", "adamw_torch", "sgd"),
    "attention": ("auto", "cudnn", "flash", "efficient", "math", "cudnn_graph"),
}  # fmt: skip


def _check_tensor(options: OptionValues) -> None:
    """Refuse options that layers split over several ranks do not support."""
    if options.tp == 1:
        if not options.sequence_parallel:
            raise OptionError("sequence_parallel is for tp above 1: drop --no-sequence-parallel")
        return
    _check_beside(options, "tp", WITH_TP)
    if options.sequence_parallel and options.seq_len % (options.cp * options.tp):
        raise OptionError(
            f"seq_len must be a multiple of {options.cp * options.tp}, cp · tp, with sequence_parallel, got "
            f"{options.seq_len}"
        )


def _check_beside(options: OptionValues, parallel: str, allowed: Mapping[str, Any]) -> None:
    """Refuse the first option that has none of its `allowed` values, a tuple or one, where ranks have parts."""
    for name, wanted in allowed.items():
        value = getattr(options, name)
        if value not in wanted if isinstance(wanted, tuple) else value != wanted:
            how = f"{parallel} {getattr(options, parallel)}"
            raise OptionError(f"{how} does not go with {name} {value}: drop one of them")


def _check_planned(options: OptionValues) -> None:
    """Options that a plan chooses, or does not know, must be as they are by default."""
    if options.demo:
        raise OptionError("layout auto is for --model: the demo's base is small")
    default = type(options)()
    for name in PLANNED:
        if getattr(options, name) != getattr(default, name):
            raise OptionError(
                f"layout auto plans with {name} {getattr(default, name)} or chooses it, got {getattr(options, name)}: "
                "drop one of them"
            )
    if options.fuse is False or options.dtype == "float32":
        what = "--no-fuse" if options.fuse is False else "dtype float32"
        raise OptionError(f"layout auto plans fused layers in bfloat16: drop it or {what}")


def _bound(options: OptionValues, name: str, *, low: float, below: float = float("inf")) -> None:
    value = getattr(options, name)
    if not low <= value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        raise OptionError(f"{name} must be at least {low:g}{limit}, got {value}")


def _is_within(path: str | None, folder: str, shown: bool = False) -> bool:
    """Whether `path` is `folder` or is in it. With `shown`, what is hidden there by its name is not."""
    inner, outer = Path(str(path)).resolve(), Path(folder).resolve()
    if not inner.is_relative_to(outer):
        return False
    return not (shown and any(name[0] == "." for name in inner.relative_to(outer).parts))
