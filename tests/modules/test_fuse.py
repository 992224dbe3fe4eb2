# SPDX-License-Identifier: Apache-2.0
"""fuse: fused against unfused layers of transformers' models, what they keep, what they refuse, and back again."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from lorakernels import (
    DelayedScaling,
    FrozenFP8Linear,
    LoRALinear,
    PhiloxState,
    apply_lora,
    disable_lora,
    fuse,
    group_projections,
    load_adapter,
    merge_lora,
    save_adapter,
    unfuse,
    unmerge_lora,
)
from lorakernels.config import LoRAConfig
from lorakernels.modules.fuse_memory import SAVE
from tests.modules.fused_models import (
    ATTENTION,
    FAMILIES,
    LINEARS,
    VOCABULARY,
    adapted,
    difference,
    exact,
    model_of,
    run,
    same_within,
)

# Two orders of fp32 sums, some twenty roundings along a layer and each at most 2^-24 of what is added up
FP32 = 64 * 2.0**-24
# e4m3 rounds gate and up to 2^-4 of themselves at most; SwiGLU's derivative reads both
E4M3_GATE_UP = 2 * 2.0**-4


def tokens(batch: int = 2, length: int = 12, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), device=device)


def fused_copy(model: nn.Module, **options):
    twin = copy.deepcopy(model)
    return twin, fuse(twin, **options)


@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("targets", [ATTENTION, ("q_proj", "v_proj"), LINEARS], ids=len)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_base_is_equal_to_rounding(family: str, targets, save: str) -> None:
    model = adapted(family, targets)
    twin, _ = fused_copy(model, save=save)
    x = tokens()
    expected, found = run(model, x), run(twin, x)
    if save == "fp8":
        assert same_within(found, expected, E4M3_GATE_UP) > 1e-4, "gate and up were not rounded"
        same_within({"y": found["logits"]}, {"y": expected["logits"]}, FP32)
    else:
        same_within(found, expected, FP32)
    assert list(model.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("shared", [True, False], ids=["one mask", "a mask each"])
def test_dropout_masks_are_the_unfused_ones(shared: bool) -> None:
    """Of a LoRALinearGroup with shared_dropout, or of LoRALinears by themselves."""
    model = adapted(targets=LINEARS, lora_dropout=0.3)
    twin, _ = fused_copy(model, shared_dropout=shared)
    if shared:
        groups = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
        group_projections(model, groups, shared_dropout=True)
    x, found = tokens(), []
    for each in (model, twin):
        torch.manual_seed(3)
        found.append(run(each, x))
    same_within(found[1], found[0], FP32)
    again = run(twin, x)
    assert difference(again["logits"], found[1]["logits"]) > 1e-3, "the same masks twice"


def test_ranks_that_one_kernel_does_not_take() -> None:
    """3 · 48 > 128: the group's adapters go one by one, under the one mask."""
    model = adapted(r=48, lora_dropout=0.3)
    twin, _ = fused_copy(model)
    group_projections(model, [("q_proj", "k_proj", "v_proj")], shared_dropout=True)
    x, found = tokens(), []
    for each in (model, twin):
        torch.manual_seed(3)
        found.append(run(each, x))
    same_within(found[1], found[0], FP32)


def test_ranks_and_scalings_of_their_own() -> None:
    model = adapted(rank_pattern={"k_proj": 3, "up_proj": 1}, targets=LINEARS)
    twin, _ = fused_copy(model)
    layer = twin.model.layers[0].self_attn
    assert layer.q_proj.scaling != layer.k_proj.scaling
    x = tokens()
    same_within(run(twin, x), run(model, x), FP32)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_biases_that_are_trained(family: str) -> None:
    norms = [
        n
        for n, _ in model_of(family).named_modules()
        if "layers" in n and n.endswith(("norm", "layernorm"))
    ]
    model = adapted(family, bias="all", modules_to_save=norms)
    twin, _ = fused_copy(model)
    x = tokens()
    expected = run(model, x)
    assert any("norm" in name for name in expected)
    assert any("bias" in name for name in expected) == (family == "Qwen2")
    same_within(run(twin, x), expected, FP32)


