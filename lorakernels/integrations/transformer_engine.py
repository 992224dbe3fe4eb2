# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine (TE): take over a `te.Linear`'s FP8 weight and its amax state unchanged.

    convert_te_model(model)                  # te.Linear → FrozenFP8Linear, weight bytes and amax state kept
    apply_lora(model, LoRAConfig(...))
    layer = from_te_linear(linear, config)   # or one layer at a time

TE's classes are recognised by their names and read by their attributes, as of TE 2.12. Nothing here imports TE,
because the owner of a te.Linear has imported it.

A weight made under `quantized_model_init` (or `fp8_model_init`) is a Float8Tensor: e4m3 bytes with one scale. Both are
kept. The transpose that TE caches beside them does not matter. A plain weight is quantized from its exact amax.

Some modules cannot be converted; `why_not(module)` gives the reason:

* LayerNormLinear, LayerNormMLP, GroupedLinear, MultiheadAttention, TransformerLayer and the linear operations of
  te.ops. They compute more than y = x Wᵀ + b, or take more than x.
* A te.Linear that is one rank's shard (tensor parallel, sequence parallel, FSDP), or that splits its weight
  (`parameters_split`).
* A te.Linear that returns its bias (`return_bias`) or has its own forward (a subclass, such as Megatron's).
* Weights with more than one scale (MXFP8, blockwise FP8, NVFP4), or in e5m2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lorakernels import DelayedScaling, FP8State, FrozenFP8Linear, LoRAConfig, LoRALinear
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.model.apply import parents_of, replace_module
from lorakernels.values import Weight

_TE_LINEAR = ("transformer_engine.pytorch.module.linear", "Linear")
_WHY_NOT = {
    "LayerNormLinear": "it normalises its input too: use te.LayerNorm or te.RMSNorm and a te.Linear",
    "LayerNormMLP": "it is a norm, two weights and an activation: use a te.Linear for each weight",
    "GroupedLinear": "it holds one weight per group of rows",
    "MultiheadAttention": "it calls its te.Linear with arguments that only TE's forward takes",
    "TransformerLayer": "it is built of LayerNormLinear, LayerNormMLP and MultiheadAttention",
}
_OPS = "it is a fusible operation, run by the te.ops.Sequential around it"
_DIRECTIONS = (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2))


def why_not(module: nn.Module) -> str | None:
    """A sentence that says why `module` cannot become one of our layers. None for a te.Linear that can."""
    kind = _te_class(type(module))
    if kind is None:
        of = type(module)
        return f"it is a {of.__module__}.{of.__qualname__}, not a module of Transformer Engine"
    if _is_op(kind):
        return _OPS
    if (kind.__module__, kind.__name__) != _TE_LINEAR:
        return _WHY_NOT.get(kind.__name__, "it holds no linear weight and can stay as it is")
    return _why_not_layout(module, kind) or _why_not_weight(module)


def from_te_linear(
    linear: nn.Module,
    config: LoRAConfig,
    *,
    name: str = "",
    adapter_dtype: torch.dtype | None = torch.float32,
    fp8_state: FP8State | None = None,
) -> LoRALinear:
    """A LoRALinear over a te.Linear's weight and bias, in the same mode (training or eval).

    A Float8Tensor's bytes and scale_inv are taken unchanged. The bytes share TE's memory, so drop the te.Linear. A
    plain weight is quantized from its exact amax if `config.fp8` is set. `name` selects the config's patterns and the
    column of `fp8_state`. `load_te_state` copies the amax state in a separate step.

    Raises:
        TypeError: `linear` is not a te.Linear that can be converted (`why_not`).
        ValueError: the weight or its scale is not finite, or it is FP8 and `config.fp8` is None.
    """
    weight, bias = _take_over(name or "linear", linear, plain=config.fp8 is None)
    if weight.scale_inv is not None and config.fp8 is None:
        raise ValueError("config.fp8 must be a DelayedScaling for an FP8 weight, found None")
    new = LoRALinear.from_weight(
        weight, bias, config, adapter_dtype=adapter_dtype, fp8_state=fp8_state, name=name
    )
    return new.train(linear.training)


def frozen_from_te_linear(
    linear: nn.Module,
    fp8: DelayedScaling,
    *,
    fp8_state: FP8State | None = None,
    name: str = "",
) -> FrozenFP8Linear:
    """A FrozenFP8Linear over a te.Linear's weight and bias: as `from_te_linear`, but without an adapter."""
    weight, bias = _take_over(name or "linear", linear)
    spec = FrozenSpec(fp8, fp8_state, name)
    return FrozenFP8Linear.from_weight(weight, bias, spec).train(linear.training)


