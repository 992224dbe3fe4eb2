# SPDX-License-Identifier: Apache-2.0
"""Our layer inside PEFT: built by its dispatch, or patched into a PeftModel and taken out."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor, nn

from lorakernels import BlockScaling, DelayedScaling, FrozenFP8Linear
from lorakernels.modules.linear import calls
from lorakernels.recorded.routing import without_recordings
from tests.dry_cuda import dry_cuda
from tests.recorded_calls import Recorded

peft = pytest.importorskip("peft")
from lorakernels.integrations.peft import patch, register, report, restore  # noqa: E402

FP8 = DelayedScaling()
BASES = pytest.mark.parametrize(
    "fp8", [None, FP8, BlockScaling()], ids=["plain base", "FP8 base", "FP8 blocks"]
)
# fp32, the same sums in another order
FP32 = {"rtol": 1e-5, "atol": 1e-5}
UNNAMED = re.compile(r"m\d+\+\d+ =[0-9a-f]*")  # memory that a step allocates


class MLP(nn.Module):
    """Sizes that are no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.lin0, self.lin1 = nn.Linear(10, 20), nn.Linear(20, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin1(torch.tanh(self.lin0(x)))


def config(**kwargs) -> peft.LoraConfig:
    return peft.LoraConfig(**{"target_modules": ["lin0", "lin1"], "r": 3, "lora_alpha": 5} | kwargs)


def wrapped(base: nn.Module, fp8: DelayedScaling | None, **kwargs) -> peft.PeftModel:
    return peft.get_peft_model(copy.deepcopy(base), register(config(**kwargs), fp8=fp8))


def randomize(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.5, generator=generator)


def pair(**kwargs) -> tuple[peft.PeftModel, peft.PeftModel]:
    """The same base and adapter, in PEFT's class and in ours over the plain base."""
    base = MLP()
    theirs = peft.get_peft_model(copy.deepcopy(base), config(**kwargs))
    ours = wrapped(base, None, **kwargs)
    randomize(theirs), randomize(ours)
    return theirs, ours


def layer_of(model: peft.PeftModel) -> nn.Module:
    return model.base_model.model.lin0


def base_bytes(model: nn.Module) -> dict[str, bytes]:
    """Every value held by a base layer, byte for byte."""
    return {
        name: value.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if "base_layer" in name
    }


@BASES
def test_dispatch_builds_our_layer(fp8):
    base = MLP()
    model = wrapped(base, fp8)
    layer = layer_of(model)
    assert isinstance(layer, peft.tuners.lora.Linear)
    assert (layer.in_features, layer.out_features) == (10, 20)
    assert layer.weight.shape == (20, 10)
    assert torch.equal(layer.bias, base.lin0.bias)
    assert layer.lora_A["default"].weight.dtype == torch.float32
    shown = report(model)
    assert shown.fused == ["base_model.model.lin0", "base_model.model.lin1"]
    assert str(shown).startswith("2 of 2 LoRA layers run lorakernels")
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 4 and all("lora_" in name for name in trainable)
    x = torch.randn(4, 10)
    with model.disable_adapter():
        assert torch.equal(model(x), model(x))
        off = model(x)
    assert torch.equal(model(x), off)  # B = 0
    if fp8 is None:
        torch.testing.assert_close(off, base(x), **FP32)


@pytest.mark.parametrize("shape", [(5, 10), (10,), (0, 10), (2, 3, 10)], ids=str)
def test_plain_base_computes_what_peft_computes(shape):
    theirs, ours = pair(bias="lora_only")
    x = torch.randn(shape)
    dy = torch.randn(*shape[:-1], 6)
    results = []
    for model in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(dy)
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        results.append({"y": y, "dx": leaf.grad} | grads)
    assert results[0].keys() == results[1].keys() and len(results[0]) == 7
    for name in results[0]:
        torch.testing.assert_close(
            results[1][name], results[0][name], **FP32, msg=lambda m, n=name: n + m
        )


def test_eval_drops_nothing_and_train_draws_from_torch():
    theirs, ours = pair(lora_dropout=0.4)
    x = torch.randn(64, 10)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), **FP32)
    ours.train()
    torch.manual_seed(1)
    first, second = ours(x), ours(x)
    torch.manual_seed(1)
    assert torch.equal(ours(x), first) and not torch.equal(first, second)


@BASES
def test_training_moves_adapters_only(fp8):
    model = wrapped(MLP(), fp8, lora_dropout=0.1)
    before = base_bytes(model)
    x, target = torch.randn(64, 10), torch.randn(64, 6)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-2)
    losses = []
    for _ in range(40):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-5:]) < 0.8 * losses[0]
    assert base_bytes(model) == before