@pytest.mark.parametrize("targets", [ATTENTION, LINEARS], ids=["attention", "all linears"])
@pytest.mark.parametrize("save", ["full", "recompute", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_is_as_near_to_float64_as_unfused_fp8(
    family: str, save: str, targets, device: torch.device
) -> None:
    """A fused layer rounds nothing more often but dy and B, by 2^-9 in bf16 where e5m2 rounds dy by 2^-3: together, the
    errors may be a quarter larger, what two draws of some thirty roundings differ by. Gate and up that are saved in
    e4m3 add what they add over a plain base. By itself no error reaches a quarter of its tensor."""
    size = {"model": {"hidden_size": 64, "intermediate_size": 96}}
    options = {"fp8": DelayedScaling(), "device": device, "dtype": torch.bfloat16}
    fused = adapted(family, targets, **options, **size)
    fuse(fused, save=save)
    unfused = copy.deepcopy(fused)
    unfuse(unfused)
    x = tokens(2, 32, device)
    truth = run(exact(unfused), x.cpu())
    errors = []
    for found in (run(unfused, x), run(fused, x)):
        assert found.keys() == truth.keys()
        errors.append({name: difference(found[name], value) for name, value in truth.items()})
        assert max(errors[-1].values()) < 0.25, errors[-1]
    theirs, ours = (torch.tensor([*each.values()]).square().mean().sqrt() for each in errors)
    extra = E4M3_GATE_UP if save == "fp8" else 0.0
    assert ours <= 1.25 * theirs + extra, errors
    assert errors[1]["logits"] <= 1.5 * errors[0]["logits"], errors


def test_bf16_over_a_plain_base(device: torch.device) -> None:
    """Within twice the unfused layer's own error."""
    model = adapted(targets=LINEARS, device=device, dtype=torch.bfloat16)
    twin, _ = fused_copy(model)
    x = tokens(2, 32, device)
    truth, theirs, ours = run(exact(model), x.cpu()), run(model, x), run(twin, x)
    for name, value in truth.items():
        error, peer = difference(ours[name], value), difference(theirs[name], value)
        assert error <= 2 * peer + 2.0**-8, (name, error, peer)


def test_packed_sequences_by_mask_and_positions() -> None:
    model = adapted()
    twin, _ = fused_copy(model)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)
    starts = torch.tensor([0] * 5 + [1] * 7)
    allowed = (starts[:, None] == starts) & torch.ones(12, 12, dtype=torch.bool).tril()
    mask = allowed[None, None].expand(2, 1, 12, 12)
    x = tokens()
    found = [run(m, x, attention_mask=mask, position_ids=positions) for m in (twin, model)]
    same_within(*found, FP32)
    assert difference(found[0]["logits"], run(twin, x)["logits"]) > 1e-2


@pytest.mark.parametrize("save", ["recompute", "checkpoint"])
def test_packed_sequences_by_their_starts(save: str) -> None:
    """As flash attention takes them, one without tokens among them; a mask beside them is not read."""
    model = adapted()
    twin, _ = fused_copy(model, save=save)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)
    owner = torch.tensor([0] * 5 + [1] * 7)
    mask = (owner[:, None] == owner) & torch.ones(12, 12, dtype=torch.bool).tril()
    starts = torch.tensor([0, 5, 5, 12, 17, 24], dtype=torch.int32)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7}
    x = tokens()
    found = run(twin, x, position_ids=positions, **packed)
    expected = run(
        model, x, position_ids=positions, attention_mask=mask[None, None].expand(2, 1, 12, 12)
    )
    same_within(found, expected, FP32)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must be int32 \[sequences \+ 1\]"):
        starts = starts.long()
        twin(x, use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    with pytest.raises(ValueError, match="must be one tensor, found two"):
        twin(x, use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts.clone())


def test_padding_and_a_sliding_window_come_as_masks() -> None:
    model = adapted("Mistral", model={"sliding_window": 5})
    twin, _ = fused_copy(model)
    x, mask = tokens(), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    for options in ({}, {"attention_mask": mask}):
        same_within(run(twin, x, **options), run(model, x, **options), FP32)


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the distinct storages that a forward's graph keeps inside the layers, parameters and angles apart."""
    held = [*model.parameters(), *model.buffers()]
    known = {p.untyped_storage().data_ptr() for p in held}
    for module in model.modules():
        parts = vars(module).get("_fused")
        for group in () if parts is None else parts.groups:
            known |= {a.untyped_storage().data_ptr() for a in group._lora_A.values()}
    found: dict[int, int] = {}
    inside = [False]

    def pack(t: torch.Tensor) -> torch.Tensor:
        pointer = t.untyped_storage().data_ptr()
        if inside[0] and pointer not in known:
            found[pointer] = t.untyped_storage().nbytes()
        return t

    h = model.get_input_embeddings()(x).detach().requires_grad_()
    positions = torch.arange(x.shape[1])[None]
    angles = model.model.rotary_emb(h, positions)
    known |= {t.untyped_storage().data_ptr() for t in angles}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        inside[0] = True
        for layer in model.model.layers:
            h = layer(h, position_embeddings=angles)
            kept.append(h)
        inside[0] = False
    return sum(found.values())


@pytest.mark.parametrize("targets", [ATTENTION, LINEARS], ids=["attention", "all linears"])
@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_kept_bytes_are_the_predicted_ones(family: str, fp8, save: str, targets) -> None:
    model = adapted(family, targets, fp8=fp8, dtype=torch.bfloat16, lora_dropout=0.1)
    x = tokens(2, 32)
    report = fuse(model, save=save, tokens=x.numel())
    kept = kept_bytes(model, x)
    slots = 2 * 4 * (16 + 8)  # per layer: masks' slots and FP8 scales, not in the formula
    assert abs(kept - report.saved_bytes) <= 0.02 * report.saved_bytes + slots, (kept, report)


def test_the_largest_layer_in_fp8_keeps_little() -> None:
    """design.md §8: hidden 8192, ffn 28672, 64 / 8 heads, 8192 tokens, r = 16 on q, k, v, o: at most 1.1 GB."""
    from lorakernels.modules.fuse_memory import LayerSize

    size = LayerSize(8192, 28672, 64, 8, 128, (48, 16, 0, 0), True, False)
    assert size.saved_bytes("fp8", 8192) <= 1.1e9 < size.saved_bytes("recompute", 8192)


def test_a_memory_budget_mixes_neighbours() -> None:
    model = adapted(targets=LINEARS, model={"num_hidden_layers": 4})
    x = tokens()
    least = fused_copy(model, save="checkpoint", tokens=x.numel())[1].saved_bytes
    fp8 = fused_copy(model, save="fp8", tokens=x.numel())[1].saved_bytes
    expected = run(model, x)
    for budget, modes in (
        (10**9, {"full"}),
        (fp8, {"fp8"}),
        (fp8 - 1, {"fp8", "checkpoint"}),
        (least, {"checkpoint"}),
    ):
        twin, report = fused_copy(model, memory_budget=budget, tokens=x.numel())
        assert {layer.save for layer in report.layers} == modes
        assert report.saved_bytes <= budget and f"{report.saved_bytes:,}" in str(report)
        same_within(run(twin, x), expected, E4M3_GATE_UP)
    before = model.state_dict()
    with pytest.raises(ValueError, match=rf"{least} bytes together"):
        fuse(model, memory_budget=least - 1, tokens=x.numel())
    assert list(before) == list(model.state_dict())
    with pytest.raises(ValueError, match="needs tokens"):
        fuse(model, memory_budget=10**9)


@pytest.mark.parametrize("fp8", [DelayedScaling(amax_history_len=4), None], ids=["fp8", "plain"])
def test_unfuse_restores_every_bit(fp8) -> None:
    model = adapted(targets=LINEARS, fp8=fp8, dtype=torch.bfloat16)
    x = tokens()
    if fp8 is not None:
        run(model, x)
        model.model.layers[0].self_attn.q_proj.fp8_state.reduce_and_update()
    model.config.use_cache = True
    twin, _ = fused_copy(model)
    assert twin.config.use_cache is False
    unfuse(twin)
    assert twin.config.use_cache is True
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    states = model.state_dict(), twin.state_dict()
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert torch.equal(value.float(), states[1][name].float()), name
    pointers = [p.untyped_storage().data_ptr() for p in twin.model.layers.parameters()]
    assert len(set(pointers)) == len(pointers), "memory is still shared"
    expected, found = run(model, x), run(twin, x)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    with pytest.raises(ValueError, match="not fused"):
        unfuse(twin)


def test_unfuse_after_training_leaves_usable_scales() -> None:
    model = adapted(targets=LINEARS, fp8=DelayedScaling(amax_history_len=4), dtype=torch.bfloat16)
    fuse(model)
    state = model.model.layers[0].self_attn.q_proj.fp8_state
    x = tokens()
    for _ in range(2):
        run(model, x)
        state.reduce_and_update()
    unfuse(model)
    attention = model.model.layers[0].self_attn
    scales = [m.fp8_scale for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])
    assert scales[0][0] > 0 and scales[0][1] == 0
    truth = run(exact(model), x)
    assert difference(run(model, x)["logits"], truth["logits"]) < 0.25


