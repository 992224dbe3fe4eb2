# SPDX-License-Identifier: Apache-2.0
"""What runs in a provider's process of bench_decoder_layer.py: layers are built, checked, and timed when asked."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.lib.energy import joules_of
from benchmarks.lib.rows import Row
from benchmarks.lib.timing import MAX_SCRUBS, SCRUB_BYTES, heat, synchronize
from benchmarks.lib.workers import reason_of
from benchmarks.peers.base import Unavailable
from benchmarks.peers.layer_case import SIZES, LayerCase, LayerPeer, P, make_layer_case
from benchmarks.peers.layers import (
    HfPeft,
    HfPeftCompiled,
    HfPlain,
    Ours,
    OursInBlocks,
    errors,
    fault,
    truth,
)
from benchmarks.peers.te_layers import HfTeLora, TeLayer, TeLayerLora

Samples = dict[str, list[float]]

MAKE: dict[str, Callable[[LayerCase], LayerPeer]] = {
    "te layer fp8, no lora": TeLayer,
    "te layer fp8 + lora": TeLayerLora,
    "hf + te fp8 + lora": HfTeLora,
    "hf bf16, no lora": HfPlain,
    "hf + peft bf16": HfPeft,
    "hf + peft bf16, compiled": HfPeftCompiled,
    "ours, not fused": Ours,
    "ours, full": partial(Ours, save="full"),
    "ours, recompute": partial(Ours, save="recompute"),
    "ours, fp8": partial(Ours, save="fp8"),
    "ours, checkpoint": partial(Ours, save="checkpoint"),
    "ours, blocks": partial(OursInBlocks, save="recompute"),
}
NOT_GRAPHED = ("hf bf16, no lora", "hf + peft bf16, compiled")
GRAPHED = ", graphed"
LEAD_SCRUBS = (
    128  # 10 ms on an H200, in front of every row's samples: after a longer rest a GPU runs faster
)
# A check of its own would have to be compiled for its own number of tokens
CHECKED_AS = {"hf + peft bf16, compiled": HfPeft}


def kind_of(name: str) -> str:
    """What an error is: a peer's own limits are its row's business, ours are wrong."""
    return "WRONG" if name.startswith("ours") else "raised"


class Provider:
    """What runs in a provider's process: it holds the layers of one size at a time."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.peers: dict[str, LayerPeer] = {}

    def handlers(self) -> dict[str, Callable[..., Any]]:
        requests = (self.build, self.measure, self.kernels, self.free)
        return {request.__name__: request for request in requests}

    def build(self, size: str) -> dict[str, Row]:
        """By row: "check", "error" and memory. What cannot be built or is wrong is not kept."""
        case = make_layer_case(SIZES[size], P, self.device)
        heads = {self.name: self._checked(case)}
        if self.name in self.peers:
            heads[self.name] |= memory(self.peers[self.name])
            if (predicted := self.peers[self.name].predicted_bytes) is not None:
                heads[self.name]["predicted MB"] = round(predicted / 1e6, 1)
            if self.name not in NOT_GRAPHED:
                heads[self.name + GRAPHED] = self._graphed(case, heads[self.name]["error"])
        for peer in self.peers.values():
            peer.case = replace(peer.case, weights={})  # who needs them holds them
        del case
        _clear()
        return heads

    def _checked(self, case: LayerCase) -> Row:
        make = MAKE[self.name]
        try:
            small = case.to_check()
            peer = CHECKED_AS.get(self.name, make)(small)
            found = errors(peer, truth(small, peer.lora))
            if wrong := fault(peer, found):
                return {"check": f"WRONG: {wrong}", "error": f"{found.largest:.1e}"}
            del peer, small
            _clear()
            self.peers[self.name] = make(case)
            self.peers[self.name].warm_up()
        except Unavailable as why:
            return {"check": str(why), "error": ""}
        except Exception as problem:
            self.peers.clear()
            return {"check": f"{kind_of(self.name)}: {reason_of(problem)}", "error": ""}
        return {"check": "ok", "error": f"{found.largest:.1e}"}

    def _graphed(self, case: LayerCase, error: object) -> Row:
        try:
            peer = MAKE[self.name](case)
            self.peers[self.name + GRAPHED] = peer.graphed()
        except Unavailable as why:
            return {"check": str(why), "error": ""}
        except Exception as problem:
            return {"check": f"{kind_of(self.name)}: {reason_of(problem)}", "error": ""}
        return {"check": "ok", "error": error}

    def measure(self, seconds: float, at_most: int) -> dict[str, Samples]:
        """By row: seconds of "forward", "backward" and "host" by sample, of "wall" per step, and its "joules"."""
        heat(self.device, 0.1)
        found = {row: samples(peer, seconds, at_most) for row, peer in self.peers.items()}
        _clear()  # the others' turn: what is cached here is memory that they lack
        return found

    def kernels(self, bandwidth: float) -> list[Row]:
        from benchmarks.lib.breakdown import record, rows

        peer = self.peers[self.name]
        calls, split = record(peer.forward, peer.backward, self.device)
        return rows(calls, split, bandwidth)

    def free(self) -> None:
        self.peers.clear()
        _clear()


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory(peer: LayerPeer) -> Row:
    """MB that a forward leaves behind, and the most during forward and backward."""
    device = peer.case.device
    if device.type != "cuda":
        return {"saved MB": "", "peak MB": ""}
    _clear()
    before = torch.cuda.memory_allocated(device)
    x = peer.x.clone()  # not a leaf: freed here unless the layer keeps it
    torch.cuda.reset_peak_memory_stats(device)
    y = peer.layer(x)
    del x
    saved = torch.cuda.memory_allocated(device) - before - y.numel() * y.element_size()
    peer.backward(y)
    peak = torch.cuda.max_memory_allocated(device) - before
    return {"saved MB": round(saved / 1e6, 1), "peak MB": round(peak / 1e6, 1)}


