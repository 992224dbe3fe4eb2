# SPDX-License-Identifier: Apache-2.0
"""What a step of a pipeline is asked for, and whether all ranks are asked for the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.parallel.context.rows import NO_MASK
from lorakernels.parallel.context.share import ContextParallel
from lorakernels.parallel.pipeline.stages import ROWS
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.tensor.known_tokens import check_values, digest_of, digests

_TAKEN = ("input_ids", *ROWS, "cu_seq_lens_q", "max_length_q")


class Asked(NamedTuple):
    """What a rank is asked for in a step.

    Attributes:
        labels, items, inputs: of `PipelineParallel.forward_backward`, of whole rows.
        trains: whether there is a backward.
        how: what else must be equal on all ranks, in words.
        on_gpu: whether values on a GPU are compared, for which the host waits.
    """

    labels: Any
    items: Any
    inputs: dict[str, Any]
    trains: bool
    how: str
    on_gpu: bool

    def values(self) -> dict[str, int]:
        """Digests of what must be equal on all ranks."""
        return digests({"labels": self.labels, "items": self.items, **self.inputs}, self.on_gpu)

    def __str__(self) -> str:
        given = [f"{name} {_shown(x)}" for name, x in sorted(self.inputs.items()) if x is not None]
        values = f"labels {_shown(self.labels)}", f"items {_shown(self.items)}"
        return "; ".join([f"backward {self.trains}", self.how, *values, *given])


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device.type}"
    return repr(x) if isinstance(x, bool | int | float | None) else type(x).__name__


def check_inputs(asked: Asked, microbatches: int, shared: bool) -> None:
    """Refuse inputs that are not whole rows of a step, which `microbatches` divide.

    Args:
        asked: what this rank is asked for.
        microbatches: of a step.
        shared: whether ranks share each row.

    Raises:
        TypeError: another input, or no `input_ids`.
        ValueError: a shape or the labels' dtype does not fit, or there is a mask over shared rows.
        RuntimeError: there is a backward, and gradients are off.
    """
    if asked.trains and not torch.is_grad_enabled():
        raise RuntimeError("forward_backward needs gradients: call loss under torch.no_grad()")
    for name in asked.inputs:
        if name not in _TAKEN:
            raise TypeError(f"a pipeline takes {[*_TAKEN]} of whole rows, found {name}")
    tokens = asked.inputs.get("input_ids")
    if tokens is None:
        raise TypeError("a pipeline needs input_ids")
    if tokens.dim() != 2 or len(tokens) % microbatches or not len(tokens):
        raise ValueError(
            f"input_ids must be [B, S] with B a positive multiple of the {microbatches} microbatches, found "
            f"{list(tokens.shape)}"
        )
    wanted = {"labels": [tokens.shape], "attention_mask": [tokens.shape]}
    wanted["position_ids"] = [tokens.shape, torch.Size((1, tokens.shape[1]))]
    labels = asked.labels
    if not isinstance(labels, Tensor) or (labels.dtype, labels.device) != (
        torch.int64,
        tokens.device,
    ):
        raise ValueError(
            f"labels must be int64 on {tokens.device} as the rows, found {_shown(labels)}"
        )
    for name, x in {**asked.inputs, "labels": asked.labels}.items():
        if x is not None and name in wanted and x.shape not in wanted[name]:
            raise ValueError(
                f"{name} must be {list(tokens.shape)} as the rows, found {list(x.shape)}"
            )
    if shared and asked.inputs.get("attention_mask") is not None:
        raise ValueError(NO_MASK)


def check_agreed(
    groups: Mapping[str, Any],
    asked: object,
    check: Callable[[], None],
    digest: Callable[[], dict[str, int]],
) -> None:
    """Collective over each of `groups` in turn: `check` on all ranks, which are asked for the same.

    A rank that raised alone, and went on, would meet the others' next step. One exchange a group, on the host, tells
    all. The first group is of ranks that have stages. The next one, if any, is of those that share their rows.

    Args:
        groups: {whom it has, for the message: a group of gloo's}.
        asked: what this rank is asked for. `str` makes words of it, after `check`.
        check: raises if this rank cannot do it.
        digest: makes digests of what must be equal on all ranks, after `check`.

    Raises:
        ValueError: ranks are asked for something else, or another rank raised.
        Exception: what `check` raises.
    """
    error: Exception | None = None
    mine: tuple[int, ...] | None = None
    values: dict[str, int] = {}
    try:
        check()
        values = digest()
        mine = (zlib.crc32(str(asked).encode()), digest_of(values))
    except Exception as found:  # any: the other ranks wait below
        error = found
    for group in groups.values():
        if not comm.alike(group, 2, mine):
            mine = None  # which the next group hears
    if mine is not None:
        return
    with comm.all_together(groups.values()):
        if error is not None:
            raise error
    forms = {whose: comm.agree(group, (str(asked), values)) for whose, group in groups.items()}
    with comm.all_together(groups.values()):
        for whose, said in forms.items():
            check_forms(said, whose)


def check_forms(said: list[tuple[str, dict[str, int]]], whose: str) -> None:
    """Refuse ranks that are asked for something else, or for other values.

    Args:
        said: what each rank is asked for, and digests of the values.
        whose: which ranks they are, in words.

    Raises:
        ValueError: it has what all are asked for, or names the values.
    """
    forms = [form for form, _ in said]
    if len({*forms}) == 1:
        check_values([values for _, values in said], whose)
    else:
        raise ValueError(
            f"all ranks that {whose} must run a step of equal rows and options, found by rank {forms}"
        )


def check_shapes(found: list[tuple[int, int]], whose: str) -> None:
    """Refuse ranks whose microbatches [b, S] have several shapes. `whose` says which ranks `found` has, in order.

    Raises:
        ValueError: it names the first other one.
    """
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"rows must be equal on all ranks, found microbatches of {list(found[0])} on rank 0 and of "
                f"{list(other)} on rank {rank} of those that {whose}"
            )


def own_inputs(
    context: ContextParallel,
    stages: Any,
    together: Callable[[], AbstractContextManager[None]],
    asked: Asked,
    check: Callable[[], None],
) -> dict[str, Any]:
    """This rank's part of rows that ranks share. Collective if `context.checks_places`.

    Args:
        context: the ranks that share rows.
        stages: the group of ranks that have stages.
        together: collective at its end, where what one rank raises inside is raised on all.
        asked: what this rank is asked for.
        check: raises if this rank cannot do it.

    Raises:
        ValueError: ranks are asked for something else; or as `check` and `ContextParallel.loss`.
        TypeError, RuntimeError: as these do.
    """
    with together():
        check()
        own = context.own_inputs(asked.labels, asked.inputs)
        values = asked.values() if context.checks_places else {}
    differs = False
    forms: dict[str, list[tuple[str, dict[str, int]]]] = {}
    if context.checks_places:
        for whose, group in (("share rows", context.ranks.group), ("have stages", stages)):
            said = comm.agree(group, (str(asked), values, differs))
            forms[whose] = [(form, digested) for form, digested, _ in said]
            # the next group hears it, so that no rank goes on alone
            differs = any(form != forms[whose][0] for form in forms[whose]) or any(
                heard for *_, heard in said
            )
    with together():
        for whose, found in forms.items():
            check_forms(found, whose)
        if not differs:
            context.look_at(own["input_ids"], own)
    return own
