# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that `parallelize` splits, and the models that it refuses, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from lorakernels.autograd.attention.choose import FP8
from lorakernels.fusion.families import LayerSpec, spec_of
from lorakernels.fusion.find import decoder_layers
from lorakernels.fusion.layer import FusedDecoderLayer, parts_of
from lorakernels.fusion.parts import Parts
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.initial import initial_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.mergeable import MergeableLinear
from lorakernels.modules.marks import is_loaded_part
from lorakernels.modules.model.logits import change_of_logits
from lorakernels.modules.model.trained_parts import keeps_weight, kept_parameters
from lorakernels.modules.order import refuse
from lorakernels.parallel.ranks.agree import fingerprint
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.layers import why_not_blocks
from lorakernels.parallel.tensor.split import LoadedParts
from lorakernels.state.philox import PhiloxStates

CUTS = ("column", "row")
_PASS_A_PLAN = "for other models pass plan={pattern: 'column' or 'row'}"
_KNOWN_LINEARS = (nn.Linear, FrozenFP8Linear, MergeableLinear, LoRALinear)


class SplitTargets(NamedTuple):
    """The layers of a model that are split.

    Attributes:
        layers: {path: decoder layer} of one family; empty if the caller passed a plan.
        spec: their family, or None.
        cuts: {path of a linear: "column" or "row"}.
    """

    layers: dict[str, nn.Module]
    spec: LayerSpec | None
    cuts: dict[str, str]


def targets_by(model: nn.Module, plan: Mapping[str, str]) -> SplitTargets:
    """The linears that the patterns of `plan` match. A later pattern does not override an earlier one.

    Raises:
        ValueError: a pattern matches no linear, two patterns disagree about a linear, or a value is not in CUTS.
    """
    linears = [path for path, m in model.named_modules() if isinstance(m, _KNOWN_LINEARS)]
    cuts: dict[str, str] = {}
    for pattern, how in plan.items():
        if how not in CUTS:
            raise ValueError(f"plan[{pattern!r}] must be one of {list(CUTS)}, found {how!r}")
        matches = [path for path in linears if fnmatchcase(path, pattern)]
        if not matches:
            raise ValueError(f"plan[{pattern!r}] matches no linear layer of the model")
        for path in matches:
            if cuts.setdefault(path, how) != how:
                raise ValueError(
                    f"plan[{pattern!r}] is {how!r} for {path}, which is {cuts[path]!r}"
                )
    return SplitTargets({}, None, cuts)


def targets_in(model: nn.Module) -> SplitTargets:
    """The decoder layers of a model of transformers, and the linears in them.

    Raises:
        ValueError: there is none, they are of several families, hold projections packed in one, have norms behind them,
            or are fused in a way that cannot be split.
    """
    layers = decoder_layers(model, fused=True, advice=f"; {_PASS_A_PLAN}")
    for path, layer in layers.items():
        if isinstance(layer, FusedDecoderLayer) and (why := _objection_to_fused(parts_of(layer))):
            raise ValueError(f"{path} is fused {why}, which cannot be split over ranks yet")
    specs = {id(s): s for s in map(spec_of, layers.values())}
    if len(specs) > 1:
        names = ", ".join(s.layer for s in specs.values())
        raise ValueError(
            f"{type(model).__name__} must have decoder layers of one family, found {names}; {_PASS_A_PLAN}"
        )
    (spec,) = specs.values()
    if len(spec.qkv) != 3 or len(spec.gate_up) != 2:
        raise ValueError(f"{spec.layer} packs projections into one: it cannot be split yet")
    if spec.post_norms:
        raise ValueError(f"{spec.layer} has norms behind its projections: it cannot be split yet")
    how = {place: "column" for place in (*spec.qkv, *spec.gate_up)}
    how |= {place: "row" for place in (spec.output, spec.down)}
    cuts = {f"{path}.{place}": by for path in layers for place, by in how.items()}
    return SplitTargets(layers, spec, cuts)


def _objection_to_fused(parts: Parts) -> str:
    if parts.offload is not None:
        return "with offload_activations=True"
    if parts.attention == FP8:
        return f"with attention={FP8!r}"
    return ""


