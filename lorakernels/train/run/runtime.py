# SPDX-License-Identifier: Apache-2.0
"""How the steps of a run are executed: fused layers or transformers' own; CUDA graphs of steps or layers, or eagerly.

On a GPU, fused layers and graphs are the default. Graphs are of whole steps on one GPU and of layers on several. If a
model or a machine does not allow something, the run does without it and says why.

Dropout masks do not depend on the way of execution. Every microbatch starts from one fixed state of torch's CPU
generator, from which the layers draw their nonces. It also starts from the offset of a `PhiloxState`, which advances
after each microbatch. Eager, warm-up, captured, replayed and resumed microbatches therefore draw the same masks. A run
is the same to the bit, wherever replay began.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels import (
    ContextParallel,
    FP8State,
    FuseReport,
    LoRAExperts,
    LoRALinear,
    PhiloxState,
    PipelineParallel,
    fuse,
    model_parallel_states,
)
from lorakernels.graphs import (
    CaptureError,
    GraphManager,
    GraphOptions,
    OrderError,
    ReplayError,
    StepGraph,
)
from lorakernels.train.errors import FinetuneError, OptionError
from lorakernels.train.layouts.parts import RankPart
from lorakernels.train.layouts.tensor import SplitLayers
from lorakernels.train.model.model import decoder_and_head, is_fused
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.options.running import CAPTURED_OPTIMS
from lorakernels.train.ranks.ranks import RunRanks

Say = Callable[[str], None]
WARMUP = 3  # steps on real data before the capture


def make_random_state(seed: int, replica: int, device: torch.device) -> PhiloxState:
    """The dropout state of a replica. Each replica draws different masks."""
    states = model_parallel_states(seed, data_parallel_rank=replica, device=device)
    return states.get_states()["data-parallel-rng"]


# Of 2048 tokens on one H200 without graphs, their fused layers took 1.3 to 1.8 times as long (docs/facts.md, M5)
SLOWER = ("olmo2", "gemma2", "gemma3", "gemma3_text")


@dataclass(frozen=True)
class Fused:
    """The result of fusing the decoder layers.

    Attributes:
        report: `fuse`'s report; None if the layers are not fused.
        why_not: the reason, if they are not fused.
        unused: options that then have no effect.
    """

    report: FuseReport | None = None
    why_not: str = ""
    unused: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.report is not None

    def __str__(self) -> str:
        if self.report is None:
            without = f"; without effect on them: {', '.join(self.unused)}" if self.unused else ""
            return f"as transformers has them: {self.why_not}{without}"
        saves = ", ".join(dict.fromkeys(layer.save for layer in self.report.layers))
        return f"{str(self.report).splitlines()[0]}, save {saves}"


def fuse_layers(model: nn.Module, options: FinetuneOptions, device: torch.device) -> Fused:
    """Fuse the decoder layers if the options and the model allow it.

    Raises:
        OptionError: the layers cannot be fused within `memory_budget`. Or they cannot be fused, which `fuse` asks for,
            and other options would be without effect.
    """
    if (why_not := _why_not_fused(model, options, device)) is not None:
        return Fused(None, why_not, _of_fused_layers(options))
    budget = None if options.memory_budget is None else int(options.memory_budget * 2**30)
    try:
        report = fuse(
            model,
            save=options.save,
            memory_budget=budget,
            tokens=options.batch_size * options.seq_len // options.cp,
            attention=options.attention,
            shared_dropout=options.shared_dropout,
            offload_activations=options.offload_activations,
        )
    except (ValueError, TypeError) as error:
        if budget is not None:  # unfused layers would exceed the budget
            raise OptionError(f"memory_budget cannot be kept: {error}") from error
        if options.fuse and (unused := _of_fused_layers(options)):
            raise OptionError(
                f"the layers cannot be fused, without which {', '.join(unused)} would have no effect: {error}"
            ) from error
        return Fused(None, str(error), _of_fused_layers(options))
    report.trust_longest()  # `Batch.checked` has compared them on the host
    return Fused(report)


def _why_not_fused(model: Any, options: FinetuneOptions, device: torch.device) -> str | None:
    if options.fuse is False:
        return "--no-fuse was asked for"
    if options.fuse is None and device.type != "cuda":
        return "fused kernels are a GPU's; --fuse takes them elsewhere too"
    if options.gradient_checkpointing:
        return "gradient_checkpointing recomputes whole layers; --save checkpoint does so fused"
    kind = getattr(getattr(model, "config", None), "model_type", "")
    if options.fuse is None and kind in SLOWER and not _of_fused_layers(options):
        return (
            f"fused layers of {kind} took longer where measured, and keep less; --fuse takes them"
        )
    return None


def _of_fused_layers(options: FinetuneOptions) -> tuple[str, ...]:
    """The options that were set but that only fused layers have."""
    defaults = FinetuneOptions()
    names = ("save", "memory_budget", "offload_activations", "attention")
    changed = [name for name in names if getattr(options, name) != getattr(defaults, name)]
    return tuple("--" + name.replace("_", "-") for name in changed)


def check_scope(options: FinetuneOptions, ranks: RunRanks) -> None:
    """Raise OptionError if one graph of a whole step would contain the collectives of several processes."""
    if options.graphs == "step" and ranks.size > 1:
        raise OptionError(
            f"graphs=step is for one process, found {ranks.size} ranks: take graphs=layer or auto"
        )


class Runtime:
    """Manages the random states of a step's microbatches, and the CUDA graphs of its layers or of the whole step.

    Args:
        model: with adapters, fused or not, on its device.
        random: the state from which dropout draws; None leaves torch's generators alone.
        ranks: with several ranks, a step contains collectives, and graphs are of layers.
        warmup: steps on data before the capture.
        backend: replaces CUDA graphs, for tests.

    Attributes:
        scope: "step", "layer", or None without graphs.
        why_not: the reason if `scope` is None.
        replayed: whether the last `run` replayed a graph.
    """

    def __init__(
        self,
        model: nn.Module,
        options: FinetuneOptions,
        fp8_state: FP8State | None,
        random: PhiloxState | None,
        *,
        ranks: RunRanks = RunRanks(),  # noqa: B008  (frozen)
        warmup: int = WARMUP,
        backend: Callable[[], Any] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        check_scope(options, ranks)
        self.model, self.options, self.random, self._say = model, options, random, say
        self.ranks, self.replayed, self.warmup = ranks, False, warmup
        self.manager: GraphManager | StepGraph | None = None
        self.replay_from: int | None = None
        self._block_rng = torch.Generator().manual_seed(options.seed).get_state()
        context = ContextParallel.of(model)
        self._one_of_many = RankPart.of(model) is not None or context is not None
        self._shared: dict[str, Any] = {
            "warmup_steps": warmup,
            "fp8_state": fp8_state,
            "rng_states": [] if random is None else [random],
            "options": GraphOptions(backend=backend, together=_together(model, context)),
        }
        self.device = next(model.parameters()).device
        self.why_not = _why_not(model, options, self.device, random, backend)
        self.scope: str | None = None
        whole = options.graphs != "layer" and options.optim in CAPTURED_OPTIMS
        if self.why_not is None and ranks.size == 1 and whole:
            self.scope = "step"
        elif self.why_not is None:
            self._capture_layers()

    def _capture_layers(self) -> None:
        """Prepare graphs of the layers, or set `why_not` to the reason against them."""
        self.scope, self.manager = None, None
        self.why_not = _why_not_layers(self.model)
        if self.why_not is None:
            layers: Any = decoder_and_head(self.model)[0].layers
            shared = self._shared
            if (pipeline := PipelineParallel.of(self.model)) is not None:
                layers, shared = pipeline.layers, {**shared, "rng_states": pipeline.rng_states}
            microbatches = self.options.grad_accum
            self.manager = GraphManager(layers, num_microbatches=microbatches, **shared)
            self.scope = "layer"

    @property
    def replaying(self) -> bool:
        return self.manager is not None and self.manager.phase == "replaying"

    def run(
        self, compute: Callable[..., Any], optimizer: torch.optim.Optimizer, *inputs: Any
    ) -> Any:
        """Run `compute(*inputs)`, a whole step; with `scope` "step" this is what a graph captures.

        If capturing the step fails, or a later replay is refused, the layers are captured instead. If a replay of the
        layers is refused, they run eagerly from then on. In each case the run says why and repeats the step from its
        start. Data, draws of `random`, gradients and FP8 statistics are the same in the repetition.

        Other effects of the refused attempt at replaying layers stay. A buffer that a module writes in forward is
        written twice, and torch's CUDA generator is not restored.
        """
        if self.scope == "step" and self.manager is None:
            self.manager = StepGraph(
                compute, modules=[self.model], optimizers=[optimizer], **self._shared
            )
        if isinstance(self.manager, StepGraph):
            try:
                result = self.manager(*inputs)
            except CaptureError as error:
                self._give_up(f"{error}. {self.manager.explain(error)}")
            except ReplayError as error:
                self._give_up(_refusal(error, "--graphs layer, or --eager"))
            else:
                self.replayed = self.replaying
                if self.random is not None and not self.replayed:
                    self.random.advance()
                return result
        self.replayed = self.replaying
        return self._by_layers(compute, inputs) if self.replayed else compute(*inputs)

    def _by_layers(self, compute: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run a step over replayed layers; if a replay is refused, run it again eagerly.

        Until its last backward, a step changes only gradients, amaxes and the random state. Gradients are zeroed
        first, amaxes come out the same, and the random state is restored. The step can therefore be repeated, with the
        exceptions in `run`.

        Raises:
            FinetuneError: a replay is refused where ranks have parts of the model, or of its rows. The others cannot
                repeat the step.
        """
        before = None if self.random is None else self.random.tensor[1].clone()
        try:
            return compute(*inputs)
        except (ReplayError, OrderError) as error:
            if self._one_of_many:  # the other ranks are in the middle of this step
                raise FinetuneError(
                    f"{_refused(error)}, and the other ranks cannot repeat their step; --resume with --eager"
                ) from error
            self._give_up(_refusal(error, "--eager"))
        self.replayed = False
        self._set_offset(before)
        return compute(*inputs)

    def begin_microbatch(self) -> None:
        if self.random is not None:
            torch.set_rng_state(self._block_rng)

    def end_microbatch(self, last: bool) -> None:
        """Called after a microbatch's backward: the next microbatch draws other masks.

        Graphs of layers advance the random state themselves. A graph of a step does so for its `last` microbatch.
        """
        by_graph = last if self.scope == "step" else self.replaying and self.options.pp == 1
        if self.random is not None and not by_graph:
            self.random.advance()

    def end_step(self, step: int) -> None:
        """Called after step number `step`, optimizer included: record, capture or check.

        If a capture fails, the run goes on eagerly and says why.
        """
        if self.manager is None:
            return
        if self.random is not None:
            torch.set_rng_state(self._block_rng)  # a capture must draw a microbatch's nonces
        if isinstance(self.manager, GraphManager):
            try:
                self.manager.end_iteration()
            except (CaptureError, OrderError) as error:
                self._give_up(f"{error}. {self.manager.explain(error)}")
        if self.replay_from is None and self.replaying:
            self.replay_from = step + (not self.replayed)
            what = "whole steps" if self.scope == "step" else "layers"
            self._say(f"{what} replayed as CUDA graphs from step {self.replay_from} on")
            self._say(str(self.manager.report()).split("\n")[0])

    def start_anew(self) -> None:
        """Drop the captured graphs. They are captured again after as many warm-up steps as at the start."""
        scope = self.scope
        self.close()
        self.replayed, self.replay_from = False, None
        if scope == "layer":
            self._capture_layers()

    def _give_up(self, reason: str) -> None:
        """Fall back from whole steps to layers, or from layers to eager execution."""
        whole = self.scope == "step"
        self.close()
        self.replay_from = None
        if whole:
            self._say_on_any_rank(f"steps are not replayed as a whole: {reason}")
            self._capture_layers()
        else:
            self.scope, self.why_not = None, reason
        if self.manager is None:
            self._say_on_any_rank(f"layers run eagerly: {self.why_not}")

    def _say_on_any_rank(self, text: str) -> None:
        """Report something that may be true on one rank alone. `say` prints on the first rank only."""
        self._say(text)
        if not self.ranks.first:
            print(f"rank {self.ranks.rank}: {text}", file=sys.stderr, flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.random is None else self.random.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the offset of the run. The seed stays this rank's."""
        self._set_offset(None if self.random is None else state["philox"][1])

    def _set_offset(self, offset: Tensor | None) -> None:
        if self.random is not None and offset is not None:
            with torch.no_grad():
                self.random.tensor[1].copy_(offset)

    def close(self) -> None:
        if self.manager is not None:
            self.manager.reset() if isinstance(self.manager, StepGraph) else self.manager.close()
            self.manager = None


def _refusal(error: ReplayError | OrderError, instead: str) -> str:
    """The message about a refused replay, for the user of the command: what was found, and what to do about it."""
    return f"{_refused(error)} and the step starts again; to do without it: {instead}"


def _refused(error: ReplayError | OrderError) -> str:
    what = str(error)
    if isinstance(error, ReplayError):
        difference = f"expected {error.expected}, found {error.actual}"
        what = f"replay of layer {error.layer!r}: {error.what}: {difference}"
    return f"{what}. It was refused before its launch"


def _together(
    model: nn.Module, context: ContextParallel | None
) -> Callable[[], AbstractContextManager[None]]:
    """Collective at its end: what one rank raises inside is raised on all that have the layers, or rows, together."""
    parts: SplitLayers | None = SplitLayers.of(model)

    @contextmanager
    def together() -> Iterator[None]:
        with ExitStack() as stack:
            if context is not None:
                stack.enter_context(context.together())
            if parts is not None:
                stack.enter_context(parts.split.together())
            yield

    return together


def _why_not(
    model: nn.Module,
    options: FinetuneOptions,
    device: torch.device,
    random: PhiloxState | None,
    backend: object,
) -> str | None:
    """Why nothing is captured; None if graphs are possible."""
    if options.eager:
        return "eager was asked for"
    if options.use_dora:
        return "use_dora runs eager only"
    if options.pp > 1 and options.graphs != "layer":
        return "stages over ranks (pp) are captured with --graphs layer alone"
    if (options.tp > 1 or options.cp > 1) and not is_fused(decoder_and_head(model)[0]):
        how = "split over ranks (tp)" if options.tp > 1 else "with rows over ranks (cp)"
        return f"unfused layers {how} are not captured"
    if device.type != "cuda" and backend is None:
        return "CUDA graphs need a GPU"
    if options.lora_dropout > 0 and random is None:
        return "dropout does not draw from a state in device memory"
    for module in model.modules():
        if isinstance(module, LoRAExperts) and (why_not := module.why_not_stacked()):
            return f"LoRAExperts run one by one, as the host counts tokens: {why_not}"
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if getattr(config, "attention_dropout", 0.0):
        return f"attention_dropout = {config.attention_dropout} draws from torch's generator"
    return None


def _why_not_layers(model: nn.Module) -> str | None:
    layers = getattr(decoder_and_head(model)[0], "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return f"{type(model).__name__} has no list of decoder layers named layers"
    replayed = set(layers.modules())
    for path, module in model.named_modules():
        if isinstance(module, LoRALinear) and module.lora_dropout > 0 and module not in replayed:
            # Replayed layers draw no nonce. This module would then draw the nonces that belong to them in an eager
            # step.
            return f"{path} has dropout {module.lora_dropout} outside of the decoder layers"
    return None
