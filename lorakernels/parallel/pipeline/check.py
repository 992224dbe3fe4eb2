# SPDX-License-Identifier: Apache-2.0
"""Where `pipeline_parallel` cuts a model, and the models that it refuses, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lorakernels.fusion.families import spec_of
from lorakernels.fusion.find import decoder_layers
from lorakernels.fusion.layer import FusedDecoderLayer, parts_of
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.order import GRAPHS, managed_by_graphs, refuse
from lorakernels.parallel.pipeline.stages import Absent, Places, Stage
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.agree import trained, values
from lorakernels.state.fp8 import FP8State
from lorakernels.state.philox import PhiloxState


def places_of(model: Any) -> Places:
    """The paths of the modules at which a causal language model of transformers is cut.

    Raises:
        TypeError: it has no config of transformers, or no head.
        ValueError: it has no decoder layer that `fuse` knows, or its layers are not all in the module that transformers
            calls the base model.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"model must be one of transformers, found {type(model).__name__}")
    for path, module in model.named_modules():
        if "_orig_mod" in module._modules or _is_compiled(module):
            raise ValueError(
                f"{path or 'the model'} is compiled: stages run eagerly, without torch.compile"
            )
    layers = decoder_layers(model, fused=True)
    first = next(iter(layers))
    base = first.rpartition(".")[0].rpartition(".")[0]
    if model.get_submodule(base) is not model.base_model or any(
        path.rpartition(".")[0] != first.rpartition(".")[0] for path in layers
    ):
        raise ValueError(f"{type(model).__name__} has decoder layers outside of its base model")
    names = {id(module): path for path, module in model.named_modules()}
    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"model must have an output head, found {type(model).__name__}")
    norm = (
        f"{base}.{spec_of(layers[first]).last_norm}" if base else spec_of(layers[first]).last_norm
    )
    return Places([*layers], base, names[id(model.get_input_embeddings())], norm, names[id(head)])


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def check(model: nn.Module, places: Places) -> None:
    """Refuse a whole model, or a rank's part of one, that cannot run as stages.

    Raises:
        ValueError: the message names the module and why.
    """
    refuse(model, "pipeline_parallel")
    embedding = getattr(model.get_submodule(places.embedding), "weight", None)
    for path in places.layers:
        layer = model.get_submodule(path)
        if isinstance(layer, Absent):
            continue
        for objection in _objections(layer, embedding):
            raise ValueError(f"{path} {objection}")
    inside = tuple(f"{path}." for path in places.layers)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith(inside):
            raise ValueError(
                f"{name} trains: outside of the decoder layers no parameter of a pipeline can train yet"
            )
    for path, module in model.named_modules():
        if why := _objection(module):
            raise ValueError(f"{path} {why}")


def _objections(layer: nn.Module, embedding: Any) -> Iterator[str]:
    spec = spec_of(layer)
    if (dropout := spec.drops(layer)) is not None:
        yield f"has {dropout}, which would not draw the masks of one process: set it to 0"
    dtype = dtype_of(layer)
    if embedding is not None and dtype != embedding.dtype:
        yield f"has norms of {dtype} after an embedding of {embedding.dtype}: they must be equal"
    if "forward" in vars(layer):
        yield "has a forward set on the instance, which stages do not support: remove it"
    if isinstance(layer, FusedDecoderLayer) and parts_of(layer).offload is not None:
        yield "keeps activations in host memory: fuse without offload_activations"
    if any(p.is_meta for p in layer.parameters()):
        yield "is on the meta device: give the model its weights first"
    if any(is_sharded(p) for p in layer.parameters()):
        yield "has parameters that are DTensors (FSDP2), which are not cut into stages"


def dtype_of(layer: nn.Module) -> torch.dtype:
    """The dtype of a decoder layer's first norm, and of the hidden states that stages send."""
    return layer.get_parameter(f"{spec_of(layer).all_norms[0]}.weight").dtype


def _objection(module: nn.Module) -> str:
    if isinstance(module, nn.Dropout) and module.p:
        return f"is {module}, which would not draw the masks of one process: set lora_dropout, or p = 0"
    drops = isinstance(module, LoRALinear) and module.lora_dropout
    if drops and not isinstance(module.rng_state, PhiloxState):
        return (
            "has dropout, which draws the masks of one process only with a PhiloxState: "
            f"apply_lora(rng_state=PhiloxState(seed, device)), found {type(module.rng_state).__name__}"
        )
    return ""


def check_running(path: str, layer: nn.Module, offsets: PhiloxState | None, placed: bool) -> None:
    """Refuse what a layer has become since it was cut. A GraphManager may record and replay it.

    Args:
        path, layer: the layer, and its path in the model.
        offsets: the random state whose offset differs between microbatches, or None.
        placed: whether the layer was captured with the random state that its stage has.

    Raises:
        RuntimeError: the layer is compiled or has another forward, or it has dropout and is managed without `offsets`,
            checkpointed by torch with them, or captured without being placed.
    """
    forward = vars(layer).get("forward")
    replaced = forward is not None and not type(forward).__module__.startswith(GRAPHS)
    if _is_compiled(layer) or replaced:
        raise RuntimeError(
            f"{path} is compiled since it was cut: stages run eagerly, or by GraphManager"
        )
    if not (layer.training and slots_of(layer)):
        return
    if offsets is not None and getattr(layer, "gradient_checkpointing", False):
        raise RuntimeError(
            f"{path} has dropout and gradient checkpointing, and a recomputation would not have the offset of its "
            "microbatch: leave pipeline.offsets None, or fuse with save='checkpoint' instead"
        )
    if not managed_by_graphs(layer):
        return
    if offsets is None:
        raise RuntimeError(
            f"{path} has dropout and is managed by lorakernels.graphs, but pipeline.offsets is None: set it to the "
            "layers' PhiloxState, by which microbatches then differ, or set lora_dropout=0, or leave the graphs out"
        )
    if forward is not None and not placed:
        raise RuntimeError(
            f"{path} has dropout and was captured without rng_states=pipeline.rng_states of GraphManager: its replays "
            "would not draw the masks of one process"
        )