def check_loaded(
    loaded: LoadedParts, targets: SplitTargets, ranks: Ranks, vocabulary: bool
) -> None:
    """Refuse a group or layers other than those for which parts were read.

    Raises:
        ValueError: it names what differs.
    """
    if loaded.ranks.group != ranks.group:
        raise ValueError("mesh must be the one that load_quantized(tp=…) was given, found another")
    if loaded.vocabulary and not vocabulary:
        raise ValueError(
            "vocabulary must be True, as for load_quantized(tp=…), which read this rank's rows alone, found False"
        )
    read = {path: cut.by for path, cut in loaded.cuts.items()}
    for path in (*read, *targets.cuts):
        if read.get(path) != targets.cuts.get(path):
            raise ValueError(
                f"plan must be the one that load_quantized(tp=…) was given: {path} was read by {read.get(path)}, and "
                f"is to be split by {targets.cuts.get(path)}"
            )


def check(model: nn.Module, targets: SplitTargets, ranks: Ranks) -> None:
    """Refuse a model that cannot be split.

    Raises:
        ValueError: the ranks do not divide a size or the heads, a linear has an unknown class or is merged or sharded,
            a parameter outside of the split linears trains, or the rows are over ranks already.
    """
    refuse(model, "parallelize", targets.cuts)
    check_sizes(model, targets, ranks.size)
    for path in targets.cuts:
        for objection in _objections(model.get_submodule(path)):
            raise ValueError(f"{path} {objection}")
    _check_trained(model, targets)


def _check_trained(model: nn.Module, targets: SplitTargets) -> None:
    if whole := set(_trained_elsewhere(model, targets.cuts)):
        raise ValueError(
            f"parameters outside of the split layers cannot train yet, found {sorted(whole)[:4]}"
        )


def check_sizes(model: nn.Module, targets: SplitTargets, size: int, blocks: bool = False) -> None:
    """Refuse sizes or heads that `size` ranks do not divide. No value is read.

    Parts that `load_quantized(tp=…)` read have passed this already, and are skipped. With `blocks`, weights count as
    if they had a scale for each block.

    Raises:
        ValueError: it names the layer and the size.
    """
    for path, how in targets.cuts.items():
        module: Any = model.get_submodule(path)
        if not isinstance(module, _KNOWN_LINEARS) or is_loaded_part(module):
            continue
        by, name, dim = (module.out_features, "out_features", 0)
        if how == "row":
            by, name, dim = (module.in_features, "in_features", 1)
        if by % size:
            raise ValueError(
                f"{path} has {name} {by}, which must be a multiple of the {size} ranks"
            )
        in_blocks = blocks or getattr(module, "block_scaling", None) is not None
        if in_blocks and (why_not := why_not_blocks(by, dim, size)):
            raise ValueError(f"{path} {why_not}")
    if targets.spec is not None:
        _check_heads(model, size)


def check_split(model: nn.Module, size: int, blocks: bool) -> None:
    """Refuse a model of transformers that `size` ranks cannot split, by its modules alone: no value is read.

    `blocks` is that of `check_sizes`.

    Raises:
        ValueError: as `targets_in` and `check_sizes`, or a parameter outside of the split linears trains.
    """
    targets = targets_in(model)
    check_sizes(model, targets, size, blocks)
    _check_trained(model, targets)


def _objections(module: nn.Module) -> Iterator[str]:
    if type(module) not in _KNOWN_LINEARS and not is_loaded_part(module):
        yield f"is a {type(module).__name__}, which cannot be split over ranks"
        return
    assert isinstance(module.weight, torch.Tensor)
    if module.weight.requires_grad:
        yield "has a weight that trains: only adapters and biases of split layers can"
    if keeps_weight(module):
        yield "is in modules_to_save, which cannot be split: call merge_and_unload first"
    if initial_of(module) is not None:
        yield "has an initial adapter of OLoRA or PiSSA, which cannot be split over ranks yet"
    if any(is_sharded(p) for p in module.parameters(recurse=False)):
        yield "has parameters that are DTensors already"
    if any(p.is_meta for p in module.parameters(recurse=False)):
        yield "is on the meta device: give the model its weights first"


