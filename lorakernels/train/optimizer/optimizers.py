# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run by its name in transformers, and how it skips a step that is not finite.

    adamw_torch_fused    torch.optim.AdamW(fused=True)
    sgd                  torch.optim.SGD(fused=True), momentum beta1
    adamw_torch          torch.optim.AdamW(foreach=True)
    adamw_8bit           bitsandbytes.optim.AdamW8bit
    adafactor            transformers.Adafactor at the given learning rate, as transformers' Trainer makes it

The first two read the learning rate and `found_inf` on the device. A graph of a whole step can therefore hold them. For
the others the host waits once a step for the news that loss and norm are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.train.errors import require
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.options.running import CAPTURED_OPTIMS

FACTORS = ("lora_A", "lora_B")
RATIO = "lr_ratio"  # of a parameter group: its learning rate as a multiple of the run's


class Updater:
    """Steps an optimizer over the trained parameters.

    Attributes:
        optimizer: torch's optimizer.
        captured: whether a graph of a whole step may hold its step.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        options: FinetuneOptions,
        ratio_of: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        self.captured = options.optim in CAPTURED_OPTIMS
        made = groups(trained, options, ratio_of)
        device = next(iter(trained.values())).device
        self._ratios = [group.pop(RATIO) for group in made]
        self._rates = {r: torch.tensor(options.lr * r, device=device) for r in self._ratios}
        for group, ratio in zip(made, self._ratios, strict=True):
            group["lr"] = self._rates[ratio] if self.captured else options.lr * ratio
        self.optimizer = _make(made, options)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        if self.captured:
            for ratio, tensor in self._rates.items():
                tensor.fill_(rate * ratio)
            return
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = rate * ratio

    def step(self, finite: Tensor) -> None:
        """One step of the optimizer, which changes nothing unless `finite`, a bool scalar, is true."""
        if self.captured:
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif bool(finite):
            self.optimizer.step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the optimizer's state. The groups keep the rates that `set_rate` sets."""
        self.optimizer.load_state_dict(state)
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            if self.captured:
                group["lr"] = self._rates[ratio]
            if "capturable" in group:
                group["capturable"] = self.captured


def check_package(options: FinetuneOptions) -> None:
    """Raise FinetuneError if the optimizer's package is not installed."""
    if options.optim == "adamw_8bit":
        require("bitsandbytes")


def groups(
    trained: Mapping[str, nn.Parameter],
    options: FinetuneOptions,
    ratio_of: Callable[[str], float] = lambda name: 1.0,
) -> list[dict[str, Any]]:
    """Parameter groups: weight decay on matrices only, and LoRA+'s ratio on lora_B and on vectors, as in PEFT.

    `ratio_of(name)` multiplies the learning rate.
    """
    parameters_of: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for matrix in (True, False):
        for name, parameter in trained.items():
            if (parameter.ndim >= 2) is matrix:
                fast = not matrix or _factor_of(name) == "lora_B"
                ratio = ratio_of(name) * (options.loraplus_lr_ratio if fast else 1.0)
                parameters_of.setdefault((matrix, ratio), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": options.weight_decay * matrix, RATIO: ratio}
        for (matrix, ratio), parameters in parameters_of.items()
    ]


def _factor_of(name: str) -> str | None:
    """The factor that a parameter is: the last of the two in its name, because a path or a job may have such a name."""
    parts = reversed(name.split("."))
    return next((part for part in parts if part in FACTORS), None)


def numbers(trained: Mapping[str, nn.Parameter], options: FinetuneOptions) -> dict[str, int]:
    """{name: its number in an optimizer's state_dict}."""
    names = {id(p): n for n, p in trained.items()}
    made = groups(trained, options)
    return {names[id(p)]: i for i, p in enumerate(p for g in made for p in g["params"])}


def _make(parameters: list[dict[str, Any]], options: FinetuneOptions) -> torch.optim.Optimizer:
    name, betas = options.optim, (options.beta1, options.beta2)
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(parameters, betas=betas, fused=True, capturable=True)
    if name == "sgd":
        return _sgd(parameters, options.beta1)
    if name == "adamw_torch":
        return torch.optim.AdamW(parameters, betas=betas, foreach=True)
    if name == "adamw_8bit":
        return require("bitsandbytes").optim.AdamW8bit(parameters, betas=betas)
    return require("transformers").Adafactor(parameters, scale_parameter=False, relative_step=False)


def _sgd(parameters: list[dict[str, Any]], momentum: float) -> torch.optim.SGD:
    """SGD whose momentum begins at zero. torch's begins in memory that a skipped first step would leave unwritten."""
    made = torch.optim.SGD(parameters, momentum=momentum, fused=True)
    if momentum:
        for group in made.param_groups:
            for parameter in group["params"]:
                made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made
