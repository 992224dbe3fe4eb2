# SPDX-License-Identifier: Apache-2.0
"""Fused layers with `attention="fp8"`: what they compute, keep and refuse."""

from __future__ import annotations

import pytest
import torch

from lorakernels import DelayedScaling, fuse
from lorakernels.autograd.attention import fp8, graphed
from lorakernels.fusion.memory import SAVE
from tests.fp8_attention import emulate
from tests.fusion.fused_models import (
    ATTENTION,
    LINEARS,
    adapted,
    difference,
    fused_copy,
    run,
    same_within,
    tokens,
)
from tests.fusion.test_fuse_memory import kept_bytes

WIDE = {"head_dim": 128, "hidden_size": 64}
BASES = pytest.mark.parametrize("base", [DelayedScaling(), None], ids=["fp8", "plain"])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes it, in rows of any length."""
    emulate(monkeypatch)
    monkeypatch.setattr(fp8, "LEAST", 2)
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    monkeypatch.setattr(fp8, "_why_not_package", lambda: "")


def model(base: DelayedScaling | None, targets: tuple[str, ...] = ATTENTION) -> torch.nn.Module:
    return adapted("Llama", targets, model=WIDE, fp8=base, dtype=torch.bfloat16)


@pytest.mark.usefixtures("taken")
@BASES
def test_it_is_near_attention_in_16_bits(base: DelayedScaling | None) -> None:
    """Five e4m3 roundings of 2^-4 at most, two of which exp turns into a change of scores: under a fifth in norm."""
    plain, x = model(base), tokens(2, 24)
    found = run(fused_copy(plain, attention="fp8")[0], x)
    expected = run(fused_copy(plain)[0], x)
    assert same_within(found, expected, 0.2) > 0


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("save", SAVE)
def test_the_bytes_of_out_are_out(save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a plain base the output projection computes the same from out as from its bytes."""
    whole, x = model(None, LINEARS), tokens(2, 24)
    found = run(fused_copy(whole, attention="fp8", save=save)[0], x)
    attend = fp8.attend_rows
    monkeypatch.setattr(fp8, "attend_rows", lambda *given: (attend(*given).out, None))
    expected = run(fused_copy(whole, attention="fp8", save=save)[0], x)
    # dA reads bf16 in one case, and in the other bytes with their scale: two orders of sums
    same_within(found, expected, 2.0**-8)


@pytest.mark.usefixtures("taken")
def test_an_fp8_base_reads_the_bytes() -> None:
    """o's product is of out's bytes as they are: nothing rounds them again."""
    from lorakernels.autograd.linear import linear

    seen, real = [], linear.project
    twin, _ = fused_copy(model(DelayedScaling()), attention="fp8")
    attended = []
    attend = fp8.attend_rows

    def spy_attend(*given):  # type: ignore[no-untyped-def]
        attended.append(attend(*given))
        return attended[-1]

    def spy(operand, *others):  # type: ignore[no-untyped-def]
        seen.append(operand)
        return real(operand, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "attend_rows", spy_attend)
        patch.setattr(linear, "project", spy)
        run(twin, tokens(2, 24))
    assert len(attended) == 2
    for one in attended:
        assert any(operand.data is one.bytes_.data for operand in seen)


@pytest.mark.usefixtures("taken")
@BASES
@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("targets", [ATTENTION, LINEARS], ids=["attention", "all linears"])
def test_fewer_bytes_are_kept(
    save: str, targets: tuple[str, ...], base: DelayedScaling | None
) -> None:
    """Beside those of attention in 16 bits: a byte less for each element of q, k, v and out, and o's own x8."""
    whole, x = model(base, targets), tokens(2, 32)
    wide, before = fused_copy(whole, save=save, tokens=x.numel())
    narrow, after = fused_copy(whole, save=save, tokens=x.numel(), attention="fp8")
    expected = before.saved_bytes - after.saved_bytes
    factors = 2 * 112 + 2 * 4  # two layers: those of attention, and the scale of o's x8
    assert abs(kept_bytes(wide, x) - kept_bytes(narrow, x) - expected) <= factors
    per_token = (2 * 4 + 2 * 2) * 128 + (4 * 128 if save == "full" and base is not None else 0)
    assert expected == (0 if save == "checkpoint" else 2 * x.numel() * per_token)


def test_it_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model(None)
    kind = type(whole.model.layers[0])
    with pytest.raises(
        ValueError, match=r"layers\.0 has no attention='fp8': cuDNN needs a GPU; try 'auto'"
    ):
        fuse(whole, attention="fp8")
    assert type(whole.model.layers[0]) is kind
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    with pytest.raises(ValueError, match="heads have 8 columns, and FP8 is faster with 128 alone"):
        fuse(adapted(), attention="fp8")


@pytest.mark.usefixtures("taken")
def test_calls_that_it_does_not_take_are_refused() -> None:
    twin, report = fused_copy(model(None), attention="fp8")
    x = tokens(2, 24)
    starts = torch.tensor([0, 24, 48], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"attention='fp8' does not take .* no packed sequences"):
        twin(x, use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    mask = torch.ones(24, 24, dtype=torch.bool).tril().expand(2, 1, 24, 24)
    with pytest.raises(ValueError, match="it is causal and takes no mask"):
        twin(x, use_cache=False, attention_mask=mask)
    run(twin, x)
    assert report.backends == ["fp8"]
    assert difference(run(twin, x)["logits"], run(twin, x)["logits"]) == 0
