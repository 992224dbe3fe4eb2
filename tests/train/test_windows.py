# SPDX-License-Identifier: Apache-2.0
"""Documents and rows that are longer than a model's sliding window."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels import LoRAConfig, apply_lora, fuse
from lorakernels.train.data.packing import PackedBatch
from lorakernels.train.errors import OptionError
from lorakernels.train.model.model import attention_of, decoder_and_head, hidden_states
from lorakernels.train.model.windows import check_windows
from lorakernels.train.options.options import FinetuneOptions
from tests.train.conftest import save_model

WINDOW, LENGTHS = 8, (5, 13, 6)
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": WINDOW,
}  # fmt: skip
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2": TWO_KINDS,
    "gemma3_text": TWO_KINDS,
}


def windowed(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS.get(kind, {}), **more})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config)).eval()


def with_pictures() -> Any:
    """Gemma 3 with a vision tower: the window is in the config of its text part."""
    from transformers import AutoModelForCausalLM, Gemma3Config, SiglipVisionConfig

    torch.manual_seed(0)
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = SiglipVisionConfig(**vision, intermediate_size=48, image_size=28, patch_size=14)
    config = Gemma3Config(text_config={**SIZES, **TWO_KINDS}, vision_config=seen.to_dict())
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


MAKERS: dict[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: windowed(kind) for kind in MODELS},  # type: ignore[misc]
    "gemma3": with_pictures,
}


def documents() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (length,), generator=numbers) for length in LENGTHS]


def one_row(parts: list[Tensor]) -> PackedBatch:
    """The documents and four tokens of padding."""
    parts = [*parts, torch.zeros(4, dtype=torch.long)]
    places = [torch.arange(len(part)) for part in parts]
    places[-1] = torch.zeros(4, dtype=torch.long)
    numbers = [*range(len(parts) - 1), -1]
    segments = [torch.full_like(p, number) for p, number in zip(parts, numbers, strict=True)]
    ids, positions, segment = (torch.cat(each)[None] for each in (parts, places, segments))
    return PackedBatch(ids, ids, positions, segment, ids.numel())


@torch.no_grad()
def by_transformers(model: Any, ids: Tensor) -> Tensor:
    return decoder_and_head(model)[0](input_ids=ids[None], use_cache=False).last_hidden_state


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("kind", MAKERS)
@torch.no_grad()
def test_hidden_states_are_those_of_transformers(kind: str, fused: bool) -> None:
    """One document is longer than the window. 1e-5: fp32 sums in another order, over two layers."""
    if fused and kind == "gemma3":
        pytest.skip("has no fused layers")
    model, parts = MAKERS[kind](), documents()
    alone = torch.cat([by_transformers(model, part) for part in parts], 1)
    whole = by_transformers(model, torch.cat(parts))
    if fused:
        apply_lora(model, LoRAConfig(r=2, target_modules="all-linear", fp8=None))  # lora_B is zero
        fuse(model.eval())
    packed = hidden_states(model, one_row(parts))[:, : alone.shape[1]]
    assert (packed - alone).norm() < 1e-5 * alone.norm()
    row = hidden_states(model, one_row([torch.cat(parts)]), isolate=False)
    assert (row[:, : whole.shape[1]] - whole).norm() < 1e-5 * whole.norm()


def test_masks_that_let_documents_see_each_other_are_refused() -> None:
    """AFMoE's masks do not know the positions. Rows within the window get a mask of documents, which it takes."""
    model = windowed("afmoe", **TWO_KINDS, num_experts=8, num_dense_layers=1).train()
    check_windows(model, FinetuneOptions(seq_len=WINDOW))
    check_windows(model, FinetuneOptions(seq_len=32, isolate_documents=False))
    with pytest.raises(OptionError, match="seq_len must be at most 8, the model's sliding window"):
        check_windows(model, FinetuneOptions(seq_len=32))
    assert model.training and model.config.sliding_window == WINDOW


@pytest.fixture(scope="module")
def mistral_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("mistral"), 2)
    config = json.loads((directory / "config.json").read_text())
    kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    (directory / "config.json").write_text(json.dumps({**config, **kind}))
    return directory


@pytest.mark.parametrize("isolate", ["--isolate-documents", "--no-isolate-documents"])
def test_rows_longer_than_the_window_train(
    cli: Callable[..., int],
    base_args: list[str],
    mistral_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    isolate: str,
) -> None:
    words = [*base_args, "--model", mistral_dir, "--output", tmp_path / "out", "--steps", 1]
    assert cli(*words, isolate, "--fuse") == 0
    said = capsys.readouterr().out
    assert "by masks with a sliding window of 16 tokens" in said