def test_plain_linears_become_fp8_on_the_adapters_state_and_may_come_back() -> None:
    model = adapted(fp8=DelayedScaling(), dtype=torch.bfloat16)
    linear = model.model.layers[1].mlp.down_proj
    report = fuse(model, keep_linears=True)
    down = model.model.layers[1].mlp.down_proj
    assert type(down) is FrozenFP8Linear and down.weight.element_size() == 1
    assert down.fp8_state is model.model.layers[0].self_attn.q_proj.fp8_state
    assert down.fp8_state.names[down._column] == "model.layers.1.mlp.down_proj"
    assert report.layers[0].frozen == ("gate_proj", "up_proj", "down_proj")
    unfuse(model)
    assert model.model.layers[1].mlp.down_proj is linear


def test_a_base_that_is_fp8_already_comes_to_the_adapters_state() -> None:
    """With its histories: who updates the adapters' scales updates them all."""
    recipe = DelayedScaling(amax_history_len=4)
    model = adapted(fp8=recipe, dtype=torch.bfloat16)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            frozen = FrozenFP8Linear.from_linear(getattr(layer.mlp, name), recipe, name=name)
            setattr(layer.mlp, name, frozen)
    x = tokens()
    run(model, x)
    down = model.model.layers[1].mlp.down_proj
    down.fp8_state.reduce_and_update()
    scale = down.fp8_scale.clone()
    assert scale.min() > 0
    fuse(model)
    state = model.model.layers[0].self_attn.q_proj.fp8_state
    assert {id(m.fp8_state) for m in model.modules() if isinstance(m, FrozenFP8Linear)} == {
        id(state)
    }
    assert torch.equal(down.fp8_scale, scale)
    run(model, x)
    state.reduce_and_update()
    assert down.fp8_amax_history[-1].min() > 0


