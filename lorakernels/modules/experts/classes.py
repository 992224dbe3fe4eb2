# SPDX-License-Identifier: Apache-2.0
"""Which modules with stacked experts LoRAExperts computes: those that run transformers' own default methods.

Shapes and names do not suffice. DeepSeek-V4 clamps the gate, and more models scale or normalize an expert's output. A
module is taken if its forward uses transformers' table of implementations, its gate is transformers' default, and its
eager forward has MixtralExperts' instructions.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

from torch import nn

STACKED = ("gate_up_proj", "down_proj")
# The layout that LoRAExperts computes, in the attributes of transformers' decorator of experts
_LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LEAVE_OUT = "Leave experts out of target_parameters: target_modules adapts the layers around them"


def why_not_experts(owner: nn.Module, name: str) -> str:
    """Why LoRAExperts cannot take the place of the owner of the parameter `name`, "" if it can."""
    held, kind = set(owner._parameters), type(owner).__name__
    if name not in STACKED or held != set(STACKED) or not callable(getattr(owner, "act_fn", None)):
        return (
            f"is of a {kind} with the parameters {sorted(held)}; expected "
            f"experts with {' and '.join(STACKED)} [E, N, K] and act_fn, as in Mixtral and Qwen3-MoE"
        )
    for attribute, expected in _LAYOUT.items():
        if (value := getattr(owner, attribute, expected)) != expected:
            return f"is of a {kind} with {attribute}={value!r}, expected {expected!r}. {_LEAVE_OUT}"
    if any(getattr(owner, hooks) for hooks in _HOOKS):
        return f"is of a {kind} with hooks, which would never run again"
    why_not = _why_not_methods(owner) or _why_not_held(owner)
    return f"is of a {kind}, {why_not}. {_LEAVE_OUT}" if why_not else _why_not_shapes(owner)


def _why_not_methods(owner: nn.Module) -> str:
    """Why the owner does not compute Σ w · down(act(gate) · up), "" if it does."""
    kind: Any = type(owner)
    moe: Any = sys.modules.get("transformers.integrations.moe")
    default_gate = getattr(moe, "_default_apply_gate", None)
    if default_gate is None:
        return "which is not by transformers 5, whose experts alone LoRAExperts computes"
    if (
        "_apply_gate" in vars(owner)
        or getattr(kind, "_apply_gate", default_gate) is not default_gate
    ):
        return "whose _apply_gate is not transformers' own default, act_fn(gate) * up"
    forward = vars(owner).get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not kind.forward:
        return "whose forward was replaced on the instance"
    if kind.__call__ is not nn.Module.__call__ or not _is_default(kind.forward, moe):
        return "whose forward is not the one of transformers' MixtralExperts"
    name = getattr(getattr(owner, "config", None), "_experts_implementation", None)
    runs = moe.ALL_EXPERTS_FUNCTIONS.get(name)
    module = getattr(runs, "__module__", None)
    if runs is not None and not str(module).startswith("transformers."):
        return f"whose experts_implementation={name!r} is a function of {module}"
    return ""


def _is_default(forward: Any, moe: Any) -> bool:
    """Whether transformers' decorator made `forward`, of an eager one with MixtralExperts' instructions."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    eager: Any = getattr(forward, "__wrapped__", None)
    reference: Any = getattr(MixtralExperts.forward, "__wrapped__", None)
    if not all(isinstance(method, FunctionType) for method in (forward, eager, reference)):
        return False
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    table = cells.get("experts_interface")
    return (
        forward.__globals__ is vars(moe)
        and (table is None or table.cell_contents is moe.ALL_EXPERTS_FUNCTIONS)
        and _instructions(eager.__code__) == _instructions(reference.__code__)
    )


def _instructions(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_consts, code.co_names, code.co_varnames


def _why_not_held(owner: nn.Module) -> str:
    """Why LoRAExperts would lose something: it has only the activation and the experts of the owner; "" if not."""
    others = sorted({*owner._modules, *owner._buffers} - {"act_fn"})
    return f"which also holds {', '.join(others)}" if others else ""


def _why_not_shapes(owner: nn.Module) -> str:
    gate_up, down = (owner._parameters[name] for name in STACKED)
    assert gate_up is not None and down is not None
    if gate_up.dim() != 3 or down.shape != (len(gate_up), gate_up.shape[2], gate_up.shape[1] // 2):
        shapes = f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        return f"must be of gate_up_proj [E, 2 F, H] and down_proj [E, H, F], found {shapes}"
    return ""
