# SPDX-License-Identifier: Apache-2.0
"""LoRAReport: the changes of `apply_lora` to each module, the implementations that it runs, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lorakernels.autograd.linear.recorded import ways_of_kinds
from lorakernels.config import LoRAConfig
from lorakernels.device import capability_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.model.peft_mixtures import PEFTDifference
from lorakernels.modules.model.report_text import lines_of
from lorakernels.ops.choice import implementations
from lorakernels.ops.hardware import LayerOnGPU
from lorakernels.recipes import BlockScaling
from lorakernels.recorded.routing import counted
from lorakernels.state.fp8 import FP8State

OF_LINEAR = (  # the ops that a linear layer runs
    "quantize_lora_down",
    "fp8_linear_lora",
    "quantize_grad",
    "fp8_grad_input",
    "lora_grad_a",
    "amax_and_scale_update",
)
OF_BLOCK_LINEAR = ("quantize_blocks", *OF_LINEAR[:-1])  # under BlockScaling


@dataclass(frozen=True)
class ModuleReport:
    """One module. `action` is "lora", "saved" (modules_to_save), "bias" (bias trained) or "frozen".

    `ops` maps each op to its implementation on the module's current device; `why` maps it to the reason. `dropout`
    is a probability.
    """

    name: str
    action: str
    reason: str
    kind: str
    in_features: int = 0
    out_features: int = 0
    r: int = 0
    scaling: float = 0.0
    dropout: float = 0.0
    base: str = ""
    ops: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoRAReport:
    """The decisions of `apply_lora`, and the present state of the model.

    `print(report)` shows equal modules in one line. `modules` has a row for every module, and `details()` a line.
    `reasons` maps paths to (action, reason): only `apply_lora` knows these. `unlike_peft` says how PEFT would
    adapt a mixture by the same `target_modules`, and is None if it would do the same.
    """

    model: nn.Module = field(repr=False)
    config: LoRAConfig
    fp8_state: FP8State | None
    reasons: Mapping[str, tuple[str, str]] = field(repr=False)
    unlike_peft: PEFTDifference | None = field(default=None, repr=False)

    @property
    def modules(self) -> list[ModuleReport]:
        """One row for every module that has parameters, in module order."""
        return [
            self._row(path, module)
            for path, module in self.model.named_modules()
            if path in self.reasons or any(True for _ in module.parameters(recurse=False))
        ]

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def total_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def scales_in_charge(self) -> str:
        """Who keeps the FP8 scales current: "auto", "explicit", a manager's name, or "none" without FP8.

        Under BlockScaling it is "each block": there is nothing to keep.
        """
        if isinstance(self.config.fp8, BlockScaling):
            return "each block"
        return "none" if self.fp8_state is None else self.fp8_state.in_charge

    @property
    def dropout_source(self) -> str:
        """Where the masks come from: torch's generator, or the type of the state attached."""
        layers = (m for m in self.model.modules() if isinstance(m, LoRALinear))
        sources = {
            "torch's generator" if m.rng_state is None else type(m.rng_state).__name__
            for m in layers
        }
        return ", ".join(sorted(sources))

    @property
    def eager_forwards(self) -> str:
        """How adapted modules ran in forwards of their own, outside of graphs, traces and fused layers.

        A module counts once for each way. Recorded forwards take less of the host's time (recorded/). A backward may
        run by the ops.
        """
        kinds = ways_of_kinds()
        layers = (m for m in self.model.modules() if isinstance(m, LoRALinear))
        return counted(way for m in layers for way in m.eager_ways(kinds))

    def adapted(self) -> list[ModuleReport]:
        """The modules that have an adapter."""
        return [m for m in self.modules if m.action == "lora"]

    def __str__(self) -> str:
        rows = self.modules
        paths = {tuple(m.ops.items()) for m in rows if m.ops}
        lines = lines_of((m.name, _text(m, shows_path=len(paths) > 1)) for m in rows)
        return "\n".join([*self._head(rows), *lines, *_why(rows)])

    def details(self) -> str:
        """The text of `print(report)`, but with a line for every module."""
        rows = self.modules
        lines = [f"  {m.name}: {_text(m, shows_path=True)}" for m in rows]
        return "\n".join([*self._head(rows), *lines, *_why(rows)])

    def _head(self, rows: list[ModuleReport]) -> list[str]:
        share = 100.0 * self.trainable_parameters / max(self.total_parameters, 1)
        adapted = sum(m.action == "lora" for m in rows)
        return [
            f"LoRA on {adapted} modules, {self.trainable_parameters:,} of "
            f"{self.total_parameters:,} parameters trainable ({share:.3f} %)",
            *([str(self.unlike_peft)] if self.unlike_peft else []),
            f"FP8 scales: {_scales(self.scales_in_charge)}; dropout masks: {_masks(self.dropout_source)}; "
            f"forward passes without CUDA graphs: {self.eager_forwards}",
        ]

    def _row(self, path: str, module: nn.Module) -> ModuleReport:
        kind = type(module).__name__
        if isinstance(module, LoRALinear):
            reason = self.reasons.get(path, ("lora", "matches target_modules"))[1]
            return _lora_row(path, reason, module)
        held = ", e4m3 in blocks" if getattr(module, "block_scaling", None) is not None else ""
        if path in self.reasons:
            action, reason = self.reasons[path]
            return ModuleReport(path, action, reason + held, kind)
        trained = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
        if trained:
            return ModuleReport(path, "bias", f"trained: {', '.join(trained)}", kind)
        return ModuleReport(path or "(root)", "frozen", f"not a target{held}", kind)


