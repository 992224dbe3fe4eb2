# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine: its FP8 linear layer without LoRA, with LoRA in torch ops, graphed, and its op fuser's LoRA.

All use DelayedScaling with TE's defaults, HYBRID, which is the recipe that ours follows. W is frozen and cast to FP8
once (`is_first_microbatch`). The op fuser has no such cache and is given an FP8 weight. That is TE at its best: by
default it casts W in every step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.base import Case, Peer, Unavailable, need_gpu
from benchmarks.peers.plain import PlainLora
from lorakernels.numerics.fp8 import E4M3, FP8_MAX, amax_of, scale_of


def te_or_unavailable() -> Any:
    if cudnn := _cudnn_of_torch():
        # TE would load the system's next to torch's; the two were of different versions on an H200 machine, and what
        # one of them loads later then lacked symbols
        os.environ.setdefault("CUDNN_HOME", cudnn)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of JAX, which it looks for
            import transformer_engine.pytorch as te
    except Exception as error:  # an ImportError, or an OSError of its libraries
        reason = str(error).partition("\n")[0]
        raise Unavailable(f"transformer_engine cannot be imported ({reason})") from error
    return te


@contextlib.contextmanager
def te_first_or_hidden(wanted: bool) -> Iterator[None]:
    """Inside, TE is imported already if it is `wanted`, else not to be found; enter it before anything runs on a GPU.

    PEFT imports TE where there is one. After torch had loaded its cuDNN that ended with "undefined symbol" in the
    system's libcudnn on an H200 machine, and in time it would still change which cuDNN a bf16 peer's attention takes.
    """
    if wanted:
        with contextlib.suppress(Unavailable):  # its row will say so
            te_or_unavailable()
    hide = not wanted and "transformer_engine" not in sys.modules
    if hide:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hide:
            del sys.modules["transformer_engine"]


def _cudnn_of_torch() -> str | None:
    """The folder of the cuDNN that torch's wheels brought along, None if they did not."""
    folder = Path(sysconfig.get_path("purelib"), "nvidia", "cudnn")
    return str(folder) if any(folder.glob("lib/libcudnn.so*")) else None


def autocast(te: Any, group: Any = None) -> AbstractContextManager[None]:
    """`group`: the ranks that reduce their amax together."""
    from transformer_engine.common.recipe import DelayedScaling

    return te.autocast(enabled=True, recipe=DelayedScaling(), amax_reduction_group=group)


def frozen_linear(te: Any, linear: nn.Linear) -> nn.Module:
    """A te.Linear over copies of `linear`'s weight and bias, nothing of it trained."""
    weight = linear.weight
    n, k = weight.shape
    bias = linear.bias is not None
    new = te.Linear(k, n, bias=bias, params_dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        new.weight.copy_(weight)
        if bias:
            new.bias.copy_(linear.bias)
    return new.requires_grad_(False)


class TeBase(Peer):
    has_lora = False

    def __init__(self, case: Case) -> None:
        self.te = te_or_unavailable()
        need_gpu(case)
        super().__init__(case)
        self.first = True
        self.module = self.make(frozen_linear(self.te, case.linear()))

    def make(self, base: nn.Module) -> nn.Module:
        return base

    def forward(self, x: Tensor) -> Tensor:
        with autocast(self.te):
            return self.module(x, is_first_microbatch=self.first)

    def warm_up(self) -> None:
        self.first = True  # W's scale comes from the amax of the casts before
        super().warm_up()
        self.first = False
        super().warm_up()


class TeTorchLora(TeBase):
    """te.Linear + LoRA in torch ops, bf16 adapters."""

    has_lora = True

    def make(self, base: nn.Module) -> nn.Module:
        case, dtype = self.case, self.case.x.dtype
        a, b = case.lora_A.to(dtype), case.lora_B.to(dtype)
        module = PlainLora(base, a, b, case.scaling, case.p)
        self.adapters = (module.lora_A, module.lora_B)
        return module


class TeGraphed(TeTorchLora):
    """The same by te.make_graphed_callables. x is the graph's own; dy is copied into the graph's, as TE does it."""

    eager = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from transformer_engine.common.recipe import DelayedScaling

        sample = self.x
        self.module = self.te.make_graphed_callables(
            self.module,
            (sample,),
            enabled=True,
            recipe=DelayedScaling(),
            cache_quantized_params=True,
        )

    def take(self, case: Case) -> None:
        raise NotImplementedError("a graph keeps the x and dy that it was captured with")


class TeOpFuser(Peer):
    """te.ops as Megatron-Bridge's TEFusedLoRALinear strings them together, written from a description of it.

    main: MakeExtraOutput(in_place) → BasicLinear → Bias            dgrad adds to the LoRA branch's dx (beta = 1)
    lora: Dropout → A → B → ConstantScale → AddExtraInput(in_place)  B's GEMM adds to y (beta = 1)
    """

    def __init__(self, case: Case) -> None:
        self.te = te_or_unavailable()
        need_gpu(case)
        super().__init__(case)
        ops, dtype, device = self.te.ops, case.x.dtype, case.x.device
        (n, k), rank = case.weight.shape, case.rank
        base = ops.BasicLinear(k, n, device=device, dtype=dtype)
        base.weight = nn.Parameter(_fp8_weight(case.weight), requires_grad=False)
        bias = ops.Bias(n, device=device, dtype=dtype).requires_grad_(False)
        down = ops.BasicLinear(k, rank, device=device, dtype=dtype)
        up = ops.BasicLinear(rank, n, device=device, dtype=dtype)
        with torch.no_grad():
            bias.bias.copy_(case.bias)
            down.weight.copy_(case.lora_A)
            up.weight.copy_(case.lora_B)
        self.main = ops.Sequential(ops.MakeExtraOutput(in_place=True), base, bias)
        drop = [ops.Dropout(case.p)] if case.p > 0 else []
        scale, add = ops.ConstantScale(case.scaling), ops.AddExtraInput(in_place=True)
        self.lora = ops.Sequential(*drop, down, up, scale, add)
        self.adapters = (down.weight, up.weight)

    def forward(self, x: Tensor) -> Tensor:
        with autocast(self.te):
            y, x = self.main(x)
        with self.te.autocast(enabled=False):
            return self.lora(x, y)


def _fp8_weight(weight: Tensor) -> Tensor:
    """A Float8Tensor with W's exact scale and its transposed copy, as TE's GEMMs on Hopper take it."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    scale = scale_of(amax_of(weight), FP8_MAX[E4M3])
    amax = torch.zeros(1, device=weight.device)
    quantizer = Float8Quantizer(scale.reshape(1), amax, tex.DType.kFloat8E4M3)
    return quantizer(weight)
