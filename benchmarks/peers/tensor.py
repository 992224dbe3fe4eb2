# SPDX-License-Identifier: Apache-2.0
"""The peer of tensor parallelism in plain torch: transformers and PEFT in bf16, cut by torch's DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.peers.models import Spec
from benchmarks.peers.training import LR, HfPeft

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")


class DTensorPeft(HfPeft):
    """As transformers' own plan cuts its models: layers and the head. Rows and norms are whole on every rank."""

    def __init__(self, spec: Spec, adapted: str, device: torch.device, mesh: Any) -> None:
        self.mesh = mesh
        super().__init__(spec, adapted, device)

    def build(self) -> Any:
        model = super().build()
        for layer in model.model.layers:
            parallelize_module(layer, self.mesh, _plan_of(layer))
        head = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        return parallelize_module(model, self.mesh, head)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """A fused update takes no mixture of DTensors and plain tensors."""
        kinds = [
            [p for p in self.trained if isinstance(p, DTensor) is cut] for cut in (False, True)
        ]
        groups = [{"params": found} for found in kinds if found]
        return torch.optim.AdamW(groups, lr=LR, weight_decay=0.0, fused=True)


def _plan_of(layer: torch.nn.Module) -> dict[str, Any]:
    """By column B is cut beside W, and by row A."""
    plan: dict[str, Any] = {}
    for path, module in layer.named_modules():
        leaf = path.rpartition(".")[2]
        if leaf not in COLUMN + ROW:
            continue
        style = ColwiseParallel if leaf in COLUMN else RowwiseParallel
        if not hasattr(module, "base_layer"):
            plan[path] = style()
            continue
        plan[f"{path}.base_layer"] = style()
        plan[f"{path}.{'lora_B' if leaf in COLUMN else 'lora_A'}.default"] = style()
    return plan
