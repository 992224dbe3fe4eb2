# SPDX-License-Identifier: Apache-2.0
"""The base's own embedding and output head in an adapter file. V is the vocabulary, the weights are [V, K].

base_model.model.<path>.weight              of a model whose vocabulary was resized
base_model.model.<path>.base_layer.weight   of a head under an adapter; PEFT always writes it

PEFT puts them into the base when it loads the file, and so does `load_adapter`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.checkpoints.adapters.keys import PREFIX
from lorakernels.config import clean_path
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.initial import initial_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.parallel.tensor.layers import Part
from lorakernels.parallel.tensor.whole import PartPlace

_NAMES = ("weight", "bias")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """{path: module} of the input embedding and the output head of a model of transformers; of another model none."""
    modules: dict[str, nn.Module] = {}
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = None
        with suppress(NotImplementedError):  # of a model without words
            module = getattr(model, get, lambda: None)()
        if module is not None:
            names = (path for path, other in model.named_modules() if other is module)
            modules |= {clean_path(path): module for path in names}
    return modules


def is_tied(model: nn.Module) -> bool:
    """Whether the head has the embedding's weight, or had it before an adapter was put over it."""
    config = _text_config(getattr(model, "config", None))
    modules = embeddings(model).values()
    pointers = {id(module._parameters.get("weight")) for module in modules}
    return len(modules) == 2 and (
        len(pointers) == 1 or getattr(config, "tie_word_embeddings", False)
    )


def take_embeddings(
    model: nn.Module, expected: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """{parameter's path in `model`: value} of its embeddings, taken out of `tensors`.

    What a file has by the keys of `expected` was trained, and stays there. A tied weight has both paths. Warns if a
    file lacks one of the two of a resized vocabulary.
    """
    values: dict[str, Tensor] = {}
    modules = embeddings(model)
    for path, module in modules.items():
        for name in (n for n in _NAMES if module._parameters.get(n) is not None):
            for key in (f"{PREFIX}{path}.{name}", f"{PREFIX}{path}.base_layer.{name}"):
                if key in tensors and key not in expected:
                    values[f"{path}.{name}"] = tensors.pop(key)
    weights = [f"{path}.weight" for path in modules]
    present = [path for path in weights if path in values]
    others = [p for p in weights if p not in present and f"{PREFIX}{p}" not in expected]
    if present and others and is_tied(model):
        values |= dict.fromkeys(others, values[present[0]])
    elif present and others and _resized_from(model, None) is not None:
        warnings.warn(
            f"the file has {present[0]} of a resized vocabulary and no {others[0]}, which PEFT 0.21 leaves out if the "
            "head has an adapter: its new rows stay this model's own",
            stacklevel=4,
        )
    return values


def check_embeddings(
    model: nn.Module, values: Mapping[str, Tensor], place_of: Mapping[int, PartPlace]
) -> None:
    """Raise ValueError if one of `values`, which `take_embeddings` found, has no place in `model`."""
    modules = embeddings(model)
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        module = modules[owner]
        parameter = module._parameters[name]
        assert parameter is not None
        place = place_of.get(id(parameter))
        shape = tuple(parameter.shape) if place is None else place.shape(parameter)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"the file has {path} {list(value.shape)}, the model {list(shape)}: it was saved with another "
                f"vocabulary. Resize the base first, by model.resize_token_embeddings({value.shape[0]}); to export, "
                "save it then"
            )
        if value.dtype not in _FLOATS:
            raise ValueError(
                f"{path} must be float32, bfloat16 or float16 in the file, found {value.dtype}"
            )
        if isinstance(module, LoRALinear) and initial_of(module) is not None:
            raise ValueError(
                f"the file has {path}, which init_lora_weights={module.config.init_lora_weights!r} has changed in this "
                "model: load the adapter into the plain model"
            )
        if _is_fp8(module) and place is not None:
            raise ValueError(
                f"the file has {path}, which ranks hold in FP8 parts: load before parallelize"
            )


Like = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def put_embeddings(model: nn.Module, values: Mapping[str, Tensor], like: Like) -> Iterator[None]:
    """Put `values` into the embeddings that `model` has here. An exception inside puts the old ones back.

    `like(value, parameter)` is the part of a whole value that a parameter holds.
    """
    undo: list[Callable[[], object]] = []
    modules = {clean_path(path): module for path, module in model.named_modules()}
    try:
        for path, value in values.items():
            owner, _, name = path.rpartition(".")
            parameter = modules[owner]._parameters[name] if owner in modules else None
            if parameter is not None and not parameter.is_meta:
                undo.append(_put(modules[owner], name, like(value, parameter)))
        yield
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise


