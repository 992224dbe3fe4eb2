# SPDX-License-Identifier: Apache-2.0
"""The arguments of a pipeline's step, and whether all ranks have equal ones."""

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


class StepArguments(NamedTuple):
    """A step's arguments on one rank.

    Attributes:
        labels, items, inputs: of `PipelineParallel.forward_backward`, of whole rows.
        trains: whether there is a backward.
        how: a description of everything else that must be equal on all ranks.
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
        shown = [f"{name} {_shown(x)}" for name, x in sorted(self.inputs.items()) if x is not None]
        values = f"labels {_shown(self.labels)}", f"items {_shown(self.items)}"
        return "; ".join([f"backward {self.trains}", self.how, *values, *shown])


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device.type}"
    return repr(x) if isinstance(x, bool | int | float | None) else type(x).__name__


def check_inputs(step: StepArguments, microbatches: int, shared: bool) -> None:
    """Refuse inputs that are not the whole rows of a step, or that `microbatches` do not divide.

    Args:
        step: this rank's arguments.
        microbatches: of a step.
        shared: whether ranks share each row.

    Raises:
        TypeError: another input, or no `input_ids`.
        ValueError: a shape or the labels' dtype does not fit, or there is a mask over shared rows.
        RuntimeError: there is a backward, and gradients are off.
    """
    if step.trains and not torch.is_grad_enabled():
        raise RuntimeError("forward_backward needs gradients: call loss under torch.no_grad()")
    for name in step.inputs:
        if name not in _TAKEN:
            raise TypeError(f"a pipeline takes {[*_TAKEN]} of whole rows, found {name}")
    tokens = step.inputs.get("input_ids")
    if tokens is None:
        raise TypeError("a pipeline needs input_ids")
    if tokens.dim() != 2 or len(tokens) % microbatches or not len(tokens):
        raise ValueError(
            f"input_ids must be [B, S] with B a positive multiple of the {microbatches} microbatches, found "
            f"{list(tokens.shape)}"
        )
    wanted = {"labels": [tokens.shape], "attention_mask": [tokens.shape]}
    wanted["position_ids"] = [tokens.shape, torch.Size((1, tokens.shape[1]))]
    labels = step.labels
    if not isinstance(labels, Tensor) or (labels.dtype, labels.device) != (
        torch.int64,
        tokens.device,
    ):
        raise ValueError(
            f"labels must be int64 on {tokens.device} as the rows, found {_shown(labels)}"
        )
    for name, x in {**step.inputs, "labels": step.labels}.items():
        if x is not None and name in wanted and x.shape not in wanted[name]:
            raise ValueError(
                f"{name} must be {list(tokens.shape)} as the rows, found {list(x.shape)}"
            )
    if shared and step.inputs.get("attention_mask") is not None:
        raise ValueError(NO_MASK)


def check_agreed(
    groups: Mapping[str, Any],
    step: object,
    check: Callable[[], None],
    digest: Callable[[], dict[str, int]],
) -> None:
    """Collective over each of `groups` in turn: run `check` on all ranks, and compare their arguments.

    A rank that raised alone, and went on, would meet the next step of the others. So each group exchanges the outcome
    once, on the host. The first group has the ranks with stages. The next one, if any, has those that share rows.

    Args:
        groups: {what its ranks do, for the message: a group of gloo}.
        step: this rank's arguments. They are compared as `str`, which is called after `check`.
        check: raises if this rank cannot run the step.
        digest: returns digests of the values that must be equal on all ranks. It is called after `check`.

    Raises:
        ValueError: ranks have different arguments, or another rank raised.
        Exception: what `check` raises.
    """
    error: Exception | None = None
    mine: tuple[int, ...] | None = None
    values: dict[str, int] = {}
    try:
        check()
        values = digest()
        mine = (zlib.crc32(str(step).encode()), digest_of(values))
    except Exception as raised:  # any: the other ranks wait below
        error = raised
    for group in groups.values():
        if not comm.alike(group, 2, mine):
            mine = None  # so that the next group refuses, too
    if mine is not None:
        return
    with comm.all_together(groups.values()):
        if error is not None:
            raise error
    forms = {whose: comm.agree(group, (str(step), values)) for whose, group in groups.items()}
    with comm.all_together(groups.values()):
        for whose, said in forms.items():
            check_forms(said, whose)


def check_forms(said: list[tuple[str, dict[str, int]]], whose: str) -> None:
    """Refuse ranks whose arguments differ in form or in values.

    Args:
        said: each rank's arguments as `str`, and digests of their values.
        whose: what these ranks do, after "all ranks that", such as "have stages".

    Raises:
        ValueError: it lists all ranks' arguments, or names the values.
    """
    forms = [form for form, _ in said]
    if len({*forms}) == 1:
        check_values([values for _, values in said], whose)
    else:
        raise ValueError(
            f"all ranks that {whose} must run a step of equal rows and options, found by rank {forms}"
        )


def check_shapes(shapes: list[tuple[int, int]], whose: str) -> None:
    """Refuse ranks whose microbatches [b, S] have several shapes. `whose` says what these ranks do.

    Raises:
        ValueError: it names the first rank with another shape.
    """
    for rank, other in enumerate(shapes):
        if other != shapes[0]:
            raise ValueError(
                f"rows must be equal on all ranks, found microbatches of {list(shapes[0])} on rank 0 and of "
                f"{list(other)} on rank {rank} of those that {whose}"
            )


def own_inputs(
    context: ContextParallel,
    stages: Any,
    together: Callable[[], AbstractContextManager[None]],
    step: StepArguments,
    check: Callable[[], None],
) -> dict[str, Any]:
    """This rank's part of rows that ranks share. Collective if `context.checks_places`.

    Args:
        context: the ranks that share rows.
        stages: the group of ranks that have stages.
        together: collective at its end, where an exception of one rank is raised on all.
        step: this rank's arguments.
        check: raises if this rank cannot run the step.

    Raises:
        ValueError: ranks have different arguments; or as `check` and `ContextParallel.loss`.
        TypeError, RuntimeError: as these do.
    """
    with together():
        check()
        part = context.own_inputs(step.labels, step.inputs)
        values = step.values() if context.checks_places else {}
    differs = False
    forms: dict[str, list[tuple[str, dict[str, int]]]] = {}
    if context.checks_places:
        for whose, group in (("share rows", context.ranks.group), ("have stages", stages)):
            said = comm.agree(group, (str(step), values, differs))
            forms[whose] = [(form, digested) for form, digested, _ in said]
            # told to the next group, so that no rank goes on alone
            differs = any(form != forms[whose][0] for form in forms[whose]) or any(
                heard for *_, heard in said
            )
    with together():
        for whose, said in forms.items():
            check_forms(said, whose)
        if not differs:
            context.look_at(part["input_ids"], part)
    return part
