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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    LoRAConfig,
    LoRAReport,
    Offload,
    PhiloxState,
    PipelineParallel,
    apply_lora,
    export_model,
    load_quantized,
)
from lorakernels.train.adapter_files import AdapterFiles, save_adapter_files, tokenizer_files
from lorakernels.train.checkpoint import Checkpoints
from lorakernels.train.choices import choices
from lorakernels.train.context import share_rows, sharing
from lorakernels.train.data.prepare import RunData, check_rows, load_data, set_chat_template
from lorakernels.train.errors import (
    FinetuneError,
    ModelError,
    OptionError,
    describe_os_error,
    require,
)
from lorakernels.train.files import replace_file
from lorakernels.train.flops import Peak, Sizes, find_peak
from lorakernels.train.jobs import JobsTrainer, add_jobs, load_jobs, read_jobs, save_jobs
from lorakernels.train.layout import Gpus, planned
from lorakernels.train.loggers import check_packages
from lorakernels.train.loop import Trainer
from lorakernels.train.metrics import plot_losses
from lorakernels.train.model import (
    attention_of,
    check_directory,
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    quiet_transformers,
    reproducible,
    save_activations,
)
from lorakernels.train.model_card import model_card
from lorakernels.train.model_checks import check_model, check_same_layers
from lorakernels.train.optimizers import check_package
from lorakernels.train.option_fields import targets_of
from lorakernels.train.option_sources import default_of
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.packing import PackedRows
from lorakernels.train.parts import collect, whole_model
from lorakernels.train.pipeline import cut_stages, stage_ranks
from lorakernels.train.preflight import check_before_loading, check_vocabulary, read_config
from lorakernels.train.ranks import Ranks, joined, ranks_of_environment
from lorakernels.train.reporter import Reading, Reporter
from lorakernels.train.running_options import RunningOptions
from lorakernels.train.runtime import Runtime, check_scope, fuse_layers, make_random_state
from lorakernels.train.same_run import check_same_options
from lorakernels.train.schedule import make_schedule
from lorakernels.train.session import Session
from lorakernels.train.sharding import pinning, ranks_per_machine, shard_mesh, shard_parts
from lorakernels.train.tensor import layer_mesh, split_layers, splits_vocabulary

FEW = 10  # steps of an epoch, below which a run says so


@dataclass(frozen=True)
class Meshes:
    """The ranks over which the base is sharded, a model's stages are spread, and its layers are split; or None."""

    base: DeviceMesh | None = None
    stages: DeviceMesh | None = None
    tp: DeviceMesh | None = None


@dataclass
class Result:
    """The outcome of a finished job. `adapter` is the directory of the adapter; `fused` says if layers were fused."""

    model: nn.Module
    report: LoRAReport
    session: Session
    adapter: Path
    fused: bool = False

    def last_line(self) -> str:
        found = self.session.evaluations
        first, last = found.first_eval, found.last_eval
        if first is None or last is None:
            return f"validation loss not measured (nothing held out), adapter in {self.adapter}"
        return f"validation loss {first:.4f} → {last:.4f}, adapter in {self.adapter}"


