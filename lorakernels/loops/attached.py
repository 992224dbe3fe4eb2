# SPDX-License-Identifier: Apache-2.0
"""attach: FP8 scales, dropout states and CUDA graphs for a training loop that knows nothing of them.

apply_lora(model, config)
fuse(model)
optimizer = torch.optim.AdamW(...)
model.train()
attached = attach(model, optimizer)     # the loop stays as it is
for batch in batches:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(attached)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.device import in_backward
from lorakernels.fusion.over_ranks import together_of
from lorakernels.graphs import GraphManager, GraphOptions, Hook
from lorakernels.loops import parts
from lorakernels.loops.layer_graphs import LayerGraphs
from lorakernels.modules.linear.projections import frozen_layers, share_state
from lorakernels.modules.order import refuse
from lorakernels.state.philox import PhiloxState, PhiloxStates

IN_EVAL = (
    "stepped after forwards in eval mode: scales, dropout and graphs stand still. Call model.train(), as "
    "from_pretrained returns models in eval mode"
)


class _BeginHook(Hook):
    """The hook that starts a microbatch, on the first layer, or on the first adapter if there are no layers.

    Copies of the model do not have it.
    """


class Attached:
    """The result of `attach`.

    `print(attached)` shows the parts tied to the optimizer, whether layers are replayed, and if not, why.

    Attributes:
        why_not: why no layer is replayed; None while layers are replayed.
        manager: the GraphManager of the layers; None without.
        rng_states: the states from which their dropout draws.
        steps: optimizer steps so far.
        skipped: steps that were left out.
        microbatches: training forwards of the layers so far.
        replayed: the number of those forwards that were replays.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.layers: list[nn.Module] = []
        self.fp8_states = parts.fp8_states(model)
        self.rng_states: list[PhiloxState | PhiloxStates] = []
        self.steps = self.skipped = self.microbatches = self.replayed = 0
        self._graphs: LayerGraphs | None = None
        self._reason: str | None = None
        self._given: list[Any] = []  # adapters to which `attach` gave a random state
        self._configs: list[Any] = []
        self._handles: list[Any] = []
        self._auto = [state for state in self.fp8_states if state.in_charge == "auto"]
        self._stepping: set[int] = set()
        self._reentrant = self._said_eval = False
        self._begin_step()

    @property
    def manager(self) -> Any:
        return None if self._graphs is None else self._graphs.manager

    @property
    def replaying(self) -> bool:
        return self._graphs is not None and self._graphs.replaying

    @property
    def why_not(self) -> str | None:
        return self._reason if self._graphs is None else self._graphs.why_not

    # hooks that follow the loop

    def _begin_step(self) -> None:
        self._forwards = self._dropped = 0
        self._backward_ran = self._ran_in_eval = False
        self._replayed_before = 0 if self._graphs is None else self._graphs.replayed

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called before each forward of the first layer."""
        if not (module.training and torch.is_grad_enabled()):
            self._ran_in_eval |= torch.is_grad_enabled()
            return
        if in_backward():
            self._recomputes()
            return
        if self._was_skipped():
            self._update()
            self.skipped += 1
            self._begin_step()
        self._forwards += 1
        if self._graphs is not None:
            self._dropped += self._graphs.begin_microbatch(args, kwargs)

    def _recomputes(self) -> None:
        """Handle a forward that runs inside a backward, which is a checkpoint's recomputation.

        Forwards of other checkpoints have been counted already. A reentrant checkpoint shows its forward only here.
        """
        self._reentrant = self._reentrant or not self._forwards
        if self._reentrant:
            self._forwards += 1
            if self._graphs is not None and not self._graphs.failed:
                self._graphs.give_up(
                    "a reentrant checkpoint is around them: set use_reentrant=False"
                )

    def _watch_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._backward_ran or self.replaying or not module.training or in_backward():
            return
        outputs = output if isinstance(output, tuple | list) else [output]
        for x in outputs:
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(self._on_backward)
                return

    def _on_backward(self, grad: Tensor) -> None:
        self._backward_ran = True

    def _was_skipped(self) -> bool:
        """True if the optimizer left out the step that ended before this microbatch: its gradients are gone.

        With several ranks the answer is always False, because no rank knows whether the others left it out. The step's
        amaxes then count for the next step.
        """
        if not self._forwards or self._stepping or self._reentrant or parts.ranks() > 1:
            return False
        if not (self._backward_ran or self._replays_of_step()):
            return False
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return all(p.grad is None for group in groups for p in group["params"])

    def _replays_of_step(self) -> int:
        return 0 if self._graphs is None else self._graphs.replayed - self._replayed_before

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that a step begins with a closure, so that forwards inside the step are recognised as the closure's."""
        if any(map(callable, (*args, *kwargs.values()))):
            self._stepping.add(id(optimizer))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._stepping.discard(id(optimizer))
        if self._forwards or not self.layers:
            self._update()
            self.steps += 1
            if self._graphs is not None:
                with torch.enable_grad():
                    self._graphs.end_step()
            self._begin_step()
        elif self._ran_in_eval and not self._said_eval:
            self._said_eval = True
            warnings.warn(f"{type(optimizer).__name__} {IN_EVAL}", RuntimeWarning, stacklevel=2)

    def _update(self) -> None:
        """End a step, once: update the scales, and advance dropout for microbatches whose graphs did not do so."""
        replays = self._replays_of_step()
        self.microbatches += self._forwards
        self.replayed += replays
        eager = self._forwards - self._dropped - replays if self.layers else 1
        parts.advance(self.rng_states, max(0, eager))
        for state in self.fp8_states:
            state.reduce_and_update()

    def detach(self) -> None:
        """Undo `attach`: remove graphs, hooks, and random states that it gave."""
        graphs, self._graphs = self._graphs, None
        for handle in self._handles:
            handle.remove()
        for layer in self._given:
            layer.rng_state = None
        for config in self._configs:
            config.use_cache = True
        for state in self._auto:
            state.in_charge = "auto"
        for held in (self._handles, self._given, self._configs, self._auto):
            held.clear()
        if graphs is not None:
            self._reason = graphs.why_not or "detached"
            graphs.close()

    def __str__(self) -> str:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in self.layers}))
        scales = sum(len(state.names) for state in self.fp8_states)
        masks = ", ".join(map(str, self.rng_states)) or "none, or from torch's generator"
        origin = " (given by attach)" if self._given else ""
        how = "replayed as CUDA graphs" if self.replaying else f"eager: {self.why_not}"
        lines = [
            f"attached to {', '.join(type(o).__name__ for o in self.optimizers)}: "
            f"{self.steps} steps, {self.skipped} left out; FP8 scales of {scales} layers; dropout: {masks}{origin}",
            f"{len(self.layers)} layers {kinds}: {how}; {self.replayed} of {self.microbatches} microbatches replayed",
        ]
        if self._configs:
            lines.append("model.config.use_cache is False until detach()")
        if self._graphs is not None:
            lines += self._graphs.notes
            if self.replaying:
                lines.append(str(self.manager.report()).split("\n")[0])
        return "\n".join(lines)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    graphs: bool = True,
    warmup_steps: int = 3,
    layers: Sequence[nn.Module] | None = None,
    rng_state: PhiloxState | None = None,
    grads: str = "auto",
    max_shapes: int = 4,
    on_new_shape: str = "capture",
    mode: str = "relaxed",
    backend: Callable[[], Any] | None = None,
) -> Attached:
    """Tie the FP8 update, dropout states and CUDA graphs of an adapted model to the optimizer's steps.

    The training loop stays as it is. After each step the FP8 scales are updated, over all ranks, and the random states
    advance.

    On a GPU the decoder layers are replayed as CUDA graphs, forward and backward, once a shape has come `warmup_steps`
    times. Rarer shapes, evaluation, embedding, head, loss and optimizer run eagerly. The number of microbatches may
    change from step to step. `config.use_cache` becomes False, because a cache cannot go into a graph.

    If graphs are possible, adapters with dropout but without a random state get a PhiloxState, seeded by torch's seed.
    `why_not` says why layers stay eager. If the reason appears only during the run, a warning reports it.

    A loop may leave a step out (GradScaler, an exception, `continue`). Its microbatches then end when the next one
    finds no gradients. If gradients are kept, or with several ranks, its amaxes count for the next step.

    Args:
        model: with adapters, on its device, fused or not; it may be wrapped (DDP, PEFT).
        optimizer: its steps end the iterations; Accelerate's wrapper works too. With several optimizers, the first
            step of any of them ends the iteration.
        graphs: False leaves the layers eager.
        warmup_steps: how often a shape runs eagerly before it is captured; at least 1.
        layers: modules of the model to replay; None finds the list that holds the adapters.
        rng_state: given to the adapters that have none, instead of a new one.
        grads: who adds the gradients of parameters, as of `GraphManager`.
        max_shapes, on_new_shape, mode, backend: as of `GraphOptions`.

    Raises:
        ValueError: the model has no adapter, is attached already or was cut into stages, an optimizer has no trained
            parameter of the model, a layer is not the model's, or graphs do not take an option's value.
        TypeError: an argument is of another type.
    """
    optimizers = _optimizers(optimizer)
    _check(model, optimizers, warmup_steps, rng_state)
    _check_layers(model, layers)
    chosen = list((layers if layers is not None else parts.adapted_list(model)) or [])
    options = GraphOptions(
        on_new_shape=on_new_shape,
        max_shapes=max_shapes,
        mode=mode,
        backend=backend,
        together=together_of(chosen),
    )
    share_state(frozen_layers(model))  # PEFT makes a state for each layer
    attached = Attached(model, optimizers)
    attached.layers = chosen
    attached._reason = _why_not(model, chosen, graphs, backend is not None)
    try:
        _give(attached, rng_state)
        if attached._reason is None:
            _capture(attached, warmup_steps, grads, options)
        _hook(attached)
    except BaseException:
        attached.detach()
        raise
    return attached


