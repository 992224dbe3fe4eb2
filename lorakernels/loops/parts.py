# SPDX-License-Identifier: Apache-2.0
"""Find the parts of an adapted model that need work at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lorakernels.modules.experts.layer import LoRAExperts
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.marks import SplitModule, became
from lorakernels.parallel.ranks import comm
from lorakernels.state.fp8 import FP8State
from lorakernels.state.philox import PhiloxState, PhiloxStates, model_parallel_states

_INT63 = (1 << 63) - 1


def adapters(model: nn.Module) -> Iterator[Any]:
    """All layers with an adapter that runs our op: LoRALinears, and patched layers of PEFT."""
    for module in model.modules():
        if isinstance(module, LoRALinear) or hasattr(type(module), "lorakernels_path"):
            yield module


def drops(layer: Any) -> bool:
    """True if the layer's adapter has dropout."""
    return layer.lora_dropout > 0 if isinstance(layer, LoRALinear) else layer.dropout_p > 0


def adapted_list(model: nn.Module) -> nn.ModuleList | None:
    """The ModuleList that holds the most adapters; None if no list holds one."""
    fullest: nn.ModuleList | None = None
    most, inside = 0, set[nn.Module]()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or module in inside:
            continue
        inside |= set(module.modules())
        if (count := sum(1 for _ in adapters(module))) > most:
            fullest, most = module, count
    return fullest


def fp8_states(model: nn.Module) -> list[FP8State]:
    layers = (m for m in model.modules() if isinstance(m, FrozenFP8Linear))
    states = {id(m.fp8_state): m.fp8_state for m in layers if m.fp8_state is not None}
    return list(states.values())


def rng_states(model: nn.Module) -> list[PhiloxState | PhiloxStates]:
    """The states from which layers with dropout draw, each once."""
    states = (m.rng_state for m in adapters(model) if drops(m) and m.rng_state is not None)
    return list({id(state): state for state in states}.values())


def advance(states: Sequence[PhiloxState | PhiloxStates], steps: int) -> None:
    for state in states:
        every = state.get_states().values() if isinstance(state, PhiloxStates) else [state]
        for one in every:
            one.advance(steps)


def ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def new_rng_state(model: nn.Module, device: torch.device) -> PhiloxState:
    """A new state, seeded by torch's seed without a draw from its generator. Collective over ranks that share `model`.

    Its masks differ between ranks, but for those that hold the model's layers or rows together: these draw one mask.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    for group in _groups_that_share(model):
        rank = comm.agree(group, rank)[0]
    seed = torch.initial_seed() & _INT63
    states = model_parallel_states(seed, data_parallel_rank=rank, device=device)
    return states.get_states()["data-parallel-rng"]


def _groups_that_share(model: nn.Module) -> list[Any]:
    """The process groups over which `parallelize` and `context_parallel` spread `model`."""
    split = (m.ranks for m in model.modules() if isinstance(m, SplitModule))
    rows = (c.ranks for m in model.modules() if (c := became(m).context_parallel) is not None)
    return [ranks.group for ranks in (next(split, None), next(rows, None)) if ranks is not None]


def without_cache(model: nn.Module) -> list[Any]:
    """Switch `config.use_cache` off, because a graph cannot take a cache. Returns the configs in which it was on."""
    configs = (getattr(module, "config", None) for module in model.modules())
    caching: dict[int, Any] = {id(c): c for c in configs if getattr(c, "use_cache", None) is True}
    for config in caching.values():
        config.use_cache = False
    return list(caching.values())


def why_no_graphs(layers: Sequence[nn.Module], on_gpu: bool) -> str | None:
    """Why `layers` cannot be captured, as far as that shows before a run. `on_gpu`: they must be on a GPU."""
    tensors = [p for layer in layers for p in layer.parameters()]
    devices = sorted({str(p.device) for p in tensors})
    if len(devices) > 1:
        return f"the layers are on {', '.join(devices)}: graphs are of one device"
    if on_gpu and tensors and tensors[0].device.type != "cuda":
        return f"the model is on {devices[0]}: CUDA graphs need a GPU"
    if any(is_sharded(p) for p in tensors):
        return "parameters are sharded (FSDP2), and gathered again at each forward"
    for index, layer in enumerate(layers):
        if any(getattr(m, "_compiled_call_impl", None) is not None for m in layer.modules()):
            return f"layer {index} is compiled: torch.compile has graphs of its own (mode='reduce-overhead')"
        if any(isinstance(m, DoRALinear) for m in layer.modules()):
            return f"layer {index} has use_dora=True, which runs eager only"
        for experts in (m for m in layer.modules() if isinstance(m, LoRAExperts)):
            if why_not := experts.why_not_stacked():
                return f"layer {index} has LoRAExperts, which run one by one, as the host counts tokens: {why_not}"
    states = {id(s) for layer in layers for s in fp8_states(layer)}
    if len(states) > 1:
        return f"the layers have {len(states)} FP8States: give them one, as apply_lora and fuse do"
    return None
