# SPDX-License-Identifier: Apache-2.0
"""PEFT gives targets of a mixture other meanings: the report counts as PEFT does, and files say what PEFT misreads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from lorakernels import (  # noqa: E402
    LoRAConfig,
    LoRALinear,
    apply_lora,
    export_model,
    load_adapter,
    save_adapter,
)
from lorakernels.modules.model.peft_mixtures import RENAMED  # noqa: E402
from tests.modules.test_experts import BOTH, near  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 4, "mlp_only_layers": [0]},
    "Olmoe": {"num_experts": 4},
    "Glm4Moe": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
    "DeepseekV3": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
IDS = torch.arange(24).view(2, 12)


def made(family: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**SIZES, **OWN[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():  # large enough that experts differ
        if "experts" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


TARGETS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "names": {"target_modules": ["q_proj", "gate_proj", "up_proj", "w1", "w3", "down_proj"]},
    "an expression": {"target_modules": r".*\.(q_proj|gate_proj|up_proj|w[13]|down_proj)"},
    "attention": {"target_modules": ["q_proj", "o_proj"]},
    "with rules": {
        "target_modules": "all-linear",
        "exclude_modules": ["o_proj"],
        "rank_pattern": {"q_proj": 2, "down_proj": 3},
    },
    "a layer": {"target_modules": ["q_proj", "down_proj", "w2"], "layers_to_transform": [1]},
    "with the experts": {"target_modules": "all-linear", "target_parameters": BOTH},
}


def peft_s(family: str, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(made(family), peft.LoraConfig(r=4, lora_alpha=8, **options))


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", OWN)
def test_the_report_counts_as_peft_does(family: str, targets: str) -> None:
    expected = peft_s(family, TARGETS[targets]).get_nb_trainable_parameters()[0]
    model = made(family)
    report = apply_lora(model, LoRAConfig(r=4, fp8=None, **TARGETS[targets]))
    unlike, ours = report.unlike_peft, report.trainable_parameters
    assert (unlike is None) == (targets == "attention" or family == "Qwen2Moe")
    if unlike is None:
        assert ours == expected
        return
    assert (unlike.ours, unlike.theirs) == (ours, expected) and ours != expected
    second = str(report).splitlines()[1]
    assert second == report.details().splitlines()[1]
    assert (
        f"by PEFT 0.21 these targets are {expected:,} adapter parameters, here {ours:,}" in second
    )


def test_what_both_adapt_alone_is_named() -> None:
    report = apply_lora(made("DeepseekV3"), LoRAConfig(r=4, target_modules="all-linear"))
    assert str(report.unlike_peft).split("; ")[1:] == [
        "it also adapts model.layers.1.mlp.experts.{gate_up,down}_proj, model.layers.1.mlp.gate.weight",
        "it leaves out model.layers.0.mlp.{gate,up,down}_proj, "
        "model.layers.1.mlp.shared_experts.{gate,up,down}_proj",
    ]


def test_a_gate_without_its_up_projection() -> None:
    options = {"target_modules": ["q_proj", "gate_proj"]}
    with pytest.raises(ValueError, match="Cannot convert PEFT target"):
        peft_s("Qwen3Moe", options)
    report = apply_lora(made("Qwen3Moe"), LoRAConfig(r=4, fp8=None, **options))
    assert "PEFT 0.21 refuses these targets" in str(report).splitlines()[1]


def test_the_model_types_are_peft_s() -> None:
    theirs = pytest.importorskip("peft.utils.transformers_weight_conversion")
    patterns, names = theirs._MODEL_TO_CONVERSION_PATTERN, theirs._MOE_TARGET_MODULE_MAPPING
    fused = {kind: names[new] for kind, new in patterns.items() if new in names}
    lower = {kind: new for kind, new in fused.items() if kind == kind.lower()}  # not a class's name
    assert lower == RENAMED


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    apply_lora(model, LoRAConfig(r=4, lora_alpha=8, fp8=None, **options))
    torch.manual_seed(2)
    for layer in (m for m in model.modules() if isinstance(m, LoRALinear)):
        nn.init.normal_(layer.lora_B, std=0.1)
    return model


def test_a_file_that_peft_reads_otherwise_is_written_with_a_warning(tmp_path: Path) -> None:
    """PEFT takes "gate_proj" for the experts, and drops the adapters of the shared expert and of the dense layer."""
    model = adapted(made("DeepseekV3"), target_modules="all-linear")
    with pytest.warns(
        UserWarning, match=r"PEFT does not read .*it leaves out model\.layers\.0\.mlp"
    ):
        save_adapter(model, tmp_path)
    again = made("DeepseekV3")
    load_adapter(again, tmp_path, fp8=None)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        theirs = peft.PeftModel.from_pretrained(made("DeepseekV3"), tmp_path)
    assert not near(theirs(IDS).logits, model(IDS).logits, 1e-3)


@pytest.mark.parametrize("family", ["DeepseekV3", "Qwen3Moe", "Qwen2Moe"])
def test_a_file_without_such_layers_is_peft_s_and_written_in_silence(
    family: str, tmp_path: Path
) -> None:
    exclude = ["gate_proj", "up_proj", "down_proj"] if family != "Qwen2Moe" else None
    model = adapted(made(family), target_modules="all-linear", exclude_modules=exclude)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(made(family), tmp_path)
    assert near(theirs(IDS).logits, model(IDS).logits)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_peft_s_adapter_by_the_experts_old_names_is_read(tmp_path: Path) -> None:
    """It has target_parameters, and twice the rank on gate_up_proj."""
    options = {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
    theirs = peft_s("Qwen3Moe", options)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path)
    model = made("Qwen3Moe")
    load_adapter(model, tmp_path, fp8=None)
    assert near(model(IDS).logits, theirs(IDS).logits)


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
def test_peft_s_default_adapter_is_refused_with_what_to_do(family: str, tmp_path: Path) -> None:
    peft_s(family, {"target_modules": "all-linear"}).save_pretrained(tmp_path / "adapter")
    model = made(family)
    model.save_pretrained(tmp_path / "base")
    kinds = [type(module) for module in model.modules()]
    message = r"target_parameters: 'model.layers.\d.mlp.gate.weight' .*Router.* merge_and_unload and use the merged"
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path / "adapter", fp8=None)
    assert [type(module) for module in model.modules()] == kinds
    with pytest.raises(ValueError, match=message):
        export_model(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3", "Qwen2Moe"])
def test_register_means_peft_s_all_linear(family: str) -> None:
    """It names the layers of a model, of which PEFT would not know that they are all."""
    from lorakernels.integrations.peft import register

    model = made(family)
    config = register(peft.LoraConfig(r=4, target_modules="all-linear"), fp8=None, model=model)
    expected = peft_s(family, {"target_modules": "all-linear"})
    assert (
        peft.get_peft_model(model, config).get_nb_trainable_parameters()
        == expected.get_nb_trainable_parameters()
    )