@BASES
def test_saves_and_loads(fp8, tmp_path):
    base = MLP()
    model = wrapped(base, fp8).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    again = register(peft.LoraConfig.from_pretrained(tmp_path), fp8=fp8)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, config=again)
    assert len(report(loaded).fused) == 2
    x = torch.randn(4, 10)
    assert torch.equal(loaded(x), model(x))
    lean = peft.PeftModel.from_pretrained(
        copy.deepcopy(base), tmp_path, config=again, low_cpu_mem_usage=True
    )
    assert torch.equal(lean(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(loaded))(x), model(x))


@BASES
def test_several_adapters_run_through_peft(fp8):
    model = wrapped(MLP(), fp8).eval()
    model.add_adapter("other", config(r=4))
    randomize(model)
    x = torch.randn(6, 10)
    layer = layer_of(model)
    outputs = {}
    for names in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(names)
        outputs[len(outputs)] = layer(x)
        expected = "peft: 2 adapters are active" if len(names) == 2 else "lorakernels"
        assert layer.lorakernels_path == expected
    base = layer.base_layer(x)
    torch.testing.assert_close(outputs[0] + outputs[1] - base, outputs[2], **FP32)


@BASES
def test_mixed_batches_run_through_peft(fp8):
    model = wrapped(MLP(), fp8).eval()
    model.add_adapter("other", config(r=4))
    randomize(model)
    x = torch.randn(1, 10).expand(3, 10)  # one amax, so that FP8 quantizes every row alike
    layer = layer_of(model)
    mixed = layer(x, adapter_names=["default", "__base__", "other"])
    model.base_model.set_adapter("default")
    torch.testing.assert_close(mixed[0], layer(x)[0], **FP32)
    torch.testing.assert_close(mixed[1], layer.base_layer(x)[1], **FP32)


@BASES
def test_autocast_keeps_peft_dtypes(fp8):
    model = wrapped(MLP(), fp8)
    x = torch.randn(4, 10)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer_of(model).lora_B["default"].weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "kwargs, reason",
    [
        ({"use_dora": True}, "adapter 'default' is a DoraLinearVariant"),
        ({"lora_bias": True}, "adapter 'default' has a bias on lora_B"),
        ({"lora_dropout": 1.0}, "dropout drops everything"),
    ],
)
def test_other_maths_is_pefts_over_a_plain_base(kwargs, reason):
    theirs, ours = pair(**kwargs)
    assert layer_of(ours).lorakernels_path == f"peft: {reason}"
    x = torch.randn(4, 10)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)


def test_fp8_base_refuses_what_needs_the_weight():
    with pytest.raises(ValueError, match="use_dora=True needs a base weight in full precision"):
        wrapped(MLP(), FP8, use_dora=True)
    model = wrapped(MLP(), FP8)
    with pytest.raises(ValueError, match="init_lora_weights='olora' reads the base weight"):
        model.add_adapter("other", config(init_lora_weights="olora"))


def test_base_that_is_trained_or_hooked_runs_through_peft():
    _, ours = pair()
    layer = layer_of(ours)
    layer.base_layer.weight.requires_grad_(True)
    assert layer.lorakernels_path == "peft: the base weight is trained"
    ours(torch.randn(2, 10)).sum().backward()
    assert layer.base_layer.weight.grad is not None
    layer.base_layer.weight.requires_grad_(False)
    seen = []
    hook = layer.lora_A["default"].register_forward_hook(lambda *_: seen.append(1))
    ours(torch.randn(2, 10))
    assert seen == [1] and "hooks" in layer.lorakernels_path
    hook.remove()
    assert layer.lorakernels_path == "lorakernels"


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_is_no_plain_linear_is_left_to_peft():
    base = MLP()
    base.lin0 = Doubled(10, 20)
    model = wrapped(base, FP8)
    assert type(layer_of(model)) is peft.tuners.lora.Linear
    assert report(model).rows[0].path == "peft: a Linear of PEFT's"
    x = torch.randn(3, 10)
    torch.testing.assert_close(layer_of(model)(x), base.lin0(x), **FP32)


@BASES
def test_patch_and_restore(fp8):
    model = peft.get_peft_model(MLP(), config()).eval()
    randomize(model)
    x = torch.randn(8, 10)
    y, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name: id(p) for name, p in model.named_parameters()}
    shown = patch(model, fp8=fp8)
    assert len(shown.fused) == 2 and (shown.fp8_state is not None) == (fp8 == FP8)
    if fp8 is None:
        torch.testing.assert_close(model(x), y, **FP32)
        assert {name: id(p) for name, p in model.named_parameters()} == parameters
    else:
        assert isinstance(layer_of(model).base_layer, FrozenFP8Linear)
        assert 0 < (model(x) - y).norm() < 0.1 * y.norm()  # two FP8 roundings of 2**-4
        model.merge_adapter()
    assert restore(model).fused == []
    assert type(layer_of(model)) is peft.tuners.lora.Linear
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert torch.equal(model(x), y)