def finetune(options: FinetuneOptions) -> None:
    """Run ``lorakernels finetune --model`` on one process, or on each process that torchrun started."""
    output = Path(str(options.output))
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
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
) -> Result:
    """Load, tokenize, apply LoRA, fuse, train, write the adapter."""
    require("matplotlib")  # used at the end, but a missing package must stop the run now
    output, directory = Path(str(options.output)), Path(str(options.model))
    ranks = sharing(options, ranks)
    checkpoints = Checkpoints(output / "checkpoints", options.keep)
    if not options.resume and checkpoints.steps():
        raise FinetuneError(
            f"{output} already holds checkpoints: go on with --resume or take another directory"
        )
    if options.layout == "auto":
        options = ranks.together(lambda: plan_job(directory, options, reporter, ranks))
    if options.resume:
        check_same_options(checkpoints, options)
    check_scope(options, ranks)
    check_package(options)
    ranks.on_first(lambda: check_packages(options))
    make_schedule(options, options.steps or 1000)  # its arguments must stop the run now
    device = pick_device(options.device, ranks)
    dtype = pick_dtype(options.dtype, device)
    config = ranks.together(lambda: check_job(directory, options, reporter))
    tokenizer = load_tokenizer(directory)
    set_chat_template(tokenizer, options.chat_template)
    jobs = read_jobs(options, ranks)
    if jobs:
        data = load_jobs(jobs, options, tokenizer, output / "tokens", reporter.say)
    else:
        data = load_data(options, tokenizer, output / "tokens", reporter.say, ranks)
    check_rows(data, ranks)  # the checks below then find the same on all ranks
    check_vocabulary(config, data.max_token)
    if (names := options.needs_held_out()) and not len(data.held):
        raise OptionError(f"{names[0]} reads a held-out loss, and nothing is held out")
    random = make_random_state(options.seed, ranks.replica, device)
    torch.manual_seed(options.seed)
    mesh = shard_mesh(options, ranks, device, reporter.say)
    shared = stage_ranks(ranks, device)
    layers = layer_mesh(ranks, device)
    read_sharded = mesh if layers is None else None  # parts of layers are sharded afterwards
    meshes = Meshes(read_sharded, None if shared is None else shared.mesh, layers)
    model, report = ranks.together(
        lambda: load_adapted(directory, options, dtype, device, random, reporter, meshes)
    )
    adapters = add_jobs(model, jobs) if jobs else None
    with PipelineParallel.own_layers_alone(model):
        ranks.together(lambda: check_model(model))
    fused = fuse_layers(model, options, device)
    check_same_layers(model, ranks)  # one rank alone may have loaded or fused them otherwise
    sizes = sizes_of(model, options) if ranks.tp > 1 else None  # before the embedding is split
    split_layers(model, options, ranks, layers, reporter.say)
    if layers is not None:
        shard_parts(model, mesh, reporter.say)
    if options.gradient_checkpointing:
        save_activations(model)  # hooks the embedding, which the ranks may have replaced
    cut_stages(model, options, ranks, shared, random)
    share_rows(model, ranks, device)
    sizes = sizes or sizes_of(model, options)
    runtime = Runtime(model, options, report.fp8_state, random, ranks=ranks, say=reporter.say)
    identity = {
        **data.identity,
        "base": fingerprint(directory),
        "dtype": str(dtype),
        "on": device.type,
        "fused": bool(fused),
    }
    metrics = output / "metrics.jsonl"
    given = model, options, data.train, report.fp8_state, runtime, ranks
    trainer = Trainer(*given) if adapters is None else JobsTrainer(adapters, jobs, *given)
    session = make_session(trainer, data.held, reporter, metrics, sizes)
    files = AdapterFiles(
        model,
        directory,
        tokenizer_files(tokenizer),
        lambda: card(directory, data, session),
        partial(whole_model, model),
    )
    if not isinstance(trainer, JobsTrainer):
        checkpoints.adapter = files
    session.checkpoints, session.identity = checkpoints, identity
    if options.resume:
        session.resume()
    with whole_model(model):
        lines = choices(report, runtime, fused, describe(device, ranks), sizes, data.train.longest)
    for line in lines:
        reporter.say(line)
    written = json.dumps(asdict(options), indent=1).encode()
    ranks.on_first(lambda: replace_file(output / "options.json", written))
    step = trainer.counters.step
    ranks.on_first(lambda: session.open_loggers(step))
    session.run()
    reporter.say(session.take_best())
    adapter = output / "adapter"

    def finish() -> None:
        if isinstance(trainer, JobsTrainer):
            save_jobs(trainer, files, output, reporter.say, data)
        else:
            save_adapter_files(files, adapter)
        title = f"LoRA, rank {options.r}, {directory.name}"
        plot_losses(metrics, output / "loss.png", title)
        if options.merge is not None:
            merged = write_merged(directory, adapter, options.merge)
            reporter.say(f"merged model ({options.merge}) in {merged}")

    collect(model)
    ranks.on_first(finish)
    return Result(model, report, session, output if jobs else adapter, bool(fused))