def _scales(in_charge: str) -> str:
    """`scales_in_charge` in words."""
    words = {
        "auto": "updated at each training forward",
        "explicit": "updated by calls of reduce_and_update alone",
        "each block": "one for each block, never updated",
        "none": "none, as no layer is in FP8",
    }
    return words.get(in_charge, f"updated by {in_charge}")


def _masks(source: str) -> str:
    """`dropout_source` in words."""
    return f"drawn from {source}" if source else "none"


def _lora_row(path: str, reason: str, module: LoRALinear) -> ModuleReport:
    device, state = module.lora_A.device, module.fp8_state
    fp8, in_blocks = module.holds_fp8, module.block_scaling is not None
    place = LayerOnGPU(
        capability_of(device) if device.type == "cuda" else (0, 0),
        (module.out_features, module.in_features),
        fp8,
        state is not None and state.recipe.fp8_gemm_fprop.use_split_accumulator,
        in_blocks,
    )
    chosen = implementations("cuda" if device.type == "cuda" else "cpu", place)
    chosen = {
        op: taken
        for op, taken in chosen.items()
        if op in (OF_BLOCK_LINEAR if in_blocks else OF_LINEAR)
    }
    return ModuleReport(
        path,
        "lora",
        reason,
        type(module).__name__,
        module.in_features,
        module.out_features,
        module.r,
        module.scaling,
        module.lora_dropout,
        ("e4m3 in blocks" if in_blocks else "e4m3") if fp8 else str(module.weight.dtype)[6:],
        {op: impl for op, (impl, _) in chosen.items()},
        {op: why for op, (_, why) in chosen.items()},
    )


def _text(m: ModuleReport, shows_path: bool) -> str:
    """The text that follows a module's name."""
    if m.action != "lora":
        return f"{m.action} {m.kind} ({m.reason})"
    path = f" [{_path(m.ops)}]" if shows_path else ""
    return (
        f"lora {m.in_features}→{m.out_features} r={m.r} scaling={m.scaling:g} "
        f"p={m.dropout:g} base={m.base}{path} ({m.reason})"
    )


def _path(ops: Mapping[str, str]) -> str:
    taken: dict[str, list[str]] = {}
    for op, implementation in ops.items():
        taken.setdefault(implementation, []).append(op)
    return "; ".join(f"{impl}: {', '.join(names)}" for impl, names in taken.items())


def _why(rows: list[ModuleReport]) -> list[str]:
    """One line for every implementation in use, with its ops and the reason."""
    taken: dict[tuple[str, str], dict[str, None]] = {}
    for m in rows:
        for op, implementation in m.ops.items():
            taken.setdefault((implementation, m.why[op]), {})[op] = None
    return [f"  {impl}: {', '.join(ops)} ({why})" for (impl, why), ops in taken.items()]
