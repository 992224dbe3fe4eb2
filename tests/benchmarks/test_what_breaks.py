# SPDX-License-Identifier: Apache-2.0
"""A provider that breaks or is wrong says so in its row, stops no other, and fails the run where it is ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.benchmarks.aliases import Load, RowsOf, Run

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
TRAINED = 14336  # parameters of "tiny", LoRA on q, k, v, o
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. GPU 0 has")


def unbuilt(*arguments: Any) -> Any:
    raise NotImplementedError("no such shape\nand more")


def wrong_layer(case: Any) -> Any:
    from benchmarks.peers.layers import HfPlain

    peer = HfPlain(case)
    peer.layer = lambda x: 2 * HfPlain.layer(peer, x)  # type: ignore[method-assign]
    return peer


class BreaksWhenTimed:
    """A layer whose check passes and that then runs three times."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, case: Any) -> Any:
        from benchmarks.peers.layers import HfPlain

        self.made += 1
        peer, calls = HfPlain(case), []

        def layer(x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("it broke")
            return HfPlain.layer(peer, x)

        if self.made == 2:  # the first one is checked
            peer.layer = layer  # type: ignore[method-assign]
        return peer


class Standing:
    """Stands in for a model that trains."""

    fp8, warmup_steps, note = True, 1, "as it is"

    def __init__(
        self, trained: int = TRAINED, loss: float = 5.75, error: Exception | None = None
    ) -> None:
        self.trained, self.loss, self.error = [torch.zeros(trained)], loss, error

    def __call__(self, spec: Any, adapted: str, device: torch.device) -> Any:
        if self.error is not None:
            raise self.error
        return self

    def step(self, ids: Tensor) -> Tensor:
        assert ids.shape == (1, 32)
        return torch.tensor(self.loss)


@dataclass(frozen=True)
class Script:
    """A benchmark, where its providers are, the one that stays right, its options, a column of its numbers."""

    name: str
    providers: str
    right: str
    options: tuple[str, ...]
    column: str
    stand_in: Callable[..., Any] | None = None  # for `right`


LINEAR = Script(
    "layers.bench_lora_linear", "PEERS", "linear bf16, no lora", ("--shapes", "8x16x32"), "fwd ms"
)
LAYER = Script("layers.bench_decoder_layer", "MAKE", "hf bf16, no lora", (), "wall ms")
MODEL = Script(
    "models.bench_end_to_end", "PROVIDERS", "hf + peft bf16", ("--adapted", "qkvo"), "tokens/s",
    Standing(),
)  # fmt: skip
TE, OURS = "hf + te fp8 + lora", "ours, eager"
# What runs, what breaks and how, what its row says, the exit code
BREAKS: dict[str, tuple[Script, str, Any, str, int]] = {
    "linear, peer": (LINEAR, "te op-fuser lora", unbuilt, "raised: NotImplementedError: no such shape", 0),
    "linear, ours": (LINEAR, "ours fp8", unbuilt, "WRONG: NotImplementedError: no such shape", 1),
    "layer, peer": (LAYER, TE, unbuilt, "raised: NotImplementedError: no such shape", 0),
    "layer, ours": (LAYER, "ours, fp8", unbuilt, "WRONG: NotImplementedError: no such shape", 1),
    "layer, wrong": (LAYER, TE, wrong_layer, "WRONG: y ", 1),
    "layer, as it is timed": (LAYER, TE, BreaksWhenTimed, "raised: RuntimeError: it broke", 0),
    "model, memory": (
        MODEL, TE, Standing(error=OUT), "out of memory: CUDA out of memory. Tried to allocate 1 GiB", 0,
    ),
    "model, peer": (MODEL, TE, Standing(error=RuntimeError("no\nmore")), "raised: RuntimeError: no", 0),
    "model, ours": (MODEL, OURS, Standing(error=RuntimeError("no")), "WRONG: RuntimeError: no", 1),
    "model, parameters": (
        MODEL, OURS, Standing(TRAINED - 1), "WRONG: trains 14335 parameters, not 14336", 1,
    ),
    "model, loss": (MODEL, OURS, Standing(loss=5.9), "WRONG: first loss 5.9, bf16's is 5.75", 1),
    "model, right": (MODEL, OURS, Standing(), "ok", 0),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKS)
def test_what_breaks_says_so_and_the_rest_is_timed(
    what: str, load: Load, run: Run, rows_of: RowsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, name, stand_in, check, code = BREAKS[what]
    module: ModuleType = load(script.name)
    providers = getattr(module, script.providers)
    made = BreaksWhenTimed() if stand_in is BreaksWhenTimed else stand_in
    monkeypatch.setitem(providers, name, made)
    monkeypatch.setitem(providers, script.right, script.stand_in or providers[script.right])
    assert run(module, *script.options, "--providers", script.right, name) == code
    rows = {row["provider"]: row for row in rows_of(script.name.partition("bench_")[2])}
    right, row = rows[script.right], rows[name]
    assert right["check"] == "ok" and float(right[script.column]) > 0
    assert row["check"].startswith(check) and (row[script.column] != "") == (check == "ok")
