# SPDX-License-Identifier: Apache-2.0
"""Read and write PEFT's two files as data. No code in them is run.

Reading a config ignores unknown keys. It refuses, by name, every option that changes the maths or the base in a way
that LoRALinear does not have. Writing replaces a file only by a complete one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from lorakernels.config import LoRAConfig
from lorakernels.peft_config import HEADS, IN_PEFT, REFUSED, SHARED, TASK_TYPES
from lorakernels.recipes import Recipe

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_MAY_BE_NULL = frozenset(
    (
        "target_modules",
        "exclude_modules",
        "target_parameters",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
    )
)
# PEFT computes these initial values from the base weight. Some of them also change the base weight, so their
# adapter fits only the changed base. A file that PEFT converted (path_initial_model_for_weight_conversion) says
# True.
_INIT_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_INIT_OTHER_MATHS = ("mica",)


def from_peft_dict(data: dict[str, Any], *, fp8: Recipe | None) -> LoRAConfig:
    """The LoRAConfig of a parsed adapter_config.json.

    Raises:
        ValueError, TypeError: not a LoRA, a feature that lorakernels lacks, or a value that LoRAConfig refuses.
    """
    kind = data.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {kind!r}")
    for key, what in REFUSED.items():
        if data.get(key):
            raise ValueError(f"{key}={data[key]!r} is not supported: {what}. {IN_PEFT}")
    fields = {key: data[key] for key in SHARED if key in data}
    for key in ("rank_pattern", "alpha_pattern"):
        fields[key] = fields.get(key) or {}
    if fields.get("use_dora") is None:  # older files lack it
        fields["use_dora"] = False
    for key, value in list(fields.items()):
        if value is None and key not in _MAY_BE_NULL:
            raise ValueError(f"{key} must be set, got null")
    task, saved = data.get("task_type"), fields.get("modules_to_save") or ()
    heads = HEADS.get(task or "", ())
    if task in TASK_TYPES and (not heads or any(name.endswith(heads) for name in saved)):
        fields["task_type"] = task  # of a file without a trained head it would train one
    fields["init_lora_weights"] = _init(fields.get("init_lora_weights", True))
    return LoRAConfig(**fields, fp8=fp8)


def _init(value: Any) -> bool | str:
    """LoRAConfig's init_lora_weights for PEFT's value; refuses initializations that changed the base.

    Any other initialization does not matter once the adapter is loaded.
    """
    if isinstance(value, str):
        name = value.lower()
        if name.startswith(_INIT_CHANGES_BASE):
            raise ValueError(
                f"init_lora_weights={value!r} is not supported: it changed the base weights, so "
                "the adapter does not fit the original ones; convert it with PEFT's "
                "save_pretrained(path_initial_model_for_weight_conversion=...)"
            )
        if name.startswith(_INIT_OTHER_MATHS):
            raise ValueError(f"init_lora_weights={value!r} is not supported: lora_B is frozen")
        return "gaussian" if name == "gaussian" else True
    return value if isinstance(value, bool) else True


def to_peft_dict(
    config: LoRAConfig,
    *,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
    auto_mapping: dict[str, str] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The fields that PEFT writes for `config`, ready for JSON. `changes` replace some of them."""
    fields = {key: changes.get(key, getattr(config, key)) for key in SHARED}
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
    return {
        **fields,
        "peft_type": "LORA",
        "base_model_name_or_path": base_model_name_or_path,
        "task_type": task_type,
        "auto_mapping": auto_mapping if task_type is None else None,
        "revision": None,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "lora_bias": False,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "loftq_config": {},
        "layer_replication": None,
        "trainable_token_indices": None,
        "alora_invocation_tokens": None,
    }


def read_config(folder: Path, fp8: Recipe | None) -> LoRAConfig:
    """The LoRAConfig in `folder`. Every error names the file."""
    file = _existing(folder, CONFIG_NAME)
    try:
        data = json.loads(file.read_bytes())
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, found {type(data).__name__}")
        return from_peft_dict(data, fp8=fp8)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors in `folder`, on the CPU. Raises ValueError, which names the file, if it is damaged."""
    file = _existing(folder, WEIGHTS_NAME)
    try:
        return from_safetensors(file.read_bytes())
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def _existing(folder: Path, name: str) -> Path:
    file = folder / name
    if file.is_file():
        return file
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a directory with an adapter")
    hint = ""
    if name == WEIGHTS_NAME and (folder / "adapter_model.bin").exists():
        hint = "; adapter_model.bin is a pickle, which is not read"
    raise FileNotFoundError(f"{folder} has no {name}{hint}")


def write_files(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write both files, each whole or not at all. A new `folder` appears with both at once."""
    files = {
        WEIGHTS_NAME: to_safetensors(tensors, metadata={"format": "pt"}),
        CONFIG_NAME: json.dumps(dict(sorted(config.items())), indent=2).encode(),
    }
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, expected a directory")
    folder.parent.mkdir(parents=True, exist_ok=True)
    is_new = not folder.exists()
    staging = Path(tempfile.mkdtemp(prefix=".adapter-", dir=folder.parent if is_new else folder))
    try:
        for name, content in files.items():
            _write_synced(staging / name, content)
        if is_new:
            staging.chmod(0o777 & ~_umask())
            staging.rename(folder)
            _sync(folder.parent)
        else:
            for name in files:
                os.replace(staging / name, folder / name)
        _sync(folder)
    except OSError as error:
        raise OSError(error.errno, f"adapter not saved: {error.strerror}", str(folder)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_synced(file: Path, content: bytes) -> None:
    with open(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # not every file system syncs directories
        os.fsync(descriptor)
    os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
