# SPDX-License-Identifier: Apache-2.0
"""What fuse refuses before it changes anything, and what a fused layer refuses at its call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lorakernels import (
    DelayedScaling,
    FP8State,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    PhiloxState,
    apply_lora,
    fuse,
)
from tests.fusion.fused_models import (
    FP32,
    PACKINGS,
    adapted,
    fp8_state,
    model_of,
    run,
    same_within,
    tokens,
)


def on_layer(change):
    def wrapped(model: nn.Module) -> None:
        change(model.model.layers[1])

    return wrapped


def _tie(model: nn.Module) -> None:
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def _share(model: nn.Module) -> None:
    model.model.layers[1] = model.model.layers[0]


def _become(module: nn.Module, name: str) -> None:
    """Of a subclass that has the same name and changes what is computed."""
    kind = type(module)
    forward = lambda self, *args, **kwargs: kind.forward(self, *args, **kwargs)  # noqa: E731
    module.__class__ = type(name, (kind,), {"forward": forward, "__module__": "own"})


def _half(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().bfloat16())


def _biases(attention: nn.Module) -> None:
    attention.q_proj.bias = nn.Parameter(torch.zeros(32))
    attention.k_proj.bias = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))


def _frozen(linear: nn.Linear) -> FrozenFP8Linear:
    return FrozenFP8Linear.from_linear(linear, DelayedScaling(margin=1))


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
        r"layers\.1\.input_layernorm is a torch\..*LayerNorm, expected transformers.*LlamaRMSNorm",
    ),
    "a subclass of the norm": (
        on_layer(lambda m: _become(m.input_layernorm, "LlamaRMSNorm")),
        r"layers\.1\.input_layernorm is a .*own\.LlamaRMSNorm, expected transformers",
    ),
    "a subclass of the mlp": (
        on_layer(lambda m: _become(m.mlp, "LlamaMLP")),
        r"layers\.1\.mlp is a .*own\.LlamaMLP, expected transformers",
    ),
    "a subclass of the attention": (
        on_layer(lambda m: _become(m.self_attn, "LlamaAttention")),
        r"layers\.1\.self_attn is a .*own\.LlamaAttention, expected transformers",
    ),
    "a forward on the mlp": (
        on_layer(lambda m: setattr(m.mlp, "forward", lambda x: x)),
        r"layers\.1\.mlp has a forward of its own",
    ),
    "a forward on a projection": (
        on_layer(lambda m: setattr(m.mlp.up_proj, "forward", m.mlp.up_proj.forward)),
        r"layers\.1\.mlp\.up_proj has a forward of its own",
    ),
    "a forward on the layer": (
        on_layer(lambda m: setattr(m, "forward", m.forward)),
        r"layers\.1 has a forward of its own",
    ),
    "norms on heads that the family does not have": (
        on_layer(lambda m: setattr(m.self_attn, "q_norm", m.input_layernorm)),
        r"layers\.1\.self_attn must have the modules",
    ),
    "an activation of the same name": (
        on_layer(lambda m: setattr(m.mlp, "act_fn", type("SiLU", (nn.GELU,), {})())),
        "must be SiLU",
    ),
    "adapter dtype": (
        on_layer(lambda m: setattr(m.self_attn.q_proj, "lora_B", _half(m.self_attn.q_proj.lora_B))),
        r"must have one adapter dtype, found \['torch\.bfloat16', 'torch\.float32'\]",
    ),
    "bias dtype": (on_layer(lambda m: _biases(m.self_attn)), "must have one bias dtype"),
    "recipe": (
        on_layer(lambda m: setattr(m.mlp, "up_proj", _frozen(m.mlp.up_proj))),
        r"layers\.1\.mlp\.up_proj follows .*margin=1",
    ),
    "bidirectional": (
        on_layer(lambda m: setattr(m.self_attn, "is_causal", False)),
        r"layers\.1: self_attn\.is_causal must be True, found False",
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
PACKED_REFUSALS = {
    "hook": (
        on_layer(lambda m: m.mlp.register_forward_hook(lambda *_: None)),
        r"layers\.1\.mlp has a hook",
    ),
    "hook on a dropout": (
        on_layer(lambda m: m.resid_mlp_dropout.register_forward_hook(lambda *_: None)),
        r"layers\.1\.resid_mlp_dropout has a hook",
    ),
    "attention dropout": (
        on_layer(lambda m: setattr(m.self_attn, "attention_dropout", 0.1)),
        r"attention_dropout must be 0, found 0\.1",
    ),
    "dropout behind attention": (
        on_layer(lambda m: setattr(m.resid_attn_dropout, "p", 0.1)),
        r"layers\.1: resid_attn_dropout must be Dropout\(p=0\), found Dropout\(p=0\.1",
    ),
    "dropout behind the mlp": (
        on_layer(lambda m: setattr(m.resid_mlp_dropout, "p", 0.1)),
        r"layers\.1: resid_mlp_dropout must be Dropout\(p=0\), found Dropout\(p=0\.1",
    ),
    "a dropout that is none": (
        on_layer(lambda m: setattr(m, "resid_mlp_dropout", nn.Linear(2, 2))),
        r"layers\.1: resid_mlp_dropout must be Dropout\(p=0\), found Linear",
    ),
    "activation": (on_layer(lambda m: setattr(m.mlp, "activation_fn", nn.GELU())), "must be SiLU"),
    "another linear": (
        on_layer(lambda m: setattr(m.self_attn, "qkv_proj", nn.Bilinear(2, 2, 2))),
        r"layers\.1\.self_attn\.qkv_proj is a Bilinear",
    ),
    "separate projections": (
        on_layer(lambda m: m.self_attn.add_module("q_proj", nn.Linear(2, 2))),
        r"layers\.1\.self_attn must have the modules \['o_proj', 'qkv_proj'\]",
    ),
    "a subclass of the mlp": (
        on_layer(lambda m: _become(m.mlp, "Phi3MLP")),
        r"layers\.1\.mlp is a .*own\.Phi3MLP, expected transformers",
    ),
}
CASES = {
    **{("Llama", name): case for name, case in REFUSALS.items()},
    **{("Phi3", name): case for name, case in PACKED_REFUSALS.items()},
}


@pytest.mark.parametrize(("family", "case"), CASES)
def test_refused_before_anything_is_changed(family: str, case: str) -> None:
    change, message = CASES[family, case]
    model = adapted(family, fp8=DelayedScaling())
    change(model)
    before = [type(m) for m in model.modules()]
    names = fp8_state(model).names
    with pytest.raises((ValueError, TypeError), match=message):
        fuse(model)
    assert [type(m) for m in model.modules()] == before
    assert fp8_state(model).names == names


def test_rope_that_turns_a_part_of_each_head_is_refused() -> None:
    """As Phi-4-mini has it."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = adapted("Phi3", model={"rope_parameters": rope})
    run(model, tokens())
    with pytest.raises(ValueError, match=r"layers\.0: partial_rotary_factor must be 1, found 0\.5"):
        fuse(model)


