# SPDX-License-Identifier: Apache-2.0
"""load_quantized: what it holds while it reads, and what of it lives on."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels import load_quantized
from lorakernels.checkpoints.base.shards import Directory
from tests.small_checkpoints import Synthetic, assert_equal, config, ours, write_checkpoint


class Live(TorchDispatchMode):
    """Bytes of the storages that ops made and that live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if tensor.device.type == "cpu" and key and key not in self._seen:
            self._seen.add(key)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)
        return tensor

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return out


class Counting(Directory):
    """Counts open shards and the tensors that were read from them."""

    def __init__(self, path: Path, live: Live) -> None:
        super().__init__(path)
        self.live, self.open_now, self.most_open = live, 0, 0
        self.read: list[weakref.ref[Tensor]] = []
        self.most_read = 0

    def open(self, shard: str) -> Any:
        from contextlib import contextmanager

        outer = super().open

        @contextmanager
        def counted():  # type: ignore[no-untyped-def]
            self.open_now += 1
            self.most_open = max(self.most_open, self.open_now)
            with outer(shard) as get:

                def read(name: str) -> Tensor:
                    tensor = get(name)
                    self.read.append(weakref.ref(tensor))
                    self.most_read = max(self.most_read, sum(r() is not None for r in self.read))
                    return tensor

                yield read
            self.open_now -= 1

        return counted()


def test_one_shard_is_open_one_tensor_is_read_and_one_matrix_is_being_quantized(tmp_path):
    """Everything that ops allocate on the CPU, which is host and device here: the model, its largest matrix in bf16 on
    its way, and 12 bytes an element of it for its quantization (|W|, W · scale, its clamped copy in fp32, FP8)."""
    layers = 12
    write_checkpoint(tmp_path, config(num_hidden_layers=layers), shard_bytes=300_000)
    live = Live()
    source = Counting(tmp_path, live)
    with live:
        loaded = load_quantized(
            source, config=config(num_hidden_layers=layers), device="cpu", progress=False
        )
    assert source.most_open == 1 and source.most_read == 1
    assert source.open_now == 0 and not any(r() is not None for r in source.read)
    held = sum(t.untyped_storage().nbytes() for t in loaded.model.state_dict().values())
    largest = 144 * 272
    assert live.peak <= held + (2 + 12) * largest + 100_000  # the FP8 state, norms, rotary tables
    assert live.peak < held + 2 * sum(i.bytes for i in source.tensors.values()) / layers
    shard = max(map(source.mapped_bytes, source.shards))
    assert shard < loaded.peak_host_bytes <= shard + 2 * largest


def test_loaded_values_do_not_live_in_the_mapped_files(tmp_path):
    write_checkpoint(tmp_path, config())
    loaded = ours(tmp_path)
    before = loaded.model.model.embed_tokens.weight.clone()
    for path in tmp_path.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(2000)
            file.write(b"\xff" * 4000)
    assert torch.equal(loaded.model.model.embed_tokens.weight, before)


def test_progress_counts_every_byte(tmp_path):
    write_checkpoint(tmp_path, config(), shard_bytes=400_000)
    seen: list[tuple[int, int]] = []
    loaded = load_quantized(tmp_path, device="cpu", progress=lambda *done: seen.append(done))
    total = sum(i.bytes for i in Directory(tmp_path).tensors.values())
    assert seen[-1] == (total, total) and seen == sorted(seen) and loaded.bytes == total
    assert len(seen) == loaded.tensors


def test_a_load_is_silent_unless_it_is_asked(tmp_path, capsys, monkeypatch):
    """Also on a terminal, where `progress=True` shows a line that ends with all of it."""
    write_checkpoint(tmp_path, config())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_quantized(tmp_path, device="cpu")
    assert capsys.readouterr() == ("", "")
    load_quantized(tmp_path, device="cpu", progress=True)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("\rloading 0.0 of") and err.endswith(" GB, 100 %\n")


def test_shards_that_exist_only_while_they_are_read(tmp_path):
    """The same bits as the written checkpoint, and never two files."""
    write_checkpoint(tmp_path / "whole", config(), shard_bytes=200_000, seed=3)
    source = Synthetic(config(), tmp_path / "passing", shard_bytes=200_000, seed=3)
    most = 0

    def look(done: int, total: int) -> None:
        nonlocal most
        most = max(most, len(list((tmp_path / "passing").iterdir())))

    passing = load_quantized(source, config=config(), device="cpu", progress=look)
    assert_equal(passing.model, ours(tmp_path / "whole").model)
    assert most == 1 and not list((tmp_path / "passing").iterdir()) and len(source.shards) > 2


@pytest.mark.gpu
def test_peak_device_memory_is_the_model_and_one_matrix(tmp_path):
    """The largest matrix while it is quantized: bf16, |W| in bf16, then fp32 twice and FP8; 512-byte blocks round
    up."""
    big = config(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8
    )
    source = Synthetic(big, tmp_path, shard_bytes=64 << 20)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_quantized(source, config=big, device="cuda", progress=False)
    peak = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated() - before
    weights = sum(t.untyped_storage().nbytes() for t in loaded.model.state_dict().values())
    assert held < weights * 1.01 + (1 << 20)
    assert peak < held + 13 * 1024 * 4096 + (4 << 20)