def test_adapters_round_trip(tmp_path) -> None:
    model = adapted(targets=LINEARS)
    twin, _ = fused_copy(model)
    x = tokens()
    optimizer = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        run(twin, x)
        optimizer.step()
    save_adapter(twin, tmp_path)
    load_adapter(model, tmp_path)
    trained = run(twin, x)
    same_within(run(model, x), trained, FP32)
    other, _ = fused_copy(adapted(targets=LINEARS))
    other.load_state_dict(twin.state_dict())
    same_within(run(other, x), trained, FP32)
    load_adapter(other, tmp_path)
    same_within(run(other, x), trained, FP32)


@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
def test_merge_and_disable(fp8) -> None:
    model = adapted(targets=LINEARS, fp8=fp8).eval()
    twin, _ = fused_copy(model)
    x = tokens()
    bound = (
        FP32 if fp8 is None else 2.0**-3
    )  # e4m3 rounds the merged weight, by 2^-4 at most, in two layers

    def logits(m: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return m(x, use_cache=False).logits

    adapters = logits(twin)
    merge_lora(twin), merge_lora(model)
    assert difference(logits(twin), logits(model)) <= FP32
    assert difference(logits(twin), adapters) <= bound
    unmerge_lora(twin), unmerge_lora(model)
    assert torch.equal(logits(twin), adapters)
    with disable_lora(twin), disable_lora(model):
        assert difference(logits(twin), logits(model)) <= FP32
        assert difference(logits(twin), adapters) > 1e-2
    twin.model.layers[0].self_attn.k_proj.disable_adapters = True  # one of a group
    model.model.layers[0].self_attn.k_proj.disable_adapters = True
    assert difference(logits(twin), logits(model)) <= FP32
    twin.train(), model.train()
    if fp8 is None:
        same_within(run(twin, x), run(model, x), FP32)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "to", "assign"])
