# SPDX-License-Identifier: Apache-2.0
"""Which call may come after which: one table, from which every call that changes a model makes its refusals.

A row of `CALLS` has the states in which a call refuses a model, why, and the way out. It takes a model in any other
state. A new call adds its row, and adds its state to `STATES` if later calls must know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import nn

from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.marks import SplitModule, became, is_held, is_loaded_part

GRAPHS = "lorakernels.graphs"


def managed_by_graphs(layer: nn.Module) -> bool:
    """Whether a GraphManager records or replays the layer."""
    hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
    forward = vars(layer).get("forward")
    return any(type(hook).__module__.startswith(GRAPHS) for hook in (*hooks, forward))


def _adapter(holds: Callable[[Any], bool]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, LoRALinear) and holds(module)


class State(NamedTuple):
    """A state that a module may be in.

    Attributes:
        holds: whether a module is in it.
        says: the same in words, after the module's path.
        of_model: whether one such module puts the whole model into this state.
    """

    holds: Callable[[nn.Module], bool]
    says: str
    of_model: bool = False


STATES = {
    "adapted": State(_adapter(lambda _: True), "is a LoRALinear already", True),
    "merged": State(_adapter(lambda m: m.merged), "is merged"),
    "disabled": State(_adapter(lambda m: m.disable_adapters), "has its adapter disabled"),
    "batched": State(_adapter(lambda m: m.lora_A.dim() == 3), "has several adapters in one batch"),
    "fused": State(lambda m: became(m).fused is not None, "is fused already", True),
    "split": State(
        lambda m: isinstance(m, SplitModule) and not is_loaded_part(m),
        "is split over tensor-parallel ranks",
    ),
    "loaded": State(is_loaded_part, "is a part that load_quantized(tp=…) read"),
    "held": State(is_held, "is in a sharded base"),
    "shared rows": State(
        lambda m: became(m).rows_over_ranks, "has its rows over ranks since context_parallel", True
    ),
    "stages": State(
        lambda m: became(m).pipeline_parallel is not None,
        "was cut into stages by pipeline_parallel",
        True,
    ),
    "graphs": State(managed_by_graphs, "is managed by attach or lorakernels.graphs"),
}


class Never(NamedTuple):
    """Why a call refuses a state, and the way out. `error`: the exception's class."""

    why: str
    error: type[Exception] = ValueError


_ENABLE = Never("leave disable_lora first")
_UNMERGE = Never("call unmerge_lora first")
_ONE = Never("choose one by AdapterBatch.only(name)")


def _early(call: str) -> dict[str, Never]:
    """The refusals of a call that changes layers: it comes before ranks take the layers as they are."""
    rows = f"it is too late to {call}: call ContextParallel.close, do it, and call context_parallel again"
    return {
        "shared rows": Never(rows),
        "stages": Never(f"it is too late to {call}: do it before pipeline_parallel"),
    }


def _held(what: str) -> Never:
    why = f"cannot {what} a weight that each rank holds a part of; call its unshard() first"
    return Never(why, RuntimeError)


def _whole(call: str, error: type[Exception] = ValueError) -> dict[str, Never]:
    """Of a call that needs whole layers, of which each rank has a part since `parallelize` or `load_quantized`."""
    never = Never(f"{call} needs the whole layer", error)
    return {"split": never, "loaded": never}


_LEAVE = {"disabled": _ENABLE, **_whole("unloading"), "held": _held("unload")}

CALLS: dict[str, dict[str, Never]] = {
    "apply_lora": {
        "adapted": Never("call merge_and_unload or unload first, or batch_adapters for several"),
        "split": Never("adapters are split with their layers; add them before parallelize"),
        "loaded": Never("adapters are split with their layers; give load_quantized(lora=…)"),
        "held": _held("put an adapter over"),
        **_early("add adapters"),
    },
    "load_adapter": {"merged": _UNMERGE, "disabled": _ENABLE, "batched": _ONE},
    "save_adapter": {"disabled": _ENABLE, "batched": _ONE},
    "batch_adapters": {
        "merged": _UNMERGE,
        "disabled": _ENABLE,
        "batched": _ONE,
        **_whole("an AdapterBatch"),
        "stages": Never("microbatches would cut the rows of several adapters apart"),
    },
    "fuse": {
        "merged": _UNMERGE,
        "fused": Never("call unfuse(model) first"),
        "split": Never("matrices are joined before they are split; call fuse before parallelize"),
        **_early("fuse"),
    },
    "unfuse": {
        **_whole("unfuse", RuntimeError),
        "held": _held("unfuse"),
        **_early("unfuse"),
    },
    "parallelize": {
        "merged": _UNMERGE,
        "batched": Never("rows of several adapters cannot be split over ranks yet"),
        "split": Never("call parallelize once"),
        "held": Never("call parallelize before shard_base"),
        **_early("parallelize"),
    },
    "shard_base": {
        "merged": _UNMERGE,
        "loaded": Never("call parallelize before shard_base"),
        "held": Never("call its unshard() first"),
        "stages": Never("a pipeline with a sharded base is not supported yet"),
    },
    "pipeline_parallel": {
        "batched": Never("microbatches would cut the rows of several adapters apart"),
        **dict.fromkeys(
            ("split", "loaded"), Never("a pipeline of split layers is not supported yet")
        ),
        "held": Never("a pipeline with a sharded or offloaded base is not supported yet"),
        "shared rows": Never("call pipeline_parallel first, then context_parallel"),
        "stages": Never("call pipeline_parallel once"),
        "graphs": Never("cut the model first, then give GraphManager pipeline.layers"),
    },
    "context_parallel": {
        "shared rows": Never("call ContextParallel.close first"),
        "graphs": Never("replays would have attention of whole rows; call context_parallel first"),
    },
    "attach": {
        "stages": Never(
            "a pipeline draws for each microbatch itself; call reduce_and_update of its FP8State and advance of its "
            "PhiloxState after the optimizer's step"
        ),
    },
    "merge_lora": {
        "disabled": _ENABLE,
        "batched": _ONE,
        **_whole("merge_lora", RuntimeError),
        "held": _held("merge into"),
    },
    "merge_and_unload": {"batched": _ONE, **_LEAVE},
    "unload": _LEAVE,
}


def _raise(call: str, state: str, paths: Sequence[str]) -> NoReturn:
    never, others = CALLS[call][state], len(paths) - 1
    more = f" (and {others} more)" if others else ""
    raise never.error(f"{paths[0]} {STATES[state].says}{more}: {never.why}")


def refuse_module(path: str, module: nn.Module, call: str) -> None:
    """Raise the refusal of `call` for one module, if it has one."""
    for state in CALLS[call]:
        if STATES[state].holds(module):
            _raise(call, state, [path])


def refuse(model: nn.Module, call: str, paths: Iterable[str] | None = None) -> None:
    """Raise the refusal of `call` for `model`, if it has one, before anything is changed.

    With `paths`, only the modules there count, except for states of the whole model.
    """
    modules = {path or type(model).__name__: m for path, m in model.named_modules()}
    some = modules if paths is None else {path: model.get_submodule(path) for path in paths}
    for name in CALLS[call]:
        state = STATES[name]
        looked = modules if state.of_model else some
        if so := [path for path, module in looked.items() if state.holds(module)]:
            _raise(call, name, so)
