# SPDX-License-Identifier: Apache-2.0
"""attach: loops that know nothing of scales, random states and graphs end as those written out by hand, bit for bit.

Graphs are imitated on a CPU; the tests marked gpu take CUDA's.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lorakernels import FP8State, LoRAConfig, LoRALinear, PhiloxState, apply_lora, attach, fuse
from lorakernels.loops.layer_graphs import LayerGraphs
from tests.graphs.fake import FakeBackend

transformers = pytest.importorskip("transformers")

End = Callable[[int], None]


@pytest.fixture(autouse=True)
def math_attention() -> Iterator[None]:
    """The imitated graphs cannot replay the CPU's flash attention, and atomics differ from run to run on a GPU."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def llama(device: Any = "cpu", dropout: float = 0.0, fused: bool = True, **lora: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, **heads)
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    model = transformers.LlamaForCausalLM(config).to(device, dtype)  # adapters stay fp32
    rng_state = lora.pop("rng_state", None)
    made = LoRAConfig(r=4, lora_dropout=dropout, target_modules="all-linear", **lora)
    apply_lora(model, made, rng_state=rng_state)
    if fused:
        fuse(model)
    return model.train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module, lr: Any = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=lr)


def state_of(model: nn.Module) -> Any:
    return next(m.fp8_state for m in model.modules() if isinstance(m, LoRALinear))


def batch(length: int = 12, device: Any = "cpu") -> Tensor:
    """Drawn anew: not from the generators that masks come from."""
    batch.calls += 1  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(batch.calls)  # type: ignore[attr-defined]
    return torch.randint(64, (2, length), generator=generator).to(device)


def loss_of(model: nn.Module, length: int = 12) -> Tensor:
    ids = batch(length, next(model.parameters()).device)
    return model(input_ids=ids, labels=ids).loss


