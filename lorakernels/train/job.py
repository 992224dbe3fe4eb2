# SPDX-License-Identifier: Apache-2.0
"""One fine-tuning job, from options to adapter files.

<output>/adapter/          adapter_config.json, adapter_model.safetensors, tokenizer files, model card
<output>/<job>/adapter/    the same of each job, with `jobs`; its checkpoints then hold no adapter's files
<output>/checkpoints/      the same files after some of the steps, and the state that --resume needs
<output>/merged/           with `merge`, the merged model
<output>/metrics.jsonl     one line per step and per evaluation
<output>/tensorboard/      with `logger`, and wandb/ for wandb; run.json names the run for them
<output>/loss.png          the loss curve
<output>/options.json      the options of the run
<output>/tokens/           the token files
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorakernels import (
    LoRAReport,
    export_model,
)
from lorakernels.train.adapted import Adapted, adapted_model, lora_config
from lorakernels.train.data.packing import PackedRows
from lorakernels.train.data.prepare import RunData, check_rows, load_data, set_chat_template
from lorakernels.train.errors import (
    FinetuneError,
    OptionError,
    describe_os_error,
    require,
)
from lorakernels.train.files.adapter_files import AdapterFiles, save_adapter_files, tokenizer_files
from lorakernels.train.files.checkpoint import Checkpoints
from lorakernels.train.files.files import replace_file
from lorakernels.train.files.written import (
    ADAPTER,
    CHECKPOINTS,
    LOSS,
    MERGED,
    METRICS,
    OPTIONS,
    TOKENS,
)
from lorakernels.train.jobs import Job, JobsTrainer, load_jobs, read_jobs, save_jobs
from lorakernels.train.layouts.auto import Gpus, planned
from lorakernels.train.layouts.context import sharing
from lorakernels.train.layouts.parts import collect, whole_model
from lorakernels.train.layouts.sharding import ranks_per_machine
from lorakernels.train.model.disk import TrainedSize, check_room, written_by
from lorakernels.train.model.flops import ModelCounts, Peak, find_peak
from lorakernels.train.model.model import (
    check_directory,
    keep_large_blocks_whole,
    load_tokenizer,
    pick_device,
    pick_dtype,
    reproducible,
)
from lorakernels.train.model.preflight import check_before_loading, check_vocabulary
from lorakernels.train.model_card import model_card
from lorakernels.train.optimizer.optimizers import check_package
from lorakernels.train.optimizer.schedule import make_schedule
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.progress import Observer, nobody
from lorakernels.train.ranks.ranks import RunRanks, joined, ranks_of_environment
from lorakernels.train.run.choices import choices
from lorakernels.train.run.loggers import check_packages
from lorakernels.train.run.loop import Trainer
from lorakernels.train.run.metrics import plot_losses
from lorakernels.train.run.reporter import Reporter
from lorakernels.train.run.runtime import Runtime, check_scope
from lorakernels.train.run.same_run import check_same_options
from lorakernels.train.run.session import Session

FEW = 10  # steps of an epoch, below which a run says so


@dataclass
class Result:
    """The outcome of a finished job. `adapter` is the directory of the adapter; `fused` says if layers were fused."""

    model: nn.Module
    report: LoRAReport
    session: Session
    adapter: Path
    fused: bool = False

    def last_line(self) -> str:
        evaluations = self.session.evaluations
        first, last = evaluations.first_eval, evaluations.last_eval
        if first is None or last is None:
            return f"validation loss not measured, as no document was held out; adapter in {self.adapter}"
        return f"validation loss {first:.4f} → {last:.4f}, adapter in {self.adapter}"


def finetune(options: FinetuneOptions) -> None:
    """Run ``lorakernels finetune --model`` on one process, or on each process that torchrun started."""
    output = Path(str(options.output))
    if options.memory_budget is not None or options.layout == "auto":
        keep_large_blocks_whole()
    device = pick_device(options.device, ranks_of_environment())
    with joined(device) as ranks, contextlib.ExitStack() as held:
        ranks.on_first(lambda: held.enter_context(locked(output)))
        held.enter_context(reproducible(options.deterministic))
        reporter = Reporter("finetune", options.log_every, quiet=not ranks.first)
        result = adapt(options, reporter, ranks)
        if ranks.first:
            print(result.last_line(), flush=True)


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock an output directory for one run. The lock ends with the process, however that ends.

    Raises:
        FinetuneError: another run holds the lock.
    """
    import fcntl

    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FinetuneError(f"another run is using {output}") from error
        yield


