# SPDX-License-Identifier: Apache-2.0
"""The record of what a module has become: read, written, taken away, carried by copies, restored with its module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lorakernels import fuse
from lorakernels.modules.marks import KEY, became, mark
from lorakernels.modules.model.undo import all_or_nothing
from tests.fusion.fused_models import adapted, tokens


def test_a_read_leaves_no_record_and_a_default_takes_it_away() -> None:
    module = nn.Linear(2, 2)
    assert not became(module).saved and KEY not in vars(module)
    mark(module, saved=True, adds_one=True)
    mark(module, adds_one=False)
    assert became(module).saved and str(became(module)) == "<saved>"
    mark(module, saved=False)
    assert KEY not in vars(module)


def test_no_mark_of_another_name() -> None:
    with pytest.raises(TypeError, match="fuzed"):
        mark(nn.Linear(2, 2), fuzed=True)


def test_an_exception_restores_marks() -> None:
    model = adapted()
    mark(model, saved=True)
    before = became(model)
    with pytest.raises(ZeroDivisionError), all_or_nothing(model):
        mark(model, saved=False, adds_one=True)
        1 / 0  # noqa: B018
    assert became(model) is before


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_records_of_their_own_and_state_dict_has_none(how: str) -> None:
    torch.manual_seed(0)
    model = adapted()
    fuse(model)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    ours, theirs = (became(m.get_submodule("model.layers.0")).fused for m in (model, twin))
    assert ours is not None and theirs is not None and ours is not theirs
    assert became(twin).before_fuse is not became(model).before_fuse
    assert not any(KEY in name for name in model.state_dict())
    rows = tokens()
    assert torch.equal(model(rows).logits, twin(rows).logits)
