# SPDX-License-Identifier: Apache-2.0
"""Models that `parallelize` refuses, by what is wrong with them. Each is made from this process's rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lorakernels import LoRAConfig, apply_lora, batch_adapters, fuse, group_projections, merge_lora
from tests.distributed.tensor_models import Way, make
from tests.fusion.fused_models import LINEARS, adapted, an_adapter, fp8_state, model_of

WHOLE, CPU = Way("", False), torch.device("cpu")
Model = Callable[[int], nn.Module]
OTHER_SCALES = "scales and amax histories of FP8State 0, as its state_dict has them, differ"


def offloading(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    fuse(model, attention="math", save="checkpoint", offload_activations=True)
    return model


def grouped(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    group_projections(model, [("q_proj", "k_proj", "v_proj")])
    return model


def several(rank: int) -> nn.Module:
    model = make(Way("", False, dropout=0.0), CPU)
    batch_adapters(model, ["a", "b"])
    return model


def merged(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    merge_lora(model)
    return model


def another_seed(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    if rank == 1:
        an_adapter(model).reset_adapter()
    return model


def another_generator(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    torch.manual_seed(rank)
    return model


def scaled(row: int, direction: str = "forward") -> Model:
    """On rank 1 the same numbers stand in other columns of a row of the FP8State."""

    def made(rank: int) -> nn.Module:
        model = make(Way("", True), CPU)
        values = getattr(fp8_state(model), direction)
        values[row, :2] = torch.tensor([2.0, 4.0]).roll(rank)
        return model

    return made


def frozen_on_one(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    an_adapter(model).lora_A.requires_grad_(rank == 0)
    return model


def disabled_on_one(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    an_adapter(model).disable_adapters = rank == 1
    return model


def evaluated_on_one(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    model.model.layers[1].train(rank == 0)
    return model


def trained_norm(rank: int) -> nn.Module:
    model = make(WHOLE, CPU)
    model.model.norm.weight.requires_grad_(True)
    return model


def with_a_saved_projection(rank: int) -> nn.Module:
    """As `load_adapter(is_trainable=False)` leaves it."""
    model = model_of("Llama")
    apply_lora(model, LoRAConfig(r=4, target_modules=["q_proj"], modules_to_save=["o_proj"]))
    return model.requires_grad_(False)


def sized(**sizes: int) -> Model:
    return lambda rank: make(Way("", False, model=sizes), CPU)


def of_no_family(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    apply_lora(model, LoRAConfig(target_modules=["0"], r=2))
    return model


# {case: (model, plan, the beginning of what is said on every rank)}
REFUSED: dict[str, tuple[Model, dict[str, str] | None, str]] = {
    "key heads": (
        sized(num_key_value_heads=1),
        None,
        "num_key_value_heads must be a multiple of the 2 ranks, found 1",
    ),
    "a size": (
        sized(intermediate_size=97),
        None,
        "model.layers.0.mlp.gate_proj has out_features 97, which must be a multiple of the 2 ranks",
    ),
    "offloaded activations": (offloading, None, "model.layers.0 is fused with offload_activations"),
    "grouped": (grouped, None, "model.layers.0.self_attn.q_proj is in a group of projections"),
    "merged": (merged, None, "model.layers.0.self_attn.q_proj is merged"),
    "several adapters": (
        several,
        None,
        "model.layers.0.self_attn.q_proj has several adapters in one batch",
    ),
    "modules_to_save": (
        with_a_saved_projection,
        None,
        "model.layers.0.self_attn.o_proj is in modules_to_save",
    ),
    "packed": (lambda rank: adapted("Phi3", LINEARS), None, "Phi3DecoderLayer packs projections"),
    "norms behind": (
        lambda rank: adapted("Olmo2", LINEARS),
        None,
        "Olmo2DecoderLayer has norms behind its projections",
    ),
    "trained elsewhere": (
        trained_norm,
        None,
        "parameters outside of the split layers cannot train yet, found ['model.norm.weight']",
    ),
    "no family": (of_no_family, None, "Sequential must have decoder layers of one family"),
    "a pattern without a layer": (
        sized(),
        {"*.q_proj": "column", "*.wq": "column"},
        "plan['*.wq'] matches no linear layer of the model",
    ),
    "another kind": (sized(), {"*.q_proj": "rows"}, "plan['*.q_proj'] must be one of"),
    "two kinds": (
        sized(),
        {"*.q_proj": "row", "*self_attn*": "column"},
        "plan['*self_attn*'] is 'column' for model.layers.0.self_attn.q_proj, which is 'row'",
    ),
    "values differ": (
        another_seed,
        None,
        "all ranks of the group must have the same model, but the values of model.layers.0.self_attn.q_proj.lora_A",
    ),
    "scales differ": (
        scaled(-1),
        None,
        f"all ranks of the group must have the same model, but {OTHER_SCALES}",
    ),
    "histories differ": (
        scaled(1, "backward"),
        None,
        f"all ranks of the group must have the same model, but {OTHER_SCALES}",
    ),
    "generators differ": (
        another_generator,
        None,
        "all ranks of the group must have the same model, but torch's CPU generator, from which masks draw, differ",
    ),
    "frozen on one rank": (
        frozen_on_one,
        None,
        "all ranks of the group must have the same model, but requires_grad of model.layers.0.self_attn.q_proj.lora_A",
    ),
    "disabled on one rank": (
        disabled_on_one,
        None,
        "all ranks of the group must have the same model, but disable_adapters of model.layers.0.self_attn.q_proj",
    ),
    "evaluated on one rank": (
        evaluated_on_one,
        None,
        "all ranks of the group must have the same model, but modes of training of model.layers.1 differ",
    ),
}
