# SPDX-License-Identifier: Apache-2.0
"""A mixture's experts with adapters, forward + backward, against PEFT.

    python benchmarks/layers/bench_experts.py --output DIR [--shapes 8x4096x14336x2 …] [--providers NAME …]

A shape is E × H × F × J: of E experts, H → 2 F → F → H with SiLU, each token has J, chosen at random. There is no
router: its choice and its weights are given, and the weights get gradients. x is bf16 [T, H]. Adapters of R = 16 in
bf16 are on both of an expert's matrices.

    ours, stacked       LoRAExperts in FP8 with delayed scaling: one launch for all experts
    ours, one by one    the same layers, an expert after the other
    peft, grouped_mm    PEFT's target_parameters in bf16 over transformers' experts, by torch's grouped products
    peft, one by one    the same, an expert after the other (transformers' "eager")

Each is checked against float32 before it is timed: y, dx and the weights' gradient. "ms" is the device's time while
nothing waits for the host, and what a replayed graph takes. A layer by itself takes the longer of that and "CPU µs".
"peak MiB" is what a call has beyond what is there before it. FLOPs: 2 × 2TJ · 3HF.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from benchmarks.lib.op_bench import Bench, Option, Setting, main
from benchmarks.lib.rows import Row
from benchmarks.lib.timing import NOT_TIMED
from benchmarks.peers.base import Unavailable, relative_error
from lorakernels import LoRAConfig, apply_lora
from lorakernels.modules.experts.layer import LoRAExperts

GPU_SHAPES = ["8x4096x14336x2", "64x2048x1024x2", "128x2048x768x8"]
CPU_SHAPES = ["4x32x48x2"]
RANK = 16
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
PROVIDERS = ("ours, stacked", "ours, one by one", "peft, grouped_mm", "peft, one by one")
# Two products follow each other, each off by about 0.04 (e4m3); backward has 0.06 (e5m2) in each of three more
TOLERANCE = {"ours": 0.2, "peft": 0.03}


class Case(NamedTuple):
    """x and dy [T, H], and of each token the J experts and their weights [T, J]."""

    x: Tensor
    dy: Tensor
    index: Tensor
    weights: Tensor


class Holder(nn.Module):
    """What PEFT and apply_lora are given: a module with experts in it."""

    def __init__(self, experts: nn.Module, config: Any) -> None:
        super().__init__()
        self.experts = experts
        self.config = config

    def forward(self, *given: Tensor) -> Tensor:
        out: Tensor = self.experts(*given)
        return out


def made(shape: str, tokens: int, device: torch.device) -> tuple[Holder, Case]:
    """transformers' experts of Mixtral with random weights, and what they are called with."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    number, hidden, ffn, top = map(int, shape.split("x"))
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_local_experts=number,
        num_experts_per_tok=top,
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.device(device):
        experts = MixtralExperts(config).bfloat16()
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        x = torch.randn(tokens, hidden).bfloat16()
        dy = torch.randn(tokens, hidden).bfloat16()
        index = torch.rand(tokens, number).topk(top).indices
        weights = torch.rand(tokens, top).softmax(-1).bfloat16()
    return Holder(experts, config), Case(x.requires_grad_(), dy, index, weights.requires_grad_())


def adapters(model: nn.Module) -> list[Tensor]:
    """Draw every B anew, the same for all providers. Returns the parameters that train."""
    found = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for number, (name, parameter) in enumerate(found):
        if "lora_B" in name:
            generator = torch.Generator(parameter.device).manual_seed(number)
            drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.data.copy_(drawn * 0.02)
    return [parameter for _, parameter in found]


def ours(holder: Holder) -> nn.Module:
    config = LoRAConfig(r=RANK, lora_alpha=RANK, target_parameters=BOTH)
    report = apply_lora(holder, config, adapter_dtype=torch.bfloat16)
    assert report.fp8_state is not None
    report.fp8_state.in_charge = "explicit"  # its update is a step's, not a layer's
    return holder.train()


def stacked(holder: Holder) -> nn.Module:
    model: Any = ours(holder)
    if why_not := model.experts.why_not_stacked():
        raise Unavailable(why_not)
    return model


def one_by_one(holder: Holder) -> nn.Module:
    model: Any = ours(holder)
    model.experts.why_not_stacked = lambda dtype=None: "asked for"
    return model


