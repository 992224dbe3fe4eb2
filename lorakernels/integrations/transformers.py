# SPDX-License-Identifier: Apache-2.0
"""transformers: block-FP8 checkpoints, and Trainer.

    convert_fp8_model(model)                 # FP8Linear → FrozenFP8Linear, layer by layer
    apply_lora(model, LoRAConfig(...))
    model.enable_input_require_grads()       # only for reentrant gradient checkpointing: the
                                             # embeddings are frozen and request no gradient
    Trainer(model, ..., callbacks=[AdapterCallback()]).train()

For fused layers and CUDA graphs under Trainer see `LoRAKernelsCallback` and examples/trainer.py.

FP8Linear holds W in e4m3 with one scale_inv per block (128×128). A FrozenFP8Linear holds one scale per tensor. The
bytes are kept if all scales of a weight are equal. Otherwise W is requantized from its exact amax. Only one layer at a
time is in fp32.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from lorakernels import (
    Attached,
    DelayedScaling,
    FP8State,
    FrozenFP8Linear,
    LoRAReport,
    PhiloxState,
    attach,
    save_adapter,
)
from lorakernels.loops.parts import adapters
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.model.convert import check_block_size, check_fp8_linear, to_frozen
from lorakernels.modules.model.pretrained import guard_saving
from lorakernels.modules.model.targets import is_fp8_linear
from lorakernels.modules.model.undo import all_or_nothing
from lorakernels.recipes import Recipe

_PEFT_LAYERS = "peft.tuners.lora.layer"


def convert_fp8_model(
    model: nn.Module,
    *,
    fp8: Recipe = DelayedScaling(),  # noqa: B008  (frozen)
) -> list[str]:
    """Replace every FP8Linear of `model` by a FrozenFP8Linear, in place. Returns their paths.

    transformers then no longer counts the model as quantized, so Trainer takes it once it has adapters. Scales of the
    layers' inputs follow `fp8`. Under DelayedScaling they are in one FP8State if the layers are on one device. Under
    BlockScaling there is no state, and the layers keep their bytes and scales.

    Raises:
        ValueError: there is no FP8Linear, its scales do not fit its weight, a value is not finite, or `fp8` is a
            BlockScaling where blocks are not 128 × 128.
        TypeError: a layer holds FP8 or FP4 in another way, or `fp8` is neither a DelayedScaling nor a BlockScaling.

    Nothing is changed before all layers are checked, and an exception in the middle leaves the model as it was.
    """
    _check_recipe(fp8)
    paths = [path for path, module in model.named_modules() if is_fp8_linear(module)]
    if not paths:
        raise ValueError(f"{type(model).__name__} has no FP8Linear: nothing to convert")
    for path, module in model.named_modules():
        _check_module(path, module)
        if path in paths:
            check_block_size(path, module, fp8)
    devices = {_tensor(model.get_submodule(path).weight).device for path in paths}
    state = None
    if isinstance(fp8, DelayedScaling) and len(devices) == 1:
        state = FP8State(paths, fp8, devices.pop())
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    with all_or_nothing(model, configs.values()) as before:
        for path in paths:
            old = model.get_submodule(path)
            spec = FrozenSpec(fp8, state, path)
            new = before.patiently(partial(to_frozen, old, spec))
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
        forget_quantizer(model)
        guard_saving(model)
    return paths


def frozen_from_fp8_linear(
    module: nn.Module,
    fp8: Recipe | None,
    *,
    fp8_state: FP8State | None = None,
    name: str = "",
) -> FrozenFP8Linear:
    """A FrozenFP8Linear with the weight and frozen bias of a transformers FP8Linear, in the same mode.

    Raises:
        TypeError, ValueError: as `convert_fp8_model`.
    """
    _check_recipe(fp8)
    _check_module(name or "module", module)
    return to_frozen(module, FrozenSpec(fp8, fp8_state, name))


def forget_quantizer(model: nn.Module) -> None:
    """Remove the marks by which transformers recognises a quantized model, because the model no longer is one.

    With the marks, Trainer would refuse a model that `is_quantized` and has no adapters of PEFT's. `save_pretrained`
    would write a quantization_config that does not describe the weights.
    """
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        module.is_quantized = False
        for name in ("hf_quantizer", "quantization_method"):
            module.__dict__.pop(name, None)
        for name in ("quantization_config", "_is_quantized"):
            module.config.__dict__.pop(name, None)


class AdapterCallback(TrainerCallback):
    """Writes the adapter in PEFT's format into each of Trainer's checkpoints, as `adapter/`."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sharded = any(is_sharded(p) for p in kwargs["model"].parameters())
        if state.is_world_process_zero or sharded:  # every rank gathers, rank 0 writes
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            save_adapter(kwargs["model"], os.fspath(folder / "adapter"))


