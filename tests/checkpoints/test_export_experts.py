# SPDX-License-Identifier: Apache-2.0
"""export of adapters on the experts of Mixtral and Qwen3-MoE: what merge_and_unload gives, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from lorakernels import export_model, merge_and_unload, save_adapter  # noqa: E402
from tests.modules.test_experts import BOTH, FAMILIES, IDS, adapted  # noqa: E402

CHOICES: dict[str, dict[str, Any]] = {
    "both": {},
    "down alone, rank 2": {"target_parameters": BOTH[1:], "rank_pattern": {"experts.down_proj": 2}},
    "with modules": {"target_modules": ["q_proj"], "use_rslora": True},
}


def saved(family: str, folder: Path, **options: Any) -> nn.Module:
    """The base and an adapter over it in `folder`. Returns the model with the adapter merged, in bf16."""
    base = FAMILIES[family]().bfloat16()
    base.save_pretrained(folder / "base", max_shard_size="9KB")
    model = adapted(FAMILIES[family]().bfloat16(), **options)
    save_adapter(model, folder / "adapter")
    return merge_and_unload(model)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_merge_and_unload(family: str, choice: str, tmp_path: Path) -> None:
    """A file has gate and up of an expert apart, and their products may add in another order than that of both.

    2^-24 of a value then turns its rounding to bf16, of steps of 2^-7, with a chance below 2^-15.
    """
    expected = saved(family, tmp_path, **CHOICES[choice])
    found = export_model(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="bfloat16")
    theirs, ours = expected.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys() and found.merged > 0
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=2.0**-7, atol=1e-8)
        assert (ours[name] != value).sum() <= 2.0**-10 * value.numel(), name
    assert not torch.equal(again(IDS).logits, FAMILIES[family]().bfloat16()(IDS).logits)


def test_in_the_fp8_format_experts_stay_bf16(tmp_path: Path) -> None:
    """transformers' fine-grained FP8 names linear layers, and these hold no block of 128 × 128 either."""
    saved("Mixtral", tmp_path)
    with pytest.raises(ValueError, match="no linear layer of this model is made of whole 128"):
        export_model(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", format="fp8")
    assert not (tmp_path / "merged").exists()


def test_a_base_whose_experts_are_one_tensor_is_refused(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path)
    from safetensors.torch import save_file

    folder = tmp_path / "base"
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    other = {k: v for k, v in tensors.items() if ".experts." not in k}
    state = FAMILIES["Mixtral"]().bfloat16().state_dict()
    other |= {k: v for k, v in state.items() if "experts" in k}
    save_file(other, folder / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"the adapter changes .*gate_up_proj\.0, and the base does not hold a tensor",
    ):
        export_model(folder, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
