# SPDX-License-Identifier: Apache-2.0
"""Sequences of a batch have the adapters that AdapterBatch.rows names, in a recomputation as in its forward."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lorakernels
from lorakernels import AdapterBatch, DelayedScaling, LoRAConfig, LoRALinear
from tests.fusion.fused_models import difference
from tests.graphs.fake import FakeBackend
from tests.modules.batched_models import (
    NAMES,
    RECIPES,
    adapted,
    alone,
    batched,
    bound,
    rows,
    tiny_llama,
)


@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_sequences_in_any_order_have_their_adapters(recipe: str, fused: bool) -> None:
    """As PEFT's adapter_names: an adapter twice, one not at all, and the base alone."""
    names = ["de", "__base__", "fr", "de"]
    model, batch = batched(*RECIPES[recipe])
    singles = {name: alone(model, batch, name) for name in NAMES}
    base = copy.deepcopy(singles["fr"])
    if fused:
        for each in (model, base, *singles.values()):
            lorakernels.fuse(each)
    ids = rows(model, len(names))
    with batch.rows(names):
        out = model(input_ids=ids).logits
    dout = torch.randn_like(out)
    out.backward(dout)
    batch.give_gradients()
    for i, name in enumerate(names):
        if name == "__base__":
            with lorakernels.disable_lora(base):
                own = base(input_ids=ids[i : i + 1]).logits
        else:
            own = singles[name](input_ids=ids[i : i + 1]).logits
            own.backward(dout[i : i + 1])
        assert difference(out[i : i + 1], own) <= bound(recipe)
    for name in NAMES:
        for key, value in batch.parameters(name).items():
            expected = singles[name].get_parameter(key).grad
            assert value.grad is not None
            if expected is None:
                assert name == "it" and value.grad.count_nonzero() == 0
            else:
                assert difference(value.grad, expected) <= bound(recipe)
    with (
        batch.rows(["fr"]),
        pytest.raises(ValueError, match="exclude each other"),
        batch.only("de"),
    ):
        pass
    with pytest.raises(KeyError, match="adapter 'es' must be one of"), batch.rows(["es"]):
        pass
    with pytest.raises(ValueError, match="names must have one for each sequence"), batch.rows([]):
        pass


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_no_sequence_is_cut_between_two_adapters(fused: bool, grad: bool) -> None:
    """The numbers of tokens would be divided by three, and by two. PEFT refuses such adapter_names, too."""
    model, batch = batched()
    if fused:
        lorakernels.fuse(model)
    ids = rows(model, 4)
    message = r"3 adapters must divide the sequences, found {} in x \[{}, {}\]"
    with torch.set_grad_enabled(grad):
        for seen in ("15", "15, 64"):  # by the model, and by a layer
            for count in (1, 2, 4):
                with pytest.raises(ValueError, match=message.format(count, count, seen)):
                    model(input_ids=ids[:count, :15])
            for caller in (model, model.model):
                caller._forward_pre_hooks.clear()
        for names, count in ((["de", "fr"], 3), (["de", None, "de"], 1)):
            with batch.rows(names), pytest.raises(ValueError, match="must divide the sequences"):
                model(input_ids=ids[:count])
        with batch.rows(["de", "de", "fr", "fr"]):
            expected = model(input_ids=ids).logits
        with batch.rows(["de", "fr"]):
            assert torch.equal(model(input_ids=ids).logits, expected)
        with batch.only("de"):
            model(input_ids=ids[:1])


@pytest.mark.parametrize("init", ["olora", "pissa"])
def test_adapters_that_start_from_the_weight(init: str, tmp_path: Any) -> None:
    """All start as the base, and files fit it. What lacks the initial adapter is refused."""
    model, base = adapted(init_lora_weights=init), tiny_llama()
    message = f"init_lora_weights='{init}' has changed the weight, so "
    with pytest.raises(ValueError, match=message + "every adapter needs the whole rank"):
        lorakernels.batch_adapters(model, NAMES, {"de": 2})
    batch = lorakernels.batch_adapters(model, NAMES, {"de": 4})
    ids = rows(model)
    torch.testing.assert_close(model(input_ids=ids).logits, base(input_ids=ids).logits)
    for name in NAMES:
        for key, value in batch.parameters(name).items():
            if key.endswith("lora_B"):
                nn.init.normal_(value.data, std=0.1)
    with batch.rows(["it", "de"]):
        found = model(input_ids=ids[:2]).logits
    with batch.only("de"):
        lorakernels.save_adapter(model, tmp_path)
    lorakernels.load_adapter(base, tmp_path, fp8=None)
    torch.testing.assert_close(base(input_ids=ids[1:2]).logits, found[1:])
    with (
        pytest.raises(ValueError, match=message + "no sequence can have the base alone"),
        batch.rows(["it", None]),
    ):
        pass