def test_memory_that_moved_is_joined_again(how: str) -> None:
    model = adapted(targets=LINEARS, fp8=DelayedScaling(), weight_layout="both")
    fuse(model)
    x = tokens()
    expected = run(model, x)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = model
        values = {name: value.clone() for name, value in model.state_dict().items()}
        if how == "to":
            twin.double().float()
        twin.load_state_dict(values, assign=how == "assign")
    for _ in range(2):
        found = run(twin, x)
    if how != "assign":  # a parameter that was assigned is frozen or not as the value was
        assert found.keys() == expected.keys()
    assert torch.equal(found["logits"], expected["logits"])
    group = twin.model.layers[0]._fused.qkv
    assert group.members[0] is twin.model.layers[0].self_attn.q_proj
    assert group.members[1].lora_A.data_ptr() > group.members[0].lora_A.data_ptr()
    assert group._is_joined()
    assert group._weight is not None and group._weight.shape == (64, 32)


def test_generation_with_a_cache_is_the_layers_own() -> None:
    model = adapted().eval()
    twin, _ = fused_copy(model)
    x = tokens(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(twin.generate(x, **options), model.generate(x, **options))
    twin.train()
    with pytest.raises(RuntimeError, match="without a key-value cache"):
        twin(x, use_cache=True)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("save", ["recompute", "checkpoint"])
def test_transformers_own_checkpointing(save: str, reentrant: bool) -> None:
    model = adapted(targets=LINEARS, lora_dropout=0.3, fp8=DelayedScaling())
    fuse(model, save=save)
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    x, found = tokens(), []
    for each in (model, twin):
        torch.manual_seed(3)
        found.append(run(each, x))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
    states = [m.model.layers[0].self_attn.q_proj.fp8_state for m in (model, twin)]
    assert torch.equal(states[0].forward, states[1].forward)
    assert torch.equal(states[0].backward, states[1].backward)


def test_two_microbatches_in_flight() -> None:
    """Forward, forward, backward, backward: as one after the other, scales and masks too."""
    model = adapted(targets=LINEARS, lora_dropout=0.3, fp8=DelayedScaling(amax_history_len=4))
    fuse(model)
    model.model.layers[0].self_attn.q_proj.fp8_state.reduce_and_update()
    batches, found = (tokens(), tokens()), []
    for nested in (False, True):
        torch.manual_seed(3)
        model.zero_grad()
        losses = []
        for x in batches:
            losses.append(model(x, labels=x, use_cache=False).loss)
            if not nested:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_a_parameter_changed_between_forward_and_backward_is_noticed() -> None:
    model = adapted()
    fuse(model)
    x = tokens()
    loss = model(x, labels=x, use_cache=False).loss
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.lora_B.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_trainer_trains_a_fused_model(tmp_path) -> None:
    def trained(model: nn.Module) -> list[float]:
        data = [{"input_ids": row, "labels": row} for row in torch.arange(96).view(8, 12) % 64]
        arguments = __import__("transformers").TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=1,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=0,
        )
        trainer = __import__("transformers").Trainer(model, arguments, train_dataset=data)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    model = adapted(targets=LINEARS)
    twin, _ = fused_copy(model)
    losses = trained(model), trained(twin)
    assert len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def on_layer(change):
    def wrapped(model: nn.Module) -> None:
        change(model.model.layers[1])

    return wrapped


def _tie(model: nn.Module) -> None:
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def _share(model: nn.Module) -> None:
    model.model.layers[1] = model.model.layers[0]


