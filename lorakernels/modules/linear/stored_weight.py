# SPDX-License-Identifier: Apache-2.0
"""StoredWeight: how a frozen layer holds its weight, in FP8 or plain, moves it, saves it and loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from lorakernels.modules.linear.calls import number
from lorakernels.modules.linear.state_entries import STATE_KEYS, take_columns
from lorakernels.modules.linear.weights import BYTES, dequantize_weight, take_weight
from lorakernels.modules.marks import bring, refuse_held, refuse_move
from lorakernels.numerics.fp8 import E4M3
from lorakernels.recipes import BlockScaling
from lorakernels.state.fp8 import FP8State

# The dtype that holds the e4m3 bytes. Integers are better: gloo can broadcast them (DDP broadcasts every parameter),
# and `.to(dtype)` leaves them alone. But FSDP2 takes integer parameters only since pytorch#177844: torch 2.11 does not,
# 2.13 does.
STORAGE = torch.uint8 if TorchVersion(torch.__version__) >= "2.13" else E4M3
_HELD = (*BYTES, torch.bfloat16, torch.float16)


def frozen(weight: Tensor) -> nn.Parameter:
    """A Parameter that does not train."""
    return nn.Parameter(weight, requires_grad=False)


def is_sharded(parameter: Tensor | None) -> bool:
    """True for a DTensor. FSDP2 keeps parameters sharded in DTensors outside of their module's forward."""
    return hasattr(parameter, "device_mesh")