def convert_te_model(model: nn.Module, *, fp8: DelayedScaling | None = None) -> list[str]:
    """Replace every te.Linear of `model` by a FrozenFP8Linear, in place. Returns their paths.

    Scales and amax histories that TE has trained are copied. They share one FP8State if the layers are on one device.
    TE's norms, attention and activations stay. A later apply_lora with the same recipe keeps the scales.

    Args:
        fp8: the recipe to follow; None takes TE's recipe, or `DelayedScaling()` if TE never ran in FP8.

    Raises:
        TypeError: a TE module with a linear weight cannot be converted, or its recipe is not delayed scaling.
        ValueError: there is no te.Linear, the layers' recipes differ, trained state does not fit `fp8`, or a weight is
            not finite. Nothing is changed before all modules are checked.
    """
    if not (fp8 is None or isinstance(fp8, DelayedScaling)):
        raise TypeError(f"fp8 must be a DelayedScaling or None (the recipe TE used), got {fp8!r}")
    linears = _te_linears(model)
    devices = {_take_over(path, linear)[0].data.device for path, linear in linears.items()}
    recipe = fp8 or _common_recipe(linears)
    trained = [path for path, linear in linears.items() if _has_amax(linear)]
    for path in trained:
        _check_state(path, linears[path], recipe)
    state = FP8State(list(linears), recipe, devices.pop()) if len(devices) == 1 else None
    parents = parents_of(model)
    for path, linear in linears.items():
        new = frozen_from_te_linear(linear, recipe, fp8_state=state, name=path)
        if path in trained:
            assert new.fp8_state is not None
            load_te_state(linear, new.fp8_state, path)
        replace_module(parents, linear, new)
    return list(linears)


@torch.no_grad()
def load_te_state(module: nn.Module, state: FP8State, name: str) -> None:
    """Copy the scale and amax history of a TE module's input and output gradient into `state`'s column `name`.

    The copy is in place, so no address of `state` changes. A tensor that TE has not seen yet has scale 1 and a history
    of zeros. It becomes our "no amax seen yet" (scale 0). Its first use is then scaled by its own amax and not by 1.

    Raises:
        KeyError: `state` has no tensor `name`.
        ValueError: the module has no amax state of one GEMM, or its history length, margin, format or algorithm
            differs from `state`'s. Nothing is changed then.
    """
    column = state.column(name)
    _check_state(name, module, state.recipe)
    for key, direction, _ in _DIRECTIONS:
        theirs: Any = module.fp8_meta[key]  # type: ignore[index]
        history, scale = theirs.amax_history[:, 0], theirs.scale[0]
        ours = getattr(state, direction)
        unseen = (history == 0).all() & (scale == 1)
        ours[:-1, column] = history.to(ours.device)
        ours[-1, column] = scale.masked_fill(unseen, 0.0).to(ours.device)


def _te_class(kind: type) -> type | None:
    """The class of TE's that `kind` is or derives from; None if there is none."""
    return next((c for c in kind.__mro__ if c.__module__.startswith("transformer_engine.")), None)


def _is_op(kind: type) -> bool:
    return ".pytorch.ops." in kind.__module__ and "Linear" in kind.__name__


def _why_not_layout(linear: Any, kind: type) -> str | None:
    if type(linear).forward is not kind.forward:  # type: ignore[attr-defined]
        return f"{type(linear).__qualname__} has a forward of its own"
    if linear.tp_size > 1 or linear.sequence_parallel:
        return (
            f"it is one shard of a tensor-parallel layer (tp_size={linear.tp_size}, "
            f"parallel_mode={linear.parallel_mode!r}, sequence_parallel={linear.sequence_parallel})"
        )
    if list(linear.weight_names) != ["weight"]:
        return f"its weight is split (parameters_split) into {list(linear.weight_names)}"
    if linear.return_bias:
        return "it returns (output, bias) instead of adding the bias (return_bias=True)"
    return None


def _why_not_weight(linear: Any) -> str | None:
    weight, kind = linear.weight, _te_class(type(linear.weight))
    if linear.fsdp_wrapped or is_sharded(weight):
        return "its weight is sharded (FSDP): convert before sharding"
    if kind is None:
        plain = (torch.float32, torch.bfloat16, torch.float16)
        return None if weight.dtype in plain else f"its weight is {weight.dtype}"
    if kind.__name__ != "Float8Tensor":
        return f"its weight is a {kind.__name__}; only Float8Tensor has one scale per tensor"
    dtype = getattr(weight._fp8_dtype, "name", str(weight._fp8_dtype))
    if not dtype.endswith("E4M3"):
        return f"its FP8 weight is {dtype}; ours is e4m3"
    if weight._data is None:
        return "its FP8 weight holds only the transpose, not the bytes of W"
    if weight._scale_inv is None or weight._scale_inv.numel() != 1:
        return f"its FP8 weight must have one scale_inv, it has {weight._scale_inv}"
    return None


