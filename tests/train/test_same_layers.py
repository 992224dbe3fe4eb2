# SPDX-License-Identifier: Apache-2.0
"""A rank that alone could not read the base into FP8 must not train another model than the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels.train import adapted
from lorakernels.train.adapted import load_adapted
from lorakernels.train.errors import FinetuneError
from lorakernels.train.model_checks import check_same_layers
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.ranks import Ranks
from lorakernels.train.reporter import Reporter
from tests.processes import on_ranks

pytestmark = pytest.mark.slow


def loaded(rank: int, device: torch.device, folder: str, who: int | None) -> tuple[str, str]:
    """The class of a layer without an adapter, and what is said, where `who` cannot open the files at first."""
    ranks, real = Ranks(rank, 2), adapted.load_quantized

    def load_quantized(*args: Any, **kwargs: Any) -> Any:
        if rank == who:
            raise OSError("too many open files")
        return real(*args, **kwargs)

    options = FinetuneOptions(r=2, target_modules=["q_proj"])
    reporter = Reporter("finetune", 1, quiet=True)
    given = Path(folder), options, torch.float32, device, None, reporter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapted, "load_quantized", load_quantized)
        model, _ = ranks.together(lambda: load_adapted(*given))  # type: ignore[arg-type]
    kind = type(model.get_submodule("model.layers.0.mlp.up_proj")).__name__
    try:
        check_same_layers(model, ranks)
    except FinetuneError as error:
        return kind, str(error)
    return kind, ""


@pytest.mark.parametrize("who", [None, 0, 1])
def test_ranks_that_hold_other_layers_are_refused(who: int | None, model_dir: Path) -> None:
    found = on_ranks(loaded, 2, "gloo", str(model_dir), who)
    if who is None:
        assert found == [("FrozenFP8Linear", "")] * 2
        return
    kinds = [kind for kind, _ in found]
    assert kinds[who] == "Linear" and kinds[1 - who] == "FrozenFP8Linear"
    said = "all ranks must hold the same layers, found model.layers.0.self_attn.k_proj to be "
    assert found[1][1].startswith(said) and found[0][1] == f"rank 1 stopped: {found[1][1]}"
