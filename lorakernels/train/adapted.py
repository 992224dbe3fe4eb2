# SPDX-License-Identifier: Apache-2.0
"""The model of a run: its base with adapters, fused, and this rank's part of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lorakernels import (
    AdapterBatch,
    BlockScaling,
    DelayedScaling,
    Loaded,
    LoRAConfig,
    LoRAReport,
    Offload,
    PhiloxState,
    PipelineParallel,
    angles_by_document,
    apply_lora,
    load_quantized,
)
from lorakernels.train.errors import ModelError, OptionError
from lorakernels.train.jobs import Job, add_jobs
from lorakernels.train.layouts.context import share_rows
from lorakernels.train.layouts.parts import whole_model
from lorakernels.train.layouts.pipeline import cut_stages, stage_ranks
from lorakernels.train.layouts.sharding import pinning, shard_mesh, shard_parts
from lorakernels.train.layouts.tensor import layer_mesh, split_layers, splits_vocabulary
from lorakernels.train.model.checks import check_model, check_same_layers
from lorakernels.train.model.flops import ModelCounts
from lorakernels.train.model.model import (
    attention_of,
    load_model,
    not_read,
    quiet_transformers,
    save_activations,
)
from lorakernels.train.model.preflight import read_config
from lorakernels.train.model.windows import check_windows
from lorakernels.train.options.fields import targets_of
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.reporter import Reporter
from lorakernels.train.run.runtime import Fused, fuse_layers, make_random_state


@dataclass(frozen=True)
class Meshes:
    """The ranks over which the base is sharded, a model's stages are spread, and its layers are split; or None."""

    base: DeviceMesh | None = None
    stages: DeviceMesh | None = None
    tp: DeviceMesh | None = None


@dataclass(frozen=True)
class Adapted:
    """The result of `adapted_model`.

    Attributes:
        model: this rank's part of it, where ranks have parts.
        report: of its adapters.
        random: the state that their dropout draws from.
        fused: whether layers were fused, and why not.
        sizes: of the whole model.
        adapters: of the jobs; None without `jobs`.
    """

    model: nn.Module
    report: LoRAReport
    random: PhiloxState
    fused: Fused
    sizes: ModelCounts
    adapters: AdapterBatch | None


def adapted_model(
    directory: Path,
    options: FinetuneOptions,
    dtype: torch.dtype,
    device: torch.device,
    reporter: Reporter,
    ranks: RunRanks,
    jobs: Sequence[Job],
) -> Adapted:
    """Load the base in `directory`, add adapters, fuse, and divide what the ranks divide. Collective.

    Raises:
        ModelError: the model cannot be loaded or adapted, on this rank or another.
    """
    random = make_random_state(options.seed, ranks.replica, device)
    torch.manual_seed(options.seed)
    mesh = shard_mesh(options, ranks, device, reporter.say)
    shared = stage_ranks(ranks, device)
    layers = layer_mesh(ranks, device)
    read_sharded = mesh if layers is None else None  # parts of layers are sharded afterwards
    meshes = Meshes(read_sharded, None if shared is None else shared.mesh, layers)
    with warnings.catch_warnings():  # check_before_loading has given this warning
        warnings.filterwarnings("ignore", "LoRAConfig.* matches no ")
        model, report = ranks.together(
            lambda: load_adapted(directory, options, dtype, device, random, reporter, meshes)
        )
    angles_by_document(model)
    with PipelineParallel.own_layers_alone(model):
        ranks.together(lambda: check_model(model, options.isolate_documents))
        ranks.together(lambda: check_windows(model, options))
    adapters = add_jobs(model, jobs) if jobs else None  # from here on a batch has rows of each job
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
    return Adapted(model, report, random, fused, sizes, adapters)


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
        reading = reporter.phase("loading")
        try:
            with reading:
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
            _say_loaded(loaded, meshes, reporter)
            loaded.model.config.use_cache = False  # type: ignore[union-attr]
            return loaded.model, loaded.report
    torch.manual_seed(options.seed)
    with reporter.phase("loading") as reading:
        model = load_model(directory, dtype, device, reporter.say, reading)
    torch.manual_seed(options.seed)
    return model, add_adapters(model, options, random)


def _say_loaded(loaded: Loaded, meshes: Meshes, reporter: Reporter) -> None:
    if meshes.stages is not None or meshes.tp is not None:
        whose = "stage" if meshes.tp is None else "parts of layers"
        reporter.say(f"base: {loaded.bytes / 1e6:,.3f} MB read, those of this rank's {whose}")
    if loaded.left_out:
        reporter.say(not_read(loaded.left_out))
    if loaded.sharded is not None:
        reporter.say(f"base: {'; '.join(str(loaded.sharded).splitlines())}")


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
            fp8=recipe_of(options),
        )
    except (ValueError, TypeError) as error:
        raise OptionError(str(error)) from error


def sizes_of(model: nn.Module, options: FinetuneOptions) -> ModelCounts:
    """Counts of the whole model, also if this rank has a part of it."""
    with whole_model(model):
        return ModelCounts.of(model, options.seq_len)
