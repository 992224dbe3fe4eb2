# SPDX-License-Identifier: Apache-2.0
"""LoRAExperts: the experts of a mixture, each a linear layer of its own, which LoRALinear and FP8 can replace.

    y_t = Σ_j w_tj · down_e( act(gate_e x_t) ⊙ up_e x_t )       e = the expert that token t has chosen as its j-th

transformers 5 holds experts as two stacked parameters, `gate_up_proj` [E, 2 F, H] and `down_proj` [E, H, F].
`LoRAConfig.target_parameters` names them as in PEFT. Here each of the E matrices becomes an `nn.Linear` over the same
memory, at `….experts.gate_up_proj.3`, which `apply_lora` then adapts as any other.

The tokens are sorted by their experts on the device. On Hopper, experts in FP8 with one scale each run as one stack
(stack.py). One launch computes them all, and a CUDA graph can hold it. Elsewhere they run one by one, and the
host waits once a layer for the number of tokens of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from lorakernels.autograd.experts import ExpertSum, SwiGLU, grouped_linear
from lorakernels.config import LoRAConfig, clean_path
from lorakernels.modules.experts.classes import STACKED, why_not_experts
from lorakernels.modules.experts.stack import stacked, why_not_stacked
from lorakernels.numerics.autocast import under_autocast
from lorakernels.ops.expert_route import routing as route

_ROUTER = (
    ". Is it an adapter of PEFT's? For a mixture, PEFT turns 'gate' and 'all-linear' of target_modules into "
    "'gate.weight', the router, which stays frozen here. In PEFT, name the attention's layers in target_modules and "
    "the experts in target_parameters, or merge the adapter by PEFT's merge_and_unload and use the merged model"
)


class LoRAExperts(nn.Module):
    """Takes the place of a module with stacked experts; called as it: (hidden_states, top_k_index, top_k_weights).

    Attributes:
        gate_up_proj, down_proj: nn.ModuleList of E linear layers, H → 2 F and F → H.
        act_fn: between them, of the gate's half.

    Raises:
        TypeError: it computes something else than the module does (classes.py).
    """

    gate_up_proj: nn.ModuleList
    down_proj: nn.ModuleList
    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        if why_not := why_not_experts(stacked, STACKED[0]):
            raise TypeError(f"LoRAExperts: {STACKED[0]!r} {why_not}")
        self.training = stacked.training
        self.act_fn = cast(Callable[[Tensor], Tensor], stacked.act_fn)
        for name in STACKED:
            layers = [_linear_over(weight) for weight in getattr(stacked, name).detach()]
            setattr(self, name, nn.ModuleList(layers).train(stacked.training))
        # Its class and attributes, without weights, for `stacked_again`; not a submodule
        self._original = [_without_weights(stacked)]

    @property
    def num_experts(self) -> int:
        return len(self.gate_up_proj)

    @_disable_dynamo
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of each token's experts, [T, H] in hidden_states' dtype. torch.compile breaks its graph here.

        Args:
            hidden_states: [T, H].
            top_k_index: integers [T, J]; num_experts stands for no expert.
            top_k_weights: [T, J].

        Raises:
            RuntimeError: the stream is being captured, and the experts run one by one.
        """
        x = under_autocast(hidden_states)
        why_not = self.why_not_stacked(x.dtype)
        if why_not is None and len(x):
            return self._stacked(x, top_k_index, top_k_weights).to(hidden_states.dtype)
        if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "LoRAExperts cannot be captured: the host waits for the number of each expert's tokens, since "
                f"{why_not or 'there are none'}"
            )
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        numbers = torch.bincount(chosen, minlength=self.num_experts + 1).tolist()
        per_token = top_k_index.shape[-1]
        parts = hidden_states[order // per_token].split(numbers)
        outputs = [self.expert(e, part) for e, part in enumerate(parts[: self.num_experts])]
        outputs.append(torch.zeros_like(parts[-1], dtype=outputs[0].dtype))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        y = torch.cat(outputs)[back].view(*top_k_index.shape, -1)  # [T, J, H]
        return (y * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def why_not_stacked(self, dtype: torch.dtype = torch.bfloat16) -> str | None:
        """None if all experts run with one launch, for tokens of `dtype`; otherwise the reason why not."""
        if dtype != torch.bfloat16:
            return f"the tokens are {dtype}, not bfloat16"
        reasons = (why_not_stacked(getattr(self, name)) for name in STACKED)
        return next(filter(None, reasons), None)

    def _stacked(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, routing = x.contiguous(), route(top_k_index.contiguous(), self.num_experts)
        gate_up = grouped_linear(x, routing, True, stacked(self.gate_up_proj))
        if _is_silu(self.act_fn):
            act = SwiGLU.apply(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            act = (self.act_fn(gate) * up).contiguous()
        y = grouped_linear(act, routing, False, stacked(self.down_proj))
        out: Tensor = ExpertSum.apply(y, top_k_weights.contiguous(), routing.place)
        return out

    def expert(self, number: int, x: Tensor) -> Tensor:
        """One expert's output [M, H] for its tokens x [M, H]."""
        gate, up = self.gate_up_proj[number](x).chunk(2, dim=-1)
        y: Tensor = self.down_proj[number](self.act_fn(gate) * up)
        return y

    @torch.no_grad()
    def stacked_again(self) -> nn.Module:
        """The module that this one has replaced, with the plain linear layers' weights in new memory.

        Raises:
            TypeError: a layer is not a plain nn.Linear.
        """
        module: Any = copy.copy(self._original[0])
        module._parameters, module._modules = {}, {}
        module.act_fn = self.act_fn
        for name in STACKED:
            layers = list(getattr(self, name))
            if any(type(layer) is not nn.Linear for layer in layers):
                raise TypeError(f"{name} must hold plain nn.Linear layers to be stacked again")
            weight = torch.stack([layer.weight for layer in layers])
            trained = any(layer.weight.requires_grad for layer in layers)
            module.register_parameter(name, nn.Parameter(weight, requires_grad=trained))
        module.train(self.training)
        return cast(nn.Module, module)


def _is_silu(act_fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether the fused kernel computes it: a subclass, a forward of its own or a hook may compute something else."""
    if type(act_fn) is not nn.SiLU:
        return act_fn is nn.functional.silu
    hooked = act_fn._forward_hooks or act_fn._forward_pre_hooks
    return not hooked and "forward" not in vars(act_fn)


def _linear_over(weight: Tensor) -> nn.Linear:
    """An nn.Linear without a bias over `weight` [N, K] itself."""
    n, k = weight.shape
    layer = nn.Linear(k, n, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _without_weights(module: nn.Module) -> nn.Module:
    kept = copy.copy(module)
    kept._parameters, kept._modules = {}, {}
    vars(kept).pop("act_fn", None)  # a function
    return kept


def named_parameters(model: nn.Module, config: LoRAConfig) -> dict[str, tuple[int, int, int]]:
    """{path of a stacked parameter that `target_parameters` names: (E, N, K)}, in the model's order.

    A parameter that LoRAExperts holds layer by layer counts as well.

    Raises:
        ValueError: a name matches no parameter.
        TypeError: a parameter is not one of the stacked experts that LoRAExperts computes.
    """
    parameters = [path for path, _ in model.named_parameters()]
    held = held_experts(model)
    clean = {path: clean_path(path) for path in (*parameters, *held)}
    named = [path for path in clean if config.names_parameter(clean[path])]
    for name in config.target_parameters or ():
        if not any(clean[path] == name or clean[path].endswith(f".{name}") for path in named):
            stacked = sorted({path.rpartition(".")[2] for path in (*_stacked(model), *held)})
            raise ValueError(
                f"LoRAConfig.target_parameters: no parameter ends with {name!r}; stacked experts here: "
                f"{', '.join(stacked) or 'none'}"
            )
    shapes: dict[str, tuple[int, int, int]] = {}
    for path in named:
        owner, _, name = path.rpartition(".")
        if path not in held:
            why = why_not_experts(model.get_submodule(owner), name)
            if why:
                hint = _ROUTER if clean[path].endswith(".gate.weight") else ""
                raise TypeError(f"target_parameters: {path!r} {why}{hint}")
        e, n, k = held[path] if path in held else model.get_parameter(path).shape
        shapes[path] = (e, n, k)
    return shapes


def held_experts(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """{path that a stacked parameter would have: (E, N, K)} of every LoRAExperts."""
    shapes: dict[str, tuple[int, int, int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoRAExperts):
            for name in STACKED:
                first = getattr(module, name)[0]
                shape = (module.num_experts, first.out_features, first.in_features)
                shapes[f"{path}.{name}" if path else name] = shape
    return shapes


def _stacked(model: nn.Module) -> Iterator[str]:
    return (path for path, parameter in model.named_parameters() if parameter.dim() == 3)


def stacked_experts(model: nn.Module) -> dict[str, str]:
    """{path of a module with stacked experts: why LoRAExperts cannot take its place, "" if it can}."""
    owners = dict.fromkeys(path.rpartition(".")[0] for path in _stacked(model))
    return {path: why_not_experts(model.get_submodule(path), STACKED[0]) for path in owners}


def unstack(model: nn.Module, config: LoRAConfig) -> None:
    """Put LoRAExperts in the place of every owner of a parameter that `target_parameters` names.

    Raises:
        ValueError, TypeError: as `named_parameters`; nothing is changed then.
    """
    for path in dict.fromkeys(path.rpartition(".")[0] for path in named_parameters(model, config)):
        unstack_owner(model, path)


def unstack_owner(model: nn.Module, path: str) -> None:
    """Put LoRAExperts in the place of the stacked experts at `path`."""
    owner = model.get_submodule(path)
    if not isinstance(owner, LoRAExperts):
        replace(model, owner, LoRAExperts(owner))


def restack(model: nn.Module) -> None:
    """Put stacked experts back in the place of every LoRAExperts with plain layers only."""
    for module in [m for m in model.modules() if isinstance(m, LoRAExperts)]:
        if all(type(layer) is nn.Linear for name in STACKED for layer in getattr(module, name)):
            replace(model, module, module.stacked_again())


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new


def expert_layers(model: nn.Module) -> dict[str, str]:
    """{path of an expert's layer: clean path of the parameter that it is a part of}, in the model's order."""
    parameters: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoRAExperts):
            prefix = f"{path}." if path else ""
            for name in STACKED:
                parameter = clean_path(f"{prefix}{name}")
                for number in range(module.num_experts):
                    parameters[f"{prefix}{name}.{number}"] = parameter
    return parameters


def match_experts(model: nn.Module, config: LoRAConfig) -> list[str]:
    """The paths of the layers of LoRAExperts that get an adapter."""
    layers = expert_layers(model).items()
    return [path for path, parameter in layers if config.names_parameter(parameter)]


# PEFT's layout of adapters over stacked experts


@dataclass(frozen=True)
class Stack:
    """The adapters of one stacked parameter, in a file.

    Attributes:
        key: PEFT's, before ".lora_A.weight". The second of an owner's two parameters wraps the first. So
            the first one's key has "base_layer" after the owner's.
        parts: the keys of the E experts' adapters, one by one, before ".lora_A.weight".
    """

    key: str
    parts: tuple[str, ...]

    def join(self, tensors: dict[str, Tensor]) -> None:
        """Replace the experts' lora_A [R, K] and lora_B [N, R] by PEFT's [E R, K] and [N, R E], experts innermost."""
        a = [tensors.pop(f"{part}.lora_A.weight") for part in self.parts]
        b = [tensors.pop(f"{part}.lora_B.weight") for part in self.parts]
        tensors[f"{self.key}.lora_A.weight"] = torch.cat(a)
        tensors[f"{self.key}.lora_B.weight"] = torch.stack(b, dim=-1).flatten(1)

    def split(self, tensors: dict[str, Tensor]) -> None:
        """The reverse of `join`. Tensors that are missing or do not divide are left, to be named as unexpected."""
        number = len(self.parts)
        a, b = (tensors.get(f"{self.key}.lora_{factor}.weight") for factor in "AB")
        if a is None or b is None or a.dim() != 2 or b.dim() != 2:
            return
        if len(a) % number or b.shape[1] % number:
            return
        for factor in "AB":
            del tensors[f"{self.key}.lora_{factor}.weight"]
        layers_b = b.view(len(b), -1, number).unbind(-1)
        for part, part_a, part_b in zip(self.parts, a.chunk(number), layers_b, strict=True):
            tensors[f"{part}.lora_A.weight"] = part_a.contiguous()
            tensors[f"{part}.lora_B.weight"] = part_b.contiguous()


def stacks(experts: Mapping[str, int], prefix: str) -> list[Stack]:
    """How PEFT's file holds the adapters of stacked parameters.

    Args:
        experts: {clean path of an adapted stacked parameter: E}, an owner's in the order of STACKED.
        prefix: PEFT's, before a path.
    """
    by_owner: dict[str, list[str]] = {}
    for path in experts:
        by_owner.setdefault(path.rpartition(".")[0], []).append(path)
    adapters = []
    for owner, paths in by_owner.items():
        for depth, path in enumerate(reversed(paths)):
            key = prefix + owner + ".base_layer" * depth
            parts = tuple(f"{prefix}{path}.{number}" for number in range(experts[path]))
            adapters.append(Stack(key, parts))
    return adapters


def experts_of(model: nn.Module, adapted: Callable[[Any], bool]) -> dict[str, int]:
    """{clean path of a stacked parameter: the number of its layers that are `adapted`}, if any."""
    counts: dict[str, int] = {}
    for path, parameter in expert_layers(model).items():
        if adapted(model.get_submodule(path)):
            counts[parameter] = counts.get(parameter, 0) + 1
    return counts
