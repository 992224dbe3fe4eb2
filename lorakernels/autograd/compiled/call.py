# SPDX-License-Identifier: Apache-2.0
"""The way of a compiled layer's calls past torch's dispatcher.

Inductor's code calls each op of linear.py with plain tensors, without gradients. The first such call goes
through the dispatcher and makes a plan. What that plan depends on is kept beside the layer's numbers as a `Ready`. A
later call of the same form launches the plan at once. Every other call goes through the dispatcher.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lorakernels.autograd.linear.numbers import Numbers
from lorakernels.recorded.forms import forms_of, sees_dispatch_keys
from lorakernels.recorded.function import FunctionPlan
from lorakernels.recorded.plan import pick
from lorakernels.recorded.routing import put_ahead
from lorakernels.state.handles import known_numbers

MOST_READY = 8  # that a layer remembers of each op


class Found(NamedTuple):
    """The plan that a call ran by.

    Attributes:
        plan: what was launched.
        tensors: the places of its tensors among the op's arguments, in the order of the plan's addresses.
        columns: gives the addresses of the layer's columns in the FP8 states, for (state of x, state of dy).
        sites: the layer's dropout site.
    """

    plan: FunctionPlan
    tensors: Sequence[int]
    columns: Callable[[Any, Any], tuple[int, ...]]
    sites: tuple[int, ...]


class Ready(NamedTuple):
    """A call that a plan took.

    Attributes:
        others_of, others: which arguments are not the plan's tensors, and what they were. A handle is not among them.
        tensors_of: the plan's tensors among the arguments.
        holds_for: whether such tensors, and then the FP8 states, are of these forms.
        plan: a weak reference.
        columns, sites: as of `Found`.
    """

    others_of: Callable[[Sequence[Any]], tuple[Any, ...]]
    others: tuple[Any, ...]
    tensors_of: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    holds_for: Callable[..., bool]
    plan: Callable[[], FunctionPlan | None]
    columns: Callable[[Any, Any], tuple[int, ...]]
    sites: tuple[int, ...]

    @classmethod
    def of(cls, found: Found, args: Sequence[Any], handle: int, states: Sequence[Tensor]) -> Ready:
        others = [i for i in range(len(args)) if i != handle and i not in found.tensors]
        others_of, tensors_of = pick(others), pick(found.tensors)
        return cls(
            others_of,
            tuple([[*v] if isinstance(v, list) else v for v in others_of(args)]),
            tensors_of,
            forms_of([*tensors_of(args), *states]),
            weakref.ref(found.plan),
            found.columns,
            found.sites,
        )


def launch_ahead(
    op: Any,
    handle: int,
    count: int,
    find: Callable[[Numbers, Sequence[Any]], Found | None],
    by_ops: Callable[..., Any],
    begins: bool,
) -> None:
    """Let calls of `op` launch a plan that took a call like them, before torch's dispatcher is asked.

    Args:
        op: an overload that `define_composed` gave.
        handle: the place of the layer's handle among its arguments.
        count: how many arguments such a call has. Others that it has are None.
        find: the plan of a call that has run; None if it ran by none.
        by_ops: runs a call whose addresses a plan does not take, without telling the FP8 state of it.
        begins: whether a call with a last argument of True is a training forward, of which the FP8 state is told.
    """
    if not sees_dispatch_keys():  # a plan for other keys could not be told from one for these
        return
    name = op._schema.name

    def call(general: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        others = (*args[count:], *kwargs.values())
        if len(args) < count or any([value is not None for value in others]):
            return general(*args, **kwargs)
        given = args[:count]
        numbers = known_numbers(given[handle])
        if numbers is None:
            return general(*args, **kwargs)
        state = numbers.state
        states = () if state is None else (state.forward, state.backward)
        for ready in numbers.made.get(name, ()):
            if ready.others_of(given) != ready.others:
                continue
            tensors = ready.tensors_of(given)
            if not ready.holds_for(*tensors, *states):
                continue
            plan = ready.plan()
            if plan is None:
                continue
            if begins and given[-1] and state is not None:
                state.on_training_forward(numbers.own.column)
            columns = ready.columns(*states) if states else ()
            results = plan.run((*tensors, *columns), ready.sites)
            return by_ops(*given) if results is None else results
        results = general(*args, **kwargs)
        found = find(numbers, given)
        if found is not None:
            made = Ready.of(found, given, handle, states)
            numbers.made[name] = (made, *numbers.made.get(name, ())[: MOST_READY - 1])
        return results

    put_ahead(op, call)