class Loops:
    """Each is a loop as somebody writes it; `end(n)` is what he writes by hand after a step of n microbatches."""

    @staticmethod
    def plain(model: Any, end: End) -> None:
        optimizer = yield
        for _ in range(8):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def short_last_batches(model: Any, end: End) -> None:
        optimizer = yield
        for length in (12, 12, 12, 12, 7, 12, 12, 7, 12, 7, 7, 12, 7):
            optimizer.zero_grad()
            loss_of(model, length).backward()
            optimizer.step()
            end(1)

    @staticmethod
    def changing_number_of_microbatches(model: Any, end: End) -> None:
        optimizer = yield
        for count in (1, 2, 3, 2, 1, 4, 2):
            for _ in range(count):
                (loss_of(model) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(count)

    @staticmethod
    def two_forwards_then_one_backward(model: Any, end: End) -> None:
        optimizer = yield
        for _ in range(8):
            (loss_of(model) + loss_of(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(2)

    @staticmethod
    def user_skips(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(9):
            loss_of(model).backward()
            if step not in (1, 5, 6):
                optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def grad_scaler_skips(model: Any, end: End) -> None:
        optimizer = yield
        device = next(model.parameters()).device.type
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for step in range(9):
            factor = float("inf") if step in (0, 5) else 1.0
            scaler.scale(loss_of(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def forward_raises(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(9):
            if step in (1, 5, 6):
                with _raising(model.model.layers[1]), contextlib.suppress(KeyError):
                    loss_of(model)
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def loss_is_thrown_away(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(9):
            loss = loss_of(model)
            if step in (1, 5, 6):
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def backward_raises(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(9):
            if step in (1, 5, 6):
                with _raising(model.model.layers[1], backward=True):
                    loss = loss_of(model)
                with contextlib.suppress(KeyError):
                    loss.backward()
                optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def closure(model: Any, end: End) -> None:
        optimizer = yield

        def compute() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(8):
            optimizer.step(compute)
            end(1)

    @staticmethod
    def evaluation_between(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(8):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)
            model.eval()
            if step % 2:
                with torch.no_grad():
                    loss_of(model, 9)
            else:
                loss_of(model)
            model.train()

    @staticmethod
    def evaluation_inside_a_step(model: Any, end: End) -> None:
        optimizer = yield
        for _ in range(8):
            loss_of(model).backward()
            with torch.no_grad():
                model.eval()
                loss_of(model)
                model.train()
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(2)

    @staticmethod
    def learning_rate_schedule(model: Any, end: End) -> None:
        optimizer = yield
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        for _ in range(8):
            loss_of(model).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=False)
            end(1)

    @staticmethod
    def clipping(model: Any, end: End) -> None:
        optimizer = yield
        for _ in range(8):
            model.zero_grad()
            loss_of(model).backward()
            nn.utils.clip_grad_norm_(trained(model), 0.1)
            optimizer.step()
            end(1)


LOOPS = [name for name in vars(Loops) if not name.startswith("_")]


@contextlib.contextmanager
def _raising(layer: nn.Module, backward: bool = False) -> Iterator[None]:
    def raises(*_: Any) -> None:
        raise KeyError("imitated: out of memory")

    if backward:
        handle = layer.register_forward_hook(lambda _, args, y: y.register_hook(raises) and None)
    else:
        handle = layer.register_forward_pre_hook(raises)
    try:
        yield
    finally:
        handle.remove()


def run(name: str, model: nn.Module, optimizer: Any, end: End = lambda n: None) -> None:
    batch.calls = 0  # type: ignore[attr-defined]
    loop = getattr(Loops, name)(model, end)
    next(loop)
    with contextlib.suppress(StopIteration):
        loop.send(optimizer)


def by_hand(name: str, model: nn.Module, philox: PhiloxState | None = None) -> int:
    """The loop, with what `attach` does written out; how many microbatches it had."""
    state, total = state_of(model), 0

    def end(microbatches: int) -> None:
        nonlocal total
        total += microbatches
        state.reduce_and_update()
        if philox is not None:
            philox.advance(microbatches)

    state.reduce_and_update()
    run(name, model, adamw(model), end)
    return total


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    for direction in ("forward", "backward"):
        a, b = getattr(state_of(one), direction), getattr(state_of(other), direction)
        assert torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), direction
    assert state_of(one).forward.any() and state_of(one).backward.any()


@pytest.mark.filterwarnings("ignore:a microbatch runs eagerly:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:replay of layer.*its block runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("name", LOOPS)
def test_replayed_is_what_the_loop_by_hand_computes(name: str) -> None:
    expected, model = llama(), llama()
    by_hand(name, expected)
    optimizer = adamw(model)
    attached = attach(model, optimizer, backend=FakeBackend)
    run(name, model, optimizer)
    assert_equal(expected, model)
    assert attached.replaying and attached.why_not is None and attached.replayed >= 3
    attached.detach()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "as transformers has it"])
@pytest.mark.parametrize("name", ["plain", "changing_number_of_microbatches", "closure"])
def test_eager_is_what_the_loop_by_hand_computes_masks_too(name: str, fused: bool) -> None:
    philox = [PhiloxState(3), PhiloxState(3)]
    expected, model = (llama(dropout=0.2, fused=fused, rng_state=state) for state in philox)
    torch.manual_seed(1)
    by_hand(name, expected, philox[0])
    optimizer = adamw(model)
    torch.manual_seed(1)
    attached = attach(model, optimizer)
    run(name, model, optimizer)
    assert_equal(expected, model)
    assert torch.equal(philox[0].tensor, philox[1].tensor)
    assert not attached.replaying and "the model is on cpu" in attached.why_not


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "as transformers has it"])
@pytest.mark.parametrize("name", LOOPS)
def test_cuda_graphs_are_what_eager_layers_compute(name: str, fused: bool) -> None:
    expected, model = (llama("cuda", fused=fused) for _ in "ab")
    with attached_to(expected, graphs=False) as (eager, optimizer):
        run(name, expected, optimizer)
        assert eager.why_not == "graphs=False"
    with attached_to(model) as (attached, optimizer):
        run(name, model, optimizer)
        assert attached.replaying and attached.replayed >= 3
    assert_equal(expected, model)


@contextlib.contextmanager
def attached_to(model: nn.Module, **options: Any) -> Iterator[Any]:
    optimizer = adamw(model)
    attached = attach(model, optimizer, **options)
    try:
        yield attached, optimizer
    finally:
        attached.detach()


@pytest.mark.parametrize("name", ["plain", "changing_number_of_microbatches", "user_skips"])
def test_dropout_replays_with_a_state_of_its_own(name: str, device: torch.device) -> None:
    """One step of the state for each microbatch, eager or replayed, so that each has masks of its own."""
    model = llama(device, dropout=0.5)
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    options = {} if device.type == "cuda" else {"backend": FakeBackend}
    with attached_to(model, **options) as (attached, optimizer):
        (state,) = attached.rng_states
        assert all(layer.rng_state is state for layer in layers)
        run(name, model, optimizer)
        assert attached.replaying
        assert int(state.tensor[1]) == attached.microbatches > attached.replayed >= 3
        gradients = []
        for _ in range(3):
            batch.calls = 0  # type: ignore[attr-defined]
            loss_of(model).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in trained(model)]))
            model.zero_grad()
        assert not torch.equal(gradients[0], gradients[1])
        assert not torch.equal(gradients[1], gradients[2])
    assert all(layer.rng_state is None for layer in layers)


def test_the_state_given_by_attach_follows_torchs_seed_and_draws_nothing() -> None:
    seeds = []
    for seed in (1, 1, 2):
        model = llama(dropout=0.5)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with attached_to(model, backend=FakeBackend) as (attached, _):
            seeds.append(attached.rng_states[0].seed)
        assert torch.equal(before, torch.get_rng_state())
    assert seeds[0] == seeds[1] != seeds[2]
    assert not llama_states(graphs=False, backend=FakeBackend)
    assert not llama_states()
    given = PhiloxState(7)
    assert llama_states(rng_state=given) == [given]


def llama_states(**options: Any) -> list[Any]:
    with attached_to(llama(dropout=0.5), **options) as (attached, _):
        return attached.rng_states


def test_a_state_that_the_layers_have_stays_theirs() -> None:
    own = PhiloxState(5)
    model = llama(dropout=0.1, rng_state=own)
    with attached_to(model, backend=FakeBackend) as (attached, _):
        assert attached.rng_states == [own]
    assert all(m.rng_state is own for m in model.modules() if isinstance(m, LoRALinear))


def test_two_optimizers_end_a_step_once() -> None:
    expected, model = llama(), llama()
    state, found = state_of(expected), []
    for one, by_hand_too in ((expected, True), (model, False)):
        batch.calls = 0  # type: ignore[attr-defined]
        halves = trained(one)[::2], trained(one)[1::2]
        optimizers = [torch.optim.AdamW(half, lr=1e-2) for half in halves]
        if by_hand_too:
            state.reduce_and_update()
        else:
            attached = attach(one, optimizers, backend=FakeBackend)
        for _ in range(8):
            loss_of(one).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if by_hand_too:
                state.reduce_and_update()
        found.append(one)
    assert_equal(*found)
    assert attached.replaying and attached.steps == 8 and attached.replayed == 5


def test_lbfgs_ends_one_step_whatever_its_closure_runs() -> None:
    expected, model = llama(), llama()
    state_of(expected).reduce_and_update()
    for one in (expected, model):
        batch.calls = 0  # type: ignore[attr-defined]
        optimizer = torch.optim.LBFGS(trained(one), lr=0.1, max_iter=3)
        if one is model:
            attached = attach(model, optimizer, backend=FakeBackend)

        def closure(one: Any = one, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(one)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
            state_of(expected).reduce_and_update()
    assert_equal(expected, model)
    assert attached.replaying and attached.steps == 4 and attached.skipped == 0
    assert attached.microbatches > 8


def test_accelerates_optimizer() -> None:
    accelerate = pytest.importorskip("accelerate")
    expected, model = llama(), llama()
    by_hand("plain", expected)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    attached = attach(prepared, optimizer, backend=FakeBackend)
    run("plain", prepared, optimizer)
    assert_equal(expected, model)
    assert attached.replaying and attached.steps == 8


def test_data_parallel(tmp_path: Any) -> None:
    """Of one rank; tests/distributed has graphs of several."""
    expected, model = llama(), llama()
    by_hand("plain", expected)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = adamw(model)
        attached = attach(wrapped, optimizer, backend=FakeBackend)
        run("plain", wrapped, optimizer)
        assert_equal(expected, model)
        assert attached.replaying and attached.replayed == 5
        attached.detach()
    finally:
        torch.distributed.destroy_process_group()


def test_a_changed_model_runs_eagerly_and_is_captured_anew() -> None:
    expected, model = llama(), llama()
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        run("plain", model, optimizer)
        optimizers = [adamw(expected), optimizer]
        by_hand_state = state_of(expected)
        by_hand_state.reduce_and_update()
        run("plain", expected, optimizers[0], lambda n: by_hand_state.reduce_and_update())
        for one in (expected, model):
            one.model.layers[1].mlp.down_proj.disable_adapters = True
        replayed, losses = attached.replayed, []
        with pytest.warns(RuntimeWarning, match="disable_adapters|attributes of mlp.down_proj"):
            for one, optimizer in zip((expected, model), optimizers, strict=True):
                batch.calls = 0  # type: ignore[attr-defined]
                for _ in range(3):
                    loss = loss_of(one)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    by_hand_state.reduce_and_update()
                    losses.append(loss.item())
        assert losses[:3] == losses[3:]
        assert attached.replaying and attached.replayed == replayed + 2


def no_layers(model: Any) -> Any:
    model.model.layers = nn.Sequential(*model.model.layers)
    return model


def compiled(model: Any) -> Any:
    model.model.layers[1].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (None, {}, "the model is on cpu: CUDA graphs need a GPU"),
        (None, {"graphs": False}, "graphs=False"),
        (no_layers, {"backend": FakeBackend}, "LlamaForCausalLM has no list of layers"),
        (compiled, {"backend": FakeBackend}, "layer 1 is compiled"),
        (torch.compile, {"backend": FakeBackend}, "the model is compiled"),
    ],
    ids=["cpu", "not wanted", "no list", "a compiled layer", "a compiled model"],
)
def test_why_nothing_is_replayed(change: Any, options: Any, reason: str) -> None:
    model = llama(fused=False)
    inner, model = model, model if change is None else change(model)
    with attached_to(model, **options) as (attached, _):
        assert reason in attached.why_not and reason in str(attached)
        assert inner.config.use_cache and attached.manager is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """Bit for bit as without; of the reentrant kind eager, with the reason."""
    expected, model = llama(fused=False), llama(fused=False)
    by_hand("plain", expected)

    def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
        body = partial(nn.Module.__call__, layer, **kwargs)
        return checkpoint(body, *args, use_reentrant=reentrant)

    for layer in model.model.layers:
        layer.__class__ = type("Checkpointed", (type(layer),), {"__call__": called})
    model.enable_input_require_grads()
    said = pytest.warns(RuntimeWarning, match="use_reentrant=False")
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        with said if reentrant else contextlib.nullcontext():
            run("plain", model, optimizer)
        assert attached.replaying == (not reentrant) and attached.microbatches == 8
    assert_equal(expected, model)


