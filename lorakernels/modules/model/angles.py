# SPDX-License-Identifier: Apache-2.0
"""angles_by_document: RoPE with frequencies by length takes the length of each document, not of the whole call.

transformers takes the largest position of a call. So documents that are packed with a longer one, or rows of one
microbatch, would have other angles than alone. Where ranks share rows, each rank would have another largest position.

LongRoPE has two sets of frequencies, for lengths up to the trained one and for longer ones. transformers computes a
token's angles of the first set if the largest position of a call is below that length, and else of the second set.

Dynamic RoPE has other frequencies for each length beyond the trained one, of which a call has one. transformers keeps
the frequencies of the longest call so far. Here they are forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LONG, DYNAMIC = "longrope", "dynamic"
_SEVERAL = (
    "documents of one call must have at most {} tokens, max_position_embeddings, found {} and fewer: dynamic RoPE has "
    "other angles for each longer length, and transformers takes one length for all"
)


class DocumentAngles:
    """A forward hook of one of transformers' rotary embeddings.

    Attributes:
        to_end: int64 [1 or B, T], how many tokens a token's document has from this token on, itself included. None
            where a call has whole rows: then a document ends where the next position is not the next number.
    """

    to_end: Tensor | None = None

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """The output of `module` for these arguments if each document is alone; None leaves `output` as it is."""
        call = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        positions, layer = call["position_ids"], call.get("layer_type")
        kind = _kinds(module)[layer]
        if positions.dim() != 2 or not _depends(kind):
            return None
        lengths = positions + (_to_end(positions) if self.to_end is None else self.to_end)
        most = _trained_length(module, layer)
        if DYNAMIC in kind:
            longest = max(most, int(lengths.max()))  # transformers has read it as well
            if module.training and longest > most and bool((lengths != longest).any()):
                raise ValueError(_SEVERAL.format(most, longest))
            return None if _forget(module, layer, longest) else module.forward(**call)
        beyond = positions.new_full((len(positions), 1), most)
        short = module.forward(**call | {"position_ids": positions.clamp(max=most - 1)})
        long = module.forward(**call | {"position_ids": torch.cat([positions, beyond], 1)})
        is_long = (lengths > most)[..., None]
        if isinstance(output, Tensor):
            return torch.where(is_long, long[:, :-1], short)
        return tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))


def angles_by_document(model: nn.Module) -> list[Any]:
    """Let the rotary embeddings of `model` compute each document's angles by its own length.

    `fuse`, `context_parallel`, `pipeline_parallel` and `finetune` do so. Call it for a model that runs otherwise, where
    rows are packed. It changes nothing in models whose angles do not depend on a length, and for rows that are one
    document of equal lengths each. A document ends where `position_ids` do not go up by one.

    Under dynamic RoPE a call has the angles of its own length, also after a longer one. In training, documents of
    several lengths raise a ValueError if one is beyond `max_position_embeddings`.

    Returns:
        The handles of the hooks that it has added. `remove()` of each undoes it.
    """
    return [
        module.register_forward_hook(DocumentAngles(), with_kwargs=True)
        for module in model.modules()
        if any(map(_depends, _kinds(module).values())) and not _hooks(module)
    ]


def document_angles(model: nn.Module) -> list[DocumentAngles]:
    """The hooks that `angles_by_document` has added to `model`."""
    return [hook for module in model.modules() for hook in _hooks(module)]


def dynamic_length(model: nn.Module) -> int:
    """The largest length up to which a model's dynamic RoPE has one set of frequencies; 0 if it has no such RoPE."""
    lengths = [
        _trained_length(module, layer)
        for module in model.modules()
        for layer, kind in _kinds(module).items()
        if DYNAMIC in kind
    ]
    return min(lengths, default=0)


def _hooks(module: nn.Module) -> list[DocumentAngles]:
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, DocumentAngles)]


def _kinds(module: Any) -> dict[str | None, str]:
    """{layer type: kind of RoPE} of a rotary embedding, {None: kind} if it has one kind; else {}."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return dict(kinds) if isinstance(kinds, dict) else {}


def _depends(kind: str) -> bool:
    """Whether frequencies depend on a length."""
    return kind == LONG or DYNAMIC in kind


def _trained_length(module: Any, layer: str | None) -> int:
    """The length beyond which frequencies change."""
    config = module.config
    most: int = config.max_position_embeddings
    if DYNAMIC in _kinds(module)[layer]:
        return most
    rope = getattr(config, "rope_parameters", None) or {}  # transformers 4 has none
    rope = rope if layer is None else rope[layer]
    name = "original_max_position_embeddings"
    return rope.get(name) or getattr(config, name, None) or most


def _to_end(positions: Tensor) -> Tensor:
    """int64 [B, T]: how many tokens follow in each token's document, itself included. The host does not wait."""
    length = positions.shape[1]
    after = torch.arange(1, length + 1, device=positions.device)
    ends = after.expand_as(positions).clone()
    ends[:, :-1].masked_fill_(positions[:, 1:] == positions[:, :-1] + 1, length)
    return ends.flip(1).cummin(1).values.flip(1) - after + 1


def _forget(module: Any, layer: str | None, longest: int) -> bool:
    """Reset dynamic RoPE if it has kept the frequencies of a longer call. Returns whether it had not."""
    prefix = "" if layer is None else f"{layer}_"
    name = f"{prefix}max_seq_len_cached"
    if int(getattr(module, name, module.max_seq_len_cached)) <= longest:
        return True
    first, now = (getattr(module, f"{prefix}{kept}inv_freq") for kept in ("original_", ""))
    module.register_buffer(f"{prefix}inv_freq", first.to(now.device), persistent=False)
    setattr(module, name, _trained_length(module, layer))
    return False
