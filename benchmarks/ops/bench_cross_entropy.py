# SPDX-License-Identifier: Apache-2.0
"""Token losses of a chunk of logits with their gradient: ours in place and as e5m2 bytes, beside PyTorch's autograd.

    python benchmarks/ops/bench_cross_entropy.py --output DIR [--shapes 2048x128256 …] [--providers ours torch]

    ours        reads logits [M, V] twice, the second time mostly from L2, and writes dz over them    6 MV bytes in bf16
    ours, fp8   the same with dz's bytes beside them                                                  5 MV
    torch       F.cross_entropy of fp32 logits, and its backward

The floor is 4 MV bytes, one read and one write in bf16, at the bandwidth of a copy measured in the same run. Losses
and dz are compared with float64's before anything is timed, on 64 rows. One that is wrong is not timed, and the exit
code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.lib.op_bench import Bench, Option, Setting, against_floor, calls_of, main
from benchmarks.lib.rows import Row
from lorakernels import ops
from lorakernels.ops.cross_entropy import GRAD_SCALE_INV

IGNORE = -100
CHECKED = 64  # rows: float64 of more would take longer than all timings
# Of the sum of all |dz|: one rounding to bf16 (2⁻⁹), or to e5m2 (2⁻³), and as much again for what fp32 adds up
ALLOWED = {"ours": 2**-8, "ours, fp8": 2**-2, "torch": 2**-8}


class Inputs(NamedTuple):
    logits: Tensor  # bf16 [M, V]
    labels: Tensor  # int64 [M]
    own: Tensor  # a copy of the logits, which is written over


Found = tuple[Tensor, Tensor]  # losses fp32 [M], dz [M, V]


def ours(i: Inputs) -> Found:
    return ops.cross_entropy_(i.own, i.labels, None, IGNORE, True), i.own


def ours_fp8(i: Inputs) -> Found:
    return ops.cross_entropy_fp8(i.logits, i.labels, IGNORE)


def torchs(i: Inputs) -> Found:
    leaf = i.logits.detach().requires_grad_()
    losses = F.cross_entropy(leaf.float(), i.labels, reduction="none")
    (dz,) = torch.autograd.grad(losses, leaf, torch.ones_like(losses))
    return losses.detach(), dz


PROVIDERS: dict[str, Callable[[Inputs], Found]] = {
    "ours": ours,
    "ours, fp8": ours_fp8,
    "torch": torchs,
}
OPTIONS = (
    Option("shapes", ["2048x128256", "8192x32000"], cpu=["16x257"], metavar="MxV"),
    Option("providers", list(PROVIDERS), choices=PROVIDERS),
)


def fault(name: str, i: Inputs, found: Found) -> str:
    losses, dz = (t[:CHECKED] for t in found)
    if dz.dtype == torch.uint8:
        dz = dz.view(torch.float8_e5m2).double() * GRAD_SCALE_INV
    wide, labels = i.logits[:CHECKED].double(), i.labels[:CHECKED]
    exact = F.cross_entropy(wide, labels, reduction="none")
    if not torch.allclose(losses.double(), exact, rtol=2e-6, atol=1e-5):  # as its contract test
        return "losses"
    right = wide.softmax(1) - F.one_hot(labels, wide.shape[1])
    return "" if (dz - right).abs().sum() <= ALLOWED[name] * right.abs().sum() else "dz"


def rows(setting: Setting) -> Iterator[Row]:
    for shape in setting.args.shapes:
        m, v = map(int, shape.split("x"))
        generator = torch.Generator(setting.device).manual_seed(7)
        where = {"generator": generator, "device": setting.device}
        logits = 2 * torch.randn(m, v, dtype=torch.bfloat16, **where)
        inputs = Inputs(logits, torch.randint(0, v, (m,), **where), logits.clone())
        calls = {}
        for name in setting.args.providers:
            calls |= calls_of(
                PROVIDERS, [name], inputs, lambda i, found, n=name: fault(n, i, found)
            )
        yield from against_floor({"shape": shape}, calls, 4 * m * v, setting)


BENCH = Bench("cross_entropy", __doc__, OPTIONS, rows)

if __name__ == "__main__":
    sys.exit(main(BENCH))
