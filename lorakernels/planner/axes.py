# SPDX-License-Identifier: Apache-2.0
"""PlanAxes: how many GPUs a plan is for, and what they share. Its check needs no torch, and so takes no second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanAxes:
    """How many GPUs train, how many of them share a row (`cp`, context parallel), or have a model's stages (`pp`).

    With both, `cp` GPUs have each of the `pp` stages, and a row is on `cp · pp` of them.
    `microbatches` of a step run through the stages; None is as many as stages. With `sharded_optimizer` all GPUs split
    AdamW's state, as ShardedAdamW does. `tp` GPUs hold each layer together (tensor parallel), with rows split between
    layers, and embedding and head by tokens where `finetune --tp` does so. With `cp`, `tp · cp` GPUs share a row.
    """

    gpus: int
    cp: int = 1
    pp: int = 1
    microbatches: int | None = None
    sharded_optimizer: bool = False
    tp: int = 1

    @property
    def in_a_step(self) -> int:
        return self.pp if self.microbatches is None else self.microbatches

    def check(self, length: int, host_memory: int | None) -> None:
        """Raise ValueError if they do not fit a row of `length` tokens, or each other."""
        positive("gpus", self.gpus)
        for name in ("cp", "pp", "tp"):
            if self.gpus % positive(name, getattr(self, name)):
                raise ValueError(
                    f"{name} must divide the {self.gpus} gpus, found {getattr(self, name)}"
                )
        if self.sharded_optimizer and (self.gpus == 1 or self.pp > 1):
            raise ValueError(
                f"sharded_optimizer needs several GPUs with the same layers, found {self.gpus} with pp {self.pp}"
            )
        if self.gpus % (self.cp * self.pp):
            raise ValueError(
                f"cp · pp must divide the {self.gpus} gpus, found {self.cp} · {self.pp}"
            )
        if self.tp > 1:
            self._check_tensor(length, host_memory)
        if self.cp > 1 and length % (2 * self.cp):
            raise ValueError(
                f"tokens of a row must be a multiple of 2 cp = {2 * self.cp}, found {length}"
            )
        if self.microbatches is not None and self.pp == 1:
            raise ValueError(
                f"microbatches are of pipeline stages, found {self.microbatches} with pp 1"
            )
        if self.pp > 1 and positive("microbatches", self.in_a_step) < self.pp:
            raise ValueError(f"microbatches must be at least pp, {self.pp}, found {self.in_a_step}")
        if self.pp > 1 and host_memory:
            raise ValueError(
                f"host_memory does not go with pp {self.pp}: stages have no offloaded base and no offloaded activations"
            )

    def _check_tensor(self, length: int, host_memory: int | None) -> None:
        """Raise ValueError for what does not go with layers that GPUs hold together."""
        if self.pp > 1:
            raise ValueError(
                f"tp does not go with pp: parallelize refuses stages, found tp {self.tp} with pp {self.pp}"
            )
        if self.sharded_optimizer:
            raise ValueError(
                f"sharded_optimizer does not go with tp {self.tp}: parallelize refuses ShardedAdamW"
            )
        if host_memory:
            raise ValueError(
                f"host_memory does not go with tp {self.tp}: split layers have no offloaded activations, and finetune "
                "refuses an offloaded base of theirs"
            )
        if self.gpus % (self.tp * self.cp):
            raise ValueError(
                f"tp · cp must divide the {self.gpus} gpus, found {self.tp} · {self.cp}"
            )
        if length % (self.tp * self.cp):
            raise ValueError(
                f"tokens of a row must be a multiple of tp · cp = {self.tp * self.cp}, found {length}"
            )


def positive(name: str, value: int) -> int:
    """`value`. Raises ValueError if it is no positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, found {value!r}")
    return value