@pytest.mark.parametrize("family", PACKINGS)
def test_compiling_a_fused_layer_is_refused_by_its_path(family: str) -> None:
    model = adapted(family, fp8=DelayedScaling())
    fuse(model)
    with pytest.raises(RuntimeError, match=r"^model\.layers\.1 is fused and cannot be compiled"):
        model.model.layers[1].compile()


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    sharded = model.model.layers[1].mlp.down_proj.weight
    monkeypatch.setattr("lorakernels.fusion.check.is_sharded", lambda p: p is sharded)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight is sharded"):
        fuse(model)


@pytest.mark.parametrize("part", ["MLP", "Attention", "RMSNorm"])
def test_a_class_that_was_patched_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    kind = getattr(modeling_llama, f"Llama{part}")
    model = adapted()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, *args, **kwargs: args[0])
        with pytest.raises(TypeError, match=f"the forward of Llama{part} was replaced by"):
            fuse(model)
    other = type(f"Other{part}", (kind,), {})
    monkeypatch.setattr(modeling_llama, f"Llama{part}", other)
    with pytest.raises(TypeError, match=f"Other{part}, expected transformers.*Llama{part}"):
        fuse(adapted())


def test_a_last_norm_of_another_class_is_left_alone() -> None:
    model, x = adapted(), tokens()
    kind = type(model.model.norm)
    forward = lambda self, h: 2 * kind.forward(self, h)  # noqa: E731
    model.model.norm.__class__ = type("LlamaRMSNorm", (kind,), {"forward": forward})
    expected = run(model, x)
    fuse(model)
    same_within(run(model, x), expected, FP32)


def test_a_base_that_is_to_train_under_an_adapter_is_refused() -> None:
    model = adapted()
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight is trained"):
        fuse(model)