def _capture(attached: Attached, warmup_steps: int, grads: str, options: GraphOptions) -> None:
    """Start LayerGraphs, which captures the layers once their shapes repeat."""
    attached._configs = parts.without_cache(attached.model)
    states = [
        state for layer in attached.layers for state in parts.fp8_states(layer)
    ]  # one at most
    make = partial(
        GraphManager,
        attached.layers,
        warmup_steps=1,
        fp8_state=states[0] if states else None,
        rng_states=attached.rng_states,
        grads=grads,
        options=options,
    )
    attached._graphs = LayerGraphs(make, warmup_steps, options.max_shapes)


def _hook(attached: Attached) -> None:
    for state in attached.fp8_states:
        state.reduce_and_update()  # from now on steps update the scales
    for optimizer in attached.optimizers:
        attached._handles += [
            optimizer.register_step_pre_hook(attached._before_step),
            optimizer.register_step_post_hook(attached._after_step),
        ]
    first = attached.layers[0] if attached.layers else next(parts.adapters(attached.model))
    begins, ran = _BeginHook(attached._begin), Hook(attached._watch_backward)
    attached._handles.append(first.register_forward_pre_hook(begins, with_kwargs=True))
    attached._handles.append(first.register_forward_hook(ran))


def _give(attached: Attached, state: PhiloxState | None) -> None:
    """Give `state` to adapters that have none, or a new one if graphs need it."""
    adapters = list(parts.adapters(attached.model))
    if state is None and attached._reason is None and any(map(parts.drops, adapters)):
        state = parts.new_rng_state(attached.model, next(adapters[0].parameters()).device)
    for layer in adapters:
        if state is not None and layer.rng_state is None:
            layer.rng_state = state
            attached._given.append(layer)
    attached.rng_states = parts.rng_states(attached.model)


