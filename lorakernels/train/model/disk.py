# SPDX-License-Identifier: Apache-2.0
"""The bytes that a run writes besides its logs, and whether the output's file system has room for it.

An adapter's numbers are fp32. A checkpoint has them, what the optimizer keeps for each of them, and the FP8 state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lorakernels.train.errors import FinetuneError
from lorakernels.train.options.options import FinetuneOptions

FLOAT = 4
HISTORY = 4 << 10  # bytes for each trained tensor, two to a layer, of amaxes of delayed scaling
KEPT = {"adamw_torch_fused": 2.0, "adamw_torch": 2.0, "adamw_8bit": 0.5, "adafactor": 0.0}


@dataclass(frozen=True)
class Written:
    """Bytes that a run writes: each checkpoint, the final adapter, the merged model."""

    checkpoint: int
    adapter: int
    merged: int = 0


@dataclass(frozen=True)
class TrainedSize:
    """The trained part of each adapter: how many numbers, in how many tensors. `merged`: bytes of a merged model."""

    numbers: int
    tensors: int
    merged: int = 0


def written_by(
    options: FinetuneOptions, trained: TrainedSize, beside: Mapping[str, bytes], adapters: int = 1
) -> Written:
    """`beside`: {name: contents} of the tokenizer's files, which lie beside each adapter."""
    weights = FLOAT * trained.numbers * adapters
    moments = KEPT.get(options.optim, float(options.beta1 > 0))  # sgd has its momentum
    from_base = options.init_lora_weights not in ("true", "gaussian")
    files = sum(map(len, beside.values()))
    adapter = weights * (2 if from_base else 1) + files * adapters
    state = int(moments * weights) + weights * from_base
    if options.fp8 and options.fp8_recipe == "delayed":
        state += HISTORY * trained.tensors
    return Written(adapter + state, adapter, trained.merged)


def check_room(
    options: FinetuneOptions, written: Written, held: int, say: Callable[[str], None]
) -> None:
    """Say if there is less room than the run may need. `held`: checkpoints that are there already.

    Raises:
        FinetuneError: there is no room for the first checkpoint, the adapter and the merged model.
    """
    output = Path(str(options.output))
    existing = next(p for p in [output, *output.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    end = written.adapter + written.merged
    parts = f"a checkpoint takes {_mib(written.checkpoint)}, the adapter {_mib(written.adapter)}"
    if written.merged:
        parts += f", the merged model {_mib(written.merged)}"
    if free < written.checkpoint + end:
        raise FinetuneError(
            f"no room in {output}: {parts}, and {_mib(free)} are free: make room, or take an output on another disk"
        )
    at_once = max(1, _at_once(options) - held)
    most = at_once * written.checkpoint + end
    if free < most:
        say(
            f"little room in {output}: {parts}; with {at_once} checkpoints at once the run takes {_mib(most)}, and "
            f"{_mib(free)} are free: a smaller --keep takes less"
        )


def _at_once(options: FinetuneOptions) -> int:
    """Checkpoints that lie there together. One is written before the oldest is deleted."""
    if not options.save_every:
        return 1 + options.load_best_model_at_end
    kept = options.keep + options.load_best_model_at_end + 1
    return kept if options.steps is None else min(kept, options.steps // options.save_every + 1)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
