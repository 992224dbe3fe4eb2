# SPDX-License-Identifier: Apache-2.0
"""How a compiled layer's calls bypass torch's dispatcher.

Inductor's code calls each op of linear.py with plain tensors, without gradients. The first such call goes through the
dispatcher and is recorded. The layer's numbers keep all that the recording depends on, as a `Ready`. A later call of
the same form launches the recording at once. Every other call goes through the dispatcher.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lorakernels.autograd.linear.numbers import Numbers
from lorakernels.recorded.forms import forms_of, sees_dispatch_keys
from lorakernels.recorded.function import RecordedFunction
from lorakernels.recorded.recording import pick
from lorakernels.recorded.routing import put_ahead
from lorakernels.state.handles import known_numbers

MOST_READY = 8  # that a layer remembers of each op


class CallRecording(NamedTuple):
    """The recording that a call ran by.

    Attributes:
        recorded: the function that was launched.
        tensors: the positions of its tensors among the op's arguments, in the order of the recording's addresses.
        columns: gives the addresses of the layer's columns in the FP8 states, for (state of x, state of dy).
        sites: the layer's dropout site.
    """

    recorded: RecordedFunction
    tensors: Sequence[int]
    columns: Callable[[Any, Any], tuple[int, ...]]
    sites: tuple[int, ...]


class Ready(NamedTuple):
    """A recorded call, and the checks of a later one.

    Attributes:
        others_of: gives the arguments that are not the recording's tensors. A handle is not among them.
        others: these arguments in that call.
        tensors_of: the recording's tensors among the arguments.
        holds_for: whether such tensors, and then the FP8 states, are of these forms.
        recorded: a weak reference to the function.
        columns, sites: as of `CallRecording`.
    """

    others_of: Callable[[Sequence[Any]], tuple[Any, ...]]
    others: tuple[Any, ...]
    tensors_of: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    holds_for: Callable[..., bool]
    recorded: Callable[[], RecordedFunction | None]
    columns: Callable[[Any, Any], tuple[int, ...]]
    sites: tuple[int, ...]

    @classmethod
    def of(
        cls, call: CallRecording, args: Sequence[Any], handle: int, states: Sequence[Tensor]
    ) -> Ready:
        others = [i for i in range(len(args)) if i != handle and i not in call.tensors]
        others_of, tensors_of = pick(others), pick(call.tensors)
        return cls(
            others_of,
            tuple([[*v] if isinstance(v, list) else v for v in others_of(args)]),
            tensors_of,
            forms_of([*tensors_of(args), *states]),
            weakref.ref(call.recorded),
            call.columns,
            call.sites,
        )


def launch_ahead(
    op: Any,
    handle: int,
    count: int,
    find: Callable[[Numbers, Sequence[Any]], CallRecording | None],
    by_ops: Callable[..., Any],
    begins: bool,
) -> None:
    """Let calls of `op` launch the recording of a call like them, without torch's dispatcher.

    Args:
        op: an overload that `define_composed` gave.
        handle: the position of the layer's handle among its arguments.
        count: how many arguments such a call has. Others that it has are None.
        find: the recording of a call that has run; None without one.
        by_ops: runs a call whose addresses a recording does not take. The FP8 state does not count it again.
        begins: whether a call with a last argument of True is a training forward, which the FP8 state counts.
    """
    if not sees_dispatch_keys():  # one recording could serve calls under other keys
        return
    name = op._schema.name

    def call(general: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        others = (*args[count:], *kwargs.values())
        if len(args) < count or any([value is not None for value in others]):
            return general(*args, **kwargs)
        named = args[:count]
        numbers = known_numbers(named[handle])
        if numbers is None:
            return general(*args, **kwargs)
        state = numbers.state
        states = () if state is None else (state.forward, state.backward)
        for ready in numbers.made.get(name, ()):
            if ready.others_of(named) != ready.others:
                continue
            tensors = ready.tensors_of(named)
            if not ready.holds_for(*tensors, *states):
                continue
            recorded = ready.recorded()
            if recorded is None:
                continue
            if begins and named[-1] and state is not None:
                state.on_training_forward(numbers.default.column)
            columns = ready.columns(*states) if states else ()
            results = recorded.run((*tensors, *columns), ready.sites)
            return by_ops(*named) if results is None else results
        results = general(*args, **kwargs)
        run = find(numbers, named)
        if run is not None:
            made = Ready.of(run, named, handle, states)
            numbers.made[name] = (made, *numbers.made.get(name, ())[: MOST_READY - 1])
        return results

    put_ahead(op, call)
