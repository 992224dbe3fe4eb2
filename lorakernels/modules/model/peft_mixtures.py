# SPDX-License-Identifier: Apache-2.0
"""What PEFT adapts of a mixture where its target_modules mean more than linear layers, and where that differs.

PEFT 0.21 with transformers 5 rewrites a config for some model types, so that adapters of transformers 4 still fit.
"gate" becomes the router's weight, and "gate_proj", "up_proj" and "down_proj" (or "w1", "w3" and "w2") become the
stacked weights of the experts, the first two with twice the rank. This holds for "all-linear", names and expressions.
Linear layers of these names, of shared experts and dense layers, then get no adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lorakernels.config import ALL_LINEAR, LoRAConfig, clean_path
from lorakernels.modules.experts.layer import expert_layers, held_experts
from lorakernels.modules.model.report_text import folded
from lorakernels.modules.model.targets import all_linear, choose, counts_as_linear

GATE_UP = "gate_up_proj"
_MIXTRAL = {"gate": "gate.weight", "w1": GATE_UP, "w3": GATE_UP, "w2": "down_proj"}
_QWEN2_MOE = {
    "gate": "gate.weight",
    "gate_proj": GATE_UP,
    "up_proj": GATE_UP,
    "down_proj": "down_proj",
}
# By model_type, as of PEFT 0.21.2 with transformers 5.23. "qwen2_moe" itself is not among them.
RENAMED = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL),
    **dict.fromkeys(
        (
            "afmoe",
            "beam",
            "cohere2_moe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "glm_moe_dsa",
            "hunyuan_v1_moe",
            "longcat_flash",
            "mellum",
            "olmoe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_omni_moe",
            "qwen3_omni_moe_text",
            "qwen3_omni_moe_thinker",
            "solar_open",
        ),
        _QWEN2_MOE,
    ),
}


@dataclass(frozen=True)
class PEFTDifference:
    """The adapters that PEFT would add to this model by the same targets, if they differ from those here.

    Attributes:
        model_type, target_modules: the model, and the targets.
        ours, theirs: the numbers of the adapters' parameters; `theirs` is None where PEFT refuses the targets.
        more, less: paths that only PEFT adapts, and paths that it leaves out or adapts with another rank.
    """

    model_type: str
    target_modules: str
    ours: int
    theirs: int | None
    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()

    @property
    def numbers(self) -> str:
        if self.theirs is None:
            return "PEFT 0.21 refuses these targets: it takes gate and up projections of experts together"
        return (
            f"by PEFT 0.21 these targets are {self.theirs:,} adapter parameters, here {self.ours:,}"
        )

    def __str__(self) -> str:
        parts = [f"{self.numbers} (target_modules={self.target_modules} of a {self.model_type!r})"]
        if self.more:
            parts.append(f"it also adapts {folded(self.more)}")
        if self.less:
            parts.append(f"it leaves out {folded(self.less)}")
        return "; ".join(parts)


def unlike_peft(
    model: nn.Module, config: LoRAConfig, ours: Mapping[str, int]
) -> PEFTDifference | None:
    """How PEFT's reading of `config` differs from `ours`; None where it does not, or no name is rewritten.

    Args:
        model: with linear layers, stacked experts or LoRAExperts, as it is before or after `apply_lora`.
        ours: {path of a linear layer, or of one expert's: the rank of its adapter}.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    renamed = RENAMED.get(kind, {}) if isinstance(kind, str) else {}
    names = _names(model, config, renamed) if renamed else set()
    new = {name: _new_name(name, renamed) for name in names}
    if not any(new.values()):
        return None
    linear, parameters = _sizes(model)
    sizes, experts = {**linear, **parameters}, expert_layers(model)
    here = {clean_path(experts.get(path, path)): r for path, r in ours.items()}
    total = sum(r * sizes[path] for path, r in here.items())
    said = str(kind), repr(config.target_modules), total
    fused = {old for old, name in renamed.items() if name == GATE_UP}
    present = {old for old in fused if any(name.split(".")[-1] == old for name in names)}
    if present and present != fused:
        return PEFTDifference(*said, None)
    theirs = _rewritten(config, new, both=bool(present))
    paths = [*choose(theirs, linear), *filter(theirs.names_parameter, parameters)]
    there = {path: theirs.rank_for(path) for path in paths}
    if there == here:
        return None
    more = tuple(path for path in there if path not in here)
    less = tuple(path for path, r in here.items() if there.get(path) != r)
    return PEFTDifference(*said, sum(r * sizes[path] for path, r in there.items()), more, less)


def _names(model: nn.Module, config: LoRAConfig, renamed: Mapping[str, str]) -> set[str]:
    """The names that PEFT reads `target_modules` as before it rewrites them."""
    wanted = config.target_modules
    if not isinstance(wanted, str):
        return set(wanted or ())
    experts = expert_layers(model)
    if wanted.lower() == ALL_LINEAR:
        linear = (path for path in all_linear(model) if path not in experts)
        return {clean_path(path).split(".")[-1] for path in linear} | renamed.keys()
    parameters = [clean_path(path) for path, _ in model.named_parameters()]
    parameters += map(clean_path, held_experts(model))
    modules = [clean_path(path) for path, _ in model.named_modules() if path not in experts]
    names = {path.split(".")[-1] for path in choose(config, [*modules, *parameters])}
    for old, new in renamed.items():
        owners = {path.removesuffix(new) for path in parameters if path.split(".")[-1] == new}
        if choose(config, [f"{owner}{old}" for owner in owners]):
            names.add(old)
    return names


def _new_name(name: str, renamed: Mapping[str, str]) -> str | None:
    return next((new for old, new in renamed.items() if name.split(".")[-1] == old), None)


def _rewritten(config: LoRAConfig, new: Mapping[str, str | None], both: bool) -> LoRAConfig:
    """The config that PEFT makes of it; `both`: gate and up are named, and share one adapter of twice the rank."""
    kept = tuple(name for name, parameter in new.items() if parameter is None)
    parameters = dict.fromkeys((*(config.target_parameters or ()), *filter(None, new.values())))
    more = {rf".*\.{GATE_UP}": 2 * config.r} if both else {}
    return LoRAConfig(
        r=config.r,
        target_modules=kept,
        target_parameters=tuple(parameters),
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
        rank_pattern={**config.rank_pattern, **more},
        modules_to_save=config.modules_to_save,
    )


def _sizes(model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """{path: the size of an adapter of rank 1 on it} of linear layers, and of parameters; of experts by the latter."""
    experts = expert_layers(model)
    linear, parameters = {}, {}
    for path, module in model.named_modules():
        if counts_as_linear(module) and path not in experts:
            n, k = int(module.out_features), int(module.in_features)
            linear[clean_path(path)] = n + k
    for path, parameter in model.named_parameters():
        if parameter.dim() in (2, 3):
            number = len(parameter) if parameter.dim() == 3 else 1
            parameters[clean_path(path)] = number * sum(parameter.shape[-2:])
    for path, (number, n, k) in held_experts(model).items():
        parameters[clean_path(path)] = number * (n + k)
    return linear, parameters
