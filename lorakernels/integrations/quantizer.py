# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint straight into FP8 by transformers' own `from_pretrained`.

    from lorakernels.integrations.quantizer import LoRAKernelsConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", quantization_config=LoRAKernelsConfig())
    apply_lora(model, lora)                       # or PEFT, with `register(config, model=model)`

All linear layers but the output head become FrozenFP8Linears, with one FP8State per device. They are quantized tensor
by tensor, as they are read, to the same bytes as in `load_quantized`. The model then counts as an ordinary one: Trainer
takes it, and `save_pretrained` writes plain weights.

This needs transformers 5. Block-FP8 checkpoints are loaded by `load_quantized` or `convert_fp8_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lorakernels import DelayedScaling, FP8State, FrozenFP8Linear
from lorakernels.checkpoints.base.file_names import check_places
from lorakernels.checkpoints.base.format import format_of
from lorakernels.checkpoints.base.shards import check_one_set, header, read_index
from lorakernels.checkpoints.base.skeleton import config_of
from lorakernels.integrations.transformers import forget_quantizer
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.model.frozen_targets import frozen_targets
from lorakernels.modules.model.pretrained import guard_saving
from lorakernels.recipes import Recipe
from lorakernels.values import Weight

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"LoRAKernelsConfig needs transformers 5 or newer, found {transformers.__version__}: use load_quantized"
    )
from transformers.core_model_loading import ConversionOps

METHOD = "lorakernels"
# transformers draws random values for modules and parameters without this mark.
_INITIALIZED = "_is_hf_initialized"


@register_quantization_config(METHOD)
class LoRAKernelsConfig(QuantizationConfigMixin):
    """How `from_pretrained` holds linear layers.

    Args:
        fp8: the recipe, a DelayedScaling or a BlockScaling.
        modules_to_not_convert: ends of the paths of layers that stay plain.

    Raises:
        TypeError: `fp8` is not a DelayedScaling, or `modules_to_not_convert` not a list of names.
    """

    def __init__(
        self,
        fp8: Recipe = DelayedScaling(),  # noqa: B008  (frozen)
        modules_to_not_convert: list[str] | None = None,
    ) -> None:
        if not isinstance(fp8, Recipe):
            raise TypeError(f"fp8 must be a DelayedScaling or a BlockScaling, found {fp8!r}")
        names = [] if modules_to_not_convert is None else modules_to_not_convert
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"modules_to_not_convert must be a list of names, found {names!r}")
        self.quant_method: Any = METHOD
        self.fp8 = fp8
        self.modules_to_not_convert = list(names)

    def keeps(self, path: str) -> bool:
        """True if the layer at `path` stays plain."""
        return any(path == n or path.endswith(f".{n}") for n in self.modules_to_not_convert)


class _Quantize(ConversionOps):
    """Converts one weight: a FrozenFP8Linear replaces its nn.Linear, which has no memory yet."""

    def __init__(self, quantizer: LoRAKernelsQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *_: Any,
        model: Any = None,
        missing_keys: Any = None,
        **__: Any,
    ) -> dict[str, Tensor]:
        for name, tensors in input_dict.items():
            value = tensors[0] if isinstance(tensors, list) else tensors
            self.quantizer.put(model, name.removesuffix(".weight"), value)
            if missing_keys is not None:
                missing_keys.discard(name)
        return {}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("FP8 weights are written as plain ones, by save_pretrained")


@register_quantizer(METHOD)
class LoRAKernelsQuantizer(HfQuantizer):
    """The quantizer that transformers calls during loading."""

    requires_calibration = False
    quantization_config: LoRAKernelsConfig

    def __init__(self, quantization_config: LoRAKernelsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if self.pre_quantized:
            raise ValueError(
                "a checkpoint is never written with LoRAKernelsConfig: its config.json must not have one"
            )
        self._targets: list[str] = []
        self._states: dict[torch.device, FP8State] = {}

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes per value. transformers uses it to reserve memory in the allocator beforehand."""
        return 1 if self.param_needs_quantization(model, param_name) else param.element_size()

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if "disk" in places or (len(places) > 1 and "cpu" in places):
            raise ValueError(
                f"device_map must not offload layers, found {sorted(map(str, places))}: FP8 layers stay on one device"
            )

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **kwargs: Any
    ) -> Any:
        """Choose the layers to quantize.

        Raises:
            ValueError: the files hold anything but plain weights.
        """
        _check_plain(model, [Path(file) for file in checkpoint_files or ()])
        taken, _ = frozen_targets(model, (), ())
        self._targets = [path for path in taken if not self.quantization_config.keeps(path)]
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        return name == "weight" and path in self._targets

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    @torch.no_grad()
    def put(self, model: nn.Module, path: str, weight: Tensor) -> None:
        """Quantize `weight` [N, K] and put it into a FrozenFP8Linear at `path`.

        Raises:
            ValueError: a value is not finite, or the shape differs from the model's.
        """
        old: Any = model.get_submodule(path)
        if not weight.is_floating_point() or weight.element_size() == 1:
            raise ValueError(f"{path}.weight must be plain floating point, found {weight.dtype}")
        if weight.shape != old.weight.shape:
            raise ValueError(
                f"{path}.weight is {list(weight.shape)} in the checkpoint, {list(old.weight.shape)} in the model"
            )
        config, device = self.quantization_config, weight.device
        if isinstance(config.fp8, DelayedScaling) and device not in self._states:
            self._states[device] = FP8State(self._targets, config.fp8, device)
        spec = FrozenSpec(config.fp8, self._states.get(device), path)
        new = FrozenFP8Linear.from_weight(Weight(weight), old.bias, spec)
        if old.bias is not None:
            assert new.bias is not None
            was = getattr(old.bias, _INITIALIZED, False)
            setattr(new.bias, _INITIALIZED, was)
        setattr(new, _INITIALIZED, True)
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new.train(old.training))

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        forget_quantizer(model)
        guard_saving(model)
        for module in model.modules():
            if isinstance(module, FrozenFP8Linear):
                module.requires_grad_(False)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


def _check_plain(model: Any, paths: list[Path]) -> None:
    """Refuse files with anything but plain weights of `model`: transformers would drop scales, and go on."""
    files = [path for path in paths if path.suffix == ".safetensors"]
    if not files:
        return
    folder = files[0].parent
    check_one_set(folder, read_index(folder).values())
    tensors = {name: info for path in files for name, info in header(path).items()}
    if format_of(tensors, {}, folder).fp8:
        raise ValueError(
            f"the weights in {folder} are in block FP8, expected plain ones: load_quantized takes them"
        )
    config = config_of(folder, None) if (folder / "config.json").is_file() else model.config
    check_places(model, config, tensors)