REFUSALS = {
    "hook": (
        on_layer(lambda m: m.mlp.register_forward_hook(lambda *_: None)),
        r"layers\.1\.mlp has a hook",
    ),
    "attention dropout": (
        on_layer(lambda m: setattr(m.self_attn, "attention_dropout", 0.1)),
        r"attention_dropout must be 0, found 0\.1",
    ),
    "activation": (on_layer(lambda m: setattr(m.mlp, "act_fn", nn.GELU())), "must be SiLU"),
    "shared layer": (_share, r"layers\.1 and model\.layers\.0 are one layer"),
    "tied weight": (_tie, "shares its memory with"),
    "trained base": (
        on_layer(lambda m: m.mlp.up_proj.weight.requires_grad_()),
        r"up_proj\.weight is trained",
    ),
    "not finite": (
        on_layer(lambda m: m.mlp.up_proj.weight.data.fill_(float("nan"))),
        r"up_proj\.weight must be finite",
    ),
    "another linear": (
        on_layer(lambda m: setattr(m.mlp, "up_proj", nn.Bilinear(2, 2, 2))),
        r"layers\.1\.mlp\.up_proj is a Bilinear",
    ),
    "another module": (
        on_layer(lambda m: m.add_module("gate", nn.Linear(2, 2))),
        r"must have the modules",
    ),
    "another norm": (
        on_layer(lambda m: setattr(m, "input_layernorm", nn.LayerNorm(32))),
        "is a LayerNorm, expected an RMSNorm",
    ),
    "merged": (on_layer(lambda m: m.self_attn.q_proj.merge()), "q_proj is merged"),
    "dropout": (
        on_layer(lambda m: setattr(m.self_attn.q_proj, "lora_dropout", 0.5)),
        "must have one lora_dropout",
    ),
    "rng": (
        on_layer(lambda m: setattr(m.self_attn.q_proj, "rng_state", PhiloxState(1))),
        "must have one rng_state",
    ),
    "group": (
        lambda m: group_projections(m, [("q_proj", "k_proj", "v_proj")]),
        "fuse groups by itself",
    ),
    "attention": (
        lambda m: setattr(m.config, "_attn_implementation", "flash_attention_2"),
        "flash_attention_2",
    ),
    "epsilon": (
        on_layer(lambda m: setattr(m.input_layernorm, "variance_epsilon", 0.5)),
        "one epsilon",
    ),
    "meta": (on_layer(lambda m: m.mlp.to("meta")), "must be on one device"),
    "device": (on_layer(lambda m: m.to("meta")), "meta device"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_anything_is_changed(case: str) -> None:
    change, message = REFUSALS[case]
    model = adapted(fp8=DelayedScaling())
    change(model)
    before = [type(m) for m in model.modules()]
    names = model.model.layers[0].self_attn.q_proj.fp8_state.names
    with pytest.raises((ValueError, TypeError), match=message):
        fuse(model)
    assert [type(m) for m in model.modules()] == before
    assert model.model.layers[0].self_attn.q_proj.fp8_state.names == names


def test_other_refusals() -> None:
    model = adapted(fp8=DelayedScaling())
    for options, message in (
        ({"save": "some"}, "save must be one of"),
        ({"attention": "fast"}, "attention must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            fuse(model, **options)
    with pytest.raises(ValueError, match="no LoRALinear: call apply_lora"):
        fuse(model_of("Llama"))
    with pytest.raises(ValueError, match="Sequential has no decoder layer"):
        fuse(nn.Sequential(nn.Linear(2, 2)))
    state = model.model.layers[0].self_attn.q_proj.fp8_state
    state.pin("a graph")
    with pytest.raises(RuntimeError, match="pinned by a graph"):
        fuse(model)
    state.unpin()
    fuse(model)
    with pytest.raises(ValueError, match=r"layers\.0 is fused already"):
        fuse(model)


def test_another_family_is_refused_by_name() -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(TypeError, match=r"h\.0 is a GPT2Block: fuse knows LlamaDecoderLayer"):
        fuse(model)


def test_what_happens_to_a_fused_layer_later_is_refused_at_its_call() -> None:
    model = adapted()
    fuse(model)
    x, layer = tokens(), model.model.layers[0]
    handle = layer.mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="mlp has a hook"):
        run(model, x)
    handle.remove()
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(x, output_attentions=True, use_cache=False)
    model(x, output_hidden_states=True, use_cache=False)
    run(model, x)  # transformers' idle collectors stay behind as hooks
    old, layer.mlp.up_proj = layer.mlp.up_proj, nn.Linear(32, 48, bias=False)
    with pytest.raises(RuntimeError, match=r"mlp\.up_proj is another module"):
        run(model, x)
    layer.mlp.up_proj = old
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast to"):
        run(model, x)
    with pytest.raises(ValueError, match="position_embeddings"):
        layer(torch.randn(1, 3, 32))
    with pytest.raises(TypeError, match="4-D tensor"):
        layer(torch.randn(1, 3, 32), attention_mask=torch.ones(1, 3))
    assert isinstance(layer.self_attn.q_proj, LoRALinear)


def test_apply_lora_keeps_away_from_what_was_never_adapted() -> None:
    """Adapters on the MLP only: attention runs frozen, and the first layer's input may need no gradient."""
    plain = model_of("Llama")
    apply_lora(plain, LoRAConfig(r=4, target_modules=["gate_proj", "down_proj"], fp8=None))
    twin, _ = fused_copy(plain)
    x = tokens()
    for m in (plain, twin):
        m.zero_grad()
        m(x, labels=x, use_cache=False).loss.backward()
    for (name, p), q in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad.norm() > 0:
            assert difference(p.grad, q.grad) <= FP32, name