class StoredWeight(nn.Module):
    """What a frozen linear layer keeps: one weight, its scales, and its columns of an FP8 state.

    Attributes:
        weight, weight_scale_inv, fp8_state, block_scaling, column: as of FrozenFP8Linear.
    """

    name: str
    weight_scale_inv: Tensor | None
    block_scaling: BlockScaling | None = None
    fp8_state = number("fp8_state")
    _column: int  # where `column` is kept, also in a pickle
    column = number("_column")

    def weight_moved(self) -> None:
        """Called after the weight was moved or replaced, for the tensors of a subclass on its device."""

    def _store(self, data: Tensor, scale_inv: Tensor | None) -> None:
        """Hold `data` [N, K]: plain values, or bytes of e4m3 with their `scale_inv`."""
        self._parameters["weight"] = frozen(data if scale_inv is None else data.view(STORAGE))
        self.register_buffer("weight_scale_inv", scale_inv)

    @property
    def stored(self) -> Tensor:
        """The weight as the ops take it: e4m3 bytes as uint8, or the plain parameter.

        FSDP2 under a MixedPrecisionPolicy gathers the stored values as bf16 or fp16. Both represent bytes and e4m3
        values exactly. Any other dtype means that a plain weight was put in place of the bytes.

        Raises:
            TypeError: the layer holds FP8, but its parameter has another dtype.
        """
        stored = self._parameters["weight"]
        assert stored is not None
        if self.weight_scale_inv is None or stored.dtype == torch.uint8:
            return stored
        if stored.dtype not in _HELD:
            raise self._not_bytes(stored.dtype)
        return stored.to(STORAGE).view(torch.uint8)

    @property
    def held(self) -> Tensor:
        """`stored`, without a view where the parameter is e4m3, for callers that take both."""
        stored = self._parameters["weight"]
        assert stored is not None
        return stored if stored.dtype in BYTES else self.stored

    @property
    def holds_fp8(self) -> bool:
        """Whether the weight is e4m3 bytes with scales, and not a plain tensor."""
        return self.weight_scale_inv is not None

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's, which `layer.weight = parameter` calls. Only FP8 bytes may replace FP8 bytes.

        Raises:
            TypeError: a plain weight would replace FP8 bytes; `model.tie_weights()` tries this on a tied head.
        """
        held = name == "weight" and self._buffers.get("weight_scale_inv") is not None
        if held and param is not None and param.dtype not in BYTES:
            raise self._not_bytes(param.dtype)
        super().register_parameter(name, param)
        if name == "weight":
            self.weight_moved()

    def _not_bytes(self, dtype: torch.dtype) -> TypeError:
        return TypeError(
            f"{self.name or 'this layer'}: the weight is held in FP8, as uint8 or e4m3 bytes with a scale; found "
            f"{dtype} put in its place. A head with an adapter is not tied to the embedding any more; to set new "
            "values, load_state_dict quantizes them"
        )

    @property
    def weight(self) -> Tensor:
        stored = self._parameters["weight"]
        assert stored is not None
        if is_sharded(stored):  # FSDP2 reads `weight`, and would take a view for a new parameter
            return stored
        return self._viewed_weight

    @property
    def _viewed_weight(self) -> Tensor:
        """[N, K]: the plain weight, or the e4m3 view of the bytes."""
        return self.stored.view(E4M3) if self.holds_fp8 else self.stored

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as it computes now, a new tensor [N, K] in `dtype`. Over a sharded base it is gathered."""
        bring(self)
        return dequantize_weight(self._viewed_weight.detach(), self.weight_scale_inv, dtype)

    def _write_weight(self, weight: Tensor, scale_inv: Tensor | None) -> None:
        """Write new values into the stored weight and its scale_inv."""
        refuse_held(self, "write to")
        with torch.no_grad():
            self.stored.copy_(weight)
            if self.weight_scale_inv is not None and scale_inv is not None:
                self.weight_scale_inv.copy_(scale_inv)

    @property
    def _own_state(self) -> FP8State:
        """The FP8 state. Without one AttributeError, so that the layer lacks the attributes that are made of it."""
        if self.fp8_state is None:
            raise AttributeError("fp8_state is None")
        state: FP8State = self.fp8_state
        return state

    @property
    def fp8_scale(self) -> Tensor:
        """fp32 [2]: the scales of x and dy."""
        return self._own_state.values(self.column)[-1]

    @property
    def fp8_amax_history(self) -> Tensor:
        """fp32 [amax_history_len, 2]: the amax histories of x and dy."""
        return self._own_state.values(self.column)[:-1]

    @property
    def fp8_max(self) -> Tensor:
        """fp32 [2]: the largest values of the FP8 formats of x and dy, for which their scales were made."""
        state = self._own_state
        maxima = [state.recipe.fp8_max_forward, state.recipe.fp8_max_backward]
        return torch.tensor(maxima, device=state.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredWeight:
        scale_inv = self.weight_scale_inv
        refuse_move(self, fn)
        if self.fp8_state is not None and scale_inv is not None:
            self.fp8_state.check_move(fn(scale_inv).device)
        # fn may be .to(dtype), which would convert e4m3 like any other floating-point type
        self._hold_bytes_as(torch.uint8)
        super()._apply(fn, recurse)
        self._hold_bytes_as(STORAGE)
        if scale_inv is not None and self.weight_scale_inv is not None:
            device = self.weight_scale_inv.device
            if self.weight_scale_inv.dtype != torch.float32:
                self.weight_scale_inv = scale_inv.to(device)
            if self.fp8_state is not None:
                self.fp8_state.to(device)
        self.weight_moved()
        return self

    def _hold_bytes_as(self, dtype: torch.dtype) -> None:
        stored = self._parameters["weight"]
        if self.weight_scale_inv is None or stored is None or is_sharded(stored):
            return
        if stored.dtype != dtype:
            self._parameters["weight"] = frozen(stored.view(dtype))

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and deepcopy, with the weight as uint8, as pickle has no FP8 storage."""
        state = dict(self.__dict__)
        stored = self._parameters["weight"]
        if stored is not None and stored.dtype == E4M3:
            state["_parameters"] = {**self._parameters, "weight": frozen(stored.view(torch.uint8))}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # older pickles say whether the weight had a transposed copy, and may have one
        self.__dict__.pop("weight_layout", None)
        self._buffers.pop("weight_t", None)
        self._non_persistent_buffers_set.discard("weight_t")
        self._hold_bytes_as(STORAGE)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination[prefix + "weight"]
        if weight.dtype == torch.uint8 and not is_sharded(weight):
            destination[prefix + "weight"] = weight.detach().view(E4M3)
        if self.fp8_state is not None:
            for key in STATE_KEYS:
                destination[prefix + key] = getattr(self, key).clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        entries = {k: v for k, v in state_dict.items() if k.startswith(prefix)}
        recipe = None if self.fp8_state is None else self.fp8_state.recipe
        absent = missing_keys if strict else []
        columns = take_columns(entries, prefix, recipe, absent, error_msgs)
        try:
            storage = STORAGE if self.holds_fp8 else None
            quantized = take_weight(entries, prefix, storage, self.block_scaling)
        except ValueError as error:
            error_msgs.append(f"{prefix}weight: {error}")
            return
        if quantized:  # a plain checkpoint need not have an FP8 state
            for key in STATE_KEYS:
                if prefix + key in missing_keys:
                    missing_keys.remove(prefix + key)
        super()._load_from_state_dict(
            entries, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if columns is not None and self.fp8_state is not None:
            self.fp8_state.set_values(self.column, columns)
            # a checkpoint does not say whether its dy history is of a joint dy, so start without one
            if self.column in self.fp8_state.joint:
                self.fp8_state.backward[:, self.column] = 0.0