def with_peft(implementation: str, holder: Holder) -> nn.Module:
    import peft

    holder.config._experts_implementation = implementation
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_parameters=BOTH)
    found: nn.Module = peft.get_peft_model(holder, config, autocast_adapter_dtype=False).train()
    return found


BUILDERS: dict[str, Callable[[Holder], nn.Module]] = dict(
    zip(
        PROVIDERS,
        (stacked, one_by_one, partial(with_peft, "grouped_mm"), partial(with_peft, "eager")),
        strict=True,
    )
)


def both(model: nn.Module, case: Case, trained: list[Tensor]) -> list[Tensor]:
    y = model(case.x, case.index, case.weights)
    return [y.detach(), *torch.autograd.grad(y, (case.x, case.weights, *trained), case.dy)]


def expected(model: nn.Module, case: Case) -> list[Tensor]:
    """y, dx and the weights' gradient of the same adapters in float32, an expert after the other."""
    delta = [d.float() for d in merged(model)]
    x, weights = (t.detach().float().requires_grad_() for t in (case.x, case.weights))
    y = torch.zeros_like(x)
    for number, (gate_up, down) in enumerate(zip(*delta, strict=True)):
        token, place = torch.where(case.index == number)
        gate, up = (x[token] @ gate_up.t()).chunk(2, -1)
        out = (nn.functional.silu(gate) * up) @ down.t()
        y = y.index_add(0, token, out * weights[token, place, None])
    return [y.detach(), *torch.autograd.grad(y, (x, weights), case.dy.float())]


def merged(model: nn.Module) -> list[Tensor]:
    """Both stacked weights with their adapters."""
    experts: Any = next((m for m in model.modules() if isinstance(m, LoRAExperts)), None)
    if experts is not None:
        return [
            torch.stack([layer.merged_weight() for layer in getattr(experts, name)])
            for name in ("gate_up_proj", "down_proj")
        ]
    plain: Any = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    return [plain.experts.gate_up_proj, plain.experts.down_proj]


def fault(found: list[Tensor], right: list[Tensor], tolerance: float) -> str:
    """What is wrong, "" if nothing is."""
    for name, a, b in zip(("y", "dx", "dweights"), found, right, strict=False):
        error = relative_error(a, b)
        if not error < tolerance:
            return f"{name} is {error:.1e} from float32"
    return ""


def measured(shape: str, provider: str, setting: Setting) -> Row:
    device = setting.device
    nothing: Row = {**NOT_TIMED, "TFLOP/s": "", "peak MiB": ""}
    holder, case = made(shape, setting.args.tokens, device)
    try:
        model = BUILDERS[provider](holder)
        trained = adapters(model)
        right = expected(model, case)
        both(model, case, trained)  # sets FP8 scales and moves weights together
        found = both(model, case, trained)
    except (Unavailable, ImportError, RuntimeError, TypeError, ValueError) as error:
        wrong = provider.startswith("ours") and not isinstance(error, Unavailable)
        kind = "WRONG: " if wrong else "not taken: "
        return {"check": f"{kind}{' '.join(str(error).split())[:300]}", **nothing}
    if what := fault(found, right, TOLERANCE[provider[:4]]):
        return {"check": f"WRONG: {what}", **nothing}
    del found, right, holder
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both(model, case, trained)
    peak: object = (
        (torch.cuda.max_memory_allocated() - before) >> 20 if device.type == "cuda" else ""
    )
    columns = setting.time(lambda: both(model, case, trained))
    ms = columns["ms"]
    _, hidden, ffn, top = map(int, shape.split("x"))
    operations = 2 * 2.0 * setting.args.tokens * top * 3 * hidden * ffn
    rate: object = round(operations / ms / 1e9, 1) if isinstance(ms, float) and ms else ""
    return {"check": "ok", **columns, "TFLOP/s": rate, "peak MiB": peak}


def rows(setting: Setting) -> Iterator[Row]:
    for shape in setting.args.shapes:
        for provider in setting.args.providers:
            named: Row = {"shape": shape, "tokens": setting.args.tokens, "provider": provider}
            row = {**named, **measured(shape, provider, setting)}
            print(*row.values(), flush=True)
            yield row


BENCH = Bench(
    "experts",
    "A mixture's experts with adapters, forward + backward",
    (
        Option("shapes", GPU_SHAPES, CPU_SHAPES, metavar="ExHxFxJ"),
        Option("tokens", 4096, 48),
        Option("providers", list(PROVIDERS), choices=list(PROVIDERS)),
    ),
    rows,
    floor=False,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
