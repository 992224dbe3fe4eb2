# SPDX-License-Identifier: Apache-2.0
"""The layers that `bench_lora_linear.py` compares: ours and its peers, one class each, behind one interface.

`PEERS` maps a row's name to what makes the layer of a `Case`; `Unavailable` says why it cannot be made here. The files
that are not imported here hold the peers of whole decoder layers (layers.py, te_layers.py) and models (training.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.peers.base import Case, Peer, Unavailable
from benchmarks.peers.cublaslt import CublasltGemms
from benchmarks.peers.ours import Graphed, Ours, OursPlainBase
from benchmarks.peers.plain import FrozenLinear, HandAutograd, PeftCompiled, PeftLora
from benchmarks.peers.te import TeBase, TeGraphed, TeOpFuser, TeTorchLora

PEERS: dict[str, Callable[[Case], Peer]] = {
    "cublaslt fp8, gemms only": CublasltGemms,
    "te fp8, no lora": TeBase,
    "te fp8 + lora": TeTorchLora,
    "te fp8 + lora, graphed": TeGraphed,
    "te op-fuser lora": TeOpFuser,
    "linear bf16, no lora": FrozenLinear,
    "peft bf16": PeftLora,
    "peft bf16, compiled": PeftCompiled,
    "hand autograd bf16": HandAutograd,
    "ours bf16": OursPlainBase,
    "ours fp8": Ours,
    "ours fp8, graphed": partial(Graphed, of=Ours),
}

__all__ = ["PEERS", "Case", "Peer", "Unavailable"]
