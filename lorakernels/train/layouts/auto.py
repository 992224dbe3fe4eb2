# SPDX-License-Identifier: Apache-2.0
"""`--layout auto`: shard the base, and choose what layers keep, as `lorakernels plan` says for this model and machine.

The plan is by constants, the GPU's whole memory and the limit of the host's control groups, not by a measurement. So a
resumed run chooses the same where these and the number of GPUs are the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorakernels import LoRAConfig, ShardPlan
from lorakernels.train.errors import OptionError
from lorakernels.train.model.preflight import read_config
from lorakernels.train.options.options import FinetuneOptions


@dataclass(frozen=True)
class Gpus:
    """`count` GPUs of one machine, each with `memory` bytes; `machine` is the plan's name for their kind."""

    machine: str
    memory: int
    count: int

    @classmethod
    def of(cls, device: torch.device, count: int) -> Gpus:
        """GPUs such as `device`. Rates of a kind that plans do not know are an H200's.

        Raises:
            OptionError: `device` is not a GPU.
        """
        if device.type != "cuda":
            raise OptionError(f"layout auto plans for GPUs, found device {device}: drop it")
        properties = torch.cuda.get_device_properties(device)
        machine = "H100-80GB" if "H100" in properties.name else "H200"
        return cls(machine, properties.total_memory, count)


def planned(
    options: FinetuneOptions, lora: LoRAConfig, gpus: Gpus, say: Callable[[str], None]
) -> FinetuneOptions:
    """The options with the plan's `shard_base`, `shard_embeddings`, `offload`, `offload_activations` and
    `memory_budget`.

    `say` hears what was chosen.

    Raises:
        OptionError: nothing fits, what fits is not hidden, or the model cannot be planned.
        ModelError: its config.json cannot be read.
    """
    config = read_config(Path(str(options.model)))
    batch = (options.batch_size, options.seq_len)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LoRAConfig.* matches no ")  # a line has said it
            plan = ShardPlan.of(
                config, gpus.memory, batch, gpus.count, lora=lora, machine=gpus.machine
            )
    except (ValueError, TypeError) as error:
        raise OptionError(f"layout auto: {error}") from error
    for line in str(plan).splitlines()[:3]:
        say(f"layout: {line}")
    say(f"layout: {plan.rate:,.0f} tokens/s predicted, {plan.bytes.peak / 2**30:.1f} GiB a GPU")
    # a GiB is a power of two, so that these bytes come back as they are
    budget = plan.memory_budget / 2**30
    changes: dict[str, Any] = {"memory_budget": budget, "shard_base": plan.placement.ranks > 1}
    changes["offload_activations"] = plan.offload_activations
    changes["shard_embeddings"] = plan.placement.embeddings
    # rounded up, it could ask for one more group of weights than the plan has
    if plan.placement.offload:
        changes["offload"] = math.floor(plan.placement.offload * 1e6) / 1e6
    return replace(options, **changes)
