# SPDX-License-Identifier: Apache-2.0
"""Layers that get rows [B · T, K] from their own module: no sequence is cut between two adapters there either."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lorakernels
from lorakernels import AdapterBatch, LoRAConfig
from tests.modules.batched_models import NAMES, batched, rows

TOKENS = 15  # which three adapters divide, as they divide those of any number of sequences
MESSAGE = "{} adapters must divide the sequences, found {} in x "


class Flattening(nn.Module):
    """As a mixture's shared expert: its linear gets flat rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(0, -2))
        return y.view(*x.shape[:-1], -1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Flattening(nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def opt() -> tuple[Any, AdapterBatch]:
    """Its fc1 and fc2 alone have adapters, so that no layer sees a sequence."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
    config = transformers.OPTConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, dropout=0.0
    )
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(config)
    lorakernels.apply_lora(model, LoRAConfig(r=4, fp8=None, target_modules=["fc1", "fc2"]))
    batch = lorakernels.batch_adapters(model, NAMES)
    for layer in batch.layers.values():
        nn.init.normal_(layer.lora_B, std=0.1)
    return model, batch


def net() -> tuple[Any, AdapterBatch]:
    torch.manual_seed(0)
    model = Net()
    lorakernels.apply_lora(model, LoRAConfig(r=2, fp8=None, target_modules=["linear"]))
    batch = lorakernels.batch_adapters(model, NAMES)
    for layer in batch.layers.values():
        nn.init.normal_(layer.lora_B, std=0.1)
    return model, batch


def tokens(count: int) -> Tensor:
    return torch.randint(0, 64, (count, TOKENS))


def test_no_sequence_of_flat_rows_is_cut_between_two_adapters() -> None:
    model, batch = opt()
    ids = tokens(6)
    embedded = model.get_input_embeddings()(ids)
    for count in (1, 2, 4):
        for call in (
            lambda n: model(input_ids=ids[:n]),
            lambda n: model(ids[:n]),
            lambda n: model(inputs_embeds=embedded[:n]),
            lambda n: model.model(input_ids=ids[:n]),  # as a loss in chunks runs it
        ):
            with pytest.raises(ValueError, match=MESSAGE.format(3, count)):
                call(count)
    for names, count in ((["de", "fr"], 3), (["de", None, "de"], 4)):
        with batch.rows(names), pytest.raises(ValueError, match=MESSAGE.format(len(names), count)):
            model(input_ids=ids[:count])


def test_what_divides_has_its_adapters() -> None:
    model, batch = opt()
    ids = tokens(6)
    logits = model(input_ids=ids).logits
    for index, name in enumerate(NAMES):
        with batch.only(name):
            own = slice(2 * index, 2 * index + 2)
            torch.testing.assert_close(logits[own], model(input_ids=ids[own]).logits)
            model(input_ids=ids[:1])
    with batch.rows(["it", "fr", "it", "de"]):
        found = model(input_ids=ids[:4]).logits
    with batch.only("it"):
        torch.testing.assert_close(found[::2], model(input_ids=ids[:4:2]).logits)


def test_a_net_of_ones_own_is_asked_too() -> None:
    model, _ = net()
    with pytest.raises(ValueError, match=MESSAGE.format(3, 4)):
        model(torch.randn(4, 6, 8))
    assert model(torch.randn(3, 5, 8)).shape == (3, 5, 8)
    assert model(torch.randn(6, 8)).shape == (6, 8), "rows, of which each is a sequence"
    with lorakernels.disable_lora(model):
        model(torch.randn(4, 6, 8))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_ask_for_themselves(copied: Any) -> None:
    model, batch = net()
    other = copied(model)
    with batch.only("de"):
        alone = copied(model)
        model(torch.randn(4, 6, 8))
        with pytest.raises(ValueError, match=MESSAGE.format(3, 4)):
            other(torch.randn(4, 6, 8))
    with pytest.raises(ValueError, match=MESSAGE.format(3, 4)):
        model(torch.randn(4, 6, 8))
    alone(torch.randn(4, 6, 8))


def test_a_model_without_the_layers_is_not_asked() -> None:
    model, batch = net()
    with batch.only("de"):
        for block in model.blocks:
            block.linear = nn.Linear(8, 8)
    model(torch.randn(4, 6, 8))


def test_unloaded_layers_leave_no_memory_behind() -> None:
    model, batch = net()
    layers = [weakref.ref(layer) for layer in batch.layers.values()]
    with batch.only("de"):
        lorakernels.unload(model)
    del batch
    gc.collect()
    assert [layer() for layer in layers] == [None, None]


def test_torch_compile_asks_too() -> None:
    model, batch = net()
    compiled = torch.compile(model, backend="aot_eager")
    try:
        with pytest.raises(ValueError, match=MESSAGE.format(3, 4)):
            compiled(torch.randn(4, 6, 8))
        assert compiled(torch.randn(3, 6, 8)).shape == (3, 6, 8)
        with batch.rows(["de", "fr"]), pytest.raises(ValueError, match=MESSAGE.format(2, 3)):
            compiled(torch.randn(3, 6, 8))
    finally:
        torch._dynamo.reset()


def test_layers_are_not_asked_twice() -> None:
    """A hook for the model and one for its decoder, none for a layer: graphs and their cost stay as they are."""
    model, _ = batched()
    asking = [path for path, m in model.named_modules() if m._forward_pre_hooks]
    assert asking == ["", "model"]
    model(input_ids=rows(model))