def test_rows_inside_rows_hold_until_their_own_end() -> None:
    model, batch = batched()
    ids = rows(model)
    own = model(input_ids=ids).logits

    def named() -> list[list[int]]:
        """The buffers by which graphs see the rows."""
        every = model.named_buffers(remove_duplicate=False)
        found = [b.tolist() for name, b in every if name.endswith("named_rows")]
        assert len(found) in (0, len(batch.layers))
        return found[:1]

    assert named() == []
    with torch.no_grad(), batch.rows(["it", "fr", "de"]):
        before, outer = model(input_ids=ids).logits, named()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="inside"), batch.rows(["de"]):
                model(input_ids=ids)
                assert named() not in (outer, [])
                raise RuntimeError("inside")
            assert torch.equal(model(input_ids=ids).logits, before) and named() == outer
    assert named() == []
    assert torch.equal(model(input_ids=ids).logits, own)
    assert not torch.equal(before, own)


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
}
MICROBATCHES = [["it", "fr", "de"], ["de", "__base__", "de", "fr", "it", "fr"], ["fr"]]


def checkpointed(model: Any, kind: str) -> None:
    """Have transformers recompute every layer of `model`."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTS[kind])
    model.enable_input_require_grads()


def exact(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], expected[k]) for k in found
    )


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert len(found) == sum(p.requires_grad for p in model.parameters())
    return found


def backwards(model: Any, batch: AdapterBatch, batches: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of MICROBATCHES, each with its rows, all forwards first and backward outside of `rows`."""
    losses = []
    for names, ids in zip(MICROBATCHES, batches, strict=True):
        with batch.rows(names):
            losses.append(model(input_ids=ids).logits.square().mean())
    torch.stack(losses).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_a_recomputation_has_the_rows_of_its_forward(fused: bool, kind: str) -> None:
    """Where other rows are named by then, or none, also with as many or with other numbers of them."""
    model, batch = batched()
    if fused:
        lorakernels.fuse(model)
    batches = [rows(model, len(names)) for names in MICROBATCHES]
    expected = backwards(model, batch, batches)
    checkpointed(model, kind)
    assert exact(backwards(model, batch, batches), expected)
    ids = rows(model)
    found = []
    for outside in ([], ["de", "de", "it"]):
        with batch.rows(["it", "fr", "de"]):
            loss = model(input_ids=ids).logits.square().mean()
        with batch.rows(outside) if outside else nullcontext():
            loss.backward()
        found.append(gradients(model))
    assert exact(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_a_recomputation_in_the_device_s_thread_has_them_too(fused: bool, kind: str) -> None:
    """fp32. Gradients of one adapter's sequences are added in any order: some roundings of 2^-24."""
    model, batch = batched()
    model = model.cuda()
    if fused:
        lorakernels.fuse(model)
    batches = [rows(model, len(names)).cuda() for names in MICROBATCHES]
    expected = backwards(model, batch, batches)
    checkpointed(model, kind)
    found = backwards(model, batch, batches)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max())
        )


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_trainer_may_leave_rows_before_backward(kind: str, tmp_path: Any) -> None:
    """Its training_step calls backward after compute_loss has returned."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    names = ["it", "de", "fr"]
    steps = []
    for checkpoints in (False, True):
        model, batch = batched()
        if checkpoints:
            checkpointed(model, kind)

        class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
            named = batch

            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                with self.named.rows(names):
                    return super().compute_loss(*args, **kwargs)

        options = {"per_device_train_batch_size": 3, "max_steps": 2, "save_strategy": "no"}
        args = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **options
        )
        torch.manual_seed(1)
        data = [{"input_ids": x, "labels": x} for x in rows(model, 6)]
        Trainer(model=model, args=args, train_dataset=data).train()
        steps.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    assert exact(*steps)


def test_a_recomputation_whose_rows_are_hidden_is_refused() -> None:
    """By an offload's hooks inside of `rows`; by a forward that named none, after others did."""
    model, batch = batched()
    ids = rows(model)
    checkpointed(model, "not reentrant")
    with batch.rows(["it", "fr", "de"]), torch.autograd.graph.save_on_cpu():
        loss = model(input_ids=ids).logits.sum()
    with pytest.raises(RuntimeError, match="the adapters of its rows are not known: name them"):
        loss.backward()
    loss = model(input_ids=ids).logits.sum()
    with pytest.raises(RuntimeError, match="the adapters of its rows are not known: name them"):
        loss.backward()
    with torch.autograd.graph.save_on_cpu(), batch.rows(["it", "fr", "de"]):
        loss = model(input_ids=ids).logits.sum()
    loss.backward()  # these hooks are around rows, which calls them


