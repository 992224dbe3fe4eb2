# SPDX-License-Identifier: Apache-2.0
"""What PEFT adds to a file of the base's embedding and head: read, written where it has to be, and opened by PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lorakernels.checkpoints.adapters.files as adapters
from lorakernels import (
    DelayedScaling,
    LoRAConfig,
    apply_lora,
    export_model,
    load_adapter,
    merge_lora,
    save_adapter,
)
from tests.adapter_files import WEIGHTS

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

V, GROWN = 96, 98
PREFIX = "base_model.model."
TARGETS = {
    "inner": {"target_modules": ["q_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}
CASES = pytest.mark.parametrize("targets", TARGETS)
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
FP8 = pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "FP8"])
IDS = torch.tensor([[GROWN - 1, *range(20)], [GROWN - 2, *range(30, 50)]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    found = {}
    for tied in (False, True):
        torch.manual_seed(0)
        sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48}
        config = transformers.LlamaConfig(
            **sizes, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=tied
        )
        found[tied] = tmp_path_factory.mktemp("base")
        transformers.LlamaForCausalLM(config).save_pretrained(found[tied])
    return found


@pytest.fixture(autouse=True)
def only_expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the (vocabulary|file) has")
        yield


def base(folder: Path, grown: bool, seed: int = 5) -> Any:
    """With `grown`, the new rows are of the `seed`."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    if grown:
        torch.manual_seed(seed)
        model.resize_token_embeddings(GROWN, mean_resizing=False)
    return model.eval()


@torch.no_grad()
def logits(model: Any, grown: bool = True) -> Tensor:
    return model.eval()(IDS if grown else IDS[:, 1:]).logits


def written_by_peft(model: Any, targets: str, folder: Path) -> Any:
    options = TARGETS[targets]
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    wrapped = peft.get_peft_model(model, config)
    for name, p in wrapped.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(p, std=0.1)
    wrapped.save_pretrained(folder)
    return wrapped


def trained(model: Any, targets: str, fp8: Any) -> Any:
    apply_lora(model, LoRAConfig(r=2, init_lora_weights=False, fp8=fp8, **TARGETS[targets]))
    return model


def extras(folder: Path) -> list[str]:
    keys = (key.removeprefix(PREFIX) for key in load_file(folder / WEIGHTS))
    return sorted(key for key in keys if "lora_" not in key)


@CASES
@TIED
@pytest.mark.parametrize("grown", [False, True], ids=["same", "grown"])
@pytest.mark.parametrize("adapted", [False, True], ids=["into plain", "over adapter"])
def test_peft_s_file_is_read(
    targets: str, tied: bool, grown: bool, adapted: bool, bases: dict[bool, Path], tmp_path: Path
) -> None:
    wanted = logits(written_by_peft(base(bases[tied], grown, 1), targets, tmp_path), grown)
    model = base(bases[tied], grown, 2)
    if adapted:
        trained(model, targets, None)
    incomplete = grown and targets == "head" and not tied
    if incomplete:
        model.model.embed_tokens.weight.data = base(bases[tied], grown, 1).model.embed_tokens.weight
    message = r"no model\.embed_tokens\.weight, which PEFT 0\.21 leaves out"
    with pytest.warns(UserWarning, match=message) if incomplete else nullcontext():
        load_adapter(model, tmp_path, fp8=None)
    torch.testing.assert_close(logits(model, grown), wanted, rtol=1e-5, atol=1e-5)
    if not incomplete:
        again = base(bases[tied], grown, 3)
        load_adapter(
            again, tmp_path
        )  # FP8; e4m3 rounds by 2⁻⁴, other new rows differ by 0.5 and more
        assert (logits(again, grown) - wanted).norm() < 2**-4 * wanted.norm()


@CASES
@TIED
@FP8
def test_a_grown_vocabulary_is_saved_with_its_rows(
    targets: str, tied: bool, fp8: Any, bases: dict[bool, Path], tmp_path: Path
) -> None:
    model = trained(base(bases[tied], True, 1), targets, fp8)
    if targets == "saved":
        save_adapter(model, tmp_path)
    else:
        message = rf"another size than that of .*, {V}: the file holds the embedding and the head"
        with pytest.warns(UserWarning, match=message):
            save_adapter(model, tmp_path)
    head = "lm_head.base_layer.weight" if targets == "head" else "lm_head.weight"
    assert extras(tmp_path) == [head, "model.embed_tokens.weight"]
    for kept in (trained(base(bases[tied], True, 2), targets, fp8), base(bases[tied], True, 3)):
        load_adapter(kept, tmp_path, fp8=fp8)
        assert torch.equal(logits(kept), logits(model))
    theirs = peft.PeftModel.from_pretrained(base(bases[tied], True, 4), tmp_path)
    # fp32 in another order of sums; FP8's layers round by 2⁻⁴
    gap = (logits(theirs) - logits(model)).norm() / logits(model).norm()
    assert gap < (1e-5 if fp8 is None else 2**-4)


