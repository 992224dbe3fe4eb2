# SPDX-License-Identifier: Apache-2.0
"""Our layers inside PEFT, fused and replayed: what PEFT does with its adapters goes on, or is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FrozenFP8Linear,
    PhiloxState,
    attach,
    fuse,
    unfuse,
)
from tests.graphs.fake import FakeBackend

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from lorakernels.integrations.peft import patch, register, report, restore  # noqa: E402
from lorakernels.integrations.transformers import LoRAKernelsCallback  # noqa: E402
from lorakernels.modules.marks import became  # noqa: E402

FP8 = DelayedScaling(amax_history_len=4)
BASES = pytest.mark.parametrize("fp8", [None, FP8], ids=["plain base", "FP8 base"])
HOWS = pytest.mark.parametrize("how", ["register", "patch"])
TARGETS = {
    "Llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],  # not up_proj
    "Phi3": ["qkv_proj", "o_proj", "down_proj"],  # not gate_up_proj
    "Granite": ["q_proj", "o_proj", "down_proj"],
    "SmolLM3": ["q_proj", "o_proj", "down_proj"],
}
# fp32, the same sums in another order, through two layers
FP32 = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def math_attention() -> Iterator[None]:
    """The imitated graphs cannot replay the CPU's flash attention."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def plain_model(family: str = "Llama") -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    others: dict[str, Any] = {"use_cache": False}
    if family in ("Phi3", "SmolLM3"):
        others["pad_token_id"] = 0  # its own one is outside of the vocabulary
    if family == "Granite":
        others |= {"residual_multiplier": 0.5, "attention_multiplier": 0.3}
    if family == "SmolLM3":
        others["no_rope_layers"] = [1, 0]
    made = getattr(transformers, f"{family}Config")(vocab_size=64, **sizes, **heads, **others)
    return getattr(transformers, f"{family}ForCausalLM")(made)


def config(family: str = "Llama", **changes: Any) -> Any:
    given = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[family]}
    return peft.LoraConfig(**given | changes)


def peft_model(how: str = "register", fp8: Any = FP8, family: str = "Llama", **changes: Any) -> Any:
    made = config(family, **changes)
    if how == "register":
        register(made, fp8=fp8)
    model = peft.get_peft_model(plain_model(family), made)
    if how == "patch":
        patch(model, fp8=fp8)
    return randomized(model).train()