def test_hooks_inside_layers_are_said_and_leave_them_eager() -> None:
    expected, model = llama(fused=False), llama(fused=False)
    by_hand("plain", expected)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        with pytest.warns(RuntimeWarning, match="layers run eagerly: .*submodule 'mlp' has a hook"):
            run("plain", model, optimizer)
        assert "has a hook" in attached.why_not and attached.steps == 8
    assert_equal(expected, model)


def test_shapes_that_never_repeat_are_never_captured() -> None:
    model = llama()
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        for length in range(4, 12):
            loss_of(model, length).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert "no shape has come 3 times yet: [2, 4, 64] × 1" in attached.why_not
        assert attached.manager is None and attached.microbatches == 8


def test_no_more_shapes_than_asked_for() -> None:
    expected, model = llama(), llama()
    lengths = [5, 6, 7] * 4
    state = state_of(expected)
    state.reduce_and_update()
    optimizer = adamw(expected)
    batch.calls = 0  # type: ignore[attr-defined]
    for length in lengths:
        loss_of(expected, length).backward()
        optimizer.step()
        optimizer.zero_grad()
        state.reduce_and_update()
    options = {"backend": FakeBackend, "warmup_steps": 2, "max_shapes": 2}
    with attached_to(model, **options) as (attached, optimizer):
        batch.calls = 0  # type: ignore[attr-defined]
        with pytest.warns(RuntimeWarning, match="max_shapes=2 are captured"):
            for length in lengths:
                loss_of(model, length).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(attached.manager.report().shapes) == 2
        assert 0 < attached.replayed < len(lengths)
    assert_equal(expected, model)


