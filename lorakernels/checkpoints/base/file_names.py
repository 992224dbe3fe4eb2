# SPDX-License-Identifier: Apache-2.0
"""The names that tensors of a checkpoint's files have in a model, by transformers' own rules.

layers.0.input_layernorm.weight            model.layers.0.…   files without the model's prefix, or with one too many
language_model.model.layers.0.….weight     model.language_model.layers.0.…   transformers' renamings of a family
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lorakernels.checkpoints.base.format import of_input
from lorakernels.checkpoints.base.shards import Read, TensorSource

_SCALE = "_scale_inv"
# Old checkpoints store these tensors for each layer. Models compute them.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def names_in_model(model: Any, names: Iterable[str]) -> dict[str, str]:
    """{name in the files: name in `model`}.

    A tensor that transformers would join with others, or split, keeps its name but for the prefix of the base model.
    """
    state = model.state_dict(keep_vars=True)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    rename = _renaming(model, state)
    shown = {}
    for name in names:
        end = _SCALE if name.endswith(_SCALE) and name not in state else ""
        new, converted = rename(name.removesuffix(end))
        shown[name] = _like(name, new, prefix) if converted else new + end
    return shown


def check_places(model: Any, config: Any, names: Collection[str]) -> None:
    """Refuse files with a tensor that has no place in `model`, and that it may not leave out either.

    Args:
        model: it may be on the meta device.
        config: as it is read from config.json.
        names: of all tensors in the files.

    Raises:
        ValueError: there is such a tensor, or two tensors have one place.
    """
    names = {*names}
    Renamed.check(names_in_model(model, names))
    state = model.state_dict(keep_vars=True)
    rename = _renaming(model, state)
    strays = [
        name
        for name in names
        if rename(name.removesuffix(_SCALE))[0] not in state and not of_input(name, names)
    ]
    _refuse(model, {*strays} - {*left_out(model, config, strays)})


def _renaming(model: Any, state: Mapping[str, Any]) -> Callable[[str], tuple[str, bool]]:
    """Tells a tensor's name in the model, and whether transformers joins or splits tensors for it."""
    prefix = getattr(model, "base_model_prefix", "")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:  # before transformers 5
        return lambda name: (_with_prefix(name, prefix, state), False)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def rename(name: str) -> tuple[str, bool]:
        new, converted = rename_source_key(name, renamings, converters, prefix, state)
        if new in state:
            return str(new), converted is not None
        return _with_prefix(name, prefix, state), False

    return rename


def _like(name: str, other: str, prefix: str) -> str:
    """`name`, with `prefix` if `other` has it."""
    missing = other.startswith(prefix) and not name.startswith(prefix)
    return prefix + name if missing else name


def _with_prefix(name: str, prefix: str, state: Mapping[str, Any]) -> str:
    """`name` with the prefix of the base model, or without it, if that is a name of the model."""
    if not prefix or name in state:
        return name
    shorter, longer = name.removeprefix(f"{prefix}."), f"{prefix}.{name}"
    return next((other for other in (shorter, longer) if other in state), name)


def check_all_used(
    model: Any, config: Any, names: Collection[str], unexpected: Collection[str]
) -> list[str]:
    """The tensors of a base's files that transformers has left out by its own lists.

    Args:
        model: what transformers has loaded.
        config: as it is read from config.json.
        names: of all tensors in the files.
        unexpected: those for which transformers had no place, by the names that it gave them.

    Raises:
        ValueError: another tensor had no place in the model, or two have one place.
    """
    Renamed.check(names_in_model(model, names))
    may_go = left_out(model, config, unexpected)
    _refuse(model, {*unexpected} - {*may_go})
    lists = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    state = {*model.state_dict(keep_vars=True)}
    ignored = [
        n for n in names if n not in state and any(re.search(p, n) for p in (*lists, *_COMPUTED))
    ]
    return sorted({*may_go, *ignored})


def _refuse(model: Any, strays: Collection[str]) -> None:
    """Raise ValueError if there are tensors without a place."""
    if strays:
        raise ValueError(
            f"the files hold {len(strays)} tensors for which {type(model).__name__} has no place, and which would be "
            f"lost: {', '.join(sorted(strays)[:5])}. If the model does not need them, save it without them"
        )


def left_out(model: Any, config: Any, names: Iterable[str]) -> list[str]:
    """The `names` that `model` may leave out, as transformers does.

    These are tensors that models compute themselves, and tensors that the model's class ignores by its own list. If the
    model is the text part of a larger one, modules of the other parts may be left out, too.

    Args:
        model: the model that is filled.
        config: as it is read from config.json.
        names: of tensors that are not in it, as they are in the files.
    """
    patterns = {*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_COMPUTED}
    is_part = config is not None and config.get_text_config(decoder=True) is not config
    inside = _top_modules(model) if is_part else set()
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def may_go(name: str) -> bool:
        if any(re.search(pattern, name) for pattern in patterns):
            return True
        return is_part and name.removeprefix(prefix).partition(".")[0] not in inside

    return [name for name in names if may_go(name)]


def _top_modules(model: Any) -> set[str]:
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    return {name for module in (model, base) for name, _ in module.named_children()}


class Renamed:
    """A TensorSource whose tensors have other names.

    Args:
        source: the tensors.
        names: {its name: the name shown}.

    Attributes:
        original: {name shown: name in `source`}.
        tensors: by the names shown.

    Raises:
        ValueError: two tensors have one name.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self._source, self.original = source, self.check(names)
        self.tensors = {shown: source.tensors[name] for shown, name in self.original.items()}

    @staticmethod
    def check(names: Mapping[str, str]) -> dict[str, str]:
        """{name shown: name} of `names`, which says the reverse.

        Raises:
            ValueError: two tensors would have one name.
        """
        original: dict[str, str] = {}
        for name, shown in names.items():
            if (other := original.setdefault(shown, name)) != name:
                raise ValueError(
                    f"{other} and {name} of the checkpoint are both {shown} of the model: remove one of them"
                )
        return original

    def mapped_bytes(self, shard: str) -> int:
        return self._source.mapped_bytes(shard)

    @contextmanager
    def open(self, shard: str) -> Iterator[Read]:
        with self._source.open(shard) as read:

            def by_name(shown: str, *part: Any) -> Tensor:
                tensor: Tensor = read(self.original[shown], *part)
                return tensor

            yield by_name