@pytest.mark.parametrize("saved", ["o_proj", "mlp"])
def test_a_projection_in_modules_to_save_is_refused_also_where_it_no_longer_trains(
    saved: str,
) -> None:
    model = model_of("Llama")
    config = LoRAConfig(r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=[saved])
    apply_lora(model, config)
    model.requires_grad_(False)  # as load_adapter(is_trainable=False) does
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layers\.0\.\S+_proj is in modules_to_save: a fused"):
        fuse(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


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
    with pytest.raises(
        RuntimeError, match=r"^6 projections would be.* pinned by a graph: fuse bef"
    ):
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


DROPOUTS = {
    "self_attn.attention_dropout": lambda m, p: setattr(m.self_attn, "attention_dropout", p),
    "resid_attn_dropout.p": lambda m, p: setattr(m.resid_attn_dropout, "p", p),
    "resid_mlp_dropout.p": lambda m, p: setattr(m.resid_mlp_dropout, "p", p),
}


@pytest.mark.parametrize("place", DROPOUTS)
def test_a_dropout_set_on_a_fused_layer_is_refused_in_training_alone(place: str) -> None:
    model = adapted("Phi3")
    fuse(model)
    x, layer = tokens(), model.model.layers[1]
    expected = run(model, x)["logits"]
    DROPOUTS[place](layer, 0.25)
    with pytest.raises(ValueError, match=rf"must be 0 in training, found {place} = 0\.25: unfuse"):
        run(model, x)
    model.eval()
    assert torch.equal(run(model, x)["logits"], expected)
    DROPOUTS[place](layer, 0.0)
    assert torch.equal(run(model.train(), x)["logits"], expected)


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
    layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="is_causal must be True in a fused layer, found False"):
        run(model, x)
    layer.self_attn.is_causal = True
    old, layer.mlp.up_proj = layer.mlp.up_proj, nn.Linear(32, 48, bias=False)
    with pytest.raises(RuntimeError, match=r"mlp\.up_proj is another module"):
        run(model, x)
    layer.mlp.up_proj = old
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast to"):
        run(model, x)
    layer.mlp.down_proj.weight.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.mlp\.down_proj: weight\.requires_grad must be"
    ):
        run(model, x)
    with torch.no_grad():
        model(x)
    with pytest.raises(RuntimeError, match="must be False, found True"):
        run(model, x)
    layer.mlp.down_proj.weight.requires_grad_(False)
    run(model, x)
    with pytest.raises(ValueError, match="position_embeddings"):
        layer(torch.randn(1, 3, 32))
    with pytest.raises(TypeError, match="4-D tensor"):
        layer(torch.randn(1, 3, 32), attention_mask=torch.ones(1, 3))
    assert isinstance(layer.self_attn.q_proj, LoRALinear)


def test_layers_made_one_by_one_keep_their_states_where_fuse_is_refused() -> None:
    model = adapted("Llama", fp8=DelayedScaling())
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    for i, layer in enumerate(layers):
        layer.fp8_state, layer.column = FP8State([f"own {i}"], layer.fp8_state.recipe), 0
    before = [(layer.fp8_state, layer.column, layer.name) for layer in layers]
    model.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="attention_dropout"):
        fuse(model)
    assert [(m.fp8_state, m.column, m.name) for m in layers] == before
    model.model.layers[1].self_attn.attention_dropout = 0.0
    fuse(model)
    assert len({id(layer.fp8_state) for layer in layers}) == 1


def test_what_a_layer_with_capped_scores_does_not_take() -> None:
    model = adapted("Gemma2", fp8=DelayedScaling())
    with pytest.raises(ValueError, match=r"layers\.0 caps attention's scores at 2\.0: .*'math'"):
        fuse(model, attention="math")
    layer = model.model.layers[1]
    layer.mlp.act_fn = nn.GELU()
    with pytest.raises(
        ValueError, match=r"layers\.1: the activation must be GELU by tanh, found GELU"
    ):
        fuse(model)
    model = adapted("Gemma2", fp8=DelayedScaling())
    model.config._attn_implementation = "sdpa"
    with pytest.raises(
        ValueError, match=r'runs eager\'s attention, .*set_attn_implementation\("eager"'
    ):
        fuse(model)


def test_layers_of_an_older_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's returned a tuple."""
    model = adapted("Gemma3")
    kind = type(model.model.layers[0])

    def forward(self, hidden_states, position_embeddings, output_attentions=False):  # type: ignore[no-untyped-def]
        return (hidden_states,)

    forward.__module__ = kind.__module__
    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(ValueError, match=r"layers\.0: .* in transformers 5: found an older one"):
        fuse(model)