@torch.no_grad()
def _put(module: nn.Module, name: str, value: Tensor) -> Callable[[], object]:
    """Write `value`, and return a function that undoes it.

    An FP8 weight is quantized again. Equal bases give equal bytes.
    """
    if name == "weight" and _is_fp8(module):
        names = (name, "weight_scale_inv")
        before = {k: v.clone() for k, v in module.state_dict().items() if k in names}
        module.load_state_dict({name: value}, strict=False)
        return lambda: module.load_state_dict(before, strict=False)
    parameter = module._parameters[name]
    assert parameter is not None
    local = local_part(parameter).detach()
    new = local_part(value).to(local.device)
    if is_same_base(local, new):
        return lambda: None
    kept = local.to("cpu", copy=True)
    local.copy_(new)
    return lambda: local.copy_(kept)


def is_same_base(weight: Tensor, value: Tensor) -> bool:
    """Whether two weights come from the same base, in equal or different numbers of bits."""
    return torch.equal(weight, value.to(weight.dtype)) or torch.equal(weight.to(value.dtype), value)


def resized_embeddings(
    model: nn.Module, base: str | None, present: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """{key: tensor} of the embeddings which a file needs because the vocabulary is not the base's. Warns if any.

    As in PEFT, the base is looked up by its name: a directory, or what the cache of the Hub holds. What `present`
    has already is left out.

    Raises:
        ValueError: the values are not on this rank, or differ from the base.
    """
    was = _resized_from(model, base)
    if was is None:
        return {}
    tensors: dict[str, Tensor] = {}
    modules = embeddings(model)
    weights = [path for path in modules if f"{PREFIX}{path}.weight" not in present]
    for path, module in modules.items():
        infix = "base_layer." if isinstance(module, LoRALinear) else ""
        for name in (n for n in _NAMES if module._parameters.get(n) is not None):
            if (key := f"{PREFIX}{path}.{infix}{name}") not in present:
                tensors[key] = _of_base(path, module, name)
                if name == "weight" and _is_fp8(module) and is_tied(model) and len(weights) == 2:
                    tensors[key] = _of_base(weights[0], modules[weights[0]], name)  # not rounded
    if tensors:
        warnings.warn(
            f"the vocabulary has another size than that of {base}, {was}: the file holds the embedding and the head "
            "as well. To load it, resize the base first",
            stacklevel=4,
        )
    return tensors


def _of_base(path: str, module: nn.Module, name: str) -> Tensor:
    """The value of a parameter as the base has it: unmerged, and in fp32 where it is held in FP8."""
    parameter = module._parameters[name]
    assert parameter is not None
    merged = isinstance(module, LoRALinear) and module.merged
    changed = name == "weight" and (_is_fp8(module) or merged)
    why_not = None
    if parameter.is_meta:
        why_not = "is in another stage"
    elif changed and isinstance(module, Part):
        why_not = "is merged or in FP8, in parts over ranks"
    elif name == "weight" and isinstance(module, LoRALinear) and initial_of(module) is not None:
        why_not = f"was changed by init_lora_weights={module.config.init_lora_weights!r}"
    if why_not is not None:
        raise ValueError(
            f"{path}.{name} {why_not}, and the file needs it, as the vocabulary was resized: name the embedding and "
            "the head in modules_to_save, or save in one process"
        )
    if not changed:
        return parameter
    assert isinstance(module, FrozenFP8Linear)
    dtype = torch.float32 if module.holds_fp8 else parameter.dtype
    if isinstance(module, LoRALinear):
        return module.base_weight(dtype)
    return module.dequantized_weight(dtype)


def _is_fp8(module: nn.Module) -> bool:
    return isinstance(module, FrozenFP8Linear) and module.holds_fp8


def _resized_from(model: nn.Module, base: str | None) -> int | None:
    """The vocabulary in the base's own config.json, if that is found here and is not the model's."""
    config: Any = getattr(model, "config", None)
    name = getattr(model, "name_or_path", None) or base
    if not name or not hasattr(type(config), "from_pretrained"):
        return None
    folder = name if os.path.isfile(os.path.join(name, "config.json")) else _cached(name, config)
    if folder is None:
        return None
    try:
        before = type(config).from_pretrained(folder)
    except (OSError, ValueError):  # it is of other files than the model by now
        return None
    was, now = (getattr(_text_config(c), "vocab_size", None) for c in (before, config))
    return was if now is not None and was != now else None


def _cached(name: str, config: Any) -> str | None:
    """The directory in the Hub's cache that has the config of `name`. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        revision = getattr(config, "_commit_hash", None)
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # a path that is not there any more
        return None
    return os.path.dirname(file) if isinstance(file, str) else None


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; another one as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