def samples(peer: LayerPeer, seconds: float, at_most: int) -> Samples:
    device = peer.case.device
    for _ in range(2):
        peer.backward(peer.forward())
    synchronize(device)
    hosts = [_host(peer, device) for _ in range(3)]
    wall = _wall(peer, device, max(3, min(20, int(seconds / 4 / max(min(hosts), 1e-4)))))
    often = max(min(at_most, 8), min(at_most, int(seconds / wall)))
    split = _split_on_gpu(peer, device, often) if device.type == "cuda" else _split(peer, often)
    forward, backward = ([pair[i] for pair in split] for i in (0, 1))
    energy = joules_of(lambda: peer.backward(peer.forward()), device)
    ends = {"host": hosts, "wall": [wall], "joules": [energy]}
    return {"forward": forward, "backward": backward, **ends}


def _host(peer: LayerPeer, device: torch.device) -> float:
    start = time.perf_counter()
    peer.backward(peer.forward())
    seconds = time.perf_counter() - start
    synchronize(device)
    return seconds


def _wall(peer: LayerPeer, device: torch.device, steps: int) -> float:
    """Seconds per step of several in a row."""
    start = time.perf_counter()
    for _ in range(steps):
        peer.backward(peer.forward())
    synchronize(device)
    return (time.perf_counter() - start) / steps


def _split(peer: LayerPeer, often: int) -> list[tuple[float, float]]:
    result = []
    for _ in range(often):
        times = [time.perf_counter()]
        y = peer.forward()
        times.append(time.perf_counter())
        peer.backward(y)
        times.append(time.perf_counter())
        result.append((times[1] - times[0], times[2] - times[1]))
    return result


def _split_on_gpu(peer: LayerPeer, device: torch.device, often: int) -> list[tuple[float, float]]:
    """Forward and backward of one step behind a lead that the host needs to enqueue both, as in timing.py; empty where
    no lead suffices."""
    scrub = torch.empty(SCRUB_BYTES, dtype=torch.uint8, device=device)
    scrubs, late, found = LEAD_SCRUBS, 0, []
    while len(found) < often:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for _ in range(scrubs):
            scrub.zero_()
        events[0].record()
        y = peer.forward()
        events[1].record()
        peer.backward(y)
        events[2].record()
        del y
        if not events[0].query():  # the device has yet to begin, and everything is enqueued
            found.append(events)
        elif scrubs < MAX_SCRUBS:
            scrubs *= 2
        elif (late := late + 1) > 3:  # a host that stutters once may try again
            return []
    torch.cuda.synchronize(device)
    return [(a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3) for a, b, c in found]
