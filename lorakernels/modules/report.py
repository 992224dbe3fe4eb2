# SPDX-License-Identifier: Apache-2.0
"""LoRAReport: what `apply_lora` did to each module, which path each one takes, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from lorakernels.config import LoRAConfig
from lorakernels.fp8 import FP8State


@dataclass(frozen=True)
class ModuleReport:
    """One module. `action` is "lora", "saved" (modules_to_save), "bias" (bias trained) or "frozen"."""

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


@dataclass(frozen=True)
class LoRAReport:
    """Everything `apply_lora` decided. `print(report)` shows it as a table."""

    config: LoRAConfig
    modules: list[ModuleReport]
    fp8_state: FP8State | None
    trainable_parameters: int
    total_parameters: int
    dropout_source: str

    @property
    def scales_in_charge(self) -> str:
        """Who keeps the FP8 scales current: "auto", "explicit", a manager's name, or "none" without FP8."""
        return "none" if self.fp8_state is None else self.fp8_state.in_charge

    def adapted(self) -> list[ModuleReport]:
        """The modules that got an adapter."""
        return [m for m in self.modules if m.action == "lora"]

    def __str__(self) -> str:
        share = 100.0 * self.trainable_parameters / max(self.total_parameters, 1)
        lines = [
            f"LoRA on {len(self.adapted())} modules, {self.trainable_parameters:,} of "
            f"{self.total_parameters:,} parameters trainable ({share:.3f} %)",
            f"FP8 scales: {self.scales_in_charge}; dropout: {self.dropout_source}",
        ]
        lines += [_row(m) for m in self.modules]
        return "\n".join(lines)


def _row(m: ModuleReport) -> str:
    if m.action != "lora":
        return f"  {m.name}: {m.action} {m.kind} ({m.reason})"
    taken: dict[str, list[str]] = {}
    for op, implementation in m.ops.items():
        taken.setdefault(implementation, []).append(op)
    path = "; ".join(f"{impl}: {', '.join(names)}" for impl, names in taken.items())
    return (
        f"  {m.name}: lora {m.in_features}→{m.out_features} r={m.r} scaling={m.scaling:g} "
        f"p={m.dropout:g} base={m.base} [{path}] ({m.reason})"
    )
