# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoraConfig beside ours: the fields of both, those that only PEFT has, and the values of `task_type`."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, NoReturn

SHARED = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "use_rslora",
    "use_dora",
    "bias",
    "init_lora_weights",
)
TASK_TYPES = (
    "SEQ_CLS",
    "SEQ_2_SEQ_LM",
    "CAUSAL_LM",
    "TOKEN_CLS",
    "QUESTION_ANS",
    "FEATURE_EXTRACTION",
)
HEADS = {  # what PEFT adds to modules_to_save
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
REFUSED = {
    "alora_invocation_tokens": "adapters active from a token on (aLoRA)",
    "layer_replication": "replicated layers",
    "lora_bias": "a bias on lora_B",
    "trainable_token_indices": "trainable rows of an embedding",
    "use_qalora": "pooled inputs (QALoRA)",
    "use_bdlora": "block-diagonal adapters (BD-LoRA)",
    "arrow_config": "routed adapters (Arrow)",
    "velora_config": "compressed gradients (VeLoRA)",
    "monteclora_config": "sampled adapters (MonteCLoRA)",
    "kasa_config": "a truncated base (KaSA)",
    "megatron_config": "Megatron's parallel layers",
    "ensure_weight_tying": "adapters tied across layers",
}
IN_PEFT = (
    "PEFT itself runs it, also after `register` of lorakernels.integrations.peft with fp8=None"
)
_ONLY_HERE = {  # a file says these of how it was written
    "inference_mode": "an adapter that is not trained, as load_adapter(is_trainable=False) reads one",
    "fan_in_fan_out": "a weight stored [K, N]",
    "revision": "the base's revision, which no file of ours has",
}
# Of a file, or of an initialisation: PEFT ignores these four under any other init_lora_weights.
_IGNORED = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "loftq_config",
)


def lora_fields(config: Any) -> dict[str, Any]:
    """{field of LoRAConfig: value} of a `peft.LoraConfig`, which is read by its attributes.

    Raises:
        TypeError: `config` is no peft.LoraConfig.
        ValueError: a field that LoRAConfig lacks has another value than its default, or `register` has had `config`.
    """
    is_lora = is_dataclass(config) and getattr(config, "peft_type", None) == "LORA"
    if isinstance(config, type) or not is_lora:
        name = config.__name__ if isinstance(config, type) else type(config).__name__
        raise TypeError(f"config must be a LoRAConfig or a peft.LoraConfig, found {name}")
    if vars(config).get("_custom_modules"):
        raise ValueError(
            "config was given to `register`, which is for get_peft_model: call that, or give apply_lora a new config"
        )
    for field in fields(config):
        if field.name in (*SHARED, *_IGNORED):
            continue
        value, default = getattr(config, field.name), _default(field)
        if value != default:
            what = (REFUSED | _ONLY_HERE).get(field.name, "LoRAConfig has no such field")
            raise ValueError(
                f"peft.LoraConfig.{field.name}={value!r} is not supported: {what}. Expected {default!r}. {IN_PEFT}"
            )
    return {name: getattr(config, name) for name in (*SHARED, "task_type")}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def checked_task_type(value: Any) -> str | None:
    """`value`, one of TASK_TYPES or PEFT's enum of them, as a str; None stays.

    Raises:
        ValueError: it is something else.
    """
    if value not in (None, *TASK_TYPES):
        raise ValueError(f"LoRAConfig.task_type must be None or one of {TASK_TYPES}, got {value!r}")
    return next((name for name in TASK_TYPES if value == name), None)


class NotPeft:
    """A config that PEFT's own functions do not take."""

    @property
    def base_model_name_or_path(self) -> NoReturn:
        """Raise TypeError. `get_peft_model` reads this first of all."""
        raise TypeError(
            f"get_peft_model takes a peft.LoraConfig, found lorakernels' {type(self).__name__}. Either "
            "apply_lora(model, config), or get_peft_model(model, register(peft.LoraConfig(...))) with register of "
            "lorakernels.integrations.peft"
        )