def _take_over(path: str, linear: Any, plain: bool = False) -> tuple[Weight, Tensor | None]:
    """The weight, plain or as e4m3 bytes with their scale_inv, and the bias [N] or None.

    `plain` means that a plain weight will not be quantized, and then need not be finite.
    """
    if reason := why_not(linear):
        kind = type(linear).__name__
        raise TypeError(f"{path} is a {kind}, which cannot be converted: {reason}")
    bias = linear.bias if isinstance(linear.bias, Tensor) and linear.bias.numel() else None
    if _te_class(type(linear.weight)) is not None:
        scale_inv = linear.weight._scale_inv.detach().float().reshape(1).clone()
        if not bool((scale_inv.isfinite() & (scale_inv > 0)).all()):
            raise ValueError(
                f"{path}.weight must have a positive, finite scale_inv, found {scale_inv.item()}"
            )
        return Weight(linear.weight._data.detach().contiguous(), scale_inv), bias
    weight = linear.weight.detach()
    if not (plain or weight.is_meta or bool(weight.isfinite().all())):
        raise ValueError(f"{path}.weight must be finite to be held in FP8, found inf or NaN in it")
    return Weight(weight), bias


def _te_linears(model: nn.Module) -> dict[str, nn.Module]:
    """{path: te.Linear}.

    Raises:
        TypeError: another TE module holds a linear weight.
        ValueError: `model` has no te.Linear, or is one itself.
    """
    linears = {}
    for path, module in model.named_modules():
        kind = _te_class(type(module))
        if kind is None:
            continue
        if (kind.__module__, kind.__name__) == _TE_LINEAR:
            linears[path] = module
        elif kind.__name__ in _WHY_NOT or _is_op(kind):
            _take_over(path or "model", module)  # raises
    if not linears:
        raise ValueError(f"{type(model).__name__} has no te.Linear: nothing to convert")
    if "" in linears:
        raise ValueError("model is a te.Linear itself: use from_te_linear")
    return linears


def _common_recipe(linears: dict[str, nn.Module]) -> DelayedScaling:
    recipes: dict[str, DelayedScaling] = {}
    for path, linear in linears.items():
        recipe = _meta(linear).get("recipe")
        if recipe is None:
            continue
        try:
            recipes[path] = DelayedScaling.from_te(recipe)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}. Pass fp8=DelayedScaling(...)") from error
    for path, recipe in recipes.items():
        first, expected = next(iter(recipes.items()))
        if recipe != expected:
            raise ValueError(f"{first} follows {expected}, {path} {recipe}: one model, one recipe")
    return next(iter(recipes.values()), DelayedScaling())


def _meta(module: Any) -> dict[str, Any]:
    return getattr(module, "fp8_meta", {})


def _has_amax(linear: nn.Module) -> bool:
    """True if TE has recorded an amax or changed a scale of x or dy."""
    states: list[Any] = [_meta(linear).get(key) for key, _, _ in _DIRECTIONS]
    return any(
        bool((s.amax_history[:, 0] != 0).any() | (s.scale[0] != 1))
        for s in states
        if hasattr(s, "amax_history")
    )


def _check_state(name: str, module: nn.Module, recipe: DelayedScaling) -> None:
    meta = _meta(module)
    odd = []
    for key, _, tensors in _DIRECTIONS:
        theirs: Any = meta.get(key)
        if not hasattr(theirs, "amax_history"):
            raise ValueError(
                f"{name}: {type(module).__name__}.fp8_meta[{key!r}] must be the state of delayed scaling, found "
                f"{type(theirs).__name__}: the module never ran under it"
            )
        length, count = theirs.amax_history.shape
        if count != tensors:
            raise ValueError(f"{name}: {key} must hold one GEMM's {tensors} tensors, found {count}")
        if length != recipe.amax_history_len:
            odd.append(
                f"{key} has a history of {length} iterations, ours {recipe.amax_history_len}"
            )
    for field in ("margin", "fp8_format", "amax_compute_algo", "scaling_factor_compute_algo"):
        theirs, ours = getattr(meta["recipe"], field, None), getattr(recipe, field, None)
        theirs = getattr(theirs, "name", theirs)
        if theirs != ours:
            odd.append(f"{field} is {theirs!r}, ours {ours!r}")
    if odd:
        raise ValueError(
            f"{name}: TE's amax state does not fit: {'; '.join(odd)}. Take TE's recipe, or discard its state with "
            "module.reset_fp8_meta_tensors()"
        )
