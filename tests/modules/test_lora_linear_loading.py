# SPDX-License-Identifier: Apache-2.0
"""What load_state_dict and assignments may put where FP8 bytes, or a plain weight, are held."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.torch_version import TorchVersion

from lorakernels import DelayedScaling, LoRAConfig, LoRALinear
from lorakernels.modules.linear import stored_weight

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True, params=[torch.uint8, E4M3], ids=["stored as uint8", "stored as e4m3"])
def storage(request, monkeypatch):
    """What this torch version stores, and what the others do (stored_weight.STORAGE)."""
    monkeypatch.setattr(stored_weight, "STORAGE", request.param)


def make(fp8: bool = True) -> LoRALinear:
    return LoRALinear(24, 10, config=LoRAConfig(r=4, fp8=DelayedScaling() if fp8 else None))


def raw(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(torch.uint8)


BAD = {
    "int8": lambda: {"weight": torch.randint(-128, 127, (10, 24), dtype=torch.int8)},
    "e5m2": lambda: {"weight": torch.randn(10, 24).to(torch.float8_e5m2)},
    "bytes without their scale": lambda: {"weight": torch.randn(10, 24).to(E4M3)},
    "uint8 without a scale": lambda: {"weight": torch.zeros(10, 24, dtype=torch.uint8)},
    "bytes with a scale per block": lambda: {
        "weight": torch.randn(10, 24).to(E4M3),
        "weight_scale_inv": torch.ones(2, 2),
    },
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("fp8", [True, False], ids=["FP8 held", "plain held"])
@pytest.mark.parametrize("what", BAD)
def test_a_weight_of_another_kind_is_refused_and_changes_nothing(what, fp8, strict):
    layer = make(fp8)
    before = {k: raw(v).clone() for k, v in layer.state_dict().items()}
    state = {**layer.state_dict(), **BAD[what]()}
    if "without" in what:
        state.pop("weight_scale_inv", None)
    state["lora_A"] = torch.ones(4, 24)
    with pytest.raises(
        RuntimeError,
        match=r"weight: (a weight must be|FP8 bytes need one|weight_scale_inv must be)",
    ):
        layer.load_state_dict(state, strict=strict)
    assert all(torch.equal(raw(v), before[k]) for k, v in layer.state_dict().items())


def test_a_plain_weight_put_in_the_place_of_bytes_is_refused():
    layer = make()
    before = raw(layer.weight).clone()
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(TypeError, match=f"held in FP8.*found {dtype} put in its place"):
            layer.weight = nn.Parameter(torch.randn(10, 24, dtype=dtype))
    assert torch.equal(raw(layer.weight), before)
    layer.weight = nn.Parameter(torch.zeros(10, 24, dtype=torch.uint8), requires_grad=False)
    assert not layer.dequantized_weight().any()
    plain = make(fp8=False)
    plain.weight = nn.Parameter(torch.ones(10, 24), requires_grad=False)
    assert bool((plain.weight == 1).all())
    layer._parameters["weight"] = nn.Parameter(torch.randn(10, 24))
    with pytest.raises(TypeError, match="held in FP8"):
        layer(torch.randn(2, 24))


def test_a_gathered_weight_in_half_precision_is_bytes():
    """As FSDP2 leaves it in a forward under a MixedPrecisionPolicy."""
    layer, x = make().eval(), torch.randn(3, 24)
    expected, stored = layer(x), layer._parameters["weight"]
    layer._parameters["weight"] = nn.Parameter(stored.detach().to(torch.bfloat16), False)
    assert torch.equal(layer(x), expected)


def test_tying_an_adapted_head_again_is_refused():
    transformers = pytest.importorskip("transformers")
    from lorakernels import apply_lora

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=64, num_attention_heads=4, tie_word_embeddings=True, **sizes
    )
    model = transformers.LlamaForCausalLM(config).eval()
    apply_lora(model, LoRAConfig(r=2, target_modules=["lm_head"]))
    ids = torch.arange(8)[None]
    before = model(input_ids=ids).logits
    with pytest.raises(TypeError, match="lm_head: the weight is held in FP8"):
        model.tie_weights()
    assert torch.equal(model(input_ids=ids).logits, before) and bool(before.any())


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("gathered_as", [None, torch.bfloat16])
def test_what_fsdp2_puts_in_the_place_of_the_bytes_is_taken(gathered_as, one_rank):
    if TorchVersion(torch.__version__) < "2.13" and torch.uint8 == stored_weight.STORAGE:
        pytest.skip("FSDP2 of this torch takes no integer parameters")
    dtype = gathered_as or torch.float32
    layer, x = make().to(dtype).eval(), torch.randn(3, 24, dtype=dtype)
    expected = layer(x)
    bytes_ = raw(layer.weight).clone()
    policy = MixedPrecisionPolicy(param_dtype=gathered_as)
    fully_shard(layer, mesh=one_rank, mp_policy=policy, reshard_after_forward=True)
    assert torch.equal(layer(x), expected)
    assert torch.equal(raw(layer._parameters["weight"].to_local()), bytes_)
    assert layer.weight is layer._parameters["weight"], "else FSDP2 takes it for a new parameter"
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), expected)
    plain = distribute_tensor(torch.randn(10, 24, dtype=torch.bfloat16), one_rank, [Replicate()])
    with pytest.raises(TypeError, match=r"held in FP8.*found torch.bfloat16 put in its place"):
        layer.weight = nn.Parameter(plain, requires_grad=False)
    assert torch.equal(layer(x), expected)