def _why_not(
    model: nn.Module, layers: Sequence[nn.Module], graphs: bool, imitated: bool
) -> str | None:
    if not graphs:
        return "graphs=False"
    if not layers:
        return f"{type(model).__name__} has no list of layers with adapters: give layers"
    if any(hasattr(m, "_orig_mod") for m in model.modules()):
        return "the model is compiled: torch.compile has graphs of its own (mode='reduce-overhead')"
    return parts.why_no_graphs(layers, on_gpu=not imitated)


def _optimizers(optimizer: Any) -> list[Any]:
    """The optimizers themselves, taken out of Accelerate's wrappers."""
    optimizers = []
    for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        while not hasattr(one, "_optimizer_step_post_hooks") and hasattr(one, "optimizer"):
            one = one.optimizer
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, found {type(one).__name__}"
            )
        optimizers.append(one)
    if not optimizers:
        raise ValueError("optimizer must be one optimizer or several, found an empty list")
    return optimizers


def _check(
    model: nn.Module, optimizers: Sequence[Any], warmup_steps: Any, rng_state: object
) -> None:
    if rng_state is not None and not isinstance(rng_state, PhiloxState):
        raise TypeError(f"rng_state must be a PhiloxState, found {type(rng_state).__name__}")
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
        raise ValueError(f"warmup_steps must be an integer of at least 1, found {warmup_steps!r}")
    if not any(True for _ in parts.adapters(model)):
        raise ValueError(
            f"{type(model).__name__} has no LoRALinear: call apply_lora first, or, with PEFT, register before "
            "get_peft_model, of lorakernels.integrations.peft"
        )
    for module in model.modules():
        if any(isinstance(h, _BeginHook) for h in module._forward_pre_hooks.values()):
            raise ValueError(
                f"{type(model).__name__} is attached already: give all its optimizers in one call, or detach() first"
            )
    refuse(model, "attach")
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for optimizer in optimizers:
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not parameters & trained:
            raise ValueError(
                f"{type(optimizer).__name__} has none of the model's {len(trained)} trained parameters: make it after "
                "apply_lora"
            )


def _check_layers(model: nn.Module, layers: Any) -> None:
    if layers is None:
        return
    if not isinstance(layers, list | tuple | nn.ModuleList) or not len(layers):
        raise TypeError(f"layers must be a list of the model's modules, found {layers!r}")
    modules = set(model.modules())
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layers[{index}] must be a module, found {type(layer).__name__}")
        if layer not in modules:
            raise ValueError(f"layers[{index}] is a {type(layer).__name__} that is not the model's")
