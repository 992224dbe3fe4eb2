# SPDX-License-Identifier: Apache-2.0
"""transformers: block-FP8 checkpoints and Trainer.

    convert_fp8_model(model)                 # FP8Linear → FrozenFP8Linear, layer by layer
    apply_lora(model, LoRAConfig(...))
    model.enable_input_require_grads()       # only for reentrant gradient checkpointing: the
                                             # embeddings are frozen, so nothing else would ask
    Trainer(model, ..., callbacks=[AdapterCallback()]).train()

Fused layers and CUDA graphs under Trainer: `LoRAKernelsCallback`, examples/trainer.py.

FP8Linear holds W in e4m3 with one scale_inv per block (128×128). We hold one scale per tensor:
bytes are kept where all blocks agree, else W is requantized from its exact amax. One layer at a
time is in fp32, never the model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from lorakernels.adapters import save_adapter
from lorakernels.config import DelayedScaling
from lorakernels.fp8 import FP8State
from lorakernels.modules.convert import check_fp8_linear, to_frozen
from lorakernels.modules.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.pretrained import guard_saving
from lorakernels.modules.report import LoRAReport
from lorakernels.modules.undo import all_or_nothing
from lorakernels.philox import PhiloxState
from lorakernels.targets import is_fp8_linear


def convert_fp8_model(
    model: nn.Module,
    *,
    fp8: DelayedScaling = DelayedScaling(),  # noqa: B008  (frozen)
    weight_layout: str = "single",
) -> list[str]:
    """Replace every FP8Linear of `model` by a FrozenFP8Linear, in place; returns their paths.

    The model then no longer counts as quantized by transformers, so Trainer takes it once it has
    adapters. Scales of the layers' inputs follow `fp8`, in one FP8State.

    Raises:
        ValueError: there is no FP8Linear, its scales do not fit its weight, or a value is not finite.
        TypeError: a layer holds FP8 or FP4 in a way we do not have. Nothing is changed before all
            layers are checked, and an exception in the middle leaves the model as it was.
    """
    _check_recipe(fp8)
    paths = [path for path, module in model.named_modules() if is_fp8_linear(module)]
    if not paths:
        raise ValueError(f"{type(model).__name__} has no FP8Linear: nothing to convert")
    for path, module in model.named_modules():
        _check_module(path, module)
    devices = {_tensor(model.get_submodule(path).weight).device for path in paths}
    state = FP8State(paths, fp8, devices.pop()) if len(devices) == 1 else None
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    with all_or_nothing(model, configs.values()) as before:
        for path in paths:
            old = model.get_submodule(path)
            options = {"weight_layout": weight_layout, "fp8_state": state, "name": path}
            new = before.patiently(partial(to_frozen, old, fp8, **options))
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
        forget_quantizer(model)
        guard_saving(model)
    return paths


def frozen_from_fp8_linear(
    module: nn.Module,
    fp8: DelayedScaling | None,
    *,
    weight_layout: str = "single",
    fp8_state: FP8State | None = None,
    name: str = "",
) -> FrozenFP8Linear:
    """A FrozenFP8Linear with the weight of a transformers FP8Linear; frozen bias, same mode."""
    _check_recipe(fp8)
    _check_module(name or "module", module)
    return to_frozen(module, fp8, weight_layout=weight_layout, fp8_state=fp8_state, name=name)


def forget_quantizer(model: nn.Module) -> None:
    """transformers' own marks of a quantized model come off: it is not any more.

    Trainer refuses a model that `is_quantized` and has no adapters of PEFT's, and `save_pretrained`
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
    """Into each of Trainer's checkpoints, write the adapter in PEFT's format: `adapter/`."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sharded = any(is_sharded(p) for p in kwargs["model"].parameters())
        if state.is_world_process_zero or sharded:  # gathering takes every rank; rank 0 writes
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            save_adapter(kwargs["model"], os.fspath(folder / "adapter"))


class LoRAKernelsCallback(TrainerCallback):
    """What a loop with FP8 scales, dropout states and CUDA graphs does once per step, for Trainer.

        report = apply_lora(model, config, rng_state=philox)
        fuse(model)
        Trainer(model, ..., callbacks=[LoRAKernelsCallback(model, report, rng_state=philox)]).train()

    The scales are updated once per optimizer step, over all ranks. On a GPU the decoder layers are replayed as CUDA
    graphs after `warmup_steps` steps, forward and backward; `why_not` is the reason where they are not, and a
    capture that fails is a warning. For that every batch has one shape (pad to a fixed length,
    `dataloader_drop_last=True`), and an epoch's number of batches is a multiple of `gradient_accumulation_steps`: once
    replaying, what is not like the captured steps is refused. Eager stay: embedding, last norm, head and loss,
    clipping, the optimizer, and evaluation. A run that Trainer resumes draws other masks than one that went on.

    Args:
        model: with adapters; its decoder layers are `model.model.layers`, or `layers`.
        report: what `apply_lora` returned.
        rng_state: the layers' `PhiloxState`. Without one, dropout rules graphs out.
        graphs: False leaves the layers eager.
        layers: modules to replay, where they are not the model's decoder layers.
        options: for GraphManager.
    """

    def __init__(
        self,
        model: nn.Module,
        report: LoRAReport,
        *,
        rng_state: PhiloxState | None = None,
        graphs: bool = True,
        warmup_steps: int = 3,
        layers: Sequence[nn.Module] | None = None,
        **options: Any,
    ) -> None:
        self.model, self.report, self.rng_state = model, report, rng_state
        self.graphs, self.warmup_steps, self.layers = graphs, warmup_steps, layers
        self.manager: Any = None
        self.why_not: str | None = None
        self._options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """ValueError where Trainer would run copies of the model in threads."""
        self.on_train_end(args, state, control)  # skipped where the last train() raised
        if (gpus := getattr(args, "n_gpu", 1)) > 1:
            raise ValueError(
                f"Trainer would split each batch over {gpus} GPUs in threads (DataParallel), which copy FP8 and random "
                "states: start it with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU"
            )
        if self.report.fp8_state is not None:
            self.report.fp8_state.reduce_and_update()  # takes charge
        layers = self.layers
        if layers is None:
            layers = getattr(getattr(self.model, "model", None), "layers", None)
        device = next(self.model.parameters()).device
        self.why_not = self._why_not(layers, device)
        if self.why_not is None:
            from lorakernels.graphs import GraphManager

            self.manager = GraphManager(
                layers,
                warmup_steps=self.warmup_steps,
                num_microbatches=args.gradient_accumulation_steps,
                fp8_state=self.report.fp8_state,
                rng_states=[] if self.rng_state is None else [self.rng_state],
                **self._options,
            )

    def _why_not(self, layers: Any, device: torch.device) -> str | None:
        if not self.graphs:
            return "graphs=False"
        if device.type != "cuda" and "backend" not in self._options:
            return f"the model is on {device}: CUDA graphs need a GPU"
        if layers is None:
            return f"{type(self.model).__name__} has no model.layers: give layers"
        if self.rng_state is None and any(m.dropout > 0 for m in self.report.adapted()):
            return "dropout draws from torch's generator: give apply_lora and this callback a PhiloxState"
        return None

    @property
    def replaying(self) -> bool:
        return self.manager is not None and self.manager.phase == "replaying"

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.rng_state is not None and not self.replaying:
            self.rng_state.advance()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_substep_end(args, state, control)
        if self.report.fp8_state is not None:
            self.report.fp8_state.reduce_and_update()
        if self.manager is not None:
            self._end_iteration()

    def _end_iteration(self) -> None:
        from lorakernels.graphs import CaptureError, OrderError

        try:
            self.manager.end_iteration()
        except (CaptureError, OrderError) as error:
            self.why_not = f"{error}. {self.manager.explain(error)}"
            self.manager.close()
            self.manager = None
            warnings.warn(f"layers run eagerly: {self.why_not}", RuntimeWarning, stacklevel=2)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.manager is not None:
            self.manager.close()
            self.manager = None


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


def _check_recipe(fp8: DelayedScaling | None) -> None:
    if not isinstance(fp8, DelayedScaling):
        raise TypeError(f"an FP8 checkpoint stays FP8: fp8 must be a DelayedScaling, got {fp8!r}")


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value.detach()
