# SPDX-License-Identifier: Apache-2.0
"""Adapters of random configs, saved and loaded by us and by PEFT: every way round the logits stay what they were."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
from torch import Tensor, nn

from lorakernels import LoRAConfig, apply_lora
from lorakernels.checkpoints.adapters.files import load_adapter, save_adapter
from lorakernels.modules import lora_modules
from tests.adapter_files import peft_adapted, peft_load, randomize

NAMES = ("q", "k", "up")
PATHS = [
    f"{tower}layers.{i}.{block}"
    for tower in ("", "tower.")
    for i in range(3 if not tower else 2)
    for block in ("attn.q", "attn.k", "mlp.up")
] + ["head", "tower.head"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict(
            {"q": nn.Linear(6, 4), "k": nn.Linear(4, 6, bias=False), "q_norm": nn.LayerNorm(4)}
        )
        self.mlp = nn.ModuleDict({"up": nn.Linear(6, 6)})
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["k"](torch.tanh(self.attn["q_norm"](self.attn["q"](x))))
        return self.norm(x + torch.tanh(self.mlp["up"](x)))


class Tower(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Model(Tower):
    """Names are tails of others (`head`, `layers.0.attn.q`), which is where matching rules go wrong."""

    def __init__(self) -> None:
        super().__init__(3)
        self.embed, self.tower = nn.Embedding(11, 6), Tower(2)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.tower(self.embed(ids)))


def some(draw: random.Random, items: list, least: int = 1) -> list:
    return draw.sample(items, draw.randint(least, min(3, len(items))))


def pattern(draw: random.Random, values: list) -> dict:
    """Keys of every kind, in any order: general ones before and behind those that they cover."""
    keys = [
        *NAMES,
        "attn.q",
        r"layers\.\d\.attn\.q",
        r"layers\.(0|1)\..*",
        *PATHS[:6],
        f"^{PATHS[0]}",
        "head",
    ]
    return {key: draw.choice(values) for key in draw.sample(keys, draw.randint(0, 4))}


def target_rules(draw: random.Random) -> dict:
    rules: dict = {
        "names": {"target_modules": some(draw, [*NAMES, "attn.q", "head"])},
        "paths": {"target_modules": some(draw, PATHS)},
        "names and paths": {"target_modules": some(draw, [*NAMES, *PATHS])},
        "expression": {
            "target_modules": draw.choice([r".*\.(q|up)", r"(tower\.)?layers\.[01]\..*k", ".*head"])
        },
        "all-linear": {"target_modules": "all-linear"},
        "layers": {
            "target_modules": some(draw, list(NAMES)),
            "layers_to_transform": draw.choice([0, 1, [0, 1], [1, 2]]),
            "layers_pattern": draw.choice([None, "layers", ["blocks", "layers"]]),
        },
    }[draw.choice(["names", "paths", "names and paths", "expression", "all-linear", "layers"])]
    if draw.random() < 0.3:
        rules["exclude_modules"] = draw.choice([["layers.1.attn.q"], r"tower\..*", ["up"]])
    return rules


def fields_of(draw: random.Random) -> dict:
    fields = {
        **target_rules(draw),
        "r": draw.choice([1, 2, 4]),
        "lora_alpha": draw.choice([1, 3, 8, 16]),
        "use_rslora": draw.random() < 0.3,
        "rank_pattern": pattern(draw, [1, 2, 3, 5]),
        "alpha_pattern": pattern(draw, [2, 5, 6.5, 32]),
        "bias": draw.choice(["none", "none", "lora_only", "all"]),
    }
    if draw.random() < 0.3:
        fields["modules_to_save"] = some(draw, ["norm", "embed", "head", "tower.head"])
    return fields


def applied(draw: random.Random) -> nn.Module:
    """A model adapted by one config, or parts of it by a config each, or with a scaling changed afterwards."""
    model = Model().eval()
    parts: list[nn.Module] = [model]
    how = draw.choice(["one", "one", "parts", "scaled"])
    if how == "parts":
        parts = [model.tower, *model.layers]
    for part in parts:
        fields = fields_of(draw)
        if part is not model:
            fields |= {"target_modules": some(draw, list(NAMES)), "exclude_modules": None}
            fields |= {"layers_to_transform": None, "layers_pattern": None}
            fields |= {"modules_to_save": draw.choice([None, ["norm"]])}
        apply_lora(part, LoRAConfig(**fields, fp8=None))
    if how == "scaled":
        for layer in list(lora_modules(model).values())[::2]:
            layer.scaling *= 0.75
    randomize(model)
    return model


def plain(model: nn.Module) -> nn.Module:
    """The base that `applied` drew: its adapters and what is trained beside them come from the file."""
    base = Model().eval()
    found, own = model.state_dict(), base.state_dict()
    base.load_state_dict({name: found[name] for name in own})
    return base


def made(make, draw: random.Random) -> nn.Module:
    """What `make` draws; configs that choose nothing, or a module for both, are drawn again."""
    while True:
        try:
            return make(draw)
        except ValueError as error:
            refused = ("matches no module", "all excluded", "both adapted and trained whole")
            if not any(what in str(error) for what in refused):
                raise


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_what_we_save_computes_the_same_for_us_and_for_peft(seed, tmp_path):
    ours = made(applied, random.Random(seed))
    ids = torch.arange(11)[None]
    y = ours(ids)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the layers differ in")
        try:
            save_adapter(ours, tmp_path / "ours")
        except (
            ValueError
        ) as error:  # saved in `layers`, not in `tower.layers`: PEFT's names take both
            assert "modules_to_save" in str(error) and not any(tmp_path.iterdir())
            return
    again = plain(ours)
    load_adapter(again, tmp_path / "ours", fp8=None)
    assert torch.equal(again(ids), y)
    theirs = peft_load(plain(ours), tmp_path / "ours")
    # fp32: PEFT adds W x, bias and the adapter in another order
    torch.testing.assert_close(theirs(ids), y, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    again = plain(ours)
    load_adapter(again, tmp_path / "theirs", fp8=None)
    assert torch.equal(again(ids), y)


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_what_peft_saves_computes_the_same_for_us(seed, tmp_path):
    draw, base = random.Random(seed), Model().eval()

    def peft(draw: random.Random) -> nn.Module:
        fields = fields_of(draw)
        apply_lora(copy.deepcopy(base), LoRAConfig(**fields, fp8=None))  # both refuse the same
        for name in ("rank_pattern", "alpha_pattern"):  # sorted, as PEFT itself saves them
            fields[name] = dict(sorted(fields[name].items()))
        return peft_adapted(base, **fields)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of keys that match nothing
        theirs = made(peft, draw)
    theirs.save_pretrained(tmp_path)
    ours, ids = copy.deepcopy(base), torch.arange(11)[None]
    load_adapter(ours, tmp_path, fp8=None)
    torch.testing.assert_close(ours(ids), theirs(ids), rtol=1e-4, atol=1e-4)
