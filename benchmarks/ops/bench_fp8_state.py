# SPDX-License-Identifier: Apache-2.0
"""One update of all FP8 scales of a model: FP8State.reduce_and_update, Transformer Engine's fused one, PyTorch's form.

    python benchmarks/ops/bench_fp8_state.py --output DIR [--tensors 70 560 2240] [--histories 4 16 1024]

    every history is read and written once, every scale written: 2 directions × n × (2 L + 1) × 4 bytes

Every sample starts from fresh amaxes and random histories. The algorithm is max, the margin 0, and nothing is reduced
over processes. "te" keeps the n scales of a direction in n histories [L, 1]. "te, n Linears" keeps them in n of [L, 3]
and n of [L, 2], as that many te.Linear do: their weights and outputs have scales as well, 2.5 times the bytes. Each
provider's scales and histories are compared with the reference's, bit for bit, before it is timed. The exit code is 1
if one differs.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.op_bench import Bench, Option, Setting, main
from benchmarks.lib.rows import Row, ratio
from benchmarks.lib.timing import NOT_TIMED, time_of
from lorakernels import DelayedScaling, FP8State, ops

OPTIONS = (
    Option("tensors", [70, 560, 2240], cpu=[70, 560]),
    Option("histories", [4, 16, 1024], cpu=[4, 16]),
)


@dataclass
class Problem:
    """Both directions as fp32 [L + 1, n], ready to be updated, and as they must be afterwards."""

    before: list[Tensor]
    after: list[Tensor]
    recipe: DelayedScaling


@dataclass
class Provider:
    step: Callable[[], object]
    setup: Callable[[], object]  # puts new amaxes into row 0
    result: Callable[[], list[Tensor]]


def update_by_reference(states: list[Tensor], recipe: DelayedScaling) -> None:
    forward, backward = states
    most = (recipe.fp8_max_forward, recipe.fp8_max_backward)
    ops.amax_and_scale_update.by_reference(
        forward, backward, None, False, *most, recipe.margin, False
    )


def make_problem(n: int, length: int, device: torch.device) -> Problem:
    generator = torch.Generator(device).manual_seed(0)
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo="max")
    before = [
        torch.randn(length + 1, n, generator=generator, device=device).exp() for _ in range(2)
    ]
    after = [state.clone() for state in before]
    update_by_reference(after, recipe)
    return Problem(before, after, recipe)


def refill(states: list[Tensor], problem: Problem) -> None:
    for state, before in zip(states, problem.before, strict=True):
        state[0].copy_(before[0])


def ours(problem: Problem) -> Provider:
    names = [f"layer{i}" for i in range(problem.before[0].shape[1])]
    state = FP8State(names, problem.recipe, problem.before[0].device)
    states = [state.forward, state.backward]
    for own, before in zip(states, problem.before, strict=True):
        own.copy_(before)
    return Provider(state.reduce_and_update, lambda: refill(states, problem), lambda: states)


def pytorch(problem: Problem) -> Provider:
    states = [state.clone() for state in problem.before]
    return Provider(
        lambda: update_by_reference(states, problem.recipe),
        lambda: refill(states, problem),
        lambda: states,
    )


def te_unavailable(device: torch.device) -> str:
    """Why Transformer Engine cannot run here, "" if it can. Tried in a process of its own: it may abort."""
    if importlib.util.find_spec("transformer_engine_torch") is None:
        return "not installed"
    if device.type != "cuda":
        return "runs on a GPU only"
    probe = "import transformer_engine.pytorch"
    failed = subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode
    return f"import fails: exit code {failed}" if failed else ""


class TransformerEngine:
    """Its update over n histories of `widths` columns per direction, of which column 0 is the one of `problem`."""

    def __init__(self, problem: Problem, widths: tuple[int, int]) -> None:
        import transformer_engine.pytorch  # noqa: F401  (loads the library that the extension needs)
        import transformer_engine_torch as tex

        self.update: Callable[..., Any] = tex.fused_amax_and_scale_update_after_reduction
        self.directions = []
        formats = (tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2)
        for before, width, fp8 in zip(problem.before, widths, formats, strict=True):
            columns = [before[:, i : i + 1].expand(-1, width) for i in range(before.shape[1])]
            histories = [
                column[:-1].clone(memory_format=torch.contiguous_format) for column in columns
            ]
            scales = [column[-1].clone() for column in columns]
            reduced = torch.cat([history[0] for history in histories])
            self.directions.append((reduced, histories, scales, fp8))

    def step(self) -> None:
        for reduced, histories, scales, fp8 in self.directions:
            self.update(reduced, histories, scales, "max", fp8, 0.0)

    def result(self) -> list[Tensor]:
        return [
            torch.cat(
                [
                    torch.cat((h[:, :1], s[:1, None]))
                    for h, s in zip(histories, scales, strict=True)
                ],
                1,
            )
            for _, histories, scales, _ in self.directions
        ]


def te(problem: Problem, widths: tuple[int, int]) -> Provider:
    peer = TransformerEngine(problem, widths)
    return Provider(peer.step, lambda: None, peer.result)  # it takes amaxes from `reduced`


PROVIDERS: dict[str, Callable[[Problem], Provider]] = {
    "ours": ours,
    "te": lambda problem: te(problem, (1, 1)),
    "te, n Linears": lambda problem: te(problem, (3, 2)),
    "pytorch": pytorch,
}


def case_rows(n: int, length: int, setting: Setting, no_te: str) -> list[Row]:
    problem = make_problem(n, length, setting.device)
    floor = setting.floor_ms(2 * n * (2 * length + 1) * 4)
    rows: list[Row] = []
    for name, make in PROVIDERS.items():
        outcome, columns = (no_te if name.startswith("te") else ""), NOT_TIMED
        if not outcome:
            provider = make(problem)
            provider.step()
            same = map(torch.equal, provider.result(), problem.after)
            outcome = "ok" if all(same) else "WRONG: scales or histories differ"
        if outcome == "ok":
            repetitions = setting.args.repetitions
            timing = time_of(provider.step, setting.device, repetitions, provider.setup)
            columns = timing.columns()
        rows.append(
            {
                "tensors": n,
                "history": length,
                "provider": name,
                "check": outcome,
                **columns,
                "floor ms": round(floor, 5),
                "÷ floor": ratio(columns["ms"], floor),
                "÷ ours": ratio(columns["ms"], rows[0]["ms"] if rows else columns["ms"]),
            }
        )
    return rows


def rows(setting: Setting) -> Iterator[Row]:
    no_te = te_unavailable(setting.device)
    for n, length in product(setting.args.tensors, setting.args.histories):
        yield from case_rows(n, length, setting, no_te)


BENCH = Bench("fp8_state", "FP8State.reduce_and_update against its peers", OPTIONS, rows)

if __name__ == "__main__":
    sys.exit(main(BENCH))