def _check_heads(model: nn.Module, size: int) -> None:
    config: Any = model.config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name)
        if heads % size:
            raise ValueError(f"{name} must be a multiple of the {size} ranks, found {heads}")


def check_vocabulary(model: nn.Module, targets: SplitTargets, ranks: Ranks) -> None:
    """Refuse an embedding or a head that cannot be split by tokens.

    Raises:
        ValueError: the caller passed a plan, the model changes its logits after the head, the modules are not a plain
            nn.Embedding and nn.Linear, have hooks, a max_norm or values to restore, or the ranks do not divide the
            vocabulary.
    """
    if targets.spec is None:
        raise ValueError("vocabulary=True needs a model of transformers, found a plan of modules")
    both: Any = model
    if changed := change_of_logits(both.config.get_text_config()):
        raise ValueError(
            f"vocabulary=True takes a model whose loss is of plain logits, found {changed}"
        )
    embedding, head = both.get_input_embeddings(), both.get_output_embeddings()
    for module, kind in ((embedding, nn.Embedding), (head, nn.Linear)):
        if type(module) is not kind:
            raise ValueError(
                f"vocabulary=True takes a plain {kind.__name__}, found {type(module).__name__}"
            )
        if kept_parameters(module):
            raise ValueError(
                f"vocabulary=True replaces the {kind.__name__}, which keeps its values from before training, as one of "
                "modules_to_save or with a bias: call merge_and_unload first"
            )
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(
                f"vocabulary=True replaces the {kind.__name__}, which has hooks: add them afterwards"
            )
        if len(module.weight) % ranks.size:
            raise ValueError(
                f"the vocabulary must be a multiple of the {ranks.size} ranks, found {len(module.weight)}"
            )
    if embedding.max_norm is not None:
        raise ValueError("vocabulary=True takes an embedding without max_norm")


def _trained_elsewhere(model: nn.Module, cuts: Iterable[str]) -> Iterator[str]:
    inside = {id(p) for path in cuts for p in model.get_submodule(path).parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            yield name


def _drawn_from(layer: LoRALinear) -> list[Any] | None:
    """Seed and offset of the layer's random state, on any device; None if it has none.

    Several states are compared by name: `fork` chooses one at every call, and some differ between ranks on purpose.
    """
    state = layer.rng_state
    if isinstance(state, PhiloxStates):
        return sorted(state.get_states())
    return None if state is None else state.tensor.tolist()


def split_fingerprint(model: nn.Module, targets: SplitTargets, sequence: bool) -> dict[str, Any]:
    """{name for error messages: value} of everything that must be equal on all ranks."""
    loaded = LoadedParts.of(model)
    parts = () if loaded is None else _own_tensors(model, loaded)
    tensors = [
        (n, x) for n, x in (*model.named_parameters(), *model.named_buffers()) if n not in parts
    ]
    layers = [m for path in targets.cuts if isinstance(m := model.get_submodule(path), LoRALinear)]
    numbers = {m.name: (m.site, m.scaling, m.lora_dropout, _drawn_from(m)) for m in layers}
    modes = {n or "the model": m.training for n, m in model.named_modules()}
    return {
        "sequence_parallel": sequence,
        "the plans": targets.cuts,
        "the ways of loading them": loaded is not None,
        **fingerprint(model, tensors),
        **{f"site, scaling, dropout or rng_state of {n}": value for n, value in numbers.items()},
        **{f"requires_grad of {name}": p.requires_grad for name, p in model.named_parameters()},
        **{f"disable_adapters of {m.name}": m.disable_adapters for m in layers},
        **{f"modes of training of {name}": trains for name, trains in modes.items()},
    }


def _own_tensors(model: nn.Module, loaded: LoadedParts) -> set[str]:
    """Names of the tensors of loaded parts that differ from rank to rank."""
    names = set()
    for path in (*loaded.cuts, *loaded.vocabulary):
        layer: Any = model.get_submodule(path)
        has_blocks = getattr(layer, "block_scaling", None) is not None
        in_blocks = ("weight_scale_inv",) if has_blocks else ()
        names |= {f"{path}.{name}" for name in (*layer.dimensions, *in_blocks)}
    return names
