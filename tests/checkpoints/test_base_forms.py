# SPDX-License-Identifier: Apache-2.0
"""Every way of reading a base takes the same forms with the same values, and refuses the others by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("rich", reason="one of the ways is finetune's")

from lorakernels import (  # noqa: E402
    LoRAConfig,
    apply_lora,
    export_model,
    load_quantized,
    save_adapter,
)
from lorakernels.integrations.quantizer import LoRAKernelsConfig  # noqa: E402
from lorakernels.train.errors import ModelError  # noqa: E402
from lorakernels.train.model.model import check_directory, load_model  # noqa: E402
from tests.checkpoints.base_forms import (  # noqa: E402
    REFUSED,
    SIZES,
    TAKEN,
    plain_tensors,
    write_form,
)

AUTO = transformers.AutoModelForCausalLM
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It changes nothing: its B is 0."""
    folder = tmp_path_factory.mktemp("adapter")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    apply_lora(model, LoRAConfig(r=2, fp8=None, target_modules="all-linear"))
    save_adapter(model, folder)
    return folder


def by_load_quantized(base: Path, adapter: Path) -> nn.Module:
    return load_quantized(base, device="cpu", frozen="plain", progress=False).model


def by_transformers(base: Path, adapter: Path) -> nn.Module:
    return load_model(base, torch.bfloat16, CPU)


def by_quantizer(base: Path, adapter: Path) -> nn.Module:
    return AUTO.from_pretrained(base, dtype=torch.bfloat16, quantization_config=LoRAKernelsConfig())


def by_export(base: Path, adapter: Path) -> nn.Module:
    merged = base.parent / "merged"
    export_model(base, adapter, merged)
    return AUTO.from_pretrained(merged, dtype=torch.bfloat16)


WAYS: dict[str, Callable[[Path, Path], Any]] = {
    "load_quantized": by_load_quantized,
    "transformers": by_transformers,
    "quantizer": by_quantizer,
    "export": by_export,
}


@pytest.fixture(autouse=True)
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """These bases have none, and no way needs one but finetune's start."""
    monkeypatch.setattr("lorakernels.train.model.model.TOKENIZER_FILES", ("config.json",))


def assert_values(model: nn.Module, expected: dict[str, Tensor]) -> None:
    held = dict(model.state_dict())
    for name, value in expected.items():
        assert torch.equal(held[name].bfloat16(), value), name


@pytest.mark.slow
@pytest.mark.parametrize("way", ["load_quantized", "transformers", "export"])
@pytest.mark.parametrize("form", TAKEN)
def test_what_is_taken_has_the_same_values_in_all_ways(form, way, tmp_path, adapter):
    base = write_form(tmp_path / "base", TAKEN[form])
    assert_values(WAYS[way](base, adapter), plain_tensors())


@pytest.mark.parametrize("form", [form for form in TAKEN if form.startswith("bf16")])
def test_the_quantizer_has_load_quantized_s_bytes(form, tmp_path, adapter):
    base = write_form(tmp_path / "base", TAKEN[form])
    ours = load_quantized(base, device="cpu", progress=False).model.state_dict()
    for name, value in by_quantizer(base, adapter).state_dict().items():
        assert torch.equal(value.view(torch.uint8), ours[name].view(torch.uint8)), name


@pytest.mark.parametrize("form", [form for form in TAKEN if not form.startswith("bf16")])
def test_the_quantizer_leaves_block_fp8_to_load_quantized(form, tmp_path, adapter):
    """transformers itself names the two configs, where config.json has one."""
    base = write_form(tmp_path / "base", TAKEN[form])
    with pytest.raises(ValueError, match=r"load_quantized takes them|FineGrainedFP8Config but you"):
        by_quantizer(base, adapter)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", REFUSED)
def test_what_is_not_read_is_refused_by_name_in_all_ways(form, way, tmp_path, adapter):
    stored, named = REFUSED[form]
    if way == "quantizer":  # transformers reads a config that it knows before it asks a quantizer
        named += "|passing a LoRAKernelsConfig config|has no `quant_method` attribute"
    base = write_form(tmp_path / "base", stored)
    with pytest.raises((ValueError, ModelError, TypeError), match=named):
        WAYS[way](base, adapter)
    assert not (tmp_path / "merged").exists()
    if form != "bf16 with a scale":  # the one that headers alone do not show
        with pytest.raises(ModelError, match=named):
            check_directory(base)