def randomized(model: Any, adapter: str = "default", seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_" in name and adapter in name:
            p.data.normal_(std=0.1, generator=generator)
    return model


def ids(seed: int = 5) -> Tensor:
    return torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of one eval forward; FP8 layers then scale each tensor by its own amax, so that scales are no difference."""
    model.eval()
    found = model(input_ids=ids()).logits
    model.train()
    return found


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def steps(model: Any, optimizer: Any, count: int = 7) -> list[float]:
    losses = []
    for step in range(count):
        loss = model(input_ids=ids(step), labels=ids(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@HOWS
@pytest.mark.parametrize("family", TARGETS)
def test_fused_computes_what_peft_computes(family: str, how: str) -> None:
    theirs = randomized(peft.get_peft_model(plain_model(family), config(family))).train()
    ours = peft_model(how, None, family)
    assert str(fuse(ours)).startswith("2 fused layers")
    found = []
    for model in (theirs, ours):
        loss = model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        grads = [p.grad for n, p in model.named_parameters() if p.requires_grad]
        found.append([loss, *grads])
    assert len(found[0]) == len(found[1]) == 1 + 2 * 2 * len(TARGETS[family])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **FP32)
    unfuse(ours)
    assert all(became(m).fused_projection is None for m in ours.modules())
    torch.testing.assert_close(logits(ours), logits(theirs), **FP32)


@pytest.mark.slow
@BASES
@HOWS
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "as PEFT has it"])
@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_attached_layers_replay_to_the_same_bits(
    family: str, how: str, fp8: Any, fused: bool
) -> None:
    found = []
    for options in ({}, {"backend": FakeBackend}):
        model = peft_model(how, fp8, family)
        if fused:
            fuse(model)
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        attached = attach(model, optimizer, **options)
        losses = steps(model, optimizer)
        assert attached.replaying == bool(options)
        assert len(attached.fp8_states) == (fp8 is not None)
        found.append((losses, [p.detach().clone() for p in model.parameters()]))
        attached.detach()
    assert found[0][0] == found[1][0] and found[0][0][-1] < found[0][0][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.gpu
@BASES
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "as PEFT has it"])
@pytest.mark.parametrize("family", TARGETS)
def test_cuda_graphs_replay_to_the_same_bits(family: str, fp8: Any, fused: bool) -> None:
    found = []
    for graphs in (False, True):
        model = peft_model("register", fp8, family).to("cuda", torch.bfloat16)
        if fused:
            fuse(model)
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        attached = attach(model, optimizer, graphs=graphs)
        losses = []
        for step in range(7):
            tokens = ids(step).cuda()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert attached.replaying == graphs
        found.append((losses, [p.detach().clone() for p in model.parameters()]))
        attached.detach()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "as PEFT has it"])
def test_dropout_draws_from_the_state_that_attach_gives(fused: bool) -> None:
    model = peft_model(lora_dropout=0.5)
    if fused:
        fuse(model)
    optimizer = torch.optim.AdamW(trained(model), lr=0.0)
    attached = attach(model, optimizer, backend=FakeBackend)
    (state,) = attached.rng_states
    for step in range(6):
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert int(state.tensor[1]) == step + 1
    assert attached.replaying
    attached.detach()
    assert all(m.rng_state is None for m in model.modules() if hasattr(m, "dropout_p"))


@BASES
def test_graph_manager_alone_takes_the_layers(fp8: Any) -> None:
    from lorakernels.graphs import GraphManager, GraphOptions

    state = PhiloxState(1)
    model = peft_model(fp8=fp8, lora_dropout=0.2)
    fuse(model)
    for module in model.modules():
        if hasattr(module, "dropout_p"):
            module.rng_state = state
    fp8_state = report(model).fp8_state
    if fp8_state is not None:
        fp8_state.reduce_and_update()
    layers = model.base_model.model.model.layers
    manager = GraphManager(
        layers,
        warmup_steps=2,
        fp8_state=fp8_state,
        rng_states=[state],
        options=GraphOptions(backend=FakeBackend),
    )
    for _ in range(4):
        model(input_ids=ids(), labels=ids()).loss.backward()
        model.zero_grad()
        if fp8_state is not None:
            fp8_state.reduce_and_update()
        manager.end_iteration()
    assert manager.phase == "replaying"
    manager.close()


@BASES
def test_switching_adapters_off(fp8: Any) -> None:
    model = peft_model(fp8=fp8)
    with model.disable_adapter():
        off = logits(model)
    on = logits(model)
    assert not torch.allclose(on, off, atol=1e-2)
    fuse(model)
    close = {"rtol": 1e-4, "atol": 1e-5} if fp8 is None else {"rtol": 0.05, "atol": 0.05}
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), off, **close)
    torch.testing.assert_close(logits(model), on, **close)
    model.base_model.disable_adapter_layers()
    torch.testing.assert_close(logits(model), off, **close)
    model.base_model.enable_adapter_layers()
    torch.testing.assert_close(logits(model), on, **close)


def test_a_fused_layer_drops_as_its_active_adapter_says() -> None:
    model = peft_model(fp8=None)
    model.add_adapter("other", register(config(lora_dropout=0.5), fp8=None))
    fuse(randomized(model, "other", 2))
    for name in ("default", "other", "default", "other"):
        model.set_adapter(name)
        whole, dropped = logits(model), model.train()(input_ids=ids()).logits
        assert torch.equal(dropped, whole) is (name == "default")


@pytest.mark.filterwarnings("ignore:a microbatch runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("other", [{"r": 8, "lora_alpha": 8}, {"r": 8, "lora_alpha": 16}], ids=str)
def test_another_adapter_of_another_rank(other: dict[str, Any]) -> None:
    """Eager and replayed, there and back; the second one has the first one's scaling, or its own."""
    model = peft_model(fp8=None)
    model.add_adapter("other", register(config(**other), fp8=None))
    randomized(model, "other", 2)
    expected = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        expected[name] = logits(model)
    assert not torch.allclose(*expected.values(), atol=1e-2)
    model.set_adapter("default")
    fuse(model)
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        torch.testing.assert_close(logits(model), expected[name], **FP32)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"one plain adapter, and 2 adapters are active.*unfuse"):
        logits(model)
    model.set_adapter("default")
    both = [p for n, p in model.named_parameters() if "lora_" in n]
    optimizer = torch.optim.SGD(both, lr=0.0)
    attached = attach(model, optimizer, backend=FakeBackend)
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        model.train()
        before = attached.replayed
        losses = steps(model, optimizer, 5)
        assert attached.replaying and attached.replayed > before
        with attached.manager.disabled():
            assert losses == steps(model, optimizer, 5)
    attached.detach()


