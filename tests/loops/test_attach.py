# SPDX-License-Identifier: Apache-2.0
"""attach: loops that know nothing of scales, random states and graphs end as those written out by hand, bit for bit.

Graphs are imitated on a CPU; the tests marked gpu take CUDA's.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lorakernels import DelayedScaling, FrozenFP8Linear, LoRALinear, PhiloxState, attach
from tests.graphs.fake import FakeBackend
from tests.loops.written_loops import (
    LOOPS,
    adamw,
    assert_equal,
    attached_to,
    batch,
    by_hand,
    llama,
    loss_of,
    run,
    state_of,
    trained,
)

pytestmark = pytest.mark.usefixtures("math_attention")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_graphs_pin_the_state_of_their_layers_where_another_comes_first() -> None:
    """A frozen tower in FP8 before the layers, of another recipe, has a state of its own."""
    model = llama()
    tower = FrozenFP8Linear(8, 8, fp8=DelayedScaling(amax_history_len=3))
    model._modules = {"tower": tower, **model._modules}
    layers = next(m for m in model.modules() if isinstance(m, LoRALinear)).fp8_state
    with attached_to(model, backend=FakeBackend) as (attached, optimizer):
        run("plain", model, optimizer)
        assert attached.replaying and attached.fp8_states == [tower.fp8_state, layers]
        assert attached.manager.fp8_state is layers
        assert layers.pinned_by and not tower.fp8_state.pinned_by


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


@pytest.mark.slow
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