def slots_of(layer: nn.Module) -> int:
    """How many dropout slots a forward of the layer draws in training."""
    if isinstance(layer, FusedDecoderLayer):
        parts = parts_of(layer)
        groups = ([bool(m.lora_dropout) for m in group.adapted] for group in parts.groups)
        shared = [group.shared_dropout for group in parts.groups]
        return sum(
            sum(drops[:1] if one else drops) for drops, one in zip(groups, shared, strict=True)
        )
    adapters = (m for m in layer.modules() if isinstance(m, LoRALinear))
    return sum(bool(m.lora_dropout) and not (m.merged or m.disable_adapters) for m in adapters)


def stages_fingerprint(model: nn.Module, has_values: bool) -> dict[str, Any]:
    """{name for error messages: value} of everything that must be equal on all ranks before the model is cut.

    Args:
        model: with all its modules.
        has_values: whether all parameters that train have values.
    """
    tensors = values(trained(model)) if has_values else {}
    adapters = [(n, m) for n, m in model.named_modules() if isinstance(m, LoRALinear)]
    numbers = {
        f"site, scaling or dropout of {n}": (m.site, m.scaling, m.lora_dropout) for n, m in adapters
    }
    return tensors | numbers | generators(model)


def generators(model: nn.Module) -> dict[str, Any]:
    """{name for error messages: state} of the random states from which masks draw."""
    drawn_from: dict[str, Any] = {"torch's CPU generator": torch.get_rng_state().tolist()}
    states = {id(s): s for m in model.modules() if (s := getattr(m, "rng_state", None)) is not None}
    return drawn_from | {
        f"PhiloxState {i}": s.tensor.tolist()
        for i, s in enumerate(states.values())
        if isinstance(s, PhiloxState)
    }


def check_numbers(microbatches: int, chunks: int, ranks: int) -> None:
    """Refuse numbers that torch's schedules do not take.

    Raises:
        ValueError: it names the number.
    """
    for name, value in (("microbatches", microbatches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, found {value!r}")
    if microbatches < ranks:
        raise ValueError(f"microbatches must be at least the {ranks} ranks, found {microbatches}")
    rounds = microbatches // ranks  # microbatches that torch's interleaved schedule runs at a time
    if chunks > 1 and microbatches % rounds:
        raise ValueError(
            f"microbatches must be a multiple of {rounds} for {chunks} chunks over {ranks} ranks, found {microbatches}"
        )


def check_ranks(model: nn.Module, stages: list[list[str]], ranks: int) -> None:
    """Refuse ranks that would have nothing to train.

    Raises:
        ValueError: it names the rank.
    """
    for rank in range(ranks):
        layers = [model.get_submodule(path) for part in stages[rank::ranks] for path in part]
        if not any(p.requires_grad for layer in layers for p in layer.parameters()):
            raise ValueError(
                f"rank {rank} would have no parameter that trains: take fewer ranks, or adapters on more layers"
            )


def slots_of_stage(model: nn.Module, paths: list[str]) -> int:
    """How many slots a stage of these layers draws for a microbatch."""
    return sum(slots_of(model.get_submodule(path)) for path in paths)


def slots_before(model: nn.Module, slots: list[int], stages: Iterable[Stage]) -> dict[str, int]:
    """{path: how many slots a microbatch draws before that layer} of this rank's layers. `slots`: of each stage."""
    before: dict[str, int] = {}
    for stage in stages:
        count = sum(slots[: stage.index])
        for path in stage.paths:
            before[path] = count
            count += slots_of_stage(model, [path])
    return before


def states_of(model: nn.Module) -> list[FP8State]:
    """The model's FP8 states.

    Raises:
        ValueError: one is updated by graphs, or by `attach`.
    """
    states = {id(s): s for m in model.modules() if (s := getattr(m, "fp8_state", None)) is not None}
    for state in states.values():
        if state.in_charge not in ("auto", "explicit"):
            raise ValueError(
                f"the FP8State is updated by {state.in_charge}: cut the model before attach or graphs"
            )
    return [*states.values()]


def agreed_slots(
    model: nn.Module, ranks: Any, stages: list[list[str]], states: list[FP8State]
) -> list[int]:
    """Collective: the slots of each stage for a microbatch. All ranks' states know the columns that `fuse` joined.

    Args:
        model: cut into `stages`, over `ranks`.
        states: the model's.
    """
    mine = range(ranks.rank, len(stages), ranks.size)
    slots = {i: slots_of_stage(model, stages[i]) for i in mine}
    joint = [[state.names[column] for column in state.joint] for state in states]
    for others, names in comm.agree(ranks.group, (slots, joint)):
        slots |= others
        for state, joined in zip(states, names, strict=True):
            state.joint |= {state.column(name) for name in joined}
    return [slots[i] for i in range(len(stages))]