def test_detach_leaves_the_model_as_it_was() -> None:
    model = llama(dropout=0.1, fused=False)
    optimizer = adamw(model)
    attached = attach(model, optimizer, backend=FakeBackend)
    run("plain", model, optimizer)
    assert attached.replaying and not model.config.use_cache
    assert state_of(model).in_charge == "explicit"
    attached.detach()
    attached.detach()
    assert state_of(model).in_charge == "auto" and model.config.use_cache
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    assert all(m.rng_state is None for m in model.modules() if isinstance(m, LoRALinear))
    assert state_of(model).pinned_by is None
    run("plain", model, optimizer)
    attach(model, optimizer, backend=FakeBackend).detach()


@pytest.mark.parametrize("fails", ["attach", "detach"])
def test_an_exception_leaves_nothing_attached(fails: str, monkeypatch: Any) -> None:
    """The update that takes charge fails in attach, the end of the graphs in detach."""
    model = llama(dropout=0.1, fused=False)
    optimizer = adamw(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("NaN")

    attached = None
    if fails == "detach":
        attached = attach(model, optimizer, backend=FakeBackend)
        monkeypatch.setattr(LayerGraphs, "close", fail)
    else:
        monkeypatch.setattr(FP8State, "reduce_and_update", fail)
    with pytest.raises(RuntimeError, match="NaN"):
        attached.detach() if attached else attach(
            model, optimizer, backend=FakeBackend, warmup_steps=1
        )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    assert state_of(model).in_charge == "auto" and model.config.use_cache
    assert all(m.rng_state is None for m in model.modules() if isinstance(m, LoRALinear))


def test_a_model_without_a_list_of_layers_is_attached_once() -> None:
    """A second one would update its scales twice a step."""
    model = no_layers(llama(fused=False))
    optimizer = adamw(model)
    attached = attach(model, optimizer)
    with pytest.raises(ValueError, match="attached already"):
        attach(model, optimizer)
    attached.detach()
    attach(model, optimizer).detach()
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_step_that_raises_is_one_that_was_left_out() -> None:
    """Such as an optimizer whose states do not fit on the GPU."""
    model = llama()

    class Full(torch.optim.SGD):
        full = False

        def step(self, closure: Any = None) -> Any:
            if self.full:
                raise torch.OutOfMemoryError("full")
            return super().step(closure)

    optimizer = Full(trained(model), lr=1e-3)
    attached = attach(model, optimizer)
    for step in range(5):
        optimizer.full = step == 2
        loss_of(model).backward()
        with contextlib.suppress(torch.OutOfMemoryError):
            optimizer.step()
        optimizer.zero_grad()
    assert (attached.steps, attached.skipped, attached.microbatches) == (4, 1, 5)


def test_a_loop_without_model_train_is_said_once() -> None:
    """from_pretrained returns a model in eval mode, in which nothing of attach is done."""
    model = llama().eval()
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        with pytest.warns(
            RuntimeWarning, match=r"AdamW stepped after .* Call model\.train"
        ) as said:
            for _ in range(3):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(said) == 1 and attached.steps == 0
        model.train()
        loss_of(model).backward()
        with torch.no_grad():
            loss_of(model.eval())
        optimizer.step()
        assert attached.steps == 1


def test_a_copy_of_the_model_is_not_attached() -> None:
    model = llama()
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        run("plain", model, optimizer)
        steps, microbatches = attached.steps, attached.microbatches
        again = copy.deepcopy(model)
        loss_of(again).backward()
        attached_to(again).__enter__()[0].detach()
        assert (attached.steps, attached.microbatches) == (steps, microbatches)
        assert attached._forwards == 0


def test_what_is_dropped_is_freed() -> None:
    model = llama()
    attach(model, adamw(model), backend=FakeBackend)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_refused_before_anything_is_changed() -> None:
    model = llama()
    optimizer = adamw(model)
    before = {name: dict(m._forward_pre_hooks) for name, m in model.named_modules()}
    wrong = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    plain = transformers.LlamaForCausalLM(model.config)
    for arguments, options, error, message in (
        ((plain, adamw(plain)), {}, ValueError, "has no LoRALinear: call apply_lora first"),
        ((model, wrong), {}, ValueError, "SGD has none of the model's 42 trained parameters"),
        ((model, []), {}, ValueError, "optimizer must be one optimizer or several"),
        ((model, 3), {}, TypeError, "optimizer must be a torch.optim.Optimizer, found int"),
        ((model, optimizer), {"warmup_steps": 0}, ValueError, "warmup_steps must be .* found 0"),
        ((model, optimizer), {"rng_state": 3}, TypeError, "rng_state must be a PhiloxState"),
        (
            (model, optimizer),
            {"backend": FakeBackend, "grads": "x"},
            ValueError,
            "grads must be one",
        ),
        ((model, optimizer), {"x": 1}, TypeError, "as options, found {'x'}"),
        ((model, optimizer), {"layers": [3]}, TypeError, r"layers\[0\] must be a module"),
        ((model, optimizer), {"layers": "model"}, TypeError, "layers must be a list"),
        ((model, optimizer), {"layers": []}, TypeError, "layers must be a list"),
        ((model, optimizer), {"layers": [nn.Linear(2, 2)]}, ValueError, "is not the model's"),
    ):
        with pytest.raises(error, match=message):
            attach(*arguments, **options)
    assert before == {name: dict(m._forward_pre_hooks) for name, m in model.named_modules()}
    assert state_of(model).in_charge == "auto" and not optimizer._optimizer_step_post_hooks
    attached = attach(model, optimizer)
    with pytest.raises(ValueError, match=r"attached already.*detach"):
        attach(model, optimizer)
    attached.detach()