def test_register_comes_before_the_layers():
    model = peft.get_peft_model(MLP(), config())
    with pytest.raises(ValueError, match=r"register before get_peft_model, or patch\(model\)"):
        register(config(), model=model)


def test_patch_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="MLP has no LoRA layer"):
        patch(MLP())
    model = peft.get_peft_model(MLP(), config(use_dora=True))
    before = model.state_dict().keys()
    with pytest.raises(ValueError, match="lin0 is a DoraLinearVariant"):
        patch(model, fp8=FP8)
    assert model.state_dict().keys() == before
    model = peft.get_peft_model(MLP(), config())
    model.merge_adapter()
    with pytest.raises(ValueError, match="lin0 is merged"):
        patch(model, fp8=FP8)
    model.unmerge_adapter()
    patch(model, fp8=FP8, restorable=False)
    with pytest.raises(ValueError, match="original weight was not kept"):
        restore(model)
    with pytest.raises(TypeError, match="LoraConfig, got IA3Config"):
        register(peft.IA3Config())
    with pytest.raises(
        TypeError, match="fp8 must be a DelayedScaling, a BlockScaling or None, got True"
    ):
        register(config(), fp8=True)


def recorded_layer(fp8: DelayedScaling | BlockScaling, **kwargs) -> nn.Module:
    """[..., 256] → [..., 384] in bf16, of which there are recordings, with the adapters "default" and "other"."""
    base = nn.ModuleDict({"lin": nn.Linear(256, 384, dtype=torch.bfloat16)})
    own = {"target_modules": ["lin"], "r": 16, "lora_dropout": 0.1} | kwargs
    model = wrapped(base, fp8, **own)
    model.add_adapter("other", config(**own | {"lora_dropout": 0.3, "lora_alpha": 32}))
    return model.base_model.model["lin"]


def launched(layer: nn.Module, x: Tensor, recorded: Recorded) -> list[str]:
    """What one step hands to kernels, from one random state."""
    recorded.name(x=x, **{name.replace(".", "_"): p.data for name, p in layer.named_parameters()})
    recorded.calls.clear()
    torch.manual_seed(0)
    y = layer(x)
    y.backward(torch.ones_like(y))
    return [f"{call.name} {UNNAMED.sub('there', str(call.arguments))}" for call in recorded.calls]


@pytest.mark.parametrize("fp8", [FP8, BlockScaling()], ids=["FP8 base", "FP8 blocks"])
def test_a_call_like_one_before_checks_nothing_again(fp8, monkeypatch):
    layer, x = recorded_layer(fp8), torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True)
    with dry_cuda() as recorded:
        with without_recordings():
            by_ops = launched(layer, x, recorded)
        launched(layer, x, recorded)
        monkeypatch.setattr(calls, "check_input", None)
        monkeypatch.setattr(calls, "weight_and_call", None)
        before = recorded.runs
        assert by_ops and launched(layer, x, recorded) == by_ops
        assert recorded.runs == before + 2


@pytest.mark.parametrize("fp8", [FP8, BlockScaling()], ids=["FP8 base", "FP8 blocks"])
def test_what_changes_at_a_peft_layer_is_seen_after_calls_like_it(fp8):
    layer, x = recorded_layer(fp8), torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True)
    changes = {
        "another adapter": lambda: layer.set_adapter("other"),
        "its scaling": lambda: layer.set_scale("other", 3.0),
        "evaluation": lambda: layer.eval(),
        "training": lambda: layer.train(),
        "no dropout": lambda: setattr(layer.lora_dropout["other"], "p", 0.0),
        "a frozen A": lambda: layer.lora_A["other"].weight.requires_grad_(False),
        "the first adapter": lambda: layer.set_adapter("default"),
    }
    with dry_cuda() as recorded:
        found = [launched(layer, x, recorded)]
        for name, change in changes.items():
            change()
            with without_recordings():
                by_ops = launched(layer, x, recorded)
            for _ in range(2):
                before = recorded.runs
                assert launched(layer, x, recorded) == by_ops, name
                assert recorded.runs == before + 2, name
            assert by_ops != found[-1], name
            found.append(by_ops)


def test_what_a_peft_layer_cannot_take_is_refused_after_a_call_as_well():
    """Before a slot is drawn, or a scale updated."""
    layer = recorded_layer(FP8)
    with dry_cuda() as recorded:
        layer(torch.randn(32, 256, dtype=torch.bfloat16))
        recorded.calls.clear()
        random, updates = torch.get_rng_state(), layer.base_layer.fp8_state.updates
        with pytest.raises(ValueError, match="x must have shape"):
            layer(torch.zeros(32, 128, dtype=torch.bfloat16))
        assert torch.equal(torch.get_rng_state(), random)
        assert layer.base_layer.fp8_state.updates == updates and not recorded.calls
