# SPDX-License-Identifier: Apache-2.0
"""AdapterBatch: several adapters over one base, trained on the rows of one batch.

    rows 0 … M/J − 1 belong to the first adapter, the next M/J to the second, …
    of x [B, T, K], these are B/J whole sequences each

A layer multiplies the base once for all rows, and each row by its own adapter's A and B. So J small batches fill a GPU
as one large batch does. Each adapter has parameters of its own for an optimizer, and files of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.autograd.linear.adapter_rows import AdapterRows, Alone, CallRows
from lorakernels.modules.batch.input import check_inputs
from lorakernels.modules.batch.ranks import (
    FACTORS,
    RefuseWider,
    check_dense,
    check_rests,
    within,
)
from lorakernels.modules.experts.layer import expert_layers
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.linear.initial import initial_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.model.merge import lora_modules
from lorakernels.modules.model.trained_parts import hidden_originals
from lorakernels.modules.order import refuse

BASE = "__base__"  # PEFT's name of the base alone
NAMED = "named_rows"  # a buffer of each layer inside AdapterBatch.rows


class AdapterBatch:
    """The adapters of a model by name, from `batch_adapters`.

    Attributes:
        names: of the adapters, in the order of their rows.
        layers: {path: LoRALinear} of the model. Their lora_A is [J, R, K] and their lora_B [J, N, R].
        ranks: {name: rank} of adapters with a rank below the layers' own. Beyond it the rows of A and the columns of B
            are zeros, and so are their gradients. `parameters` leaves them out.
    """

    def __init__(
        self, layers: dict[str, LoRALinear], names: tuple[str, ...], ranks: dict[str, int]
    ) -> None:
        self.layers, self.names, self.ranks = layers, names, ranks
        self._calls = CallRows()
        for layer in layers.values():
            layer.adapter_rows = self._calls
        wholes = self._wholes()
        self._padded = {
            name: {
                path: nn.Parameter(whole.data[index], requires_grad=whole.requires_grad)
                for path, whole in wholes.items()
            }
            for index, name in enumerate(names)
        }
        self._views = {name: self._narrowed(name) for name in names}
        self._seen = {path: (whole.data_ptr(), whole.dtype) for path, whole in wholes.items()}
        self._tied: dict[str, nn.Parameter] = {}  # `follow` hands their gradients on

    def _wholes(self) -> dict[str, nn.Parameter]:
        """{path of a layer's lora_A or lora_B: all adapters' together}."""
        wholes = {
            f"{path}.{factor}": getattr(layer, factor)
            for path, layer in self.layers.items()
            for factor in FACTORS
        }
        if alone := [path for path, whole in wholes.items() if whole.dim() != 3]:
            raise RuntimeError(
                f"{alone[0]} is one adapter's: inside AdapterBatch.only the model has that one alone"
            )
        return wholes

    def _narrowed(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of `name` in its own rank, which are the padded ones where that is the layer's."""
        parts = dict(self._padded[name])
        for path, padded in parts.items() if name in self.ranks else ():
            part = within(padded.data, path, self.ranks[name])
            if part.shape != padded.shape:
                parts[path] = nn.Parameter(part, requires_grad=padded.requires_grad)
        return parts

    def _renewed(self) -> dict[str, nn.Parameter]:
        """`_wholes`, after moving the adapters' parts to where these parameters lie now.

        `model.to`, deepcopy and `load_state_dict(assign=True)` give a layer's parameters other memory.
        """
        wholes = self._wholes()
        for path, whole in wholes.items():
            self._renew(path, whole)
        for name in self.ranks:
            check_dense(name, self._views[name], self._padded[name])
        if self._tied:
            self._tie(wholes)
        return wholes

    def _renew(self, path: str, whole: Tensor) -> None:
        place = whole.data_ptr(), whole.dtype
        if self._seen.get(path) == place:
            return
        for index, name in enumerate(self.names):
            padded, view = self._padded[name][path], self._views[name][path]
            padded.grad, padded.data = None, whole.data[index]
            if view is not padded:
                view.grad, view.data = None, within(padded.data, path, self.ranks[name])
        self._seen[path] = place
        if path in self._tied:
            self._give(path, whole.grad)

    def _tie(self, wholes: Mapping[str, nn.Parameter]) -> None:
        """Have backward hand gradients on to the adapters' parts, and drop what `optimizer.zero_grad` has dropped."""
        for path, whole in wholes.items():
            if self._tied.get(path) is not whole:
                whole.register_hook(partial(self._before_sum, path))
                whole.register_post_accumulate_grad_hook(partial(self._after_sum, path))
                self._tied[path] = whole

    def _before_sum(self, path: str, _: Tensor) -> None:
        parts = ((self._views[name][path], self._padded[name][path]) for name in self.names)
        if all(view.grad is None or padded.grad is None for view, padded in parts):
            self._tied[path].grad = None

    def _after_sum(self, path: str, whole: Tensor) -> None:
        self._renew(path, whole)
        self._give(path, whole.grad)

    def _give(self, path: str, grad: Tensor | None) -> None:
        for index, name in enumerate(self.names):
            padded, view = self._padded[name][path], self._views[name][path]
            padded.grad = None if grad is None else grad[index]
            if view is not padded:
                part = padded.grad
                view.grad = None if part is None else within(part, path, self.ranks[name])

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and deepcopy. Its parts are not in the layers' memory."""
        return {**vars(self), "_seen": {}, "_tied": {}}

    def parameters(self, name: str, *, padded: bool = False) -> dict[str, nn.Parameter]:
        """{path of a LoRALinear's lora_A or lora_B: the adapter's own part of it}, for an optimizer.

        They share the model's memory, so that the next forward sees an update in place. If that memory has moved, this
        call and the next step of an optimizer that is followed find it again.

        A part has the adapter's rank. Below the layer's rank, lora_B is then a view with gaps between its rows. torch's
        `fused=True` and optimizers of other packages may need dense tensors. `padded` gives those: parts of the layer's
        rank, with zeros without a gradient in the rest.

        Raises:
            KeyError: there is no such adapter.
            RuntimeError: the call is inside `only`. Or an optimizer has given a part other memory.
        """
        if name not in self._views:
            raise KeyError(f"adapter {name!r} must be one of {', '.join(self.names)}")
        self._renewed()
        return dict((self._padded if padded else self._views)[name])

    def param_groups(
        self, options: Mapping[str, Mapping[str, Any]] | None = None, *, padded: bool = False
    ) -> list[dict[str, Any]]:
        """A parameter group of torch's optimizers for each adapter, with the `options` of its name.

        `padded`: as for `parameters`.

        Raises:
            KeyError: `options` name an adapter that the batch lacks.
            RuntimeError: the call is inside `only`.
        """
        options = options or {}
        for name in options:
            self.parameters(name)
        params = {name: [*self.parameters(name, padded=padded).values()] for name in self.names}
        return [
            {"params": parts, **options.get(name, {}), "name": name}
            for name, parts in params.items()
        ]

    def give_gradients(self) -> None:
        """Let each of `parameters` have its part of the gradients that backward has summed, without a copy.

        Raises:
            RuntimeError: the call is inside `only`. Or an optimizer has given a part other memory.
        """
        for path, whole in self._renewed().items():
            self._give(path, whole.grad)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer.step` take the gradients of `param_groups`, and clear them when it has used them.

        Backward hands them on, so that clipping and torch's GradScaler find them. After a step that is left out, call
        `optimizer.zero_grad`.

        Raises:
            RuntimeError: the call is inside `only`.
            ValueError: the optimizer has `fused=True`, and a part of a lower rank is not dense.
        """
        if any(
            group.get("fused") and not all(p.is_contiguous() for p in group["params"])
            for group in optimizer.param_groups
        ):
            raise ValueError(
                f"optimizer has fused=True, which needs dense parameters; lora_B of {', '.join(self.ranks)} is not, as "
                "its rank is below the layers': take param_groups(padded=True), or foreach=True"
            )
        self._tie(self._renewed())
        optimizer.register_step_pre_hook(lambda *_: self.give_gradients())
        optimizer.register_step_post_hook(lambda *_: self.clear_gradients())

    def clear_gradients(self) -> None:
        """Set all gradients of the adapters to None."""
        for layer in self.layers.values():
            for factor in FACTORS:
                getattr(layer, factor).grad = None
        for parts in (*self._views.values(), *self._padded.values()):
            for part in parts.values():
                part.grad = None

    @contextmanager
    def rows(self, names: Sequence[str | None]) -> Iterator[None]:
        """Inside, sequence i of a batch belongs to the adapter names[i], in any order, as PEFT's `adapter_names`.

        None, or "__base__", is the base alone. Each layer's rows are cut into len(names) equal parts, none within a
        sequence: of n · len(names) sequences, as beams are, n in a row have one name. Inside another `rows` it holds
        until its own end.

        Backward may run outside: a gradient checkpoint is computed again with the rows of its forward, or raises
        RuntimeError where these are not known. Graphs that were captured outside are not replayed: `attach` runs layers
        eagerly, and a GraphManager raises.

        Raises:
            KeyError: there is no such adapter.
            ValueError: `names` is empty, or names the base alone, but its weight lacks an initial adapter.
        """
        if not names:
            raise ValueError("names must have one for each sequence, found none")
        numbers = []
        for name in names:
            if name is not None and name != BASE:
                self.parameters(name)
            numbers.append(None if name in (None, BASE) else self.names.index(str(name)))
        if None in numbers:
            _refuse_initial(self.layers, "no sequence can have the base alone")
        made: dict[torch.device, AdapterRows] = {}
        for layer in self.layers.values():
            device = layer.lora_A.device
            made[device] = made.get(device) or AdapterRows.of(numbers, device)
        before = {path: layer._buffers.get(NAMED) for path, layer in self.layers.items()}
        try:
            # graphs that were captured see another buffer, and are not replayed
            for layer in self.layers.values():
                layer.register_buffer(NAMED, made[layer.lora_A.device].numbers, persistent=False)
            with self._calls.holding(made):
                yield
        finally:
            for path, layer in self.layers.items():
                if NAMED in layer._buffers:
                    delattr(layer, NAMED)
                if before[path] is not None:
                    layer.register_buffer(NAMED, before[path], persistent=False)

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """Inside, the model has this adapter alone, for all rows: to evaluate, save, load or train it.

        Its values go back into the batch at the end. A gradient checkpoint raises RuntimeError where backward runs
        outside. Graphs that were captured outside do not hold inside.

        Raises:
            KeyError: there is no such adapter.
            RuntimeError: the call is inside another `only`.
            ValueError: the call is inside `rows`. Or the layers hold values of this adapter beyond its rank.
        """
        padded = self.parameters(name, padded=True)
        if name in self.ranks:
            check_rests(name, padded, self.ranks[name])
        index = self.names.index(name)
        before = {path: (m.lora_A, m.lora_B, m.r, m.lora_alpha) for path, m in self.layers.items()}
        try:
            for layer in self.layers.values():
                rank = self.ranks.get(name, layer.r)
                wholes = {factor: getattr(layer, factor) for factor in FACTORS}
                alone = {
                    factor: nn.Parameter(
                        within(whole.data[index], factor, rank).clone(), whole.requires_grad
                    )
                    for factor, whole in wholes.items()
                }
                for factor, value in alone.items():
                    setattr(layer, factor, value)
                layer.r = rank
                layer.lora_alpha = layer.scaling * (rank**0.5 if layer.config.use_rslora else rank)
            with self._calls.holding(Alone()):
                yield
        finally:
            for path, (lora_A, lora_B, r, alpha) in before.items():
                layer = self.layers[path]
                if layer.lora_A is not lora_A:
                    lora_A.data[index, : layer.r].copy_(layer.lora_A.detach())
                    lora_B.data[index, :, : layer.r].copy_(layer.lora_B.detach())
                layer.lora_A, layer.lora_B, layer.r, layer.lora_alpha = lora_A, lora_B, r, alpha

    def __repr__(self) -> str:
        return f"AdapterBatch of {len(self.layers)} layers: {', '.join(self.names)}"


def batch_adapters(
    model: nn.Module, names: Sequence[str], ranks: Mapping[str, int] | None = None
) -> AdapterBatch:
    """Give every LoRALinear of `model` an adapter for each of `names`, in place of the one that it has.

    The rows of a forward, which J = len(names) has to divide, belong to the adapters in this order, as many to each.
    A model takes a multiple of J sequences, if its first dimension is the batch. It refuses any other number by a
    ValueError, also if its layers get flat rows. Documents packed into one row are refused, too: pack them into a
    row for each adapter. A block that is called by itself, outside of `model`, checks what its layers can see.

    Each new adapter starts as `LoRALinear.reset_adapter` has it, with random numbers of its own. All have the layer's
    scaling.

    An optimizer of `model.parameters()` trains all adapters alike. For learning rates of their own:

        optimizer = torch.optim.AdamW(batch.param_groups({"fr": {"lr": 1e-4}, "de": {"lr": 3e-4}}))
        batch.follow(optimizer)

    Call it before `fuse`, before optimizers are made and before graphs are captured.

    Args:
        model: has LoRALinears, none of them merged, of an expert, split over ranks or cut into stages. Nothing but
            adapters trains.
        names: at least one, all different.
        ranks: of adapters with a rank below the layers' own.

    Raises:
        ValueError: the names are not different, a rank does not fit, or a layer cannot hold several adapters. Or biases
            or `modules_to_save` train, which all adapters would share. Nothing is changed then.
    """
    layers: dict[str, Any] = dict(lora_modules(model))
    lower = dict(ranks or {})
    refuse(model, "batch_adapters", layers)
    _check(layers, names, lower)
    _check_model(model)
    made = {path: _started(layer, names, lower) for path, layer in layers.items()}
    for path, layer in layers.items():
        for factor, value in zip(FACTORS, made[path], strict=True):
            grad = getattr(layer, factor).requires_grad
            setattr(layer, factor, nn.Parameter(value, requires_grad=grad))
        if lower:
            layer.register_load_state_dict_pre_hook(RefuseWider(names, lower))
    batch = AdapterBatch(layers, tuple(names), lower)
    check_inputs(model, layers)
    return batch


@torch.no_grad()
def _started(layer: Any, names: Sequence[str], ranks: Mapping[str, int]) -> list[Tensor]:
    """A [J, R, K] and B [J, N, R] as `reset_adapter` starts each in its rank. The layer's own stay as they are."""
    factors, r = (layer.lora_A, layer.lora_B), layer.r
    wholes = [torch.zeros_like(f).expand(len(names), *f.shape).clone() for f in factors]
    try:
        for index, name in enumerate(names):
            layer.r = ranks.get(name, r)
            parts = [
                within(whole[index], factor, layer.r)
                for factor, whole in zip(FACTORS, wholes, strict=True)
            ]
            layer.lora_A, layer.lora_B = (nn.Parameter(part.contiguous()) for part in parts)
            layer.reset_adapter()
            for factor, part in zip(FACTORS, parts, strict=True):
                part.copy_(getattr(layer, factor))
    finally:
        layer.lora_A, layer.lora_B, layer.r = *factors, r
    return wholes


def _check_model(model: nn.Module) -> None:
    experts = expert_layers(model)
    trained = {id(module) for module in hidden_originals(model)}
    for path, module in model.named_modules():
        if path in experts and isinstance(module, LoRALinear):
            raise ValueError(
                f"{path} is of an expert, which takes tokens in an order of its own: their adapters would be mixed up"
            )
        if id(module) in trained:
            what = "a trained bias" if isinstance(module, LoRALinear) else "trained parameters"
            raise ValueError(
                f"{path} has {what}, which all adapters would share: expected bias='none' and no "
                "modules_to_save"
            )


def _check(layers: dict[str, Any], names: Sequence[str], ranks: Mapping[str, int]) -> None:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"names must be at least one, all different, found {list(names)}")
    if not layers:
        raise ValueError("model has no LoRALinear: call apply_lora first")
    for path, layer in layers.items():
        if type(layer) is not LoRALinear:
            raise ValueError(f"{path} is a {type(layer).__name__}, expected a LoRALinear")
        if any(map(is_sharded, layer.parameters())):
            raise ValueError(f"{path} is sharded: it cannot hold several adapters")
        if layer.lora_dropout:
            raise ValueError(
                f"{path} has lora_dropout={layer.lora_dropout}, expected 0 for several adapters"
            )
    if unknown := sorted(set(ranks) - set(names)):
        raise ValueError(f"ranks has no adapter named {', '.join(unknown)} in names")
    most = min(layer.r for layer in layers.values())
    for name, rank in ranks.items():
        if not 0 < rank <= most:
            raise ValueError(f"ranks[{name!r}] must be 1 to {most}, found {rank}")
    if any(rank < layer.r for rank in ranks.values() for layer in layers.values()):
        _refuse_initial(layers, "every adapter needs the whole rank")


def _refuse_initial(layers: Mapping[str, LoRALinear], what: str) -> None:
    for path, layer in layers.items():
        if initial_of(layer) is not None:
            raise ValueError(
                f"{path}: init_lora_weights={layer.config.init_lora_weights!r} has changed the weight, so {what}"
            )
