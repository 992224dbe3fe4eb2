# SPDX-License-Identifier: Apache-2.0
"""``finetune --jobs FILE``: several adapters over one base at once, each with data, rank and learning rate of its own.

    fr: {data: [fr.jsonl], lr: 1.0e-4}
    de: {data: [de.jsonl, news.txt], eval_data: [de_test.jsonl], r: 8}

A step trains every job on equally many of its own rows. They are the segments of one batch (AdapterBatch), in the
file's order. A job's gradient comes from the mean loss of its own tokens, and is clipped by its own norm, so that it
trains as it would alone. An epoch passes over the longest job's rows once. Shorter jobs repeat theirs meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lorakernels import AdapterBatch, batch_adapters
from lorakernels.train.data.packing import IGNORE, PADDING, PackedBatch, PackedRows
from lorakernels.train.data.prepare import RunData, load_data
from lorakernels.train.errors import ModelError, OptionError, require
from lorakernels.train.files.adapter_files import AdapterFiles, save_adapter_files
from lorakernels.train.files.written import ADAPTER, WRITTEN
from lorakernels.train.files.yaml_text import load_yaml
from lorakernels.train.model_card import model_card
from lorakernels.train.options.checks import check_apart
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.progress import in_batches
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.loop import StepRows, Trainer, evaluate
from lorakernels.train.run.reporter import Reporter


@dataclass(frozen=True)
class Job:
    """One adapter.

    Attributes:
        name: of its directory in the output, none that a run writes itself.
        data, eval_data: as the options of the same names.
        lr: its peak learning rate; None takes the run's.
        r: its rank, at most the run's; None takes that.
    """

    name: str
    data: list[str]
    eval_data: list[str]
    lr: float | None = None
    r: int | None = None


def read_jobs(options: FinetuneOptions, ranks: RunRanks) -> list[Job]:
    """The jobs of the file that the options name, in its order; none without one.

    Raises:
        OptionError: the file cannot be read, an entry is not one of a job, or there are several ranks.
    """
    if options.jobs is None:
        return []
    if ranks.size > 1:
        raise OptionError(f"jobs run on one GPU, found {ranks.size} ranks")
    path = options.jobs
    yaml = require("yaml")
    try:
        loaded = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"jobs: the file {path} cannot be read: {error}") from error
    if not isinstance(loaded, dict) or not loaded:
        raise OptionError(f"jobs: {path} must map a name to each job, found {loaded!r}")
    return [_job(path, str(name), entries, options) for name, entries in loaded.items()]


def _job(path: str, name: str, entries: Any, options: FinetuneOptions) -> Job:
    where = f"jobs: {path}: {name}"
    if not name or Path(name).name != name:
        raise OptionError(f"{where!r} must be the name of a directory in output")
    if name.startswith(".") or name.casefold() in WRITTEN:
        raise OptionError(
            f"{where!r} is a directory in output, which must not begin with a dot or be one that a run writes there: "
            f"{', '.join(WRITTEN)}"
        )
    keys = [item.name for item in fields(Job) if item.name != "name"]
    if not isinstance(entries, dict):
        raise OptionError(f"{where} must hold {', '.join(keys)}, found {entries!r}")
    if unknown := sorted(set(entries) - set(keys)):
        raise OptionError(f"{where}: unknown {unknown[0]!r}, expected one of {', '.join(keys)}")
    lists = {}
    for key in ("data", "eval_data"):
        value = entries.get(key, [])
        lists[key] = [value] if isinstance(value, str) else value
        if not isinstance(lists[key], list) or not all(isinstance(v, str) for v in lists[key]):
            raise OptionError(f"{where}: {key} must be files, found {value!r}")
        check_apart(f"{where}: {key}", lists[key], options.output)
    if not lists["data"]:
        raise OptionError(f"{where}: data is missing")
    lr, r = _number(where, "lr", entries), _number(where, "r", entries)
    if r is not None and (r != int(r) or not 1 <= r <= options.r):
        raise OptionError(f"{where}: r must be 1 to {options.r}, the run's --r, found {r:g}")
    return Job(name, **lists, lr=lr, r=None if r is None else int(r))


def _number(where: str, key: str, entries: Mapping[str, Any]) -> float | None:
    value = entries.get(key)
    if value is None:
        return None
    try:
        number = float(value)  # YAML 1.1 reads 2e-4 as a string
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not 0 < number < float("inf"):
        raise OptionError(f"{where}: {key} must be positive and finite, found {value!r}")
    return number


class JobRows:
    """The rows of several jobs, as `PackedRows`: number n stands for a row of each job.

    In training, that is row n mod the job's length. With `once`, for evaluation, every row occurs once over all
    numbers. The rows of a shorter job are spread evenly, with padding between them. `longest` is over all jobs.
    """

    def __init__(self, by_job: Sequence[PackedRows], seq_len: int, once: bool = False) -> None:
        self.by_job, self.seq_len, self.once = list(by_job), seq_len, once
        self.inputs, self.targets = (
            sum(getattr(rows, k) for rows in by_job) for k in ("inputs", "targets")
        )
        self.longest = max(rows.longest for rows in by_job)

    def __len__(self) -> int:
        return max(map(len, self.by_job), default=0)

    @property
    def fill(self) -> float:
        """Share of the packed positions that hold tokens."""
        return self.inputs / max(1, sum(map(len, self.by_job)) * self.seq_len)

    def only(self, index: int) -> JobRows:
        """The rows of one job. The segments of all other jobs are padding."""
        nothing = PackedRows(self.by_job[0].tokens, np.zeros((0, 2), np.int64), self.seq_len)
        kept = [rows if i == index else nothing for i, rows in enumerate(self.by_job)]
        return JobRows(kept, self.seq_len, self.once)

    def numbers_of(self, rows: PackedRows, numbers: Sequence[int]) -> list[int]:
        """The rows of one job that `numbers` stand for. There are fewer rows than numbers where the job has padding."""
        count, most = len(rows), len(self)
        if not self.once:
            return [n % count for n in numbers] if count else []
        return [n * count // most for n in numbers if n * count // most > (n - 1) * count // most]

    def targets_of_each(self, numbers: Sequence[int]) -> list[int]:
        """Labels of each job that are trained."""
        return [
            sum(map(rows.targets_of, self.numbers_of(rows, numbers))) for rows in self.by_job
        ]  # fmt: skip

    def inputs_of(self, number: int) -> int:
        return sum(
            rows.inputs_of(n) for rows in self.by_job for n in self.numbers_of(rows, [number])
        )

    def targets_of(self, number: int) -> int:
        return sum(self.targets_of_each([number]))

    def batch(self, numbers: Sequence[int]) -> PackedBatch:
        """A batch of J len(numbers) rows: the first job's, then the second's, …"""
        parts = []
        for rows in self.by_job:
            own_numbers = self.numbers_of(rows, numbers)
            parts += [rows.batch(own_numbers)] if own_numbers else []
            missing = len(numbers) - len(own_numbers)
            parts += [self._padding(missing)] if missing else []
        joined = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("input_ids", "labels", "positions", "segments")
        }
        targets, starts = sum(part.targets for part in parts), self._starts(parts)
        return PackedBatch(**joined, targets=targets, starts=starts, longest=self.longest).checked()

    def _padding(self, count: int) -> PackedBatch:
        zeros = torch.zeros(count, self.seq_len, dtype=torch.int64)
        pieces = torch.arange(0, self.seq_len, self.longest, dtype=torch.int32)
        begins = torch.arange(count, dtype=torch.int32)[:, None] * self.seq_len + pieces
        starts = torch.cat((begins.flatten(), begins.new_tensor([zeros.numel()])))
        labels, segments = torch.full_like(zeros, IGNORE), torch.full_like(zeros, PADDING)
        return PackedBatch(zeros, labels, zeros, segments, 0, starts, self.longest)

    def _starts(self, parts: Sequence[PackedBatch]) -> Tensor:
        """The first position of each document, counted over all rows. The tail holds the number of positions."""
        starts_of_parts, offset = [], 0
        for part in parts:
            assert part.starts is not None
            starts_of_parts.append(part.starts[part.starts < part.input_ids.numel()] + offset)
            offset += part.input_ids.numel()
        starts = torch.cat(starts_of_parts)
        size = sum(len(part.starts) - 1 for part in parts if part.starts is not None) + 1
        whole = torch.full((size,), offset, dtype=torch.int32)
        whole[: len(starts)] = starts
        return whole


def load_jobs(
    jobs: Sequence[Job], options: FinetuneOptions, tokenizer: Any, cache: Path, reporter: Reporter
) -> RunData:
    """The data of every job, joined.

    Raises:
        DataError: a file or a row cannot be used, or a job has nothing to train on.
    """
    loaded = []
    for job in jobs:
        reporter.say(f"job {job.name}:")
        of_job = replace(options, data=job.data, eval_data=job.eval_data)
        arguments = of_job, tokenizer, cache, reporter.say, RunRanks(), reporter.phase
        loaded.append(load_data(*arguments))
    identity: dict[str, Any] = {
        f"{job.name}: {key}": value
        for job, data in zip(jobs, loaded, strict=True)
        for key, value in {**data.identity, "lr": str(job.lr), "r": str(job.r)}.items()
    }
    # an optimizer's state tells parameters apart by their number alone
    identity["the order of jobs"] = [job.name for job in jobs]
    train = JobRows([data.train for data in loaded], options.seq_len)
    held = JobRows([data.held for data in loaded], options.seq_len, once=True)
    files = tuple(file for data in loaded for file in data.files)
    return RunData(train, held, identity, files)  # type: ignore[arg-type]


def add_jobs(model: nn.Module, jobs: Sequence[Job]) -> AdapterBatch:
    """An adapter for each job.

    Raises:
        ModelError: the model's layers cannot hold several adapters.
    """
    ranks = {job.name: job.r for job in jobs if job.r is not None}
    try:
        return batch_adapters(model, [job.name for job in jobs], ranks)
    except ValueError as error:
        raise ModelError(str(error)) from error


def save_jobs(
    trainer: JobsTrainer, files: AdapterFiles, output: Path, reporter: Reporter, data: RunData
) -> None:
    """Write <output>/<job>/adapter/ of every job, as PEFT opens it, and say its held-out loss."""
    held: Any = data.held
    losses = trainer.evaluate_each(held, reporter)
    for job in trainer.jobs:
        loss = (
            f"{losses[job.name]:.4f}"
            if job.name in losses
            else "not measured, as no document was held out"
        )
        text = f"Job {job.name}, one of {len(trainer.jobs)} at once. Held-out loss in nats per token: {loss}."
        options = job_options(job, trainer.options)
        sizes = {"sequences a step": trainer.rows_per_step, "steps": trainer.steps}
        card = model_card(files.base, options, ", ".join(job.data), text, sizes)
        target = output / job.name / ADAPTER
        with trainer.adapters.only(job.name):
            save_adapter_files(replace(files, card=partial(bytes, card)), target)
        reporter.say(f"job {job.name}: validation loss {loss}, adapter in {target}")


def job_options(job: Job, options: FinetuneOptions) -> FinetuneOptions:
    """The options that would train the job alone. Of a smaller rank, alpha is smaller, as the scaling stays."""
    r = job.r or options.r
    share = math.sqrt(r / options.r) if options.use_rslora else r / options.r
    alpha = options.lora_alpha * share
    return replace(options, data=job.data, lr=job.lr or options.lr, r=r, lora_alpha=alpha)


class JobsTrainer(Trainer):
    """Trains the adapters of an AdapterBatch, each as its job says."""

    def __init__(
        self, adapters: AdapterBatch, jobs: Sequence[Job], model: nn.Module, *arguments: Any, **more: Any
    ) -> None:  # fmt: skip
        self.adapters, self.jobs = adapters, list(jobs)
        super().__init__(model, *arguments, **more)
        self.items_of_each = torch.ones(len(self.jobs), device=self.device)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {
            f"{job.name}: {path}": parameter
            for job in self.jobs
            for path, parameter in self.adapters.parameters(job.name, padded=True).items()
        }

    def _ratio(self, name: str) -> float:
        job = next(job for job in self.jobs if job.name == name.rpartition(": ")[0])
        return 1.0 if job.lr is None else job.lr / self.options.lr

    def _set_items(self, rows: StepRows) -> None:
        super()._set_items(rows)
        targets = self.rows.targets_of_each(rows.numbers)  # type: ignore[attr-defined]
        self.items_of_each.copy_(torch.tensor(targets, dtype=torch.float32))

    def _forward_and_backward(self, batches: list[PackedBatch]) -> Tensor:
        self.adapters.clear_gradients()
        loss = super()._forward_and_backward(batches)
        self.adapters.give_gradients()
        return loss

    def _clip(self, gradients: list[Tensor]) -> Tensor:
        """Scale each job's gradients to the mean over its own tokens, and clip them. Returns the norm over all jobs."""
        norms = []
        most = self.options.max_grad_norm
        for number, job in enumerate(self.jobs):
            parts = self.adapters.parameters(job.name, padded=True).values()
            gradients_of_job = [p.grad for p in parts if p.grad is not None]
            factor = self.items / self.items_of_each[number]
            norm = torch.nn.utils.get_total_norm(gradients_of_job).float() * factor
            if most > 0:
                factor = factor * (most / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients_of_job, factor)
            norms.append(norm)
        return torch.stack(norms).norm()

    def evaluate_each(self, held: JobRows, reporter: Reporter) -> dict[str, float]:
        """{name: mean token loss, in nats, on its held-out rows} of the jobs that have any."""
        losses = {}
        for i, job in enumerate(self.jobs):
            if len(held.by_job[i]):
                rows: Any = held.only(i)
                with reporter.phase(f"evaluation of {job.name}", in_batches) as shown:
                    losses[job.name] = evaluate(self.model, rows, self.options, RunRanks(), shown)
        return losses