@TIED
def test_the_base_s_own_vocabulary_is_not_saved(
    tied: bool, bases: dict[bool, Path], tmp_path: Path
) -> None:
    """PEFT writes the head under an adapter, and needs none to load."""
    model = trained(base(bases[tied], False), "head", None)
    save_adapter(model, tmp_path)
    assert extras(tmp_path) == []
    theirs = peft.PeftModel.from_pretrained(base(bases[tied], False), tmp_path)
    torch.testing.assert_close(logits(theirs, False), logits(model, False), rtol=1e-5, atol=1e-5)


def test_a_merged_head_is_saved_as_the_base_has_it(bases: dict[bool, Path], tmp_path: Path) -> None:
    model = trained(base(bases[False], True, 1), "head", None)
    wanted = logits(model)
    merge_lora(model)
    with pytest.warns(UserWarning, match="the vocabulary has"):
        save_adapter(model, tmp_path)
    again = base(bases[False], True, 2)
    load_adapter(again, tmp_path, fp8=None)
    assert torch.equal(logits(again), wanted)


@pytest.mark.parametrize("targets", ["inner", "head"])
def test_another_vocabulary_is_refused_with_what_to_do(
    targets: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    written_by_peft(base(bases[False], True), targets, tmp_path / "adapter")
    model = base(bases[False], False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = rf"\[{GROWN}, 32\], the model \[{V}, 32\].*resize_token_embeddings\({GROWN}\)"
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path / "adapter")
    after = model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[k], after[k]) for k in before)
    with pytest.raises(ValueError, match=message):
        export_model(bases[False], tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize("adapted", [False, True], ids=["into plain", "over adapter"])
@FP8
def test_an_error_while_loading_puts_the_rows_back(
    fp8: Any, adapted: bool, bases: dict[bool, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    written_by_peft(base(bases[True], True, 1), "head", tmp_path)
    model = base(bases[True], True, 2)
    if adapted:
        trained(model, "head", fp8)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(adapters, "_copy_values", fails)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        load_adapter(model, tmp_path, fp8=fp8)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[k].float(), after[k].float()) for k in before)


@pytest.mark.parametrize("grown", [False, True], ids=["same", "grown"])
@pytest.mark.parametrize("targets", ["inner", "head"])
@TIED
def test_export_merges_over_the_file_s_rows(
    tied: bool, targets: str, grown: bool, bases: dict[bool, Path], tmp_path: Path
) -> None:
    source = base(bases[tied], grown, 1).bfloat16().float()
    source.save_pretrained(tmp_path / "source")
    written_by_peft(source, targets, tmp_path / "adapter")
    other = base(tmp_path / "source", False)
    if grown and not (targets == "head" and not tied):  # PEFT leaves the embedding out then
        other.model.embed_tokens.weight.data[V:] = 0.5
        other.lm_head.weight.data[V:] = 0.5
    other.save_pretrained(tmp_path / "base")
    export_model(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    wanted = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "source"), tmp_path / "adapter"
    ).merge_and_unload()
    values = wanted.bfloat16().state_dict()
    if tied and targets == "head":  # PEFT merges into the embedding, too
        values["model.embed_tokens.weight"] = source.bfloat16().get_input_embeddings().weight
    for name, value in merged.bfloat16().state_dict().items():
        # one bf16 rounding of W + s B A, whose product is added in another order
        torch.testing.assert_close(value, values[name], rtol=2**-7, atol=0)


def test_rows_of_another_kind_are_refused(bases: dict[bool, Path], tmp_path: Path) -> None:
    written_by_peft(base(bases[False], False), "head", tmp_path)
    key = f"{PREFIX}lm_head.base_layer.weight"
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(tensors | {key: tensors[key].to(torch.float8_e4m3fn)}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"lm_head\.weight must be float32, bfloat16 or float16"):
        load_adapter(base(bases[False], False), tmp_path)
