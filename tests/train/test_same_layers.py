# SPDX-License-Identifier: Apache-2.0
"""A rank that alone could not read the base into FP8 must not train another model than the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels import PhiloxState
from lorakernels.train import adapted
from lorakernels.train.adapted import Meshes, load_adapted
from lorakernels.train.errors import FinetuneError
from lorakernels.train.layouts.pipeline import stage_ranks
from lorakernels.train.model.checks import check_same_layers
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.reporter import Reporter
from tests.processes import on_ranks

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """`who` cannot open the files at first, of `size` ranks in `pp` stages, whose parts then nobody can read alone."""

    who: int | None
    size: int = 2
    pp: int = 1


def loaded(rank: int, device: torch.device, folder: str, case: Case) -> tuple[str, str]:
    """The class of a layer without an adapter, and what is said."""
    ranks, real = RunRanks(rank, case.size, pp=case.pp), adapted.load_quantized

    def load_quantized(*args: Any, **kwargs: Any) -> Any:
        if case.who is not None and kwargs["stages"] is not None:
            raise ValueError("on all ranks, which so read the whole model")
        if rank == case.who:
            raise OSError("too many open files")
        return real(*args, **kwargs)

    options = FinetuneOptions(r=2, target_modules=["q_proj"])
    reporter = Reporter("finetune", 1, quiet=True)
    shared = stage_ranks(ranks, device)
    meshes = Meshes() if shared is None else Meshes(stages=shared.mesh)
    random = PhiloxState(1, device)
    given = Path(folder), options, torch.float32, device, random, reporter, meshes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapted, "load_quantized", load_quantized)
        model, _ = ranks.together(lambda: load_adapted(*given))
    own = f"model.layers.{rank // ranks.of_stage}.mlp.up_proj"
    kind = type(model.get_submodule(own)).__name__
    try:
        check_same_layers(model, ranks)
    except FinetuneError as error:
        return kind, str(error)
    return kind, ""


NAME = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize("case", [Case(None), Case(0), Case(1)], ids=str)
def test_ranks_that_hold_other_layers_are_refused(case: Case, model_dir: Path) -> None:
    found = on_ranks(loaded, 2, "gloo", str(model_dir), case)
    if case.who is None:
        assert found == [("FrozenFP8Linear", "")] * 2
        return
    kinds = [kind for kind, _ in found]
    assert kinds[case.who] == "Linear" and kinds[1 - case.who] == "FrozenFP8Linear"
    said = f"all ranks must hold the same layers, found {NAME} to be "
    assert found[1][1].startswith(said) and found[0][1] == f"rank 1 stopped: {found[1][1]}"


@pytest.mark.parametrize("case", [Case(None, 4, 2), Case(3, 4, 2), Case(1, 2, 2)], ids=str)
def test_ranks_of_a_stage_that_hold_other_layers_are_refused(case: Case, model_dir: Path) -> None:
    """All ranks hold the whole model before it is cut, where its parts cannot be read."""
    found = on_ranks(loaded, case.size, "gloo", str(model_dir), case)
    if case.who is None:
        assert found == [("FrozenFP8Linear", "")] * 4
        return
    assert [kind == "Linear" for kind, _ in found] == [r == case.who for r in range(case.size)]
    said = f"all ranks must hold the same layers, found {NAME} to be Linear("
    own = found[case.who][1]
    assert own.startswith(said) and "on rank 0 FrozenFP8Linear(" in own
    others = [said for rank, (_, said) in enumerate(found) if rank != case.who]
    assert others == [f"rank {case.who} stopped: {own}"] * (case.size - 1)