def plan_job(
    directory: Path, options: FinetuneOptions, reporter: Reporter, ranks: Ranks
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


def check_job(directory: Path, options: FinetuneOptions, reporter: Reporter) -> Any:
    """Check what needs no weight. Returns the config of the model's text part."""
    check_directory(directory)
    lora = lora_config(options)
    return check_before_loading(directory, options, lora, reporter.say)


def load_adapted(
    directory: Path,
    options: FinetuneOptions,
    dtype: torch.dtype,
    device: torch.device,
    random: PhiloxState,
    reporter: Reporter,
    meshes: Meshes = Meshes(),
) -> tuple[nn.Module, LoRAReport]:
    """The base with its adapters, and their report. Of a pipeline and of split layers, this rank's part alone, where
    that can be read.

    With `fp8`, load_quantized quantizes the weights one by one, including layers without an adapter. If it refuses the
    checkpoint before it reads a value, transformers loads the model instead, unless the base is sharded or offloaded.
    An initialisation from the 16-bit weight is such a case, and holds the same layers in FP8. If it refuses to read a
    part of the model, such as with DoRA, it reads the whole one on every rank.

    Raises:
        ModelError: the model cannot be loaded or adapted.
    """
    if options.fp8:
        quiet_transformers()
        reading = Reading(reporter)
        try:
            loaded = load_quantized(
                directory,
                device=device,
                dtype=dtype,
                lora=lora_config(options),
                rng_state=random,
                attn_implementation=attention_of(read_config(directory)),
                progress=reading,
                mesh=meshes.base,
                offload=Offload(options.offload, progress=pinning(reporter.say)),
                embeddings=options.shard_embeddings and meshes.base is not None,
                stages=meshes.stages,
                tp=meshes.tp,
                vocabulary=meshes.tp is not None and splits_vocabulary(directory, options),
            )
        except (ValueError, TypeError, OSError) as error:
            if reading.began or meshes.base is not None or options.offload:
                raise ModelError(f"the model in {directory} cannot be loaded: {error}") from error
            if meshes.stages is not None or meshes.tp is not None:
                reporter.say(f"base: each rank reads the whole model first: {error}")
                whole = Meshes(meshes.base)
                return load_adapted(directory, options, dtype, device, random, reporter, whole)
            reporter.say(f"loaded by transformers instead of into FP8 tensor by tensor: {error}")
        else:
            assert loaded.report is not None
            if meshes.stages is not None or meshes.tp is not None:
                whose = "stage" if meshes.tp is None else "parts of layers"
                reporter.say(
                    f"base: {loaded.bytes / 1e6:,.3f} MB read, those of this rank's {whose}"
                )
            if loaded.sharded is not None:
                reporter.say(f"base: {'; '.join(str(loaded.sharded).splitlines())}")
            loaded.model.config.use_cache = False  # type: ignore[union-attr]
            return loaded.model, loaded.report
    torch.manual_seed(options.seed)
    model = load_model(directory, dtype, device)
    torch.manual_seed(options.seed)
    return model, add_adapters(model, options, random)


def add_adapters(
    model: nn.Module, options: FinetuneOptions, random: PhiloxState | None = None
) -> LoRAReport:
    try:
        lora = lora_config(options)
        frozen = "fp8" if lora.changes_base and lora.fp8 else "plain"
        return apply_lora(model, lora, rng_state=random, frozen=frozen)
    except (ValueError, TypeError) as error:
        raise ModelError(str(error)) from error


def recipe_of(options: FinetuneOptions) -> DelayedScaling | BlockScaling | None:
    """The FP8 recipe of the base; None for a plain base."""
    if not options.fp8:
        return None
    return BlockScaling() if options.fp8_recipe == "block" else DelayedScaling()


def lora_config(options: FinetuneOptions) -> LoRAConfig:
    try:
        return LoRAConfig(
            r=options.r,
            lora_alpha=options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules=targets_of(options.target_modules),
            exclude_modules=options.exclude_modules or None,
            target_parameters=options.target_parameters or None,
            use_rslora=options.use_rslora,
            use_dora=options.use_dora,
            init_lora_weights=options.init_lora_weights == "true" or options.init_lora_weights,
            weight_layout=options.weight_layout,  # type: ignore[arg-type]
            fp8=recipe_of(options),
        )
    except (ValueError, TypeError) as error:
        raise OptionError(str(error)) from error


def sizes_of(model: nn.Module, options: FinetuneOptions) -> Sizes:
    """Sizes of the whole model, also if this rank has a part of it."""
    with whole_model(model):
        return Sizes.of(model, options.seq_len)


def make_session(
    trainer: Trainer, held: PackedRows, reporter: Reporter, metrics: Path, sizes: Sizes
) -> Session:
    """A Session without checkpoints."""
    model: Any = trainer.model
    options = trainer.options
    peak = find_peak(trainer.device, next(model.parameters()).dtype, options.fp8)
    tokens = trainer.rows_per_step * options.seq_len
    reporter.say(f"{trainer.steps:,} steps of {tokens:,} positions; {_mfu_line(peak)}")
    if line := few_steps(len(trainer.rows), trainer.rows_per_step, options):
        reporter.say(line)
    return Session(trainer, held, options, reporter, metrics, sizes.flops, peak)


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
    return f"MFU against {peak.tflops:g} TFLOP/s ({peak.name})" if isinstance(peak, Peak) else peak


def describe(device: torch.device, ranks: Ranks) -> str:
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


def write_merged(base: Path, adapter: Path, format: str) -> Path:
    """Write the base with the adapter merged into it, beside the adapter.

    Raises:
        FinetuneError: the merge failed; the adapter is kept.
    """
    try:
        return export_model(
            base, adapter, adapter.parent / "merged", format=format, overwrite=True
        ).path
    except (ValueError, OSError) as error:
        what = describe_os_error(error, adapter.parent) if isinstance(error, OSError) else error
        raise FinetuneError(
            f"the adapter is in {adapter}, but was not merged: {what}; lorakernels export merges it later"
        ) from error


def without_lora(options: FinetuneOptions, **changes: Any) -> FinetuneOptions:
    """Options of the same machine, for training a whole model without FP8 by the ordinary way of running."""
    running = {item.name: default_of(item) for item in fields(RunningOptions)}
    return replace(options, fp8=False, **running, **changes)