@BASES
def test_a_layer_whose_adapters_are_all_deleted_computes_its_base(fp8: Any) -> None:
    """The adapter that stays, or comes, has other targets: one of q, k, v, and neither of gate and up."""
    model = peft_model(fp8=fp8)
    model.add_adapter("other", register(config(target_modules=["q_proj", "o_proj"]), fp8=fp8))
    randomized(model, "other", 2)
    fuse(model)
    logits(model)
    model.set_adapter("other")
    expected = logits(model)
    model.delete_adapter("default")
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)
    model.add_adapter("third", register(config(), fp8=fp8))
    randomized(model, "third", 3)
    model.set_adapter("third")
    bare = copy.deepcopy(model)
    unfuse(bare)
    close = FP32 if fp8 is None else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(logits(model), logits(bare), **close)


@BASES
@pytest.mark.parametrize("safe", [False, True])
def test_merging_and_unmerging(fp8: Any, safe: bool) -> None:
    model = peft_model(fp8=fp8)
    fuse(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "base_layer" in n}
    on = logits(model)
    model.merge_adapter(safe_merge=safe)
    # an FP8 base rounds the sum once more: 2**-4 of each weight at most
    close = FP32 if fp8 is None else {"rtol": 0.2, "atol": 0.2}
    merged = logits(model)
    torch.testing.assert_close(merged, on, **close)
    with model.disable_adapter():
        assert not torch.allclose(logits(model), merged, atol=1e-2)
    model.unmerge_adapter()
    for name, p in model.named_parameters():
        if name in before and p.dtype != torch.float32:
            assert torch.equal(p, before[name]), name
        elif name in before:  # (W + Δ) − Δ
            torch.testing.assert_close(p, before[name], **FP32)
    torch.testing.assert_close(logits(model), on, **FP32)


@BASES
def test_a_merged_adapter_is_not_replayed_as_an_active_one(fp8: Any) -> None:
    model = peft_model(fp8=fp8)
    fuse(model)
    optimizer = torch.optim.SGD(trained(model), lr=0.0)
    attached = attach(model, optimizer, backend=FakeBackend)
    before = steps(model, optimizer, 5)
    assert attached.replaying
    model.merge_adapter()
    with pytest.warns(RuntimeWarning, match="a microbatch runs eagerly"):
        loss = model(input_ids=ids(4), labels=ids(4)).loss.item()
    assert loss == pytest.approx(before[4], abs=2e-2)
    attached.detach()