def test_evaluating_with_rows_leaves_recomputations_in_the_adapters_order() -> None:
    model, batch = batched()
    ids = rows(model)
    model(input_ids=ids).logits.square().mean().backward()
    expected = gradients(model)
    checkpointed(model, "not reentrant")
    with torch.no_grad(), batch.rows(["it", "fr", "de"]):
        model.eval()(input_ids=ids)
    loss = model.train()(input_ids=ids).logits.square().mean()
    with batch.rows(["it", "fr", "de"]), pytest.raises(RuntimeError, match="are not known"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    model(input_ids=ids).logits.square().mean().backward()
    assert exact(gradients(model), expected)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_rows_that_a_recomputation_names_itself(kind: str) -> None:
    model, batch = batched()
    ids = rows(model)

    def forward(embeds: Tensor) -> Tensor:
        with batch.rows(["it", "fr", "de"]):
            found: Tensor = model(inputs_embeds=embeds).logits.square().mean()
            return found

    embeds = model.get_input_embeddings()(ids).requires_grad_()
    forward(embeds).backward()
    expected = gradients(model)
    checkpoint(forward, embeds, **CHECKPOINTS[kind]).backward()
    assert exact(gradients(model), expected)


def test_a_change_in_place_is_noticed_inside_rows() -> None:
    """As torch does without hooks of saved tensors."""
    model, batch = batched()
    with batch.rows(["it", "fr", "de"]):
        loss = model(input_ids=rows(model)).logits.square().sum()
    with torch.no_grad():
        next(iter(batch.layers.values())).lora_A.add_(1)
        for layer in batch.layers.values():
            layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place after its forward"):
        loss.backward()


def test_torch_compile_computes_named_rows() -> None:
    layer = LoRALinear(64, 48, config=LoRAConfig(r=4, fp8=None))
    batch = lorakernels.batch_adapters(nn.Sequential(layer), NAMES)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(24, 64, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager")
    compiled(x)
    found = []
    for run in (layer, compiled, lambda x: checkpoint(compiled, x, use_reentrant=False)):
        x.grad = None
        with batch.rows(["it", "it", "fr", "de"]):
            y = run(x)
        y.square().sum().backward()
        found.append({"x": x.grad, **gradients(layer)})
    assert exact(found[1], found[0])
    assert exact(found[2], found[0])


def test_torch_compile_refuses_to_cut_a_sequence() -> None:
    layer = LoRALinear(64, 48, config=LoRAConfig(r=4, fp8=None))
    lorakernels.batch_adapters(nn.Sequential(layer), NAMES)
    compiled = torch.compile(layer, backend="aot_eager")
    try:
        with pytest.raises(ValueError, match="3 adapters must divide the sequences, found 2"):
            compiled(torch.randn(2, 6, 64))
        assert compiled(torch.randn(3, 6, 64)).shape == (3, 6, 48)
    finally:
        torch._dynamo.reset()  # a frame that raised runs by pieces


SCHEDULES: dict[str, list[Any]] = {
    "first none": [None] * 6 + [["it", "fr", "de"]] * 3 + [None] * 3,
    "always": [["it", "fr", "de"], ["de", "de", "it"]] * 5,
    "then none": [["it", "fr", "de"]] * 5 + [None] * 5,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a microbatch runs eagerly", "ignore:layers run eagerly")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_a_graph_of_other_rows_is_not_replayed(fused: bool, schedule: str) -> None:
    losses = []
    for graphs in (False, True):
        model, batch = batched(DelayedScaling())
        torch.manual_seed(1)
        if fused:
            lorakernels.fuse(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for name in NAMES:
            for value in batch.parameters(name).values():
                nn.init.normal_(value.data, std=0.1)
        options: Any = {"backend": FakeBackend} if graphs else {"graphs": False}
        attached = lorakernels.attach(model, optimizer, **options)
        found = []
        with sdpa_kernel(SDPBackend.MATH):
            for names in SCHEDULES[schedule]:
                ids = rows(model)
                with batch.rows(names) if names else nullcontext():
                    loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
        assert not graphs or schedule == "always" or attached.replaying, str(attached)
        attached.detach()
        losses.append(found)
    assert losses[0] == losses[1]