def adapt(
    options: FinetuneOptions,
    reporter: Reporter,
    ranks: RunRanks = RunRanks(),  # noqa: B008  (frozen)
) -> Result:
    """Load, tokenize, apply LoRA, fuse, train, write the adapter."""
    require("matplotlib")  # used at the end, but a missing package must stop the run now
    output, directory = Path(str(options.output)), Path(str(options.model))
    ranks = sharing(options, ranks)
    checkpoints = Checkpoints(output / CHECKPOINTS, options.keep)
    options = check_run(directory, options, checkpoints, reporter, ranks)
    device = pick_device(options.device, ranks)
    dtype = pick_dtype(options.dtype, device)
    config, trained = ranks.together(lambda: check_job(directory, options, reporter))
    tokenizer = load_tokenizer(directory)
    set_chat_template(tokenizer, options.chat_template)
    jobs, beside = read_jobs(options, ranks), tokenizer_files(tokenizer)
    written = written_by(options, trained, beside, len(jobs) or 1)
    ranks.on_first(lambda: check_room(options, written, len(checkpoints.steps()), reporter.say))
    data = read_data(options, config, tokenizer, jobs, reporter, ranks)
    adapted = adapted_model(directory, options, dtype, device, reporter, ranks, jobs)
    model, state = adapted.model, adapted.report.fp8_state
    runtime = Runtime(model, options, state, adapted.random, ranks=ranks, say=reporter.say)
    arguments = model, options, data.train, state, runtime, ranks
    extra = adapted.adapters
    trainer = Trainer(*arguments) if extra is None else JobsTrainer(extra, jobs, *arguments)
    session = make_session(trainer, data.held, reporter, checkpoints, adapted.sizes)
    whole = partial(whole_model, model)
    files = AdapterFiles(model, directory, beside, lambda: card(directory, data, session), whole)
    if not isinstance(trainer, JobsTrainer):
        checkpoints.adapter = files
    session.identity = {
        **data.identity,
        "base": fingerprint(directory),
        "dtype": str(dtype),
        "on": device.type,
        "fused": bool(adapted.fused),
    }
    if options.resume:
        session.resume()
    begin(session, runtime, adapted, data)
    session.run()
    reporter.say(session.take_best())
    collect(model)
    ranks.on_first(lambda: write_results(session, files, data, output))
    adapter = output if jobs else output / ADAPTER
    return Result(model, adapted.report, session, adapter, bool(adapted.fused))


def check_run(
    directory: Path,
    options: FinetuneOptions,
    checkpoints: Checkpoints,
    reporter: Reporter,
    ranks: RunRanks,
) -> FinetuneOptions:
    """Check what needs no file of the model, or all that a plan needs. Returns the options, with a plan's choices."""
    if not options.resume and checkpoints.steps():
        raise FinetuneError(
            f"{options.output} already holds checkpoints: go on with --resume or take another directory"
        )
    if options.layout == "auto":
        options = ranks.together(lambda: plan_job(directory, options, reporter, ranks))
    if options.resume:
        check_same_options(checkpoints, options)
    check_scope(options, ranks)
    check_package(options)
    ranks.on_first(lambda: check_packages(options))
    make_schedule(options, options.steps or 1000)  # its arguments must stop the run now
    return options


def read_data(
    options: FinetuneOptions,
    config: Any,
    tokenizer: Any,
    jobs: Sequence[Job],
    reporter: Reporter,
    ranks: RunRanks,
) -> RunData:
    """The rows of the run, or of all its jobs, the same number on all ranks.

    Raises:
        ModelError: the model of `config` has no embedding for a token.
        OptionError: an option reads a held-out loss, and nothing is held out.
    """
    tokens = Path(str(options.output)) / TOKENS
    if jobs:
        data = load_jobs(jobs, options, tokenizer, tokens, reporter)
    else:
        data = load_data(options, tokenizer, tokens, reporter.say, ranks, reporter.phase)
    check_rows(data, ranks)  # the checks below then find the same on all ranks
    check_vocabulary(config, data.files)
    if (names := options.needs_held_out()) and not len(data.held):
        raise OptionError(
            f"{names[0]} reads a held-out loss, and no document is held out: give --eval-data FILE, or a larger "
            "--eval-fraction"
        )
    return data


def begin(session: Session, runtime: Runtime, adapted: Adapted, data: RunData) -> None:
    """Say what the run will do, and write that into its output folder."""
    trainer, options = session.trainer, session.options
    ranks, where = trainer.ranks, describe(trainer.device, trainer.ranks)
    with whole_model(adapted.model):
        lines = choices(
            adapted.report, runtime, adapted.fused, where, adapted.sizes, data.train.longest
        )
    for line in lines:
        session.reporter.say(line)
    written = json.dumps(asdict(options), indent=1).encode()
    ranks.on_first(lambda: replace_file(Path(str(options.output)) / OPTIONS, written))
    step = trainer.counters.step
    ranks.on_first(lambda: session.open_loggers(step))