@BASES
def test_what_a_fused_model_saves_loads(fp8: Any, tmp_path: Path) -> None:
    model = peft_model(fp8=fp8)
    fuse(model)
    model.save_pretrained(tmp_path)
    plain = peft_model(fp8=fp8)
    again = peft.PeftModel.from_pretrained(plain_model(), tmp_path)
    saved = {n: p for n, p in again.named_parameters() if "lora_" in n}
    assert len(saved) == 24
    for name, p in model.named_parameters():
        if "lora_" in name:
            assert torch.equal(p, saved[name]), name
    model.load_adapter(tmp_path, "second")
    assert "second" in model.peft_config
    model.set_adapter("second")
    close = FP32 if fp8 is None else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(logits(model), logits(plain), **close)
    model.delete_adapter("default")
    torch.testing.assert_close(logits(model), logits(plain), **close)


@BASES
def test_copies_and_pickles_are_fused_models_of_their_own(fp8: Any) -> None:
    model = peft_model(fp8=fp8)
    fuse(model)
    on = logits(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), on)
        for p in trained(again):
            p.data.zero_()
        assert not torch.equal(logits(again), on)
    assert torch.equal(logits(model), on)


def dora(model: Any) -> Any:
    return peft.get_peft_model(plain_model(), register(config(use_dora=True), fp8=None))


def merged(model: Any) -> Any:
    model.merge_adapter()
    return model


def off(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


def plain_peft(model: Any) -> Any:
    return peft.get_peft_model(plain_model(), config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dora, r"layers\.0\.self_attn\.q_proj: .* cannot be fused: adapter 'default' is a Dora"),
        (merged, r"layers\.0\.self_attn\.q_proj: .* the adapter is merged"),
        (off, r"layers\.0\.self_attn\.q_proj: .* adapters are disabled"),
        (plain_peft, "with PEFT, register or patch"),
    ],
    ids=["DoRA", "merged", "switched off", "PEFT's own class"],
)
def test_what_cannot_be_fused_is_refused(change: Any, message: str) -> None:
    model = change(peft_model(fp8=None))
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        fuse(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert all(became(m).fused_projection is None for m in model.modules())


def test_a_refusal_of_blocks_names_the_projection() -> None:
    model = peft_model(fp8=BlockScaling())
    message = r"layers\.0\.self_attn\.q_proj has 64 rows, which must be a multiple of 128 under"
    with pytest.raises(ValueError, match=message):
        fuse(model)


def test_restoring_a_patched_model_after_unfuse() -> None:
    model = peft_model("patch")
    unpatched = randomized(peft.get_peft_model(plain_model(), config()))
    fuse(model)
    with pytest.raises(ValueError, match=r"q_proj is in a fused layer: call unfuse"):
        restore(model)
    unfuse(model)
    restore(model)
    assert not any(
        isinstance(m, FrozenFP8Linear) and "up_proj" not in n for n, m in model.named_modules()
    )
    for layer in model.base_model.model.model.layers:  # not targeted: fuse has made it FP8
        assert isinstance(layer.mlp.up_proj, FrozenFP8Linear)
    torch.testing.assert_close(logits(model), logits(unpatched), rtol=0.1, atol=0.1)


@pytest.mark.slow
def test_trainer_with_the_callback_replays_and_saves(tmp_path: Path) -> None:
    found = []
    for options in ({"graphs": False}, {"backend": FakeBackend}):
        model = peft_model()
        fuse(model)
        rows = [{"input_ids": row, "labels": row} for s in range(8) for row in ids(s)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            num_train_epochs=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
        )
        kernels = LoRAKernelsCallback(model, **options)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[kernels])
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert kernels.why_not == (
            None if len(options) and "backend" in options else "graphs=False"
        )
    assert found[0] == found[1] and len(found[0]) == 8
    saved = peft.PeftModel.from_pretrained(plain_model(), tmp_path / "checkpoint-8")
    theirs = {n: p for n, p in saved.named_parameters() if "lora_" in n}
    assert all(torch.equal(p, theirs[n]) for n, p in model.named_parameters() if "lora_" in n)
