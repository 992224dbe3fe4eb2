# SPDX-License-Identifier: Apache-2.0
"""One fine-tuning job from options to adapter files.

<output>/adapter/          PEFT's files: adapter_config.json, adapter_model.safetensors
<output>/checkpoints/      what --resume goes on from
<output>/metrics.jsonl     one line per step and per evaluation
<output>/loss.png          the loss curve
<output>/options.json      the options of the run
<output>/tokens/           the token files
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorakernels import DelayedScaling, LoRAConfig, LoRAReport, apply_lora
from lorakernels.train.checkpoint import Checkpoints
from lorakernels.train.data import TokenFile, hold_out, tokenize_files
from lorakernels.train.errors import DataError, FinetuneError, ModelError, OptionError, require
from lorakernels.train.files import replace_dir, replace_file
from lorakernels.train.flops import Peak, find_peak, flops_per_token
from lorakernels.train.loop import Trainer
from lorakernels.train.metrics import plot_losses
from lorakernels.train.model import (
    check_directory,
    check_model,
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    reproducible,
    save_activations,
)
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.packing import PackedRows
from lorakernels.train.reporter import Reporter
from lorakernels.train.session import Session


@dataclass
class Result:
    """What a finished job hands back."""

    model: nn.Module
    report: LoRAReport
    session: Session
    adapter: Path

    def last_line(self) -> str:
        first, last = self.session.first_eval, self.session.last_eval
        if first is None or last is None:
            return f"validation loss not measured (nothing held out), adapter in {self.adapter}"
        return f"validation loss {first:.4f} → {last:.4f}, adapter in {self.adapter}"


def finetune(options: FinetuneOptions) -> None:
    """The whole of ``lorakernels finetune --model``."""
    output = Path(str(options.output))
    with locked(output), reproducible(options.deterministic):
        reporter = Reporter("finetune", options.log_every)
        result = adapt(options, reporter)
        print(result.last_line(), flush=True)


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """One run per output directory; the lock goes with the process, however it ends."""
    import fcntl

    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FinetuneError(f"another run is using {output}") from error
        yield


def adapt(options: FinetuneOptions, reporter: Reporter) -> Result:
    """Load, tokenize, apply LoRA, train, write the adapter."""
    require("matplotlib")  # needed at the end: better missed now
    output, directory = Path(str(options.output)), Path(str(options.model))
    checkpoints = Checkpoints(output / "checkpoints", options.keep)
    if not options.resume and checkpoints.steps():
        raise FinetuneError(
            f"{output} already holds checkpoints: go on with --resume or take another directory"
        )
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    check_directory(directory)
    tokenizer = load_tokenizer(directory)
    tokens = tokenize_files([Path(p) for p in options.data], tokenizer, output / "tokens")
    # Padding is masked, so its id does not matter; a tokenizer's own may lie outside the embedding.
    train, held = pack_data(tokens, options, 0, reporter)
    model = load_model(directory, dtype, device)
    check_model(model, options.seq_len, tokens.max_token)
    if options.gradient_checkpointing:
        save_activations(model)
    torch.manual_seed(options.seed)
    report = add_adapters(model, options)
    reporter.say(str(report).split("\n")[0])
    identity = {
        "tokens": tokens.path.name,
        "base": fingerprint(directory),
        "dtype": str(dtype),
        "on": device.type,
    }
    session = make_session(model, options, train, held, reporter, output / "metrics.jsonl", report)
    session.checkpoints, session.identity = checkpoints, identity
    if options.resume:
        session.resume()
    replace_file(output / "options.json", json.dumps(asdict(options), indent=1).encode())
    session.run()
    adapter = save_adapter_files(model, output / "adapter", directory)
    plot_losses(
        output / "metrics.jsonl", output / "loss.png", f"LoRA, rank {options.r}, {directory.name}"
    )
    return Result(model, report, session, adapter)


def pack_data(
    tokens: TokenFile, options: FinetuneOptions, pad_token: int, reporter: Reporter | None
) -> tuple[PackedRows, PackedRows]:
    """Training and held-out rows; the reporter says what came of the documents."""
    train_spans, held_spans, how = hold_out(tokens, options.eval_fraction, options.seed)
    train = PackedRows(tokens.tokens, train_spans, options.seq_len, pad_token)
    held = PackedRows(tokens.tokens, held_spans, options.seq_len, pad_token)
    if not len(train):
        raise DataError(
            f"nothing to train on: {len(tokens.tokens)} tokens in {len(tokens.spans)} documents"
        )
    if reporter is None:
        return train, held
    reporter.say(
        f"{len(tokens.tokens):,} tokens in {len(tokens.spans):,} documents; {how}; "
        f"{len(train):,} sequences of {options.seq_len} to train on, {100 * train.fill:.1f} % full"
    )
    if split := train.split_documents + held.split_documents:
        reporter.say(
            f"{split:,} documents are longer than seq_len {options.seq_len} and were split"
        )
    return train, held


def add_adapters(model: nn.Module, options: FinetuneOptions) -> LoRAReport:
    names = options.target_modules
    config = lora_config(options, names[0] if names == ["all-linear"] else names)
    try:
        return apply_lora(model, config)
    except (ValueError, TypeError) as error:
        raise ModelError(str(error)) from error


def lora_config(options: FinetuneOptions, targets: str | list[str]) -> LoRAConfig:
    try:
        return LoRAConfig(
            r=options.r,
            lora_alpha=options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules=targets,
            exclude_modules=options.exclude_modules or None,
            use_rslora=options.use_rslora,
            fp8=DelayedScaling() if options.fp8 else None,
        )
    except (ValueError, TypeError) as error:
        raise OptionError(str(error)) from error


def make_session(
    model: Any,
    options: FinetuneOptions,
    train: PackedRows,
    held: PackedRows,
    reporter: Reporter,
    metrics: Path,
    report: LoRAReport | None,
) -> Session:
    """A Session without checkpoints; ``report=None`` trains whatever parameters require gradients."""
    trainer = Trainer(model, options, train, None if report is None else report.fp8_state)
    device = trainer.device
    peak = find_peak(device, next(model.parameters()).dtype, options.fp8)
    reporter.say(f"{trainer.steps} steps on {describe(device)}; {_mfu_line(peak)}")
    flops = flops_per_token(model, model.config.get_text_config(), options.seq_len)
    return Session(trainer, held, options, reporter, metrics, flops, peak)


def _mfu_line(peak: Peak | str) -> str:
    return f"MFU against {peak.tflops:g} TFLOP/s ({peak.name})" if isinstance(peak, Peak) else peak


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU, {torch.get_num_threads()} threads"


def fingerprint(directory: Path) -> str:
    """Of config.json and, per weight file, its name, header and 256 windows of 4 KiB spread over its values."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            length = path.stat().st_size
            digest.update(f"{path.name} {length}".encode() + file.read(size))
            start = 8 + size
            for window in range(256):
                file.seek(start + window * max(0, length - start - 4096) // 255)
                digest.update(file.read(4096))
    return digest.hexdigest()[:24]


def save_adapter_files(model: nn.Module, target: Path, base: Path) -> Path:
    """PEFT's two files, complete or absent."""
    from lorakernels import save_adapter

    with replace_dir(target) as temporary:
        save_adapter(model, temporary, base_model_name_or_path=str(base), task_type="CAUSAL_LM")
    return target


def without_lora(options: FinetuneOptions, **changes: Any) -> FinetuneOptions:
    """The same machine and logging, for training a whole model."""
    return replace(options, fp8=False, **changes)
