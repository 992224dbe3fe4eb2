# SPDX-License-Identifier: Apache-2.0
"""A fused layer whose `max_length_q` is less than a document has: an error on a CPU, a device assertion on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import FuseReport, PhiloxState, fuse
from lorakernels.autograd.attention import longest_document
from tests.dry_cuda import dry_cuda
from tests.fusion.fused_models import adapted, fused_copy, tokens

ROOT = Path(__file__).parents[2]
RULE = "max_length_q must be at least the tokens of each document in cu_seq_lens_q"
ENDS = [0, 5, 5, 12, 17, 24]


def packed(longest: Any, ends: list[int] = ENDS, **device: Any) -> dict[str, Any]:
    starts = torch.tensor(ends, dtype=torch.int32, **device)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest}


def test_a_longer_document_is_refused_before_anything_changes() -> None:
    rng = PhiloxState(3, "cpu")
    twin, _ = fused_copy(adapted(lora_dropout=0.5, rng_state=rng))
    drawn, slots = torch.get_rng_state(), rng.tensor.clone()
    with pytest.raises(ValueError, match=f"{RULE}, found 6 for one of 7"):
        twin(tokens(), use_cache=False, **packed(6))
    # `tokens` draws before the call
    torch.set_rng_state(drawn)
    tokens()
    after = torch.get_rng_state()
    torch.set_rng_state(drawn)
    with pytest.raises(ValueError, match=RULE):
        twin(tokens(), use_cache=False, **packed(1))
    assert torch.equal(torch.get_rng_state(), after) and torch.equal(rng.tensor, slots)
    assert not twin.model.layers[0].lorakernels.fused.chosen


def test_what_is_not_too_short_runs() -> None:
    """The longest itself, more, all tokens, and nothing, which stands for them. Where it is trusted, anything."""
    twin, report = fused_copy(adapted())
    x = tokens()
    found = [twin(x, use_cache=False, **packed(n)).logits for n in (7, 8, 24, None)]
    report.trust_longest()
    found.append(twin(x, use_cache=False, **packed(3)).logits)  # a mask, which asks for no length
    assert all(torch.equal(found[0], other) for other in found[1:])


def on_gpu(model: nn.Module, h: Tensor, angles: Any, given: dict[str, Any]) -> list[Any]:
    """What the check would have handed to a GPU."""
    with dry_cuda() as recorded:
        recorded.name(starts=given["cu_seq_lens_q"])
        model.model.layers[0](h, position_embeddings=angles, **given)
    calls = [call for call in recorded.calls if call.name == "check_longest_document"]
    return [{k: str(v).partition(" =")[0] for k, v in call.arguments.items()} for call in calls]


def layer_on_gpu() -> tuple[nn.Module, FuseReport, Tensor, Any]:
    model = adapted(dtype=torch.bfloat16, model={"hidden_size": 64}).eval()
    report = fuse(model, attention="math")
    h = torch.randn(2, 12, 64, dtype=torch.bfloat16)
    return model, report, h, model.model.rotary_emb(h, torch.arange(12)[None])


def test_a_gpu_is_asked_once_a_layer_unless_nothing_can_be_longer() -> None:
    model, report, h, angles = layer_on_gpu()
    (call,) = on_gpu(model, h, angles, packed(6))
    assert call["starts"].startswith("starts+0")
    assert (call["documents"], call["longest"]) == ("5", "6")
    assert not on_gpu(model, h, angles, packed(24)) and not on_gpu(model, h, angles, packed(None))
    report.trust_longest()
    assert not on_gpu(model, h, angles, packed(6))


def test_a_gpu_without_our_kernel_asserts_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(longest_document, "why_not_csrc", lambda _: "built for another")
    monkeypatch.setattr(
        torch, "_assert_async", lambda right, rule: said.append((bool(right), rule))
    )
    model, _, h, angles = layer_on_gpu()
    for longest in (6, 7):
        assert not on_gpu(model, h, angles, packed(longest))
    assert said == [(False, RULE), (True, RULE)]


# On a GPU

CODE = """
import sys

import torch

from lorakernels import fuse
from lorakernels.autograd.attention import longest_document
from tests.fusion.fused_models import adapted

captured, by_torch, second = sys.argv[1] == "captured", sys.argv[2] == "torch", int(sys.argv[3])
if by_torch:
    longest_document.why_not_csrc = lambda _: "not here"
model = adapted(dtype=torch.bfloat16, model={"hidden_size": 64}, device="cuda").eval()
report = fuse(model, attention="flash")
layer = model.model.layers[0]
h = torch.randn(2, 12, 64, dtype=torch.bfloat16, device="cuda")
starts = torch.tensor([0, 5, 5, 12, 17, 24], dtype=torch.int32, device="cuda")
given = {
    "position_embeddings": model.model.rotary_emb(h, torch.arange(12, device="cuda")[None]),
    "cu_seq_lens_q": starts,
    "max_length_q": 7,
}
with torch.no_grad():
    out = layer(h, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            out = layer(h, **given)
    run = graph.replay if captured else lambda: layer(h, **given)
    run()
    torch.cuda.synchronize()
    print("the first is right", flush=True)
    starts.copy_(torch.tensor([0, 5, 5, 5 + second, 17, 24], dtype=torch.int32))
    run()
    torch.cuda.synchronize()
    print("the second is right", bool(out.isfinite().all()), flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["csrc", "torch"])
@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("second", [7, 8])
def test_a_device_asserts_it(how: str, by: str, second: int) -> None:
    """Documents of 5, 0, 7, 5 and 7 tokens are right. Then one of them has 8, or they are moved."""
    command = [sys.executable, "-c", CODE, how, by, str(second)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert "the first is right" in done.stdout, done.stderr
    if second == 7:
        assert done.returncode == 0 and "the second is right True" in done.stdout, done.stderr
    else:
        assert done.returncode != 0 and "the second is right" not in done.stdout
        assert RULE in done.stderr and "device-side assert triggered" in done.stderr