class LoRAKernelsCallback(TrainerCallback):
    """`attach` for Trainer, which makes its optimizer itself: scales, dropout states and CUDA graphs of each step.

        report = apply_lora(model, config)
        fuse(model)
        Trainer(model, ..., callbacks=[LoRAKernelsCallback(model)]).train()

    The rules of `attach` about shapes, microbatches and skipped steps apply. On a GPU, decoder layers whose shapes
    repeat are replayed as CUDA graphs, and other shapes run eagerly. Embedding, last norm, head and loss, clipping,
    the optimizer and evaluation always run eagerly. A run that Trainer resumes draws other masks than an uninterrupted
    run. Fused layers then start with new FP8 scales of dy. After PEFT's checkpoints, which hold none, all layers do.

    Attributes:
        attached: what `attach` returned, while Trainer trains.
        why_not: why layers are not replayed; None while they are. It stays after the end of training.

    Args:
        model: with adapters, ours or PEFT's over our op; it may be a PeftModel.
        report: what `apply_lora` returned; if given, the callback checks that it is this model's.
        rng_state: the layers' `PhiloxState`; None lets `attach` make one.
        graphs: False leaves the layers eager.
        warmup_steps: how often a shape comes before its capture.
        layers: modules to replay; None takes the model's decoder layers.
        options: of `attach`, besides these.

    Raises:
        ValueError: `report` is another model's, or the adapters are PEFT's own layers.
        TypeError: `attach` has no option of a name.
    """

    def __init__(
        self,
        model: nn.Module,
        report: LoRAReport | None = None,
        *,
        rng_state: PhiloxState | None = None,
        graphs: bool = True,
        warmup_steps: int = 3,
        layers: Sequence[nn.Module] | None = None,
        **options: Any,
    ) -> None:
        if report is not None and report.model is not model:
            raise ValueError(
                "report must be what apply_lora returned for this model, found another model's"
            )
        if plain := _pefts_own(model):
            raise ValueError(
                f"{plain} is PEFT's own layer, and none is of lorakernels: call register of "
                "lorakernels.integrations.peft before get_peft_model, or patch(model) now"
            )
        self.model, self.attached = model, None
        self.why_not: str | None = None
        named = {"graphs": graphs, "warmup_steps": warmup_steps, "layers": layers}
        self._options: dict[str, Any] = named | {"rng_state": rng_state} | options
        inspect.signature(attach).bind_partial(model, **self._options)

    attached: Attached | None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to Trainer's optimizer.

        Raises:
            ValueError: Trainer would run copies of the model in threads, or the model has no layer of lorakernels.
        """
        self.on_train_end(args, state, control)  # Trainer skips it if the last train() raised
        if (gpus := getattr(args, "n_gpu", 1)) > 1:
            raise ValueError(
                f"Trainer would split each batch over {gpus} GPUs in threads (DataParallel), which copy FP8 and random "
                "states: start it with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU"
            )
        self.attached = attach(self.model, kwargs["optimizer"], **self._options)

    @property
    def manager(self) -> Any:
        """The GraphManager of the layers; None without."""
        return None if self.attached is None else self.attached.manager

    @property
    def replaying(self) -> bool:
        return self.attached is not None and self.attached.replaying

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.attached is not None:
            self.why_not = self.attached.why_not

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.attached is not None:
            self.why_not = self.attached.why_not
            self.attached.detach()
            self.attached = None


def _pefts_own(model: nn.Module) -> str | None:
    """The path of the first LoRA layer, if all are PEFT's own. PEFT is not imported. Adapters may come later."""
    if any(True for _ in adapters(model)):
        return None
    kinds = ((path, kind) for path, m in model.named_modules() for kind in type(m).__mro__)
    return next((path for path, kind in kinds if kind.__module__ == _PEFT_LAYERS), None)


def _check_module(path: str, module: nn.Module) -> None:
    kind = type(module)
    if not kind.__module__.startswith("transformers."):
        return
    if not is_fp8_linear(module):
        if kind.__name__ in ("FP8Experts", "FP8GroupedLinear") or kind.__name__.startswith(
            "FbgemmFp8"
        ):
            raise TypeError(
                f"{path} is a {kind.__name__}, which cannot be converted: only FP8Linear can"
            )
        return
    check_fp8_linear(path, module)


def _check_recipe(fp8: Recipe | None) -> None:
    if not isinstance(fp8, Recipe):
        raise TypeError(
            f"an FP8 checkpoint stays FP8: fp8 must be a DelayedScaling or a BlockScaling, got {fp8!r}"
        )


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value.detach()