def write_results(session: Session, files: AdapterFiles, data: RunData, output: Path) -> None:
    """Write the adapters, the curve of the loss and the merged model, of the whole model on one rank."""
    trainer, options, say = session.trainer, session.options, session.reporter.say
    if isinstance(trainer, JobsTrainer):
        save_jobs(trainer, files, output, session.reporter, data)
    else:
        save_adapter_files(files, output / ADAPTER)
    title = f"LoRA, rank {options.r}, {files.base.name}"
    plot_losses(session.metrics, output / LOSS, title)
    if options.merge is not None:
        with session.reporter.phase("merging") as shown:
            merged = write_merged(files.base, output / ADAPTER, options.merge, shown)
        say(f"merged model ({options.merge}) in {merged}")


def plan_job(
    directory: Path, options: FinetuneOptions, reporter: Reporter, ranks: RunRanks
) -> FinetuneOptions:
    """The options with what a plan chose for them."""
    check_directory(directory)
    device = pick_device(options.device, ranks)
    gpus = Gpus.of(device, ranks_per_machine(ranks))
    return planned(options, lora_config(options), gpus, reporter.say)


def card(base: Path, data: RunData, session: Session) -> bytes:
    """The model card of the adapter as it is now."""
    options, trainer = session.options, session.trainer
    files = ", ".join(f"`{Path(name).name}`" for name in options.data)
    trained_on = (
        f"{files}: {data.train.inputs:,} tokens in {len(data.train):,} packed sequences. Held out: "
        f"{data.held.inputs:,} tokens."
    )
    sizes = {"sequences a step": trainer.rows_per_step, "steps": trainer.steps}
    return model_card(base, options, trained_on, session.described(), sizes)


def check_job(
    directory: Path, options: FinetuneOptions, reporter: Reporter
) -> tuple[Any, TrainedSize]:
    """Check what needs no weight. Returns the config of the model's text part, and what will be trained."""
    check_directory(directory)
    lora = lora_config(options)
    return check_before_loading(directory, options, lora, reporter.say)


def make_session(
    trainer: Trainer,
    held: PackedRows,
    reporter: Reporter,
    checkpoints: Checkpoints,
    sizes: ModelCounts,
) -> Session:
    model: Any = trainer.model
    options = trainer.options
    peak = find_peak(trainer.device, next(model.parameters()).dtype, options.fp8)
    tokens = trainer.rows_per_step * options.seq_len
    reporter.say(f"{trainer.steps:,} steps of {tokens:,} positions{_mfu_line(peak)}")
    if line := few_steps(len(trainer.rows), trainer.rows_per_step, options):
        reporter.say(line)
    metrics = Path(str(options.output)) / METRICS
    return Session(trainer, held, options, reporter, metrics, sizes.flops, peak, checkpoints)


def few_steps(rows: int, rows_per_step: int, options: FinetuneOptions) -> str:
    """A sentence about data whose epoch has fewer than FEW steps, and what changes that; "" of more data."""
    if rows >= FEW * rows_per_step:
        return ""
    steps = f"{rows / rows_per_step:.1f}" if rows > rows_per_step else "at most one"
    many = "sequence" if rows == 1 else "sequences"
    return (
        f"few steps: an epoch has {steps}, as all training data are {rows:,} {many} of {options.seq_len:,} and a step "
        f"takes {rows_per_step:,}; smaller --batch-size, --grad-accum or --seq-len make more steps of an epoch, and "
        f"--{'steps' if options.steps else 'epochs'} says how long to train"
    )


def _mfu_line(peak: Peak | str) -> str:
    if isinstance(peak, Peak):
        return f"; MFU against {peak.tflops:g} TFLOP/s ({peak.name})"
    return f"; {peak}" if peak else ""


def describe(device: torch.device, ranks: RunRanks) -> str:
    one = f"the CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        one = torch.cuda.get_device_name(device)
    return f"{ranks.size} × {one}" if ranks.size > 1 else one


def fingerprint(directory: Path) -> str:
    """A hash of the base model's files.

    It covers config.json and, per weight file, the name, size, header and 256 windows of 4 KiB spread over its values.
    """
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


def write_merged(base: Path, adapter: Path, format: str, progress: Observer = nobody) -> Path:
    """Write the base with the adapter merged into it, beside the adapter.

    Raises:
        FinetuneError: the merge failed; the adapter is kept.
    """
    try:
        target = adapter.parent / MERGED
        return export_model(
            base, adapter, target, format=format, overwrite=True, progress=progress
        ).path
    except (ValueError, OSError) as error:
        what = describe_os_error(error, adapter.parent) if isinstance(error, OSError) else error
        raise FinetuneError(
            f"the adapter is in {adapter}, but was not merged: {what}; lorakernels export merges it later"
        ) from error
